/* Memory of devices, pinned memory of the host, and device memory that another process opens.

   A block of device memory is a private mapping in a range of addresses of its own: it takes pages of this machine only
   where something is written. By default nothing is, so that 80 GB cost nothing and every read gives 0. The variable
   STANDIN_WRITES is the number of bytes up to which a copy or a fill takes place.

   True: sizes, the limit of the device, which device an address belongs to, what has been freed (an access ends the
   process), and that another process which opens a block sees the same bytes. Not true: how the driver of a real GPU
   cuts its memory, beside blocks of 2 MiB. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BLOCK (2UL << 20)
#define MAX_DEVICES 8
/* Below the addresses at which Linux puts programs (0x55...) and libraries (0x7f...). */
#define DEVICES_BEGIN 0x100000000000UL
#define DEVICE_SPAN 0x080000000000UL
#define PINNED_BEGIN 0x580000000000UL
#define PINNED_SPAN 0x080000000000UL

enum kind {
    OWN,        /* memory of a device, which counts as used */
    IMPORTED,   /* memory of another process */
    RESERVED,   /* addresses; their memory is counted by standin_charge */
    PINNED,     /* memory of the host that the runtime has made */
    REGISTERED, /* memory of the host that the program has made, and declared as pinned */
};

struct block {
    uintptr_t base;
    size_t bytes;
    int device; /* -1: the host */
    enum kind kind;
    int file; /* which holds the bytes of an exported block; -1: a private mapping */
    struct block *next;
};

struct range {
    uintptr_t begin, end;
    uintptr_t next; /* grows until the end: an address that has been freed is not given out again soon */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks; /* a few hundred: the caching allocator asks for large ones */
static struct range ranges[MAX_DEVICES + 1]; /* the last one: pinned memory */
static size_t used[MAX_DEVICES];

static size_t in_blocks(size_t bytes) {
    if (!bytes)
        bytes = 1;
    return (bytes + BLOCK - 1) & ~(BLOCK - 1);
}

static size_t max_written(void) {
    static long long limit = -1;
    if (limit < 0) {
        const char *value = getenv("STANDIN_WRITES");
        limit = value ? strtoll(value, NULL, 10) : 0;
    }
    return (size_t)limit;
}

static struct range *range_of(int device) {
    struct range *range = &ranges[device < 0 ? MAX_DEVICES : device];
    if (!range->begin) {
        range->begin = device < 0 ? PINNED_BEGIN : DEVICES_BEGIN + (uintptr_t)device * DEVICE_SPAN;
        range->end = range->begin + (device < 0 ? PINNED_SPAN : DEVICE_SPAN);
        range->next = range->begin;
    }
    return range;
}

/* Under the lock. The block that has this address, or NULL. */
static struct block *block_at(const void *address) {
    for (struct block *block = blocks; block; block = block->next)
        if ((uintptr_t)address >= block->base && (uintptr_t)address - block->base < block->bytes)
            return block;
    return NULL;
}

/* Under the lock. Maps so many bytes (of the file, if there is one) where nothing is yet; NULL if there is no room. */
static void *map(int device, size_t bytes, int file) {
    struct range *range = range_of(device);
    int flags = MAP_NORESERVE | MAP_FIXED_NOREPLACE | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    for (int turns = 0; turns < 2;) {
        if (range->next + bytes > range->end) {
            range->next = range->begin;
            turns++;
            continue;
        }
        void *address = (void *)range->next;
        range->next += bytes + BLOCK; /* a gap, so that what runs over the end of a block meets nothing */
        if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, file, 0) == address)
            return address;
    }
    return NULL;
}

/* Under the lock. Enters a block that is mapped; NULL stays NULL. */
static void *enter(void *base, size_t bytes, int device, enum kind kind, int file) {
    if (!base)
        return NULL;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){(uintptr_t)base, bytes, device, kind, file, blocks};
    blocks = block;
    return base;
}

/* Under the lock. Takes the block that begins at `base` out of the list; NULL where none does. */
static struct block *leave(const void *base) {
    for (struct block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->base == (uintptr_t)base) {
            struct block *block = *at;
            *at = block->next;
            return block;
        }
    return NULL;
}

