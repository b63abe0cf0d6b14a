/* Stands for libcuda.so.1, the driver, which Triton, torch's virtual memory, and vLLM's sleep and transfers call.

   True: devices, memory with its limit, which addresses belong to which block. Not true: a module is not read, and a
   kernel of it does nothing. All devices have one context. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL 1 /* else the header renames some functions */
#include "standin.h"
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Contexts, modules and kernels are handles that nothing looks into. */
static char handle[64];

CUresult cuInit(unsigned flags) {
    return standin_num_visible() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error ? "error of the stand-in for CUDA (no GPU computes)" : "no error";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    return cuGetErrorString(error, text);
}

/* Devices and contexts */

CUresult cuDeviceGetCount(int *count) {
    *count = standin_num_visible();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, length, "%s", standin_gpu()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    standin_uuid(standin_number(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    return cuDeviceGetUuid(uuid, device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = standin_gpu()->bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = standin_attribute(attribute);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (context)
        *context = (CUcontext)handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = standin_device();
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = (CUcontext)handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream stream, CUdevice *device) {
    *device = standin_device();
    return CUDA_SUCCESS;
}

/* Tables of functions between NVIDIA's own libraries. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    return CUDA_ERROR_NOT_FOUND;
}

/* Modules and kernels */

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *code) {
    *module = (CUmodule)handle;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *code, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, code);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    return cuModuleLoadData(module, path);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)handle;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *library_options, void **library_values, unsigned num_library_options) {
    *library = (CUlibrary)handle;
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    *kernel = (CUkernel)handle;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = (CUfunction)handle;
    return CUDA_SUCCESS;
}

/* Of a kernel without spilled registers: Triton reads these to choose a configuration. */
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        *value = 1024;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = 32;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    standin_launch();
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    standin_launch();
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                              size_t shared, unsigned flags) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = 16;
    return CUDA_SUCCESS;
}

/* Memory */

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = standin_gpu()->bytes;
    *free_bytes = *total - standin_used(standin_device());
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *base, size_t bytes) {
    *base = (CUdeviceptr)standin_malloc(bytes, standin_device());
    return *base ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree_v2(CUdeviceptr base) {
    return standin_free((void *)base) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    standin_copy(to, (void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    standin_copy((void *)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    standin_copy((void *)to, (void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    void *begin;
    size_t size;
    if (!standin_find((void *)address, NULL, &begin, &size))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = (CUdeviceptr)begin;
    if (bytes)
        *bytes = size;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    int device = 0;
    void *base = NULL;
    size_t bytes = 0;
    int on_device = standin_find((void *)address, &device, &base, &bytes);
    if (!on_device && !standin_is_pinned((void *)address))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = (CUcontext)handle;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = address;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = device;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(void **)value = base;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = bytes;
        break;
    default: /* the other attributes ask whether the memory is of a special kind */
        *(int *)value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr address) {
    for (unsigned i = 0; i < count; i++)
        cuPointerGetAttribute(values[i], attributes[i], address);
    return CUDA_SUCCESS;
}

/* Virtual memory, which vLLM's sleep and expandable segments use: memory is counted when it is made, and its bytes lie
   at the addresses that are reserved. So mapping and access need nothing (silent.py), and one piece of memory cannot be
   seen at two addresses. */

struct piece {
    size_t bytes;
    int device;
    struct piece *next;
};

static struct piece *pieces;
static pthread_mutex_t pieces_lock = PTHREAD_MUTEX_INITIALIZER;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    *bytes = 2UL << 20;
    return CUDA_SUCCESS;
}

CUresult cuMulticastGetGranularity(size_t *bytes, const CUmulticastObjectProp *properties,
                                   CUmulticastGranularity_flags option) {
    *bytes = 2UL << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *memory, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    if (!standin_charge(properties->location.id, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *piece = malloc(sizeof *piece);
    piece->bytes = bytes;
    piece->device = properties->location.id;
    pthread_mutex_lock(&pieces_lock);
    piece->next = pieces;
    pieces = piece;
    pthread_mutex_unlock(&pieces_lock);
    *memory = (CUmemGenericAllocationHandle)piece;
    return CUDA_SUCCESS;
}

/* As the driver does, it refuses a piece that is not there: vLLM releases memory that sleeps once more when its
   process ends. */
CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
    pthread_mutex_lock(&pieces_lock);
    struct piece **place = &pieces;
    while (*place && *place != (struct piece *)memory)
        place = &(*place)->next;
    struct piece *piece = *place;
    if (piece)
        *place = piece->next;
    pthread_mutex_unlock(&pieces_lock);
    if (!piece)
        return CUDA_ERROR_INVALID_VALUE;
    standin_discharge(piece->device, piece->bytes);
    free(piece);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *base, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    *base = (CUdeviceptr)standin_reserve(bytes);
    return *base ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes) {
    return standin_free((void *)base) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* What was there is gone: memory that is mapped there again reads as 0. */
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    madvise((void *)address, bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

/* Functions by name: the newest version that is preloaded. */
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newest);
    if (!*function)
        *function = dlsym(RTLD_DEFAULT, name);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
