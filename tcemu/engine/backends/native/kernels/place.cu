// A multiplicand as `wgmma` reads it: tiles of LINES rows (of B: columns) by 128 bytes along K, swizzled, each one block of memory.

struct Places {
    int batch, lines, k;          // of the codes, [batch, lines, k]
    int line_tiles, k_tiles;      // of what is written
    int chunk, filled;            // elements of a promoted chunk, and with zeros behind it so many as fill whole tiles
    int step, unit;               // products of a step, and with zeros behind them those of the instruction's own
};

constexpr int OF_PIECE = 16 / sizeof(Code);  // elements of 16 bytes, which a thread makes

// the element of the codes that stands at this place along K; -1 where a zero does
__device__ __forceinline__ int source(const Places &s, int place) {
    const int rest = place % s.filled, inside = rest / s.unit * s.step + rest % s.unit;
    const int at = place / s.filled * s.chunk + inside;
    return rest % s.unit < s.step && inside < s.chunk && at < s.k ? at : -1;
}

extern "C" __global__ void __launch_bounds__(256) place(const Places *places, const Code *codes, Words4 *out) {
    const Places s = *places;
    const s64 piece = (s64)blockIdx.x * 256 + threadIdx.x;
    const s64 tile = piece / (LINES * 8);
    if (tile >= (s64)s.batch * s.line_tiles * s.k_tiles) return;
    const int in_tile = (int)(piece % (LINES * 8)), row = in_tile / 8, column = in_tile % 8;
    const int k_tile = (int)(tile % s.k_tiles);
    const s64 rest = tile / s.k_tiles;
    const int line = (int)(rest % s.line_tiles) * LINES + row;
    const int first = (k_tile * 8 + column) * OF_PIECE;
    union { Words4 words; Code codes[OF_PIECE]; } made = {{0, 0, 0, 0}};
    if (line < s.lines) {
        const Code *from = codes + ((rest / s.line_tiles) * s.lines + line) * s.k;
        const int begin = source(s, first), end = source(s, first + OF_PIECE - 1);
        if (begin >= 0 && end == begin + OF_PIECE - 1 && (u64)(from + begin) % 16 == 0) {
            made.words = *(const Words4 *)(from + begin);
        } else {
            for (int i = 0; i < OF_PIECE; ++i) {
                const int at = source(s, first + i);
                if (at >= 0) made.codes[i] = from[at];
            }
        }
    }
    out[tile * (LINES * 8) + row * 8 + (column ^ (row & 7))] = made.words;
}
