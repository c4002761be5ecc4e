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

/* Sixteen lanes. The compiler cuts them up for processors with narrower registers, element by element where they are exchanged or
   there are many of them: where time goes, code is written in registers. */
#define LANES 16
#if defined(__AVX512F__)
#define WIDTH 16 /* floats of a register, */
#define SUMS 24 /* registers for the sums of a tile, */
#define TOKENS 8 /* and its most tokens */
#elif defined(__AVX__)
#define WIDTH 8
#define SUMS 12
#define TOKENS 6
#elif defined(__aarch64__)
#define WIDTH 4
#define SUMS 24
#define TOKENS 6
#else
#define WIDTH 4
#define SUMS 8
#define TOKENS 2
#endif
#if WIDTH == 8 /* weights of bfloat16 are unpacked in registers, which sums cannot have as well */
#define TILE_SUMS_bfloat16 10
#define TILE_TOKENS_bfloat16 5
#else
#define TILE_SUMS_bfloat16 SUMS
#define TILE_TOKENS_bfloat16 TOKENS
#endif
#define TILE_SUMS_float32 SUMS
#define TILE_TOKENS_float32 TOKENS
#define PARTS (LANES / WIDTH) /* registers of sixteen lanes */
#define UNROLL _Pragma("GCC unroll 16") /* else arrays of registers lie in memory */
#define AHEAD 16 /* keys that memory is asked for before they are used */
#define BUNDLE 8 /* rows that read their shared prompt together, at most, */
#define QUERIES 64 /* and their queries of one KV head */
#define FEW 4 /* rows that a thread takes at once, at least, where it has as many */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float reg __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ireg __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t hreg __attribute__((vector_size(2 * WIDTH)));
typedef int8_t breg __attribute__((vector_size(WIDTH)));
#ifndef INLINE /* tests compile without, which is faster */
#define INLINE static inline __attribute__((always_inline))
#endif
#define NOINLINE __attribute__((noinline)) /* compiled once, so that its bits are the same for all who call it */

INLINE int64_t rounded_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE vec load(const float *from) { vec x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }
INLINE reg choose(ireg where, reg a, reg b) { return (reg)((where & (ireg)a) | (~where & (ireg)b)); }

INLINE float sum_of(const float x[LANES]) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e^x for x <= 0 to two units in the last place: Cody and Waite's reduction, a polynomial of degree 6. 0 below -87; NaN of NaN. */
INLINE reg exponential(reg x) {
    ireg small = x < -87.0f;
    reg y = choose(small, (reg){} - 87.0f, x);
    reg n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounds to nearest */
    reg r = y - n * 0.693359375f + n * 2.12194440e-4f;
    reg p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    reg scale = (reg)((__builtin_convertvector(n, ireg) + 127) << 23);
    return choose(small, (reg){}, p * scale);
}

/* x / (1 + e^-x). */
INLINE reg silu(reg x) {
    ireg positive = x >= 0.0f;
    reg e = exponential(choose(positive, -x, x));
    return choose(positive, x / (1.0f + e), x * e / (1.0f + e));
}

#define SWAPPED(s, l) ((l) & (s) ? WIDTH + ((l) ^ (s)) : (l))
#define KEPT(s, l) ((l) & (s) ? WIDTH + (l) : ((l) ^ (s)))
#define FOUR(m, s, l) m(s, l), m(s, l + 1), m(s, l + 2), m(s, l + 3)
#if WIDTH == 16
#define ALL(m, s) FOUR(m, s, 0), FOUR(m, s, 4), FOUR(m, s, 8), FOUR(m, s, 12)
#elif WIDTH == 8
#define ALL(m, s) FOUR(m, s, 0), FOUR(m, s, 4)
#else
#define ALL(m, s) FOUR(m, s, 0)
#endif
#define EXCHANGE(s)                                                                    \
    UNROLL for (int i = 0; i < WIDTH; i++)                                             \
        if (!(i & s)) {                                                                \
            reg a = x[i], b = x[i | s];                                                \
            x[i] = __builtin_shufflevector(a, b, ALL(SWAPPED, s));                     \
            x[i | s] = __builtin_shufflevector(a, b, ALL(KEPT, s));                    \
        }

/* A square of registers: rows become columns. */
INLINE void transpose(reg x[WIDTH]) {
    EXCHANGE(1)
    EXCHANGE(2)
#if WIDTH >= 8
    EXCHANGE(4)
#endif
#if WIDTH == 16
    EXCHANGE(8)
#endif
}

/* Adds LANES features of queries times those of a block of keys, by feature. query: [queries, width]; scores: [queries, span]. */
INLINE void add_products(int queries, const float *query, const reg keys[LANES][PARTS], float *scores, int64_t width,
                         int64_t span) {
    reg sum[4][PARTS];
    UNROLL for (int i = 0; i < queries; i++) memcpy(sum[i], scores + i * span, sizeof sum[i]);
    for (int d = 0; d < LANES; d++)
        UNROLL for (int i = 0; i < queries; i++)
            UNROLL for (int p = 0; p < PARTS; p++) sum[i][p] += query[i * width + d] * keys[d][p];
    UNROLL for (int i = 0; i < queries; i++) memcpy(scores + i * span, sum[i], sizeof sum[i]);
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

/* The elements of a register. */
INLINE reg some_float32(const float *x) {
    reg some;
    memcpy(&some, x, sizeof some);
    return some;
}
INLINE reg some_bfloat16(const uint16_t *x) {
    hreg half;
    memcpy(&half, x, sizeof half);
    return (reg)(__builtin_convertvector(half, ireg) << 16);
}
INLINE reg some_int8(const int8_t *x) {
    breg bytes;
    memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, ireg), reg);
}

INLINE void put_float32(float *to, reg x) { memcpy(to, &x, sizeof x); }
INLINE void put_bfloat16(uint16_t *to, reg x) {
    ireg bits = (ireg)x, rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    ireg made = (ireg)choose(x == x, (reg)rounded, (reg)((ireg){} + 0x7fc0));
#if WIDTH == 8 && defined(__AVX2__) /* GCC narrows element by element */
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)made, (__m256i)made), 8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(both));
#else
    hreg half = __builtin_convertvector(made, hreg);
    memcpy(to, &half, sizeof half);
#endif
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
