/* Stands for libcudart.so.13, the CUDA runtime, through which torch reaches a GPU.

   True: devices and their properties, memory, the checks of a launch's sizes, which stream is being captured. Not true:
   kernels do nothing, a graph does nothing, events measure the time of the host, and all is done when a call returns,
   but for collectives of several ranks (nccl.c): no race can show. Functions that are exported, and are neither here nor
   in silent.py, say so when called. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL 1 /* else the header renames some functions */
#include "standin.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Errors: the last one is kept for the thread, since torch asks for it after a launch. */

static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error) {
    static __thread char text[32];
    snprintf(text, sizeof text, "cudaError %d", error);
    return text;
}

/* torch looks for "out of memory", and users do. */
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    default:
        return "error of the stand-in for CUDA (no GPU computes)";
    }
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = standin_num_visible();
    return result(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = standin_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= standin_num_visible())
        return result(cudaErrorInvalidDevice);
    standin_set_device(device);
    return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    return cudaSetDevice(device);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = standin_attribute(attribute);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct standin_gpu *gpu = standin_gpu();
    struct cudaDeviceProp *p = properties;
    memset(p, 0, sizeof *p);
    strcpy(p->name, gpu->name);
    standin_uuid(standin_number(device), (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = gpu->bytes;
    p->major = gpu->major;
    p->minor = gpu->minor;
    p->multiProcessorCount = gpu->processors;
    p->l2CacheSize = gpu->l2_bytes;
    p->sharedMemPerMultiprocessor = gpu->shared_bytes;
    p->sharedMemPerBlockOptin = standin_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->reservedSharedMemPerBlock = standin_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    p->sharedMemPerBlock = standin_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->regsPerBlock = p->regsPerMultiprocessor = standin_attribute(cudaDevAttrMaxRegistersPerBlock);
    p->maxThreadsPerBlock = standin_attribute(cudaDevAttrMaxThreadsPerBlock);
    p->maxThreadsPerMultiProcessor = standin_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->maxBlocksPerMultiProcessor = standin_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    p->maxThreadsDim[0] = standin_attribute(cudaDevAttrMaxBlockDimX);
    p->maxThreadsDim[1] = standin_attribute(cudaDevAttrMaxBlockDimY);
    p->maxThreadsDim[2] = standin_attribute(cudaDevAttrMaxBlockDimZ);
    p->maxGridSize[0] = standin_attribute(cudaDevAttrMaxGridDimX);
    p->maxGridSize[1] = standin_attribute(cudaDevAttrMaxGridDimY);
    p->maxGridSize[2] = standin_attribute(cudaDevAttrMaxGridDimZ);
    p->totalConstMem = standin_attribute(cudaDevAttrTotalConstantMemory);
    p->warpSize = standin_attribute(cudaDevAttrWarpSize);
    p->memoryBusWidth = standin_attribute(cudaDevAttrGlobalMemoryBusWidth);
    p->pciBusID = standin_number(device) + 1;
    p->memPitch = 2147483647;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->asyncEngineCount = 3;
    p->canMapHostMemory = 1;
    p->canUseHostPointerForRegisteredMem = 1;
    p->computePreemptionSupported = 1;
    p->concurrentKernels = 1;
    p->concurrentManagedAccess = 1;
    p->cooperativeLaunch = 1;
    p->globalL1CacheSupported = 1;
    p->localL1CacheSupported = 1;
    p->managedMemory = 1;
    p->memoryPoolsSupported = 1;
    p->streamPrioritiesSupported = 1;
    p->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02X:00.0", standin_number(device) + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

/* 13.0, whatever the wheels' minor version: functions that are newer are unknown here. */
cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    return cudaDriverGetVersion(version);
}

/* Memory */

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = standin_gpu()->bytes;
    *free_bytes = *total - standin_used(standin_device());
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **base, size_t bytes) {
    *base = standin_malloc(bytes, standin_device());
    return result(*base ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void **base, size_t bytes, cudaStream_t stream) {
    return cudaMalloc(base, bytes);
}

cudaError_t cudaMallocManaged(void **base, size_t bytes, unsigned flags) {
    return cudaMalloc(base, bytes);
}

cudaError_t cudaFree(void *base) {
    return result(standin_free(base) ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaFreeAsync(void *base, cudaStream_t stream) {
    return cudaFree(base);
}

cudaError_t cudaHostAlloc(void **base, size_t bytes, unsigned flags) {
    *base = standin_pinned(bytes);
    return result(*base ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **base, size_t bytes) {
    return cudaHostAlloc(base, bytes, 0);
}

cudaError_t cudaFreeHost(void *base) {
    return cudaFree(base);
}

cudaError_t cudaHostRegister(void *base, size_t bytes, unsigned flags) {
    return result(standin_register(base, bytes) ? cudaErrorHostMemoryAlreadyRegistered : cudaSuccess);
}

cudaError_t cudaHostUnregister(void *base) {
    return result(standin_unregister(base) ? cudaErrorHostMemoryNotRegistered : cudaSuccess);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    if (standin_find(pointer, &attributes->device, NULL, NULL)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
    } else if (standin_is_pinned(pointer)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = attributes->devicePointer = (void *)pointer;
    }
    return cudaSuccess;
}

/* A pool of the runtime's own is not kept: memory of a pool is memory of the device. */
static char pool;

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *handle, int device) {
    *handle = (cudaMemPool_t)&pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *handle, const struct cudaMemPoolProps *properties) {
    *handle = (cudaMemPool_t)&pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}

/* Copies */

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    standin_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int at, const void *from, int source, size_t bytes, cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        standin_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    standin_fill(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(to, value, bytes);
}

/* Between processes */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *base) {
    return result(standin_export(base, (char *)handle) ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaIpcOpenMemHandle(void **base, cudaIpcMemHandle_t handle, unsigned flags) {
    *base = standin_import((char *)&handle);
    return result(*base ? cudaSuccess : cudaErrorMapBufferObjectFailed);
}

cudaError_t cudaIpcCloseMemHandle(void *base) {
    return cudaFree(base);
}

/* Streams: where something runs makes no difference here, so that a stream is what a program has said of it. */

struct stream {
    int priority;
    unsigned flags;
    unsigned long long id;
    unsigned long long capture; /* the number of the capture that runs on it, or 0 */
};

static struct stream default_stream;

static struct stream *stream_of(cudaStream_t stream) {
    return standin_is_default(stream) ? &default_stream : (struct stream *)stream;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static unsigned long long next_id = 16;
    struct stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    made->flags = flags;
    made->id = __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
    *stream = (cudaStream_t)made;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream_of(stream) != &default_stream)
        free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    standin_wait(stream, standin_begun(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return standin_is_done(stream, standin_begun(stream)) ? cudaSuccess : result(cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize(void) {
    standin_wait_for_all();
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = stream_of(stream)->flags;
    return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = stream_of(stream)->id;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    return cudaGetDevice(device);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* Graphs: a capture has a number, and what was captured is not kept. Each graph has one node: it is not empty. */

static void *new_handle(void) {
    return calloc(1, 64);
}

static enum cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
    return stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capture_status(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **needed,
                                     const cudaGraphEdgeData **edges, size_t *num_needed) {
    *status = capture_status(stream);
    if (id)
        *id = stream_of(stream)->capture;
    if (graph)
        *graph = (cudaGraph_t)&default_stream;
    if (needed)
        *needed = NULL;
    if (edges)
        *edges = NULL;
    if (num_needed)
        *num_needed = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long next_capture = 1;
    stream_of(stream)->capture = __atomic_fetch_add(&next_capture, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *needed,
                                          const cudaGraphEdgeData *edges, size_t num_needed,
                                          enum cudaStreamCaptureMode mode) {
    return cudaStreamBeginCapture(stream, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    stream_of(stream)->capture = 0;
    *graph = new_handle();
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    *mode = cudaStreamCaptureModeRelaxed;
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) {
    *graph = new_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    *executable = new_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes)
        *nodes = NULL;
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    standin_launch();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}

/* Events: the host's clock when they were recorded. */

struct event {
    double ms;
    void *stream;         /* on which it was recorded, or NULL */
    unsigned long number; /* of what was begun there before */
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(struct event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct event *recorded = (struct event *)event;
    *recorded = (struct event){now.tv_sec * 1e3 + now.tv_nsec * 1e-6, stream, standin_begun(stream)};
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const struct event *recorded = (struct event *)event;
    return standin_is_done(recorded->stream, recorded->number) ? cudaSuccess : result(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const struct event *recorded = (struct event *)event;
    standin_wait(recorded->stream, recorded->number);
    return cudaSuccess;
}

/* The host waits: what follows on the stream is computed at once. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return cudaEventSynchronize(event);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(((struct event *)to)->ms - ((struct event *)from)->ms);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

/* An event of another process has always been reached: that process's calls were done when they returned. */
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    memset(handle, 0, sizeof *handle);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    return cudaEventCreateWithFlags(event, 0);
}

/* Kernels: the code that nvcc writes registers them, and keeps a launch's sizes until the launch. */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} launch;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    launch.grid = grid;
    launch.block = block;
    launch.shared = shared;
    launch.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch.grid;
    *block = launch.block;
    *shared = launch.shared;
    *(void **)stream = launch.stream;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* The sizes that no GPU accepts are refused as by the real runtime: they come from shapes. */
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    int empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    if (empty || block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535)
        return result(cudaErrorInvalidConfiguration);
    standin_launch();
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}

/* What a kernel needs is not known without its code: values with which the sizes that torch chooses are usual ones. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    const struct standin_gpu *gpu = standin_gpu();
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = gpu->major * 10 + gpu->minor;
    attributes->maxDynamicSharedSizeBytes = standin_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const cudaLaunchConfig_t *config) {
    *clusters = 16;
    return cudaSuccess;
}

/* Constants of kernels, which no kernel reads: all have one place. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static void *place;
    if (!place)
        place = standin_malloc(1, standin_device());
    *address = place;
    return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned num_options, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned num_library_options) {
    *library = (cudaLibrary_t)&default_stream;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (cudaKernel_t)&default_stream;
    return cudaSuccess;
}

/* Functions of the driver, which torch asks the runtime for: the newest version that is preloaded. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newest);
    if (!*function || !strcmp(name, "cuDevicePrimaryCtxRetain")) /* which has no second version */
        *function = dlsym(RTLD_DEFAULT, name);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function)
        standin_say("the driver's function %s was asked for and is not known to it", name);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, status);
}
