// The elements of a float operand in one case, drawn by one warp. `element`, which precedes this text, is written from
// tcemu/uses/fuzz/case_generator.py and has all arithmetic. What a case does not need is made known to the compiler here, which removes it. Also
// defined before this text: ELEMENTS of a case, [outer, PLACES, INNER], PIECE, the elements that a lane writes at once, MAY_BE_TWINS, and masks of
// the bit fields of tcemu/uses/fuzz/random_words.py.

enum Variant { USUAL, SPECIALS, RAW_BITS, ZEROS };  // of a case: without special values, with them, every bit drawn, all +0
constexpr u32 NOTHING = ALL | SAME_SIGN;            // in the second word: all elements are +0

struct alignas(PIECE * sizeof(Code)) Piece { Code codes[PIECE]; };
struct alignas(16) Case { u32 key, other_key, first, second; };  // first, second: PackedKindFields, with masks EDGE and so on

__device__ __forceinline__ void fill_table(u32 threads) {
    for (u32 byte = threadIdx.x; byte < sizeof edge_fractions / sizeof *edge_fractions; byte += threads) edge_fractions[byte] = edge_fraction(byte);
}

template <Variant VARIANT>
__device__ __forceinline__ void draw_variant(const Case &source, const u32 *__restrict__ place_words, Code *__restrict__ out, int lane) {
    const u32 first = VARIANT == SPECIALS ? source.first : source.first & ~SPECIAL;
    const u32 second = VARIANT == ZEROS ? NOTHING : VARIANT == RAW_BITS ? source.second | RAW : source.second & ~RAW;
    constexpr u32 STRIDE = 32 * PIECE, ROW = INNER * PLACES;
    constexpr bool one_place = INNER % PIECE == 0;   // the elements of a piece have one place
    constexpr bool same_places = STRIDE % ROW == 0;  // all pieces of a lane have the same places
    Piece *to = (Piece *)out + lane;
    u32 own[PIECE], place[PIECE];
    const auto load_places = [&](u32 at) {
#pragma unroll
        for (u32 v = 0; v < PIECE; ++v) {
            own[v] = (at + (one_place ? 0 : v)) / INNER % PLACES;
            place[v] = place_words[own[v]] & ~(MAY_BE_TWINS ? 0 : FLIPPED | NUDGED);
        }
    };
    if (same_places) load_places(lane * PIECE);
#pragma unroll 1
    for (u32 first_of_warp = 0; first_of_warp < ELEMENTS; first_of_warp += STRIDE, to += 32) {
        const u32 at = first_of_warp + lane * PIECE;
        if (ELEMENTS % STRIDE != 0 && at >= ELEMENTS) break;
        if (!same_places) load_places(at);
        Piece piece;
#pragma unroll
        for (u32 v = 0; v < PIECE; ++v)  // an element takes the word that its place has
            piece.codes[v] = element(source.key, source.other_key, first, second, place[v], at + v + ((place[v] & PLACE) - own[v]) * INNER);
        *to = piece;
    }
}

// Few variants, since the warps of a multiprocessor draw cases of all kinds at once, and its cache of instructions holds some 2,000
__device__ __forceinline__ void draw_case(const Case &source, const u32 *__restrict__ place_words, Code *__restrict__ out, int lane) {
    if (source.second & RAW) draw_variant<RAW_BITS>(source, place_words, out, lane);
    else if ((source.second & (ZERO | SAME_SIGN)) == NOTHING) draw_variant<ZEROS>(source, place_words, out, lane);
    else if (source.first & SPECIAL) draw_variant<SPECIALS>(source, place_words, out, lane);
    else draw_variant<USUAL>(source, place_words, out, lane);
}
