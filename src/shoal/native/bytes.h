/* Products of bytes: weights rounded to int8 with a scale per output, activations with one per token; see kernels.c. Sums are
   integers, and exact: they do not depend on the instructions that make them. */

#define ZERO 128 /* x86 multiplies unsigned bytes by signed ones: what stands for zero in the former */
typedef uint8_t bvec __attribute__((vector_size(LANES)));

/* One step along the inputs of `panels` panels for m tokens: 16 groups of four weights. */
INLINE void step_bytes(int m, int panels, ivec sum[TOKENS][PANELS], const char *w, int64_t panel, const char *x, int64_t width) {
    ivec weights[PANELS];
    for (int p = 0; p < panels; p++) memcpy(&weights[p], w + p * panel, sizeof weights[p]);
    for (int i = 0; i < m; i++) {
        int32_t four;
        memcpy(&four, x + i * width, sizeof four);
        for (int p = 0; p < panels; p++) {
#if defined(__AVX512VNNI__)
            sum[i][p] = (ivec)_mm512_dpbusd_epi32((__m512i)sum[i][p], _mm512_set1_epi32(four), (__m512i)weights[p]);
#elif defined(__AVXVNNI__)
            __m256i half[2];
            memcpy(half, &sum[i][p], sizeof half);
            for (int h = 0; h < 2; h++)
                half[h] = _mm256_dpbusd_avx_epi32(half[h], _mm256_set1_epi32(four), ((const __m256i *)&weights[p])[h]);
            memcpy(&sum[i][p], half, sizeof half);
#else
            for (int b = 0; b < 4; b++) sum[i][p] += ((weights[p] << (24 - 8 * b)) >> 24) * ((four >> 8 * b) & 255);
#endif
        }
    }
}

/* The sums of m tokens by n panels, as the bits of integers. */
INLINE void sums_of_bytes(int m, int n, const char *w, int64_t panel, const char *x, int64_t width, float *sums) {
    ivec sum[TOKENS][PANELS] = {{{0}}};
    for (int64_t k = 0; k < width; k += 4) step_bytes(m, n, sum, w + k * LANES, panel, x + k, width);
    for (int i = 0; i < m; i++)
        for (int p = 0; p < n; p++) store(sums + (i * n + p) * LANES, (vec)sum[i][p]);
}
TILE(tile_of_bytes, sums_of_bytes)

/* What sums of bytes stand for. A function of its own: no sum that follows may be fused with these products. */
static NOINLINE vec scaled(ivec sum, const int32_t *zeros, const float *scales, float token_scale, int64_t lanes) {
    int32_t zero[LANES] = {0};
    float scale[LANES] = {0};
    ivec shift;
    memcpy(zero, zeros, lanes * sizeof *zero);
    memcpy(scale, scales, lanes * sizeof *scale);
    memcpy(&shift, zero, sizeof shift);
    return __builtin_convertvector(sum - shift, vec) * load(scale) * token_scale;
}

/* The sums [m, n * 16] of `tile_of_bytes` become products of m tokens from `token` on by panels from `panel` on. */
static void scale_bytes(const Product *a, int64_t token, int64_t m, int64_t panel, int64_t n, float *sums) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < n; p++, sums += LANES) {
            int64_t at = (panel + p) * LANES, left = a->outputs - at;
            store(sums, scaled((ivec)load(sums), a->zeros + at, a->scales + at, a->token_scales[token + i], left < LANES ? left : LANES));
        }
}
