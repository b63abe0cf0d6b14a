/* Stands for libnccl.so.2, for communicators of one rank: what it sends it receives. In a larger one the collectives
   return without a value, since the other ranks do not exist; torch's `fake` process group does so without NCCL. */
#include "standin.h"
#include <stdlib.h>
#include <string.h>

typedef int status; /* ncclResult_t; 0: success */
#define INVALID_ARGUMENT 4

struct communicator {
    int size, rank, device;
};

typedef struct {
    char bytes[128];
} unique_id;

status ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

const char *ncclGetErrorString(status error) {
    return error ? "error of the stand-in for NCCL (no GPU computes)" : "no error";
}

const char *ncclGetLastError(struct communicator *communicator) {
    return "";
}

/* Communicators */

status ncclGetUniqueId(unique_id *id) {
    memset(id, 1, sizeof *id);
    return 0;
}

static status make(struct communicator **made, int size, int rank) {
    struct communicator *communicator = malloc(sizeof *communicator);
    *communicator = (struct communicator){size, rank, standin_device()};
    *made = communicator;
    return 0;
}

status ncclCommInitRank(struct communicator **made, int size, unique_id id, int rank) {
    return make(made, size, rank);
}

status ncclCommInitRankConfig(struct communicator **made, int size, unique_id id, int rank, void *config) {
    return make(made, size, rank);
}

status ncclCommInitRankScalable(struct communicator **made, int size, int rank, int num_ids, unique_id *ids,
                                void *config) {
    return make(made, size, rank);
}

/* Who is in which part is known to the other ranks only: the part is taken for the whole. */
status ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **made, void *config) {
    return make(made, whole->size, whole->rank);
}

status ncclCommDestroy(struct communicator *communicator) {
    free(communicator);
    return 0;
}

status ncclCommAbort(struct communicator *communicator) {
    return ncclCommDestroy(communicator);
}

status ncclCommGetAsyncError(struct communicator *communicator, int *error) {
    *error = 0;
    return 0;
}

status ncclCommCount(struct communicator *communicator, int *size) {
    *size = communicator->size;
    return 0;
}

status ncclCommUserRank(struct communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

status ncclCommCuDevice(struct communicator *communicator, int *device) {
    *device = communicator->device;
    return 0;
}

status ncclMemAlloc(void **base, size_t bytes) {
    *base = standin_malloc(bytes, standin_device());
    return *base ? 0 : 1;
}

status ncclMemFree(void *base) {
    return standin_free(base) ? INVALID_ARGUMENT : 0;
}

/* Collectives */

static size_t size_of(int type) { /* ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16 ... float8 */
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static status collective(const void *from, void *to, size_t count, int type, struct communicator *communicator) {
    standin_launch();
    if (communicator->size == 1 && from != to)
        standin_copy(to, from, count * size_of(type));
    return 0;
}

status ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                     void *stream) {
    return collective(from, to, count, type, communicator);
}

status ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                     struct communicator *communicator, void *stream) {
    return collective(from, to, count, type, communicator);
}

status ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                         struct communicator *communicator, void *stream) {
    return collective(from, to, count, type, communicator);
}

status ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *communicator,
                     void *stream) {
    return collective(from, to, count, type, communicator);
}

status ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                  struct communicator *communicator, void *stream) {
    return collective(from, to, count, type, communicator);
}

/* A sum of values times a factor is an operation of its own, with a number that no other one has. */
status ncclRedOpCreatePreMulSum(int *operation) {
    *operation = 5;
    return 0;
}
