/* The common part of the stand-in for CUDA, which its libraries share in a process: libstandin.so.

   No GPU computes. Device memory is memory of this process, kernels do nothing, and every call is done when it returns.
   What is true: sizes, addresses, types and devices of memory; which calls are made, and in which order. What is not:
   values, time, and anything that depends on two kernels running at once. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* gpu.c: the GPU that is stood in for, as the variables STANDIN_* describe it (tools/standin/build.py sets them) */

struct standin_gpu {
    char name[96];            /* ends in "(stand-in, no GPU)", so that logs of a run say so */
    size_t bytes;             /* of device memory */
    int major, minor;         /* compute capability */
    int processors;           /* streaming multiprocessors */
    int shared_bytes;         /* shared memory of a multiprocessor */
    int l2_bytes;
};

const struct standin_gpu *standin_gpu(void);
int standin_num_installed(void);     /* GPUs of the machine, as NVML counts them */
int standin_num_visible(void);       /* those that CUDA_VISIBLE_DEVICES leaves */
int standin_number(int device);      /* of a visible GPU, among those of the machine */
int standin_device(void);            /* the current device of this thread */
void standin_set_device(int device);
int standin_attribute(int attribute); /* of CUdevice_attribute; cudaDeviceAttr has the same numbers */
void standin_uuid(int number, unsigned char uuid[16]);

/* memory.c: device memory, pinned memory, and memory of other processes */

void *standin_malloc(size_t bytes, int device); /* NULL: the device has not so much left */
int standin_free(void *base);                   /* 0, or 1 where no block begins */
size_t standin_used(int device);
int standin_charge(int device, size_t bytes);   /* 1 and counted as used, or 0 where that is more than is left */
void standin_discharge(int device, size_t bytes);
void *standin_reserve(size_t bytes);            /* addresses of the current device which count for nothing */
int standin_find(const void *address, int *device, void **base, size_t *bytes); /* 1 in a block of a device */
int standin_is_device(const void *address);
int standin_is_pinned(const void *address);
void *standin_pinned(size_t bytes);
int standin_register(void *base, size_t bytes);
int standin_unregister(void *base);
int standin_export(void *base, char handle[64]);   /* 0, or 1 */
void *standin_import(const char handle[64]);       /* NULL: its process has ended or freed it */
void standin_copy(void *to, const void *from, size_t bytes);
void standin_fill(void *to, int value, size_t bytes);
void standin_poke(void *to, const void *from, size_t bytes); /* always written: what a kernel should have left */

/* streams.c: what another thread still does on a stream. Everything else is done when its call returns */

unsigned long standin_begin(void *stream);            /* one more thing; returns their number so far */
void standin_end(void *stream);                       /* the first of them is done */
unsigned long standin_begun(void *stream);
int standin_is_done(void *stream, unsigned long number); /* so many of the things begun are done */
void standin_wait(void *stream, unsigned long number);
void standin_wait_for_all(void);
int standin_is_default(void *stream);                 /* what follows on such a stream is computed at once */

/* report.c: what the stand-in says, and what it counts */

extern long standin_launches;                   /* kernels of this process; read by name */
extern long standin_unknown_calls;              /* calls of functions that are unknown; read by name */
void standin_launch(void);
int standin_unknown(const char *function);      /* names it on stderr at its first call. Returns 0: success */
void standin_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#ifdef __cplusplus
}
#endif
