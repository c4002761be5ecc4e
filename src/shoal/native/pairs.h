/* Sums of products by instructions that multiply pairs of bfloat16; see kernels.c. They run over the inputs in their order, too, and
   are the same for all numbers of tokens; their bits are not those of `tile.h`. */
#if defined(__AMX_BF16__) && defined(__linux__)
/* The matrix unit of x86 multiplies 16 tokens by a panel in the time of one: 32 inputs at a time, of which those of even and those
   of odd places are summed apart, then added. It computes each row of a tile by itself. */
#define PAIR_TOKENS 16
#define PAIR_SUMS 0
#define UNIT_INPUTS 32

/* GCC 12 does not know that these instructions read memory. */
#define WRITTEN(array) __asm__ volatile("" : : "r"(array) : "memory")

/* 1 if the kernel lets this process use the unit. */
static int multiplies_pairs(void) {
    enum { REQUEST = 0x1023, TILES_OF_DATA = 18 };
    static int known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, REQUEST, TILES_OF_DATA) == 0;
    return known;
}

/* Tiles 0 to 3 are sums, 4 the tokens, 5 to 7 weights. */
static void shape_tiles(int64_t tokens) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = i < 5 ? (uint8_t)tokens : 16;
    WRITTEN(&shape);
    _tile_loadconfig(&shape);
}

/* One step: tokens in rows of so many bytes by 1 or 4 panels. */
#define ADD_PANEL(sum, weight, p) _tile_loadd(weight, w + (p) * panel, 64); _tile_dpbf16ps(sum, 4, weight);
#define UNIT_STEP(n) \
    for (int line = 0; line < 16; line++) \
        for (int p = 0; p < n; p++) __builtin_prefetch(w + p * panel + 64 * line + FETCHED); \
    _tile_loadd(4, x, row); \
    ADD_PANEL(0, 5, 0) \
    if (n > 1) { ADD_PANEL(1, 6, 1) ADD_PANEL(2, 7, 2) ADD_PANEL(3, 5, 3) }

/* sums [m, n * 16], in rows of `all` panels, of x [m, width] by n panels, 1 or 4. Tiles are shaped for m tokens. */
INLINE void unit_tile(int64_t m, int n, const char *w, int64_t panel, const uint16_t *x, int64_t width, float *sums,
                        int64_t all) {
    int64_t row = width * 2, left = width % UNIT_INPUTS;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = UNIT_INPUTS; k <= width; k += UNIT_INPUTS, x += UNIT_INPUTS, w += UNIT_INPUTS * 2 * LANES) { UNIT_STEP(n) }
    if (left) { /* zeros behind the last inputs */
        uint16_t features[PAIR_TOKENS][UNIT_INPUTS] = {{0}}, weights[PANELS][UNIT_INPUTS * LANES] = {{0}};
        for (int64_t i = 0; i < m; i++) memcpy(features[i], x + i * width, left * 2);
        for (int p = 0; p < n; p++) memcpy(weights[p], w + p * panel, left * 2 * LANES);
        WRITTEN(features);
        WRITTEN(weights);
        x = features[0], row = sizeof *features, w = (const char *)weights, panel = sizeof *weights;
        UNIT_STEP(n)
    }
    _tile_stored(0, sums, all * 64);
    if (n > 1) { _tile_stored(1, sums + 16, all * 64); _tile_stored(2, sums + 32, all * 64); _tile_stored(3, sums + 48, all * 64); }
}
static void tile_of_pairs(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,
                          const char *next, int64_t share) {
    const uint16_t *tokens = (const uint16_t *)x;
    WRITTEN(x);
    shape_tiles(m);
    if (n == PANELS) unit_tile(m, PANELS, w, panel, tokens, width, sums, n);
    else for (int64_t p = 0; p < n; p++) unit_tile(m, 1, w + p * panel, panel, tokens, width, sums + p * LANES, n);
    _tile_release();
}
#elif defined(__AVX512BF16__)
/* Processors without a matrix unit for them: AMD's from Zen 4 on, and Cooper Lake, where nobody has measured. */
#define PAIR_TOKENS TOKENS
#define PAIR_SUMS SUMS
static int multiplies_pairs(void) { return 1; }
/* Weights of two inputs side by side for the outputs of a panel. A byte is a bfloat16 without rounding; bytes lie input by input. */
INLINE __m512i pairs_at(int format, const char *w) {
    if (format == BFLOAT16) return _mm512_loadu_si512(w);
    __m512i even = _mm512_srli_epi32((__m512i)weights_bytes(w, 0), 16);
    return _mm512_or_si512((__m512i)weights_bytes(w + LANES, 0), even);
}
INLINE void pair_tile(int format, int m, int n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,
                      const char *next, int64_t share) {
    const int bytes = 2 * LANES * (format == BYTES ? 1 : 2);
    Asked asked = lines_asked(w, panel, n, bytes, width / 2, next, share);
    __m512 sum[TOKENS][PANELS];
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < n; p++) sum[i][p] = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 2, w += bytes) {
        __m512i weights[PANELS];
        UNROLL for (int p = 0; p < n; p++) weights[p] = pairs_at(format, w + p * panel);
        ask(&asked, n);
        UNROLL for (int i = 0; i < m; i++) {
            int32_t pair;
            memcpy(&pair, x + (i * width + k) * 2, sizeof pair);
            __m512bh features = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int p = 0; p < n; p++) sum[i][p] = _mm512_dpbf16_ps(sum[i][p], (__m512bh)weights[p], features);
        }
    }
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < n; p++) _mm512_storeu_ps(sums + (i * n + p) * LANES, sum[i][p]);
}
#define PAIR_TILE(...) pair_tile(BFLOAT16, __VA_ARGS__)
#define PAIR_TILE_OF_BYTES(...) pair_tile(BYTES, __VA_ARGS__)
TILE(tile_of_pairs, PAIR_TILE)
TILE(tile_of_pairs_in_bytes, PAIR_TILE_OF_BYTES)
#define READS_BYTES TOKENS /* most tokens for which bytes are read where they are */
#endif
#ifdef PAIR_TOKENS
/* Two inputs side by side for each output; a byte is a bfloat16 without rounding. */
static void pairs_of_bytes(void *to, const int8_t *w, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        ivec even = (ivec)weights_bytes((const char *)w + i, 0), odd = (ivec)weights_bytes((const char *)w + i + LANES, 0);
        ivec pairs = odd | (ivec)((uvec)even >> 16);
        memcpy((uint16_t *)to + i, &pairs, sizeof pairs);
        __builtin_prefetch(w + i + FETCHED);
    }
}
#endif
