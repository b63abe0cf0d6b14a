/* What the stand-in says on stderr, and what it counts. Every line begins with the words that no GPU computes. */
#include "standin.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

long standin_launches;
long standin_unknown_calls;

void standin_launch(void) {
    __atomic_add_fetch(&standin_launches, 1, __ATOMIC_RELAXED);
}

void standin_say(const char *format, ...) {
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(stderr, "stand-in for CUDA, no GPU computes: %s\n", text); /* one call: lines of processes do not mix */
}

/* A program that goes on with what such a function should have written reads nonsense: the reader must know of it. */
int standin_unknown(const char *function) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *named[4096];
    static int num_named;
    pthread_mutex_lock(&lock);
    standin_unknown_calls++;
    int seen = 0;
    for (int i = 0; i < num_named && !seen; i++)
        seen = !strcmp(named[i], function);
    if (!seen && num_named < 4096)
        named[num_named++] = function;
    pthread_mutex_unlock(&lock);
    if (!seen)
        standin_say("%s is not known to it: it did nothing and returned success", function);
    return 0;
}
