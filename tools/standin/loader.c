/* Libraries of CUDA that a program opens by path, as torch and vLLM open those of their wheels, are the stand-in's: a
   preloaded library is found by its name only. Every other call is passed on by a jump, so that it looks like a call of
   the program, whose own search path the real function goes by. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

static const struct {
    const char *begin, *name;
} ours[] = {
    {"libcudart.so", "libcudart.so.13"},       {"libcuda.so", "libcuda.so.1"},
    {"libcublas.so", "libcublas.so.13"},       {"libcublasLt.so", "libcublasLt.so.13"},
    {"libnvidia-ml.so", "libnvidia-ml.so.1"},  {"libnccl.so", "libnccl.so.2"},
};

/* The name of the stand-in for the library of this path, or the path itself. */
static const char *replaced(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *file = slash ? slash + 1 : path;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        size_t length = strlen(ours[i].begin);
        if (!strncmp(file, ours[i].begin, length) && (file[length] == 0 || file[length] == '.'))
            return ours[i].name;
    }
    return path;
}

void *dlopen(const char *path, int flags) {
    static void *(*real)(const char *, int);
    if (!real)
        real = dlsym(RTLD_NEXT, "dlopen");
    return real(path ? replaced(path) : NULL, flags); /* a jump: -O2 and no stack protector, see build.py */
}
