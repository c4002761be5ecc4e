/* Native kernels of passes on a CPU: products by packed weights, ragged attention, rotary embedding with the write to the cache,
   RMS norm, and a decoder's pass of these in one call; draws (drawing.h).

   Plain C with OpenMP, for float32 and bfloat16; sums are float32 always. The file is compiled on the machine it runs on. The
   types come by including the other files once for each. No -ffast-math: NaN and infinity must come out as PyTorch has them. */
#define _GNU_SOURCE /* syscall, clock_gettime */
#include "kernels.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PARALLEL 65536 /* least work worth a second thread */
#ifdef _OPENMP
static int64_t own_thread(void) { return omp_get_thread_num(); }
static int64_t all_threads(void) { return omp_get_num_threads(); }
#else
static int64_t own_thread(void) { return 0; }
static int64_t all_threads(void) { return 1; }
#endif
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, SUFFIX)

static inline float bits_to_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float widen_float32(float x) { return x; }
static inline float narrow_float32(float x) { return x; }
static inline float widen_bfloat16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

/* Rounds to nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow_bfloat16(float x) {
    uint32_t bits = float_to_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0u : (uint16_t)rounded;
}

/* Sixteen lanes; the compiler cuts them up for processors with narrower registers. */
#define LANES 16
#define AHEAD 16 /* keys that memory is asked for before they are used */
#define BUNDLE 8 /* rows that read their shared prompt together, at most, */
#define QUERIES 64 /* and their queries of one KV head */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES)));
#ifndef INLINE /* tests compile without, which is faster */
#define INLINE static inline __attribute__((always_inline))
#endif
#define NOINLINE __attribute__((noinline)) /* compiled once, so that its bits are the same for all who call it */

INLINE int64_t rounded_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE vec load(const float *from) { vec x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }
INLINE vec choose(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

INLINE float sum_of(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e^x for x <= 0 to two units in the last place: Cody and Waite's reduction, a polynomial of degree 6. 0 below -87; NaN of NaN. */
INLINE vec exponential(vec x) {
    ivec small = x < -87.0f;
    vec y = choose(small, (vec){} - 87.0f, x);
    vec n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounds to nearest */
    vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec scale = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return choose(small, (vec){}, p * scale);
}

/* x / (1 + e^-x). */
INLINE vec silu(vec x) {
    ivec positive = x >= 0.0f;
    vec e = exponential(choose(positive, -x, x));
    return choose(positive, x / (1.0f + e), x * e / (1.0f + e));
}

#define SWAPPED(s, l) ((l) & (s) ? 16 + ((l) ^ (s)) : (l))
#define KEPT(s, l) ((l) & (s) ? 16 + (l) : ((l) ^ (s)))
#define ALL(m, s) m(s, 0), m(s, 1), m(s, 2), m(s, 3), m(s, 4), m(s, 5), m(s, 6), m(s, 7), m(s, 8), m(s, 9), m(s, 10), m(s, 11), \
                  m(s, 12), m(s, 13), m(s, 14), m(s, 15)
#define EXCHANGE(s)                                                                    \
    for (int i = 0; i < LANES; i++)                                                    \
        if (!(i & s)) {                                                                \
            vec a = x[i], b = x[i | s];                                                \
            x[i] = __builtin_shufflevector(a, b, ALL(SWAPPED, s));                     \
            x[i | s] = __builtin_shufflevector(a, b, ALL(KEPT, s));                    \
        }

/* A square of lanes: rows become columns. */
INLINE void transpose(vec x[LANES]) {
    EXCHANGE(1)
    EXCHANGE(2)
    EXCHANGE(4)
    EXCHANGE(8)
}

/* Adds LANES features of queries times those of a block of keys, by feature. query: [queries, width]; scores: [queries, span]. */
INLINE void add_products(int queries, const float *query, const vec keys[LANES], float *scores, int64_t width, int64_t span) {
    vec sum[4];
    for (int i = 0; i < queries; i++) sum[i] = load(scores + i * span);
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < queries; i++) sum[i] += query[i * width + d] * keys[d];
    for (int i = 0; i < queries; i++) store(scores + i * span, sum[i]);
}

/* A buffer of the calling thread, at least so many floats; kept for its next call. NULL: no memory. */
static float *scratch(size_t floats) {
    static _Thread_local float *held = NULL;
    static _Thread_local size_t size = 0;
    if (floats > size) {
        free(held);
        held = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        size = held ? floats : 0;
    }
    return held;
}

INLINE vec lanes_float32(const float *x) { return load(x); }
INLINE vec lanes_bfloat16(const uint16_t *x) {
    hvec half;
    memcpy(&half, x, sizeof half);
    return (vec)(__builtin_convertvector(half, ivec) << 16);
}

INLINE vec lanes_int8(const int8_t *x) {
    bvec bytes;
    memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, ivec), vec);
}

INLINE void put_float32(float *to, vec x) { store(to, x); }
INLINE void put_bfloat16(uint16_t *to, vec x) {
    ivec bits = (ivec)x, rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    hvec half = __builtin_convertvector((ivec)choose(x == x, (vec)rounded, (vec)((ivec){} + 0x7fc0)), hvec);
    memcpy(to, &half, sizeof half);
}

#include "team.h"
#include "tile.h"
#include "pairs.h"
#define SUFFIX float32
#define T float
#include "typed.h"
#include "attend.h"
#include "decode.h"
#undef SUFFIX
#undef T
#define SUFFIX bfloat16
#define T uint16_t
#include "typed.h"
#ifndef ONLY_FLOAT32 /* tests compile wrong kernels without, which is faster */
#include "attend.h"
#include "decode.h"
#endif
#undef SUFFIX
#include "drawing.h"
#define SUFFIX float32
#include "drafting.h"
#undef SUFFIX
#ifndef ONLY_FLOAT32
#define SUFFIX bfloat16
#include "drafting.h"
#endif
