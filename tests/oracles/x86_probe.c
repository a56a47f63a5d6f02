/* The matrix and dot-product units of an x86 CPU as functions for ctypes: `count` instructions on rows of operands.

   A row is what one instruction takes: 64 bytes of each operand for AVX512, a tile of 1,024 bytes for AMX. */
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BF16 __attribute__((target("avx512f,avx512bf16")))
#define VNNI __attribute__((target("avx512f,avx512vnni")))
#define AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#define ROWS(name, features, instruction)                                                                      \
    features void name(const char *a, const char *b, const char *c, char *d, int64_t count) {                  \
        for (int64_t i = 0; i < 64 * count; i += 64) {                                                         \
            __m512i x = _mm512_loadu_si512(a + i), y = _mm512_loadu_si512(b + i), z = _mm512_loadu_si512(c + i); \
            _mm512_storeu_si512(d + i, instruction);                                                           \
        }                                                                                                      \
    }

ROWS(vdpbf16ps, BF16, _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(z), (__m512bh)x, (__m512bh)y)))
ROWS(vpdpbusd, VNNI, _mm512_dpbusd_epi32(z, x, y))
ROWS(vpdpbusds, VNNI, _mm512_dpbusds_epi32(z, x, y))

/* Linux gives tiles to a process that asks: ARCH_REQ_XCOMP_PERM for XTILEDATA. Returns 0 if it has. */
long request_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }

struct tile_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed));

#define TILES(name, instruction)                                                              \
    AMX void name(const char *a, const char *b, const char *c, char *d, int64_t count) {      \
        struct tile_configuration all = {.palette = 1};                                       \
        for (int i = 0; i < 3; i++) all.bytes[i] = 64, all.rows[i] = 16;                      \
        _tile_loadconfig(&all);                                                               \
        for (int64_t i = 0; i < 1024 * count; i += 1024) {                                    \
            _tile_loadd(0, c + i, 64);                                                        \
            _tile_loadd(1, a + i, 64);                                                        \
            _tile_loadd(2, b + i, 64);                                                        \
            instruction(0, 1, 2);                                                             \
            _tile_stored(0, d + i, 64);                                                       \
        }                                                                                     \
        _tile_release();                                                                      \
    }

TILES(tdpbf16ps, _tile_dpbf16ps)
TILES(tdpbssd, _tile_dpbssd)
TILES(tdpbsud, _tile_dpbsud)
TILES(tdpbusd, _tile_dpbusd)
TILES(tdpbuud, _tile_dpbuud)
