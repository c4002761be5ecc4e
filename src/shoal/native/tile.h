/* Tiles of products: some tokens by some panels of weights, with all sums in registers; see kernels.c.

   A panel has the weights of 16 outputs. Each sum runs over the inputs in their order, one product and one addition of float32 a
   step, whatever the format of the weights, the width of the registers and the number of tokens: the bits of a token do not depend
   on the tokens beside it. `pairs.h` has the sums of processors that multiply pairs of bfloat16. */

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
#define PANELS 4 /* most panels of a tile */
#define PARTS (LANES / WIDTH) /* registers of a panel */
#define PANELS_OF(m) (SUMS / ((m) * PARTS) < PANELS ? SUMS / ((m) * PARTS) : PANELS)
#define BLOCK 256 /* tokens whose features stay in the cache while all weights are read */
#define FETCHED 2048 /* bytes of a panel that memory is asked for before they are used */
#define UNROLL _Pragma("GCC unroll 16") /* else arrays of registers lie in memory */
typedef float reg __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ireg __attribute__((vector_size(4 * WIDTH)));

/* Weights of input k of a step, for the outputs of a register; `w`: the step's weights of these outputs. */
INLINE reg weights_float32(const char *w, int k) {
    (void)k;
    reg x;
    memcpy(&x, w, sizeof x);
    return x;
}
INLINE reg weights_bfloat16(const char *w, int k) {
    ireg pairs;
    memcpy(&pairs, w, sizeof pairs);
    return (reg)(k ? pairs & (int32_t)0xffff0000 : pairs << 16);
}

INLINE reg weights_bytes(const char *w, int k) {
    (void)k;
#if defined(__AVX512F__)
    return (reg)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
#elif defined(__AVX2__)
    return (reg)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
#else
    reg x;
    for (int i = 0; i < WIDTH; i++) x[i] = ((const int8_t *)w)[i];
    return x;
#endif
}

/* A step along the inputs takes as many as have their weights side by side for each output: a panel is [width / step, 16, step]. */
enum { FLOAT32, BFLOAT16, BYTES };
#define STEP_OF(format) ((format) == BFLOAT16 ? 2 : 1)
#define STEP_BYTES(format) ((format) == BYTES ? LANES : 4 * LANES)

INLINE reg weights_of(int format, const char *w, int k) {
    return format == FLOAT32 ? weights_float32(w, k) : format == BFLOAT16 ? weights_bfloat16(w, k) : weights_bytes(w, k);
}

/* sums [m, n * 16] of tokens x [m, width] by n panels of so many bytes. */
INLINE void tile(int format, int m, int n, const char *w, int64_t panel, const char *tokens, int64_t width, float *sums) {
    const int registers = n * PARTS, step = STEP_OF(format);
    const float *x = (const float *)tokens;
    reg sum[TOKENS][PANELS * PARTS];
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) sum[i][p] = (reg){};
    for (int64_t at = 0; at < width; at += step, w += STEP_BYTES(format)) {
        UNROLL for (int p = 0; p < n; p++) __builtin_prefetch(w + p * panel + FETCHED);
        UNROLL for (int k = 0; k < step; k++) {
            reg weights[PANELS * PARTS];
            UNROLL for (int p = 0; p < registers; p++)
                weights[p] = weights_of(format, w + p / PARTS * panel + p % PARTS * (STEP_BYTES(format) / PARTS), k);
            UNROLL for (int i = 0; i < m; i++) {
                float feature = x[i * width + at + k];
                UNROLL for (int p = 0; p < registers; p++) sum[i][p] += feature * weights[p];
            }
        }
    }
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) memcpy(sums + (i * registers + p) * WIDTH, &sum[i][p], sizeof(reg));
}
#define FLOAT32_TILE(...) tile(FLOAT32, __VA_ARGS__)
#define BFLOAT16_TILE(...) tile(BFLOAT16, __VA_ARGS__)
#define BYTES_TILE(...) tile(BYTES, __VA_ARGS__)

