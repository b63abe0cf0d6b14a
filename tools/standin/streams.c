/* What another thread still does on a stream: collectives of several ranks, which wait for the other ranks (nccl.c).

   A stream counts what was begun on it and what is done, in order. An event keeps the count at which it was recorded. */
#include "standin.h"
#include <pthread.h>
#include <stdlib.h>

struct counts {
    void *stream;
    unsigned long begun, done;
    struct counts *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct counts *all; /* a few: streams on which collectives were begun; they stay when the stream ends */

/* Under the lock; NULL if nothing was ever begun on the stream. */
static struct counts *find(void *stream) {
    struct counts *at = all;
    while (at && at->stream != stream)
        at = at->next;
    return at;
}

int standin_is_default(void *stream) {
    return (uintptr_t)stream < 16; /* the default streams are small numbers, not addresses */
}

unsigned long standin_begin(void *stream) {
    pthread_mutex_lock(&lock);
    struct counts *counts = find(stream);
    if (!counts) {
        counts = calloc(1, sizeof *counts);
        counts->stream = stream;
        counts->next = all;
        all = counts;
    }
    unsigned long number = ++counts->begun;
    pthread_mutex_unlock(&lock);
    return number;
}

void standin_end(void *stream) {
    pthread_mutex_lock(&lock);
    find(stream)->done++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

unsigned long standin_begun(void *stream) {
    pthread_mutex_lock(&lock);
    struct counts *counts = find(stream);
    unsigned long number = counts ? counts->begun : 0;
    pthread_mutex_unlock(&lock);
    return number;
}

int standin_is_done(void *stream, unsigned long number) {
    pthread_mutex_lock(&lock);
    struct counts *counts = find(stream);
    int done = !counts || counts->done >= number;
    pthread_mutex_unlock(&lock);
    return done;
}

void standin_wait(void *stream, unsigned long number) {
    pthread_mutex_lock(&lock);
    struct counts *counts = find(stream);
    while (counts && counts->done < number)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void standin_wait_for_all(void) {
    pthread_mutex_lock(&lock);
    for (struct counts *counts = all; counts; counts = counts->next)
        for (unsigned long number = counts->begun; counts->done < number;)
            pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
