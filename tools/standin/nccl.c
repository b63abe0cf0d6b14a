/* Stands for libnccl.so.2. A communicator of one rank receives what it sends.

   With values, the processes of one machine meet: rank 0 makes memory without a name, whose place is in the id that
   it hands out, and data passes through it piece by piece. A thread of each communicator does so, as on a GPU a kernel
   would: on a stream that is not a default one, calls return before the others have come, and an event tells when they
   have. Without values, and in a larger communicator, collectives return at once: the other ranks do not exist. torch's
   `fake` process group then does so without NCCL. Messages between two ranks, parts of communicators, and sums times a
   factor have no values. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int status; /* ncclResult_t; 0: success */
#define SYSTEM_ERROR 2
#define INVALID_ARGUMENT 4
#define INVALID_USAGE 5

#define MAX_RANKS 8
#define PIECE (1UL << 20) /* bytes of a rank that pass at once */

/* Memory of all ranks. It is all zeros at first, which is the state before the first meeting. */
struct meeting {
    int num_here;  /* ranks that have come to the meeting that is on */
    int num_done;  /* meetings */
    char pad[4088];
    char pieces[MAX_RANKS][PIECE];
};

enum kind { BROADCAST, GATHER, REDUCE_TO_ALL, REDUCE_TO_ONE, SCATTER };

struct call {
    enum kind kind;
    const char *from;
    char *to;
    size_t count;
    int type, operation, root;
    void *stream;
    struct call *next;
};

struct communicator {
    int size, rank, device;
    struct meeting *meeting; /* NULL: the other ranks do not exist, or there is none */
    int aborted;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t called;
    struct call *first, **last;
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

static int has_values(void) {
    return getenv("STANDIN_VALUES") != NULL;
}

static status refused(const char *what) {
    standin_say("it has no values of NCCL's %s", what);
    return INVALID_USAGE;
}

/* Types and sums: ncclDataType_t is int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16 */

static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0; /* not a number */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest, ties to even */
}

/* sum, product, maximum, minimum, mean (a sum until it is divided) */
#define REDUCED(a, b, operation) \
    ((operation) == 1 ? (a) * (b) : (operation) == 2 ? ((a) > (b) ? (a) : (b)) : (operation) == 3 ? ((a) < (b) ? (a) : (b)) : (a) + (b))

/* Of each element, over the ranks in their order. `wide` is the type in which it is computed. */
#define REDUCE(type, wide, load, store)                                             \
    for (size_t i = 0; i < count; i++) {                                            \
        wide value = load(((const type *)meeting->pieces[0])[i]);                   \
        for (int rank = 1; rank < size; rank++) {                                   \
            wide other = load(((const type *)meeting->pieces[rank])[i]);            \
            value = REDUCED(value, other, operation);                               \
        }                                                                           \
        ((type *)to)[i] = store(operation == 4 ? value / size : value);             \
    }                                                                               \
    break

static void reduce(const struct meeting *meeting, int size, void *to, size_t count, int type, int operation) {
    switch (type) {
    case 0:
        REDUCE(int8_t, int, , );
    case 1:
        REDUCE(uint8_t, int, , );
    case 2:
        REDUCE(int32_t, int64_t, , );
    case 3:
        REDUCE(uint32_t, int64_t, , );
    case 4:
        REDUCE(int64_t, int64_t, , );
    case 5:
        REDUCE(uint64_t, uint64_t, , );
    case 6:
        REDUCE(_Float16, float, , );
    case 7:
        REDUCE(float, float, , );
    case 8:
        REDUCE(double, double, , );
    case 9:
        REDUCE(uint16_t, float, of_bfloat16, to_bfloat16);
    }
}

/* The work of a communicator's thread */