/* Weights by groups of inputs: whole numbers times the group's scale, plus its minimum. A group of a panel has the scales of its 16
   outputs, the minima (not BYTES_OF_32), and the numbers: a byte each, or two inputs in a byte, the first in its low half. A weight
   is the float32 that the format stands for, so that the sums are those of unpacked weights. */
#define GROUP_OF(form) ((form) == BYTES_OF_16 ? 16 : 32)
#define HAS_MINIMA(form) ((form) != BYTES_OF_32)
#define INPUTS_OF_BYTE(form) ((form) == NIBBLES_OF_32 ? 2 : 1)
#define FACTOR_BYTES(form) (4 * LANES * (1 + HAS_MINIMA(form)))
#define GROUP_BYTES(form) (FACTOR_BYTES(form) + GROUP_OF(form) * LANES / INPUTS_OF_BYTE(form))

static int64_t bytes_of_groups(int64_t form, int64_t width) { return width / GROUP_OF(form) * GROUP_BYTES(form); }

/* The numbers of input k of a step as floats; `w`: the step's bytes of a register's outputs. */
INLINE reg numbers_of(int form, const char *w, int k) {
    if (form != NIBBLES_OF_32) return weights_bytes(w, 0);
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)w));
    return (reg)_mm512_cvtepi32_ps(k ? _mm512_srli_epi32(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)w));
    return (reg)_mm256_cvtepi32_ps(k ? _mm256_srli_epi32(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi32(15)));
#else
    reg x;
    for (int i = 0; i < WIDTH; i++) x[i] = k ? (uint8_t)w[i] >> 4 : w[i] & 15;
    return x;
#endif
}
INLINE reg factor_at(const char *w) { reg x; memcpy(&x, w, sizeof x); return x; }
/* The weights of a register's outputs; `factors`: of these outputs in the group. */
INLINE reg weights_in_group(int form, const char *factors, const char *w, int k) {
    reg x = numbers_of(form, w, k) * factor_at(factors);
    return HAS_MINIMA(form) ? x + factor_at(factors + 4 * LANES) : x;
}

/* As `tile`, by weights in groups. */
INLINE void tile_in_groups(int form, int m, int n, const char *w, int64_t panel, const char *tokens, int64_t width, float *sums) {
    const int registers = n * PARTS, step = INPUTS_OF_BYTE(form);
    const float *x = (const float *)tokens;
    reg sum[TOKENS][PANELS * PARTS];
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) sum[i][p] = (reg){};
    for (int64_t at = 0; at < width; at += GROUP_OF(form), w += GROUP_BYTES(form)) {
        const char *numbers = w + FACTOR_BYTES(form);
        for (int line = 0; line < FACTOR_BYTES(form); line += 64)
            UNROLL for (int p = 0; p < n; p++) __builtin_prefetch(w + p * panel + FETCHED + line);
        for (int inner = 0; inner < GROUP_OF(form); inner += step, numbers += LANES) {
            if (inner % (4 * step) == 0)
                UNROLL for (int p = 0; p < n; p++) __builtin_prefetch(numbers + p * panel + FETCHED);
            UNROLL for (int k = 0; k < step; k++) {
                reg unpacked[PANELS * PARTS];
                UNROLL for (int p = 0; p < registers; p++) {
                    int64_t from = p / PARTS * panel;
                    unpacked[p] = weights_in_group(form, w + from + p % PARTS * 4 * WIDTH, numbers + from + p % PARTS * WIDTH, k);
                }
                UNROLL for (int i = 0; i < m; i++) {
                    float feature = x[i * width + at + inner + k];
                    UNROLL for (int p = 0; p < registers; p++) sum[i][p] += feature * unpacked[p];
                }
            }
        }
    }
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) memcpy(sums + (i * registers + p) * WIDTH, &sum[i][p], sizeof(reg));
}
#define BYTES_16_TILE(...) tile_in_groups(BYTES_OF_16, __VA_ARGS__)
#define BYTES_32_TILE(...) tile_in_groups(BYTES_OF_32, __VA_ARGS__)
#define NIBBLES_32_TILE(...) tile_in_groups(NIBBLES_OF_32, __VA_ARGS__)

