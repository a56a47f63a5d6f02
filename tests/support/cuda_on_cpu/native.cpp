// After machine.cpp, what the texts of tcemu.native ask the machine for: barriers that count, copies, and the products of small whole numbers,
// which are exact in every type, by the manual's formulas for where their elements stand.

#include <map>
#include <utility>

alignas(1024) static u8 memory[1 << 18];
static u32 shared_address(const void *p) { return (u32)((const u8 *)p - memory); }

struct Counter { int expected = 0, pending = 0; long bytes = 0; u32 phase = 0; };
static std::map<u32, Counter> counters;
static void look(Counter &c) {
    if (c.pending == 0 && c.bytes == 0) c.pending = c.expected, ++c.phase;
}
static void barrier_begin(u32 at, u32 arrivals) { counters[at] = Counter{(int)arrivals, (int)arrivals, 0, 0}; }
static void barriers_begun() {}
static void arrive(u32 at) { --counters[at].pending, look(counters[at]); }
static void arrive_expecting(u32 at, u32 bytes) { counters[at].bytes += bytes, arrive(at); }
static void await(u32 at, u32 parity) {
    while ((counters[at].phase & 1) == parity) yield();
}
static void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
    memcpy(memory + to, from, bytes);
    counters[barrier].bytes -= bytes, look(counters[barrier]);
}
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int MOST> static void wgmma_wait() {}

template <class... T, size_t... AT> static void call(void (*entry)(T...), void **given, std::index_sequence<AT...>) { entry((T)given[AT]...); }
template <class... T> static void run_entry(void (*entry)(T...), int grid, int threads, void **given) {
    launch(grid, threads, [=] { call(entry, given, std::index_sequence_for<T...>{}); });
}

// ---- elements

static double of_f16(u16 w) { _Float16 h; memcpy(&h, &w, 2); return (double)h; }
static u16 to_f16(double v) { const _Float16 h = (_Float16)v; u16 w; memcpy(&w, &h, 2); return w; }
static double of_e4m3(u8 w) {
    const int e = w >> 3 & 15, m = w & 7;
    const double v = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    return w & 128 ? -v : v;
}
static double element(const u8 *p, char kind) {
    u16 half; u32 word;
    memcpy(&half, p, 2), memcpy(&word, p, 4);
    switch (kind) {
        case 's': return (signed char)*p;
        case '8': return of_e4m3(*p);
        case 'h': return of_f16(half);
        case 'b': return __uint_as_float((u32)half << 16);
        default: return __uint_as_float(word & ~0x1FFFu);
    }
}
