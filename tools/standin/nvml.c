/* Stands for libnvidia-ml.so.1 (NVML), by which tools, Ray, vLLM and this project look for GPUs without using one.

   As the real one it knows all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says. A function that is not here is
   missing, and who looks for it is told so by the linker. */
#include "standin.h"
#include <stdio.h>

typedef int status; /* nvmlReturn_t */
#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3

static char devices[8]; /* the handle of a device is the address of its byte */

static int index_of(void *device) {
    return (int)((char *)device - devices);
}

status nvmlInit_v2(void) {
    return SUCCESS;
}

status nvmlInitWithFlags(unsigned flags) {
    return SUCCESS;
}

status nvmlShutdown(void) {
    return SUCCESS;
}

const char *nvmlErrorString(status error) {
    return error ? "error of the stand-in for NVML (no GPU computes)" : "success";
}

status nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.00.00");
    return SUCCESS;
}

status nvmlSystemGetCudaDriverVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

status nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

status nvmlDeviceGetCount_v2(unsigned *count) {
    *count = standin_num_installed();
    return SUCCESS;
}

status nvmlDeviceGetCount(unsigned *count) {
    return nvmlDeviceGetCount_v2(count);
}

status nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= (unsigned)standin_num_installed())
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

status nvmlDeviceGetHandleByIndex(unsigned index, void **device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static status uuid_text(int index, char *text, unsigned length) {
    unsigned char u[16];
    standin_uuid(index, u);
    snprintf(text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
             u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return SUCCESS;
}

status nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    return uuid_text(index_of(device), text, length);
}

status nvmlDeviceGetHandleByUUID(const char *wanted, void **device) {
    for (int i = 0; i < standin_num_installed(); i++) {
        char text[64];
        uuid_text(i, text, sizeof text);
        int at = 0;
        while (text[at] && text[at] == wanted[at])
            at++;
        if (!text[at] && !wanted[at]) {
            *device = &devices[i];
            return SUCCESS;
        }
    }
    return INVALID_ARGUMENT;
}

/* The bus of device i is i + 1, as cudaDeviceGetPCIBusId says. */
status nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || number < 1)
        return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}

status nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = index_of(device);
    return SUCCESS;
}

status nvmlDeviceGetMinorNumber(void *device, unsigned *number) {
    return nvmlDeviceGetIndex(device, number);
}

status nvmlDeviceGetName(void *device, char *text, unsigned length) {
    snprintf(text, length, "%s", standin_gpu()->name);
    return SUCCESS;
}

status nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = standin_gpu()->major;
    *minor = standin_gpu()->minor;
    return SUCCESS;
}

/* nvmlMemory_t: total, free, used. Only this process's memory is known to be used. */
status nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = standin_gpu()->bytes;
    memory[2] = standin_used(index_of(device));
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}

status nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = rates[1] = 0;
    return SUCCESS;
}

status nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *can) {
    *can = 0; /* OK */
    return SUCCESS;
}

/* torch requires these two: no link between GPUs is shown. */
status nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
    return NOT_SUPPORTED;
}

status nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *bus) {
    return NOT_SUPPORTED;
}

status nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
    return NOT_SUPPORTED;
}

status nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
    *count = 0;
    return SUCCESS;
}

status nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