/* A function that makes the sums [m, n * 16] of tokens x [m, width] by n panels of so many bytes each. */
typedef void Tile(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums);

/* A function that unpacks so many weights of bytes. */
typedef void Unpack(void *to, const int8_t *w, int64_t count);

/* The tiles of a product: the most tokens and panels (0: as many as registers hold), the bytes of a feature, and of a weight that is
   unpacked. */
typedef struct {
    Tile *tile;
    int64_t tokens, panels, feature, size;
    Unpack *unpack; /* or NULL: the tile reads the weights where they are */
} Tiling;

/* A Tile of a macro or function that the compiler must tell the numbers of tokens and panels. */
#define CASE(sums_of, m, n) case 8 * m + n: if (m * n * PARTS <= SUMS) sums_of(m, n, w, panel, x, width, sums); break;
#define CASES(sums_of, m) CASE(sums_of, m, 1) CASE(sums_of, m, 2) CASE(sums_of, m, 3) CASE(sums_of, m, 4)
#define TILE(name, sums_of)                                                                                           \
    static void name(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums) { \
        switch (8 * m + n) {                                                                                          \
            CASES(sums_of, 1) CASES(sums_of, 2) CASES(sums_of, 3) CASES(sums_of, 4)                                   \
            CASES(sums_of, 5) CASES(sums_of, 6) CASES(sums_of, 7) CASES(sums_of, 8)                                   \
        }                                                                                                             \
    }
TILE(tile_float32, FLOAT32_TILE)
TILE(tile_bfloat16, BFLOAT16_TILE)
TILE(tile_bytes, BYTES_TILE)
TILE(tile_bytes_16, BYTES_16_TILE)
TILE(tile_bytes_32, BYTES_32_TILE)
TILE(tile_nibbles_32, NIBBLES_32_TILE)

static void floats_of_bytes(void *to, const int8_t *w, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        reg x = weights_bytes((const char *)w + i, 0);
        memcpy((float *)to + i, &x, sizeof x);
        __builtin_prefetch(w + i + FETCHED);
    }
}

/* So many weights in groups. */
INLINE void floats_of_groups(int form, float *to, const char *w, int64_t count) {
    const int step = INPUTS_OF_BYTE(form);
    for (int64_t group = 0; group < count / (GROUP_OF(form) * LANES); group++, w += GROUP_BYTES(form)) {
        const char *numbers = w + FACTOR_BYTES(form);
        for (int inner = 0; inner < GROUP_OF(form); inner += step, numbers += LANES) {
            __builtin_prefetch(numbers + FETCHED);
            UNROLL for (int k = 0; k < step; k++)
                UNROLL for (int p = 0; p < PARTS; p++, to += WIDTH) {
                    reg x = weights_in_group(form, w + p * 4 * WIDTH, numbers + p * WIDTH, k);
                    memcpy(to, &x, sizeof x);
                }
        }
    }
}
static void floats_of_bytes_16(void *to, const int8_t *w, int64_t n) { floats_of_groups(BYTES_OF_16, to, (const char *)w, n); }
static void floats_of_bytes_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(BYTES_OF_32, to, (const char *)w, n); }
static void floats_of_nibbles_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(NIBBLES_OF_32, to, (const char *)w, n); }

/* By form; WHOLE: signed bytes. */
static Tile *const tiles_in_place[] = {tile_bytes, tile_bytes_16, tile_bytes_32, tile_nibbles_32};
static Unpack *const floats_of[] = {floats_of_bytes, floats_of_bytes_16, floats_of_bytes_32, floats_of_nibbles_32};