int standin_charge(int device, size_t bytes) {
    size_t total = standin_gpu()->bytes;
    pthread_mutex_lock(&lock);
    int fits = used[device] + bytes <= total;
    if (fits)
        used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

void standin_discharge(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

size_t standin_used(int device) {
    pthread_mutex_lock(&lock);
    size_t bytes = used[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Whoever reads a log of the run learns here that its numbers are none. */
static void announce(void) {
    const struct standin_gpu *gpu = standin_gpu();
    const char *values = getenv("STANDIN_VALUES") ? "the CPU computes its values" : "no value on it is true";
    standin_say("process %d uses an %s of %.1f GB; %s", getpid(), gpu->name, gpu->bytes / 1e9, values);
}

void *standin_malloc(size_t bytes, int device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, announce);
    bytes = in_blocks(bytes);
    if (!standin_charge(device, bytes))
        return NULL;
    pthread_mutex_lock(&lock);
    void *base = enter(map(device, bytes, -1), bytes, device, OWN, -1);
    if (!base)
        used[device] -= bytes;
    pthread_mutex_unlock(&lock);
    return base;
}

void *standin_reserve(size_t bytes) {
    bytes = in_blocks(bytes);
    int device = standin_device();
    pthread_mutex_lock(&lock);
    void *base = enter(map(device, bytes, -1), bytes, device, RESERVED, -1);
    pthread_mutex_unlock(&lock);
    return base;
}

void *standin_pinned(size_t bytes) {
    bytes = in_blocks(bytes);
    pthread_mutex_lock(&lock);
    void *base = enter(map(-1, bytes, -1), bytes, -1, PINNED, -1);
    pthread_mutex_unlock(&lock);
    return base;
}

int standin_register(void *base, size_t bytes) {
    pthread_mutex_lock(&lock);
    int taken = block_at(base) != NULL;
    if (!taken)
        enter(base, bytes, -1, REGISTERED, -1);
    pthread_mutex_unlock(&lock);
    return taken;
}

int standin_unregister(void *base) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(base);
    int known = block && block->kind == REGISTERED && block->base == (uintptr_t)base;
    if (known)
        free(leave(base));
    pthread_mutex_unlock(&lock);
    return !known;
}

int standin_free(void *base) {
    if (!base)
        return 0;
    pthread_mutex_lock(&lock);
    struct block *block = leave(base);
    if (block) {
        munmap(base, block->bytes);
        if (block->kind == OWN)
            used[block->device] -= block->bytes;
        if (block->file >= 0)
            close(block->file);
        free(block);
    }
    pthread_mutex_unlock(&lock);
    return block == NULL;
}

/* Under the lock. Copies the pages of the block that have been written; reading the others would make them. */
static void copy_pages(char *to, const struct block *block) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const char *from = (const char *)block->base;
    unsigned char present[512];
    for (size_t at = 0; at < block->bytes; at += sizeof present * page) {
        size_t bytes = block->bytes - at;
        if (bytes > sizeof present * page)
            bytes = sizeof present * page;
        if (mincore((void *)(from + at), bytes, present))
            memset(present, 1, sizeof present);
        for (size_t i = 0; i < bytes / page; i++)
            if (present[i] & 1)
                memcpy(to + at + i * page, from + at + i * page, page);
    }
}

/* Under the lock. From here on the block's bytes are those of a file without a name, which ends with its last user:
   nothing is left in /dev/shm, however the processes end. */
static int share(struct block *block) {
    int file = memfd_create("standin", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)block->bytes)) {
        if (file >= 0)
            close(file);
        return 1;
    }
    char *copy = mmap(NULL, block->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (copy == MAP_FAILED) {
        close(file);
        return 1;
    }
    copy_pages(copy, block);
    munmap(copy, block->bytes);
    void *base = (void *)block->base;
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED; /* over the private mapping */
    if (mmap(base, block->bytes, PROT_READ | PROT_WRITE, flags, file, 0) != base) {
        close(file);
        return 1;
    }
    block->file = file;
    return 0;
}

/* The handle says where the other process finds the file: process, descriptor and size. */
int standin_export(void *base, char handle[64]) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(base);
    int failed = !block || block->device < 0 || (block->file < 0 && share(block));
    if (!failed) {
        memset(handle, 0, 64);
        snprintf(handle, 64, "%d %d %zu", getpid(), block->file, block->bytes);
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

void *standin_import(const char handle[64]) {
    int process, descriptor;
    size_t bytes;
    if (sscanf(handle, "%d %d %zu", &process, &descriptor, &bytes) != 3)
        return NULL;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, descriptor);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    int device = standin_device();
    pthread_mutex_lock(&lock);
    void *base = enter(map(device, bytes, file), bytes, device, IMPORTED, -1);
    pthread_mutex_unlock(&lock);
    close(file); /* the mapping keeps it */
    return base;
}

int standin_is_device(const void *address) {
    return (uintptr_t)address >= DEVICES_BEGIN && (uintptr_t)address < DEVICES_BEGIN + MAX_DEVICES * DEVICE_SPAN;
}

int standin_find(const void *address, int *device, void **base, size_t *bytes) {
    if (!standin_is_device(address))
        return 0;
    pthread_mutex_lock(&lock);
    const struct block *block = block_at(address);
    if (block) {
        if (device)
            *device = block->device;
        if (base)
            *base = (void *)block->base;
        if (bytes)
            *bytes = block->bytes;
    }
    pthread_mutex_unlock(&lock);
    return block != NULL;
}

int standin_is_pinned(const void *address) {
    pthread_mutex_lock(&lock);
    const struct block *block = block_at(address);
    int pinned = block && block->device < 0;
    pthread_mutex_unlock(&lock);
    return pinned;
}

/* The largest copy from a device that takes place in any case: what the host waits for, and reads as 0 or as poked. */
#define READ_BYTES (1UL << 20)

void standin_copy(void *to, const void *from, size_t bytes) {
    if (bytes > max_written()) {
        if (standin_is_device(to))
            return;
        if (standin_is_device(from) && bytes > READ_BYTES)
            return; /* zeros, which would take memory */
    }
    memmove(to, from, bytes);
}

void standin_fill(void *to, int value, size_t bytes) {
    if (!standin_is_device(to) || bytes <= max_written())
        memset(to, value, bytes);
}

void standin_poke(void *to, const void *from, size_t bytes) {
    memmove(to, from, bytes);
}
