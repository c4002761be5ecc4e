/* The number of threads of a parallel region; see kernels.c. Results have the same bits with any.

   Threads meet after every product. Where another process has taken the processor of one, all wait for milliseconds at each meeting,
   and it is faster to compute with fewer threads. So a region in which a thread was without a processor for long is followed by
   some time with half of the threads, which doubles as long as this goes on. */
#include <time.h>

#define LOST 1000000       /* nanoseconds without a processor that count, */
#define FIRST_PAUSE 8000000 /* of the first pause, */
#define LONGEST_PAUSE 1000000000 /* and of the longest */

static struct { int64_t end, length; } pause_of_team = {0, FIRST_PAUSE};

static int64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

int64_t team(int64_t threads) {
    int64_t end = __atomic_load_n(&pause_of_team.end, __ATOMIC_RELAXED);
    return threads > 1 && nanoseconds(CLOCK_MONOTONIC) < end ? threads / 2 : threads;
}

/* Judges a region of so many threads, one of which was without a processor for so many nanoseconds. */
void judge_team(int64_t threads, int64_t lost) {
    int64_t length = __atomic_load_n(&pause_of_team.length, __ATOMIC_RELAXED);
    if (threads < 2) return;
    if (lost < LOST) length = length - length / 8 > FIRST_PAUSE ? length - length / 8 : FIRST_PAUSE;
    else {
        if (length > FIRST_PAUSE) __atomic_store_n(&pause_of_team.end, nanoseconds(CLOCK_MONOTONIC) + length, __ATOMIC_RELAXED);
        length = 2 * length < LONGEST_PAUSE ? 2 * length : LONGEST_PAUSE;
    }
    __atomic_store_n(&pause_of_team.length, length, __ATOMIC_RELAXED);
}

/* The clocks of a thread at the begin of a region. */
typedef struct { int64_t wall, own; } Clocks;
INLINE Clocks clocks(void) { return (Clocks){nanoseconds(CLOCK_MONOTONIC), nanoseconds(CLOCK_THREAD_CPUTIME_ID)}; }

/* Keeps the longest time that a thread of the region was without a processor. */
INLINE void keep_lost(Clocks begin, int64_t *lost) {
    Clocks end = clocks();
    int64_t own = end.wall - begin.wall - (end.own - begin.own);
    if (own > LOST / 2) {
#pragma omp critical(lost_time)
        if (own > *lost) *lost = own;
    }
}