/* Until all ranks are here. 1: this rank has left instead. Like NCCL's kernels, the others then wait for ever. */
static int meet(struct communicator *communicator) {
    struct meeting *meeting = communicator->meeting;
    int number = __atomic_load_n(&meeting->num_done, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&meeting->num_here, 1, __ATOMIC_ACQ_REL) == communicator->size) {
        __atomic_store_n(&meeting->num_here, 0, __ATOMIC_RELEASE);
        __atomic_add_fetch(&meeting->num_done, 1, __ATOMIC_ACQ_REL);
        return 0;
    }
    while (__atomic_load_n(&meeting->num_done, __ATOMIC_ACQUIRE) == number) {
        if (__atomic_load_n(&communicator->aborted, __ATOMIC_RELAXED))
            return 1;
        usleep(50);
    }
    return 0;
}

/* One piece of `count` elements that begins at element `at`; `part`: whose it is when sums are scattered. */
static int pass(struct communicator *communicator, const struct call *call, int part, size_t at, size_t count) {
    struct meeting *meeting = communicator->meeting;
    const size_t width = size_of(call->type), bytes = count * width;
    const int rank = communicator->rank;
    if (call->kind != BROADCAST || rank == call->root)
        memcpy(meeting->pieces[rank], call->from + (part * call->count + at) * width, bytes);
    if (meet(communicator))
        return 1;
    char *to = call->to + at * width;
    if (call->kind == BROADCAST)
        memcpy(to, meeting->pieces[call->root], bytes);
    else if (call->kind == GATHER)
        for (int other = 0; other < communicator->size; other++)
            memcpy(to + other * call->count * width, meeting->pieces[other], bytes);
    else if (call->kind == REDUCE_TO_ALL || rank == (call->kind == SCATTER ? part : call->root))
        reduce(meeting, communicator->size, to, count, call->type, call->operation);
    return meet(communicator);
}

static void run(struct communicator *communicator, const struct call *call) {
    const size_t step = PIECE / size_of(call->type);
    const int num_parts = call->kind == SCATTER ? communicator->size : 1;
    for (int part = 0; part < num_parts; part++)
        for (size_t at = 0; at < call->count; at += step)
            if (pass(communicator, call, part, at, call->count - at < step ? call->count - at : step))
                return;
}

static void *work(void *argument) {
    struct communicator *communicator = argument;
    pthread_mutex_lock(&communicator->lock);
    for (;;) {
        struct call *call = communicator->first;
        if (!call && communicator->aborted)
            break;
        if (!call) {
            pthread_cond_wait(&communicator->called, &communicator->lock);
            continue;
        }
        if (!(communicator->first = call->next))
            communicator->last = &communicator->first;
        pthread_mutex_unlock(&communicator->lock);
        run(communicator, call);
        standin_end(call->stream);
        free(call);
        pthread_mutex_lock(&communicator->lock);
    }
    pthread_mutex_unlock(&communicator->lock);
    return NULL;
}

static void enqueue(struct communicator *communicator, struct call call) {
    struct call *made = malloc(sizeof *made);
    *made = call;
    unsigned long number = standin_begin(call.stream);
    pthread_mutex_lock(&communicator->lock);
    *communicator->last = made;
    communicator->last = &made->next;
    pthread_cond_signal(&communicator->called);
    pthread_mutex_unlock(&communicator->lock);
    if (standin_is_default(call.stream))
        standin_wait(call.stream, number);
}

/* Communicators */

status ncclGetUniqueId(unique_id *id) {
    memset(id, 1, sizeof *id);
    if (!has_values())
        return 0;
    int file = memfd_create("standin-nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(struct meeting)))
        return SYSTEM_ERROR;
    snprintf(id->bytes, sizeof id->bytes, "%d %d", getpid(), file);
    return 0;
}

/* Returns when all ranks are here, so that the file's first owner may close it. */
static status join(struct communicator *communicator, const unique_id *id) {
    int process, descriptor;
    char path[64];
    if (communicator->size > MAX_RANKS || sscanf(id->bytes, "%d %d", &process, &descriptor) != 2)
        return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, descriptor);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return SYSTEM_ERROR;
    communicator->meeting = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (communicator->meeting == MAP_FAILED)
        return SYSTEM_ERROR;
    meet(communicator);
    if (process == getpid())
        close(descriptor);
    communicator->last = &communicator->first;
    pthread_mutex_init(&communicator->lock, NULL);
    pthread_cond_init(&communicator->called, NULL);
    return pthread_create(&communicator->thread, NULL, work, communicator) ? SYSTEM_ERROR : 0;
}

