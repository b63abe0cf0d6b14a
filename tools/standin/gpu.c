/* The GPU that is stood in for. Its sizes come from the table GPUS of tools/standin/build.py, by variables of the
   environment; limits that are equal in all GPUs of that table are written here. */
#define _GNU_SOURCE
#include "standin.h"
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 8

static struct standin_gpu gpu;
static int num_installed, num_visible;
static int visible_devices[MAX_DEVICES]; /* the number of each among those of the machine */
static __thread int current;

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (!value || !*value) {
        standin_say("%s is not set: start the program with tools/standin/run.py", name);
        exit(2);
    }
    return value;
}

/* As CUDA does: the numbers up to the first that is no device. */
static int choose(const char *visible, int installed) {
    int count = 0;
    for (const char *at = visible; *at && count < MAX_DEVICES;) {
        char *end;
        long device = strtol(at, &end, 10);
        if (end == at || device < 0 || device >= installed)
            break;
        visible_devices[count++] = (int)device;
        at = *end == ',' ? end + 1 : end;
    }
    return count;
}

static void read_environment(void) {
    snprintf(gpu.name, sizeof gpu.name, "%s (stand-in, no GPU)", variable("STANDIN_NAME"));
    gpu.bytes = strtoull(variable("STANDIN_BYTES"), NULL, 10);
    sscanf(variable("STANDIN_CAPABILITY"), "%d.%d", &gpu.major, &gpu.minor);
    gpu.processors = atoi(variable("STANDIN_PROCESSORS"));
    gpu.shared_bytes = atoi(variable("STANDIN_SHARED_BYTES"));
    gpu.l2_bytes = atoi(variable("STANDIN_L2_BYTES"));
    num_installed = atoi(variable("STANDIN_COUNT"));
    if (num_installed > MAX_DEVICES)
        num_installed = MAX_DEVICES;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    num_visible = choose(visible ? visible : "0,1,2,3,4,5,6,7", num_installed);
}

/* At the first question, not when the library is loaded: it is loaded into every child of a run, shells too. */
static void ready(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
}

const struct standin_gpu *standin_gpu(void) {
    ready();
    return &gpu;
}

int standin_num_installed(void) {
    ready();
    return num_installed;
}

int standin_num_visible(void) {
    ready();
    return num_visible;
}

int standin_device(void) {
    return current;
}

void standin_set_device(int device) {
    current = device;
}

int standin_number(int device) {
    ready();
    return visible_devices[device];
}

void standin_uuid(int number, unsigned char uuid[16]) {
    for (int i = 0; i < 16; i++)
        uuid[i] = (unsigned char)(i * 7 + number);
}

int standin_attribute(int attribute) {
    ready();
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return gpu.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return gpu.minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return gpu.processors;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return gpu.shared_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return gpu.shared_bytes - 1024; /* the driver keeps one KiB of each block */
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return gpu.l2_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 49152;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: /* kHz; for printing and for estimates of time, which are not true here */
        return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return 5120;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return 1;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: /* 0: any number of processes */
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_TCC_DRIVER:
    case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        return 0;
    default: /* the other attributes ask whether the GPU can do something */
        return 1;
    }
}
