// The operands of the tile kernel, decoded once a matrix. A block of threads makes one step of the rows of A, or of the
// columns of B, that a block of `tile` takes; what it makes lies together, in sections of which `Prepared` has the places.
// The bytes, powers and values of factors are those of tcemu/engine/arithmetic/step/anchored.py:
//
//   values     of each factor, f32 or f64; 16 bytes of a line (a row or a column), then the next line's. Where a tensor core multiplies them,
//              they are bf16 in the order of its fragments, and there are no low bits and signs
//   low bits   of each factor a byte: the exponent of its lowest bit that is not 0, so counted that it is 0 at the least; ABSENT for a zero
//   signs      of each factor a byte, 0x80 if it is negative
//   powers     of each factor 2^(BASE * exponent + ...) in bf16, in the order of the fragments of `mma`
//   tops       of each line its max exponent, at the place of a float's exponent where exponents are relative
//   near       of each line how many products are within NEAR / 2 binades of that; where exponents are relative

constexpr int A_LINES = 16 * ROW_TILES * WARPS_DOWN, B_LINES = 8 * COLUMN_TILES * WARPS_ACROSS;  // of a block of `tile`
constexpr int KP = TERMS < 8 ? 8 : TERMS;  // products in the fragments, a multiple of 8
constexpr int WORD = WIDE ? 8 : 4;
constexpr bool IN_BF16 = SUMMED || OWN_BITS;
[[maybe_unused]] constexpr int PIECE = TERMS < 16 ? TERMS : 16;  // bytes of a line that lie together in the sections of bytes

constexpr int TOP = RELATIVE ? 1 << FIELD : 1;  // what a top is counted in

constexpr int RUN = KP < 32 ? KP : 32;  // products whose fragments of B lie together, 16 bytes of a lane

// Where things are in a step of so many lines, in bytes
template <int LINES> struct Prepared {
    static constexpr int of_bytes = IN_BF16 ? 0 : LINES * TERMS, of_fragments = LINES * KP * 2;
    static constexpr int values = 0, low_bits = values + (IN_BF16 ? of_fragments : LINES * TERMS * WORD), signs = low_bits + of_bytes,
                         powers = signs + of_bytes, tops = powers + of_fragments, near = tops + LINES * 4,
                         bytes = near + (RELATIVE ? LINES * 4 : 0);
    static __device__ __forceinline__ int value(int line, int k) { return k * WORD / 16 * (LINES * 16) + line * 16 + k * WORD % 16; }
    static __device__ __forceinline__ int byte(int line, int k) { return k / PIECE * (LINES * PIECE) + line * PIECE + k % PIECE; }
    // Where an element of a fragment lies. A register holds k and k + 1; A's registers: rows g, g + 8, and the same 8 products on.
    static __device__ __forceinline__ int in_fragment_of_a(int line, int k) {
        const int lane = line % 8 * 4 + k % 8 / 2, tile = line / 16;
        if (KP == 8) return (tile * 32 + lane) * 8 + line % 16 / 8 * 4 + k % 2 * 2;
        return ((tile * (KP / 16) + k / 16) * 32 + lane) * 16 + (line % 16 / 8 + k % 16 / 8 * 2) * 4 + k % 2 * 2;
    }
    static __device__ __forceinline__ int in_fragment_of_b(int line, int k) {
        const int lane = line % 8 * 4 + k % 8 / 2, tile = line / 8;
        return ((k / RUN * (LINES / 8) + tile) * 32 + lane) * (RUN / 2) + k % RUN / 8 * 4 + k % 2 * 2;
    }
    // Where a factor lies that an instruction takes in each of the four lanes of a line: four products, of A for the rows g and g + 8
    static __device__ __forceinline__ int in_repeated_of_a(int line, int k) {
        return ((line / 16 * (TERMS / 4) + k / 4) * 8 + line % 8) * 16 + k % 4 / 2 * 8 + line % 16 / 8 * 4 + k % 2 * 2;
    }
    static __device__ __forceinline__ int in_repeated_of_b(int line, int k) {
        return ((line / 8 * (TERMS / 8) + k / 8) * 8 + line % 8) * 16 + k % 8 * 2;
    }
    // a lane's part of four repeated products of A from k on, of eight of B
    static __device__ __forceinline__ Words4 repeated_of_a(const u8 *section, int tile, int k, int lane) {
        return *(const Words4 *)(section + ((tile * (TERMS / 4) + k / 4) * 8 + lane / 4) * 16);
    }
    static __device__ __forceinline__ Words4 repeated_of_b(const u8 *section, int tile, int k, int lane) {
        return *(const Words4 *)(section + ((tile * (TERMS / 8) + k / 8) * 8 + lane / 4) * 16);
    }
    // a lane's part of the fragments of 16 products from k on
    static __device__ __forceinline__ Words4 fragment_of_a(const u8 *section, int tile, int k, int lane) {
        return *(const Words4 *)(section + ((tile * (KP / 16) + k / 16) * 32 + lane) * 16);
    }
    static __device__ __forceinline__ Words2 fragment_of_b(const u8 *section, int tile, int k, int lane) {
        return *(const Words2 *)(section + ((k / RUN * (LINES / 8) + tile) * 32 + lane) * (RUN / 2) + k % RUN / 2);
    }
};

struct alignas(16) Values {  // of one line, as they lie together
    Value v[16 / WORD];
};
