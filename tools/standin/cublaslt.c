/* Stands for libcublasLt.so.13: matrix products with a choice of algorithm. There is one, and it does nothing. */
#include "standin.h"
#include <stdlib.h>
#include <string.h>

typedef int status; /* 0: success */

size_t cublasLtGetVersion(void) {
    return 130101;
}

size_t cublasLtGetCudartVersion(void) {
    return 13000;
}

/* Descriptors are handles that nothing looks into: their attributes are set in silence (silent.py). */

static status make(void **handle) {
    *handle = calloc(1, 512);
    return 0;
}

static status end(void *handle) {
    free(handle);
    return 0;
}

status cublasLtCreate(void **handle) {
    return make(handle);
}

status cublasLtDestroy(void *handle) {
    return end(handle);
}

status cublasLtMatmulDescCreate(void **descriptor, int compute_type, int scale_type) {
    return make(descriptor);
}

status cublasLtMatmulDescDestroy(void *descriptor) {
    return end(descriptor);
}

status cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return make(layout);
}

status cublasLtMatrixLayoutDestroy(void *layout) {
    return end(layout);
}

status cublasLtMatmulPreferenceCreate(void **preference) {
    return make(preference);
}

status cublasLtMatmulPreferenceDestroy(void *preference) {
    return end(preference);
}

/* cublasLtMatmulHeuristicResult_t: the algorithm, the bytes of its workspace (0), and a status of 0. */
#define RESULT_BYTES 96

status cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                      void *preference, int wanted, void *results, int *found) {
    memset(results, 0, RESULT_BYTES);
    *found = wanted > 0;
    return 0;
}

status cublasLtMatmul(void) {
    standin_launch();
    return 0;
}
