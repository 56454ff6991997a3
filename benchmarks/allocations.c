/* Counter of the bytes that torch's CPU allocator (libc10) holds from posix_memalign, and of their
 * peak: all CPU tensors, and the workspaces of kernels. Memory that oneDNN itself takes from
 * posix_memalign, for the code that it compiles, does not count.
 *
 *     cc -O2 -shared -fPIC allocations.c -o allocations.so -ldl
 *     ALLOCATIONS=<prefix> LD_PRELOAD=./allocations.so python train.py …
 *
 * Each program writes its peak in bytes to <prefix>.<process ID> at its end; its forks write
 * nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* 65,536 slots of 16 bytes are 1 MiB: few, since the table adds to the resident memory of the
 * watched program, but far more than there are tensors at the same time. A power of two, so that
 * `& (SLOTS - 1)` wraps a slot around. */
#define SLOTS (1u << 16)

/* Open addressing with linear probing. Address 0: the slot is empty; 1: its entry was removed, and
 * a search goes on past the slot. */
static struct { uintptr_t address; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of table, live and peak */
static size_t live, peak; /* bytes */
static pid_t first; /* process ID of the program; its forks have others */
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static uintptr_t c10_begin, c10_end; /* addresses of libc10's code; 0 until it is loaded */

/* Multiplicative hashing (Knuth): 2654435761 is 2^32 divided by the golden ratio. Torch aligns
 * tensors to 64 bytes, so the lowest 6 bits are 0 and are shifted out. */
static uint32_t slot_of(uintptr_t address) {
    return (uint32_t)((address >> 6) * 2654435761u) & (SLOTS - 1);
}

/* Find the executable segment of libc10; called for each loaded library, until it returns 1. */
static int find_c10(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    (void)data;
    if (!strstr(info->dlpi_name, "libc10.so")) return 0;
    for (int n = 0; n < info->dlpi_phnum; n++)
        if (info->dlpi_phdr[n].p_type == PT_LOAD && info->dlpi_phdr[n].p_flags & PF_X) {
            c10_begin = info->dlpi_addr + info->dlpi_phdr[n].p_vaddr;
            c10_end = c10_begin + info->dlpi_phdr[n].p_memsz;
        }
    return 1;
}

__attribute__((constructor)) static void begin(void) {
    real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_free = dlsym(RTLD_NEXT, "free");
    first = getpid();
}

__attribute__((destructor)) static void end(void) {
    const char *prefix = getenv("ALLOCATIONS");
    char path[4096];
    if (!prefix || getpid() != first) return;
    snprintf(path, sizeof path, "%s.%d", prefix, (int)first);
    FILE *file = fopen(path, "w");
    if (file) {
        fprintf(file, "%zu\n", peak);
        fclose(file);
    }
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) begin();
    int code = real_memalign(out, alignment, size);
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (!c10_end) dl_iterate_phdr(find_c10, NULL);
    if (caller < c10_begin || caller >= c10_end) return code;
    if (code == 0 && size) {
        pthread_mutex_lock(&lock);
        uint32_t slot = slot_of((uintptr_t)*out);
        /* A slot that is empty or whose entry was removed can be taken. */
        while (table[slot].address > 1) slot = (slot + 1) & (SLOTS - 1);
        table[slot].address = (uintptr_t)*out;
        table[slot].size = size;
        live += size;
        if (live > peak) peak = live;
        pthread_mutex_unlock(&lock);
    }
    return code;
}

void free(void *pointer) {
    if (!real_free) begin();
    /* Only addresses aligned to 64 bytes can be in the table: the others need no lock. */
    if (pointer && !((uintptr_t)pointer & 63)) {
        pthread_mutex_lock(&lock);
        uint32_t slot = slot_of((uintptr_t)pointer);
        for (; table[slot].address; slot = (slot + 1) & (SLOTS - 1))
            if (table[slot].address == (uintptr_t)pointer) {
                live -= table[slot].size;
                table[slot].address = 1;
                /* A mark (1) before an empty slot only prolongs searches: clear this mark and the
                 * marks before it. Otherwise the table would fill with marks. */
                if (!table[(slot + 1) & (SLOTS - 1)].address)
                    for (; table[slot].address == 1; slot = (slot - 1) & (SLOTS - 1))
                        table[slot].address = 0;
                break;
            }
        pthread_mutex_unlock(&lock);
    }
    real_free(pointer);
}

/* Bytes at the peak since the last call, which begins a new one. */
size_t allocations_peak(void) {
    pthread_mutex_lock(&lock);
    size_t last_peak = peak;
    peak = live;
    pthread_mutex_unlock(&lock);
    return last_peak;
}