static status make(struct communicator **made, int size, int rank, const unique_id *id) {
    struct communicator *communicator = calloc(1, sizeof *communicator);
    communicator->size = size;
    communicator->rank = rank;
    communicator->device = standin_device();
    *made = communicator;
    return size > 1 && id && has_values() ? join(communicator, id) : 0;
}

status ncclCommInitRank(struct communicator **made, int size, unique_id id, int rank) {
    return make(made, size, rank, &id);
}

status ncclCommInitRankConfig(struct communicator **made, int size, unique_id id, int rank, void *config) {
    return make(made, size, rank, &id);
}

status ncclCommInitRankScalable(struct communicator **made, int size, int rank, int num_ids, unique_id *ids,
                                void *config) {
    return make(made, size, rank, &ids[0]);
}

/* Who is in which part is known to the other ranks only: the part is taken for the whole. */
status ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **made, void *config) {
    return whole->meeting ? refused("ncclCommSplit") : make(made, whole->size, whole->rank, NULL);
}

/* What has been called and has not met the other ranks is given up. */
status ncclCommAbort(struct communicator *communicator) {
    if (communicator->meeting) {
        pthread_mutex_lock(&communicator->lock);
        __atomic_store_n(&communicator->aborted, 1, __ATOMIC_RELAXED);
        pthread_cond_signal(&communicator->called);
        pthread_mutex_unlock(&communicator->lock);
        pthread_join(communicator->thread, NULL);
        munmap(communicator->meeting, sizeof(struct meeting));
    }
    free(communicator);
    return 0;
}

status ncclCommDestroy(struct communicator *communicator) {
    return ncclCommAbort(communicator);
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

static status collective(struct communicator *communicator, struct call call) {
    standin_launch();
    if (communicator->size == 1 && call.from != call.to)
        standin_copy(call.to, call.from, call.count * size_of(call.type));
    if (!communicator->meeting)
        return 0;
    if (call.operation > 4 || call.type > 9)
        return refused("sum times a factor, or of float8");
    enqueue(communicator, call);
    return 0;
}

status ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                     void *stream) {
    return collective(communicator, (struct call){GATHER, from, to, count, type, .stream = stream});
}

status ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                     struct communicator *communicator, void *stream) {
    return collective(communicator, (struct call){REDUCE_TO_ALL, from, to, count, type, operation, .stream = stream});
}

status ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                         struct communicator *communicator, void *stream) {
    return collective(communicator, (struct call){SCATTER, from, to, count, type, operation, .stream = stream});
}

status ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *communicator,
                     void *stream) {
    return collective(communicator, (struct call){BROADCAST, from, to, count, type, 0, root, stream});
}

status ncclBcast(void *data, size_t count, int type, int root, struct communicator *communicator, void *stream) {
    return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

status ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                  struct communicator *communicator, void *stream) {
    return collective(communicator, (struct call){REDUCE_TO_ONE, from, to, count, type, operation, root, stream});
}

status ncclSend(const void *from, size_t count, int type, int peer, struct communicator *communicator, void *stream) {
    standin_launch();
    return communicator->meeting ? refused("ncclSend") : 0;
}

status ncclRecv(void *to, size_t count, int type, int peer, struct communicator *communicator, void *stream) {
    standin_launch();
    return communicator->meeting ? refused("ncclRecv") : 0;
}

/* A sum of values times a factor is an operation of its own, with a number that no other one has. */
status ncclRedOpCreatePreMulSum(int *operation) {
    *operation = 5;
    return 0;
}
