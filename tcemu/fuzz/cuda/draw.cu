// The elements of a float operand, drawn: a warp takes a case. `element`, which comes before, is written from tcemu/fuzz/elements.py and has all
// arithmetic. Most kinds of cases do not ask for all of it: what is zero for a whole case is made known to the compiler here, which leaves out
// what follows from it. Before it stand also: ELEMENTS of a case, [outer, PLACES, INNER], PIECE of them that a lane writes at once, WARPS of a block,
// and masks of the words of bit_fields.py.

enum : u32 { EDGE_BIT = 1, SPECIAL_BIT = 2, ZERO_BIT = 4, TWINS_BIT = 8, RAW_BIT = 16, NOTHING_BIT = 32 };  // what a case asks for
constexpr u32 NOTHING = ALL | SAME_SIGN;  // in the second word: all elements are +0

struct alignas(PIECE * sizeof(Code)) Piece { Code codes[PIECE]; };
struct alignas(16) Case { u32 key, other_key, first, second; };  // the last two: OfPacked of bit_fields.py, of which EDGE and so on are masks

// The elements of a case that asks for this alone
template <u32 ASKED> __device__ __forceinline__ void draw_as(const Case &of, const u32 *__restrict__ of_place, Code *__restrict__ out, int lane) {
    const u32 first = of.first & ~((ASKED & EDGE_BIT ? 0 : EDGE) | (ASKED & SPECIAL_BIT ? 0 : SPECIAL));
    const u32 no_zeros = ASKED & ZERO_BIT ? 0 : ZERO, second_asked = ASKED & RAW_BIT ? of.second | RAW : of.second & ~(RAW | no_zeros);
    const u32 second = ASKED & NOTHING_BIT ? NOTHING : second_asked;
    constexpr int AT_ONCE = 32 * PIECE, ROW = INNER * PLACES;
    constexpr bool one_place = AT_ONCE % ROW == 0;  // of all elements of a lane with the same v
    Piece *to = (Piece *)out + lane;
#pragma unroll 1
    for (int at = lane * PIECE; at < ELEMENTS; at += AT_ONCE, to += 32) {
        Piece piece;
#pragma unroll
        for (int v = 0; v < PIECE; ++v) {
            const u32 place = of_place[((one_place ? lane * PIECE : at) + v) / INNER % PLACES] & ~(ASKED & TWINS_BIT ? 0 : FLIPPED | NUDGED);
            piece.codes[v] = element(of.key, of.other_key, first, second, place, (at + v) / ROW, (at + v) % INNER);
        }
        *to = piece;
    }
}

// draw_as<asked>, where `asked` is known to have these bits, and may have those from NEXT on
template <u32 ASKED, u32 NEXT>
__device__ __forceinline__ void draw_asked(u32 asked, const Case &of, const u32 *__restrict__ of_place, Code *__restrict__ out, int lane) {
    if constexpr (NEXT == RAW_BIT) draw_as<ASKED>(of, of_place, out, lane);
    else if (asked & NEXT) draw_asked<ASKED | NEXT, 2 * NEXT>(asked, of, of_place, out, lane);
    else draw_asked<ASKED, 2 * NEXT>(asked, of, of_place, out, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) draw(const int *cases, const Case *__restrict__ of_cases,
                                                             const u32 *__restrict__ of_places, Code *__restrict__ out) {
    const s64 at = (s64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (at >= *cases) return;
    const Case of = of_cases[at];
    const u32 *of_place = of_places + at * PLACES;
    Code *own = out + at * ELEMENTS;
    const int lane = threadIdx.x % 32;
    const u32 asked = (of.first & EDGE ? EDGE_BIT : 0) | (of.first & SPECIAL ? SPECIAL_BIT : 0) | (of.second & ZERO ? ZERO_BIT : 0) |
                      (of.second & TWINS ? TWINS_BIT : 0);
    if (of.second & RAW) draw_as<RAW_BIT>(of, of_place, own, lane);
    else if ((of.second & (ZERO | SAME_SIGN)) == NOTHING) draw_as<NOTHING_BIT>(of, of_place, own, lane);
    else draw_asked<0, EDGE_BIT>(asked, of, of_place, own, lane);
}
