// The elements of a float operand in one case, drawn by one warp. `element`, which precedes this text, is written from
// tcemu/uses/fuzz/case_generator.py and has all arithmetic. Most kinds of cases need only part of it: values that are zero for a whole case are made
// known to the compiler here, which removes what depends on them. Also defined before this text: ELEMENTS of a case, [outer, PLACES, INNER],
// PIECE, the elements that a lane writes at once, MAY_BE_TWINS, and masks of the bit fields of tcemu/uses/fuzz/random_words.py.

__device__ __forceinline__ void fill_table(u32 threads) {
    for (u32 byte = threadIdx.x; byte < sizeof edge_fractions / sizeof *edge_fractions; byte += threads) edge_fractions[byte] = edge_fraction(byte);
}

enum : u32 { EDGE_BIT = 1, SPECIAL_BIT = 2, ZERO_BIT = 4, TWINS_BIT = 8, RAW_BIT = 16, NOTHING_BIT = 32 };  // features of a case
constexpr u32 NOTHING = ALL | SAME_SIGN;  // in the second word: all elements are +0

struct alignas(PIECE * sizeof(Code)) Piece { Code codes[PIECE]; };
struct alignas(16) Case { u32 key, other_key, first, second; };  // first, second: PackedKindFields, with masks EDGE and so on

// Draws a case that has only these features
template <u32 FEATURES>
__device__ __forceinline__ void draw_features(const Case &source, const u32 *__restrict__ place_words, Code *__restrict__ out, int lane) {
    const u32 first = source.first & ~((FEATURES & EDGE_BIT ? 0 : EDGE) | (FEATURES & SPECIAL_BIT ? 0 : SPECIAL));
    const u32 no_zeros = FEATURES & ZERO_BIT ? 0 : ZERO;
    const u32 second_used = FEATURES & RAW_BIT ? source.second | RAW : source.second & ~(RAW | no_zeros);
    const u32 second = FEATURES & NOTHING_BIT ? NOTHING : second_used;
    constexpr u32 STRIDE = 32 * PIECE, ROW = INNER * PLACES;
    constexpr bool one_place = INNER % PIECE == 0;    // the elements of a piece have one place
    constexpr bool same_places = STRIDE % ROW == 0;  // all pieces of a lane have the same places
    Piece *to = (Piece *)out + lane;
    u32 own[PIECE], place[PIECE];
    const auto load_places = [&](u32 at) {
#pragma unroll
        for (u32 v = 0; v < PIECE; ++v) {
            own[v] = (at + (one_place ? 0 : v)) / INNER % PLACES;
            place[v] = place_words[own[v]] & ~(FEATURES & TWINS_BIT ? 0 : FLIPPED | NUDGED);
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

// Few loops, since a multiprocessor's warps draw cases of all kinds at once, and its cache of instructions holds one program of some 2,000
__device__ __forceinline__ void draw_case(const Case &source, const u32 *__restrict__ place_words, Code *__restrict__ out, int lane) {
    constexpr u32 USUAL = EDGE_BIT | ZERO_BIT | (MAY_BE_TWINS ? TWINS_BIT : 0);
    if (source.second & RAW) draw_features<RAW_BIT>(source, place_words, out, lane);
    else if ((source.second & (ZERO | SAME_SIGN)) == NOTHING) draw_features<NOTHING_BIT>(source, place_words, out, lane);
    else if (source.first & SPECIAL) draw_features<USUAL | SPECIAL_BIT>(source, place_words, out, lane);
    else draw_features<USUAL>(source, place_words, out, lane);
}
