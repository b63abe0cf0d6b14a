/* Stands for libcublas.so.13: matrix products, which do nothing (silent.py names them). Here is what has a result. */
#include "standin.h"
#include <stdlib.h>

typedef int status; /* 0: success */

status cublasCreate_v2(void **handle) {
    *handle = calloc(1, 256);
    return 0;
}

status cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

status cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

status cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

status cublasGetVersion_v2(void *handle, int *version) {
    *version = 130101;
    return 0;
}

status cublasGetProperty(int part, int *value) {
    *value = part == 0 ? 13 : 1; /* major, then minor and patch */
    return 0;
}
