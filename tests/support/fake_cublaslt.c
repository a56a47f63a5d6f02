// A cuBLASLt that proposes nothing but what it was asked: each number of its answer is one of the question. See test_replay_heuristic.py.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
typedef struct { int compute, scale; int32_t trans[2]; int8_t fast; } Desc;
typedef struct { int type; uint64_t rows, columns; int64_t ld; } Layout;
typedef struct { uint64_t workspace; uint32_t alignment[4]; } Preference;
typedef struct { uint64_t data[8]; size_t workspace; int state; float waves; int reserved[4]; } Answer;

static int live = 0;
int fake_live(void) { return live; }
size_t cublasLtGetVersion(void) { return 130100; }

static int made(void **out, size_t size) { *out = calloc(1, size); live++; return SUCCESS; }
static int freed(void *x) { free(x); live--; return SUCCESS; }
int cublasLtCreate(void **out) {
#ifdef WITHOUT_GPU
    return NOT_INITIALIZED;
#endif
    return made(out, 1);
}
int cublasLtDestroy(void *x) { return freed(x); }
int cublasLtMatmulDescDestroy(void *x) { return freed(x); }
int cublasLtMatrixLayoutDestroy(void *x) { return freed(x); }
int cublasLtMatmulPreferenceDestroy(void *x) { return freed(x); }
int cublasLtMatmulPreferenceCreate(void **out) { return made(out, sizeof(Preference)); }
int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    made(out, sizeof(Desc));
    ((Desc *)*out)->compute = compute;
    ((Desc *)*out)->scale = scale;
    return SUCCESS;
}
int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    Layout layout = {type, rows, columns, ld};
    made(out, sizeof layout);
    memcpy(*out, &layout, sizeof layout);
    return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t size) {
    if ((attribute == 3 || attribute == 4) && size == 4) { memcpy(&desc->trans[attribute - 3], value, 4); return SUCCESS; }
    if (attribute == 25 && size == 1) { memcpy(&desc->fast, value, 1); return SUCCESS; }
    return INVALID_VALUE;
}
int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t size) {
    if (attribute == 1 && size == 8) { memcpy(&preference->workspace, value, 8); return SUCCESS; }
    if (attribute >= 5 && attribute <= 8 && size == 4) { memcpy(&preference->alignment[attribute - 5], value, 4); return SUCCESS; }
    return INVALID_VALUE;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, Desc *desc, Layout *a, Layout *b, Layout *c, Layout *d, Preference *preference, int most,
                                   Answer *answers, int *found) {
    uint64_t inner_a = desc->trans[0] ? a->rows : a->columns, inner_b = desc->trans[1] ? b->columns : b->rows;
    uint64_t m = desc->trans[0] ? a->columns : a->rows, n = desc->trans[1] ? b->rows : b->columns;
    if (!handle || desc->scale != 0 || inner_a != inner_b || m != c->rows || n != c->columns || c != d) return INVALID_VALUE;
    for (Layout *x = a; x; x = x == a ? b : x == b ? c : 0) if (x->ld != (int64_t)x->rows) return INVALID_VALUE;
    *found = 0;
    if (inner_a == 13) return NOT_SUPPORTED;
    if (inner_a == 17) return SUCCESS;
    uint64_t flags = desc->trans[0] | desc->trans[1] << 1 | desc->fast << 2;
    for (int i = 0; i < most && i < 2; i++, ++*found) {
        Answer answer = {{desc->compute + i, m, n, flags, a->type, b->type, c->type, inner_a}, preference->workspace, 0, 0.5f, {0}};
        answers[i] = answer;
        for (int j = 0; j < 4; j++) if (preference->alignment[j] != preference->alignment[0]) return INVALID_VALUE;
    }
    if (inner_a == 19) answers[0].state = NOT_SUPPORTED;
    return SUCCESS;
}
int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algo, int attribute, void *value, size_t size, size_t *written) {
    if (attribute < 0 || attribute > 8 || size != (attribute < 7 ? 4 : 2)) return INVALID_VALUE;
    uint32_t one = attribute == 3 ? (uint32_t)(algo[0] & 1 ? 4 : 2) : (uint32_t)algo[attribute < 3 ? attribute : attribute - 1];
    memcpy(value, &one, size);
    *written = size;
    return SUCCESS;
}
