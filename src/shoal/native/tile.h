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

/* A function that makes the sums [m, n * 16] of tokens x [m, width] by n panels of so many bytes each. */
typedef void Tile(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums);

/* A function that unpacks so many weights of bytes. */
typedef void Unpack(void *to, const int8_t *w, int64_t count);

/* The tiles of a product: the most tokens and panels (0: as many as registers hold), the bytes of a feature, and of a weight as the
   tile reads it. */
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

static void floats_of_bytes(void *to, const int8_t *w, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        reg x = weights_bytes((const char *)w + i, 0);
        memcpy((float *)to + i, &x, sizeof x);
        __builtin_prefetch(w + i + FETCHED);
    }
}
