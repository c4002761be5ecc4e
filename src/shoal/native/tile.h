/* Tiles of products: some tokens by some panels of weights, with all sums in registers; see kernels.c.

   A panel has the weights of 16 outputs. Each sum runs over the inputs in their order, one product and one addition of float32 a
   step, whatever the format of the weights, the width of the registers and the number of tokens: the bits of a token do not depend
   on the tokens beside it. `pairs.h` has the sums of processors that multiply pairs of bfloat16. */

#define PANELS 4 /* most panels of a tile */
/* Panels of a tile of m tokens with so many registers for sums. */
#define PANELS_OF(sums, m) ((sums) / ((m) * PARTS) < 1 ? 1 : (sums) / ((m) * PARTS) < PANELS ? (sums) / ((m) * PARTS) : PANELS)
#define BLOCK 256 /* tokens whose features stay in the cache while all weights are read */
#define FETCHED 2048 /* bytes of a panel that memory is asked for before they are used */

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

/* Lines of weights that memory is asked for while a tile is computed, one a panel and step; after `left` steps they are of panels
   that lie `jump` bytes behind. */
typedef struct { const char *at; int64_t stride, pace, left, jump; } Asked;

/* Those of `share` bytes from `next` on, or without any the lines FETCHED bytes behind those that are used: of n panels, then of the
   next n. `bytes`: of a panel's step; `steps`: of a panel. */
INLINE Asked lines_asked(const char *w, int64_t panel, int n, int64_t bytes, int64_t steps, const char *next, int64_t share) {
    if (share) return (Asked){next, 64, (share + steps - 1) / steps, 0, 0};
    return (Asked){w + FETCHED, panel, bytes, steps - FETCHED / bytes, (n - 1) * panel};
}
INLINE void ask(Asked *asked, int n) {
    UNROLL for (int p = 0; p < n; p++) __builtin_prefetch(asked->at + p * asked->stride);
    asked->at += asked->pace + (--asked->left == 0 ? asked->jump : 0);
}

/* sums [m, n * 16] of tokens x [m, width] by n panels of so many bytes. */
INLINE void tile(int format, int m, int n, const char *w, int64_t panel, const char *tokens, int64_t width, float *sums,
                 const char *next, int64_t share) {
    const int registers = n * PARTS, step = STEP_OF(format);
    const float *x = (const float *)tokens;
    Asked asked = lines_asked(w, panel, n, STEP_BYTES(format), width / step, next, share);
    reg sum[TOKENS][PANELS * PARTS];
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) sum[i][p] = (reg){};
    for (int64_t at = 0; at < width; at += step, w += STEP_BYTES(format)) {
        ask(&asked, n);
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
   outputs, the minima (or none), and the numbers, of two inputs side by side for each output: a byte each; or four bits, the first
   two inputs in the low halves of two bytes, the next two in the high ones. Centred numbers of four bits are 8 less. */
#define GROUP_OF(form) ((form) == BYTES_OF_16 ? 16 : 32)
#define IN_NIBBLES(form) ((form) >= NIBBLES_OF_32)
#define HAS_MINIMA(form) ((form) != BYTES_OF_32 && (form) != CENTRED_OF_32)
#define FACTOR_SIZE(form) ((form) == BYTES_OF_16 || (form) == NIBBLES_OF_32 ? 4 : 2) /* float32, or float16 */
#define FACTOR_BYTES(form) (FACTOR_SIZE(form) * LANES * (1 + HAS_MINIMA(form)))
#define CENTRE(form) ((form) == CENTRED_OF_32 ? 8 : 0)
#define STEP 32 /* bytes of a panel's step, */
#define INPUTS_OF_STEP(form) (IN_NIBBLES(form) ? 4 : 2)
#define GROUP_BYTES(form) (FACTOR_BYTES(form) + GROUP_OF(form) / INPUTS_OF_STEP(form) * STEP)

static int64_t bytes_of_groups(int64_t form, int64_t width) { return width / GROUP_OF(form) * GROUP_BYTES(form); }

/* Pairs of numbers of 16 bits; `w`: the step's bytes of a register's outputs. `second`: of the step's second two inputs. */
INLINE ireg numbers_of(int form, const char *w, int second) {
#if defined(__AVX512BW__)
    __m256i bytes = _mm256_loadu_si256((const __m256i *)w);
    if (!IN_NIBBLES(form)) return (ireg)_mm512_cvtepi8_epi16(bytes);
    __m512i wide = _mm512_cvtepu8_epi16(bytes);
    return (ireg)(second ? _mm512_srli_epi16(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi16(15)));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)w);
    if (!IN_NIBBLES(form)) return (ireg)_mm256_cvtepi8_epi16(bytes);
    __m256i wide = _mm256_cvtepu8_epi16(bytes);
    return (ireg)(second ? _mm256_srli_epi16(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi16(15)));
#else
    ireg x;
    for (int i = 0; i < WIDTH; i++) {
        int32_t a = w[2 * i], b = w[2 * i + 1];
        if (!IN_NIBBLES(form)) a = (int8_t)a, b = (int8_t)b;
        else if (second) a = (uint8_t)a >> 4, b = (uint8_t)b >> 4;
        else a &= 15, b &= 15;
        x[i] = (int32_t)((uint32_t)b << 16 | (a & 0xffff));
    }
    return x;
#endif
}

/* sum + the products of pairs. */
INLINE ireg add_pairs(ireg sum, ireg a, ireg b) {
#if defined(__AVX512VNNI__)
    return (ireg)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (ireg)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (ireg)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sum + (ireg)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE float float_of_half(uint16_t half) { /* exact but for infinities and NaN, which no file has */
    float x = bits_to_float((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    return half & 0x8000 ? -x : x;
}
/* The scales of a register's outputs, or with `minima` their minima; `w`: the first output's scale. */
INLINE reg factors_of(int form, const char *w, int minima) {
    reg x;
    w += minima * FACTOR_SIZE(form) * LANES;
    if (FACTOR_SIZE(form) == 4) {
        memcpy(&x, w, sizeof x);
        return x;
    }
#if defined(__AVX512F__)
    return (reg)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
#elif defined(__F16C__)
    return (reg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)w));
#else
    uint16_t halves[WIDTH];
    memcpy(halves, w, sizeof halves);
    for (int i = 0; i < WIDTH; i++) x[i] = float_of_half(halves[i]);
    return x;
#endif
}

INLINE reg floats_of_ints(ireg x) { return __builtin_convertvector(x, reg); }

/* The weights of input k of a step. `factors`: of a register's outputs in the group; `w`: the step's bytes of these outputs. */
INLINE reg weights_in_group(int form, const char *factors, const char *w, int k) {
    ireg pairs = numbers_of(form, w, k / 2);
    reg x = floats_of_ints((k % 2 ? pairs >> 16 : pairs << 16 >> 16) - CENTRE(form)) * factors_of(form, factors, 0);
    return HAS_MINIMA(form) ? x + factors_of(form, factors, 1) : x;
}

/* Most tokens, and registers for sums of whole numbers, of a tile of groups; the others are added once a group. */
#if defined(__AVX512F__)
#define GROUP_TOKENS 8
#define GROUP_SUMS 16
#elif defined(__SSE2__) && !defined(__AVX__)
#define GROUP_TOKENS 2
#define GROUP_SUMS 8
#else
#define GROUP_TOKENS 4
#define GROUP_SUMS 8
#endif

/* Features of a token by groups of inputs: whole numbers of 16 bits times a scale. */
typedef struct {
    float scale, sum; /* of the numbers, times the scale */
    int32_t centre;   /* minus the centre of centred weights times the sum of the numbers */
    int32_t unused;
} GroupHead;
#define ROUNDED_BYTES(group) ((int64_t)sizeof(GroupHead) + 2 * (group))

/* Rounds n features, the scale being that with which the largest just fits. NaN and infinities make all NaN. */
static NOINLINE void round_features(char *to, const float *x, int64_t n, int64_t group) {
    for (; n > 0; n -= group, x += group, to += ROUNDED_BYTES(group)) {
        GroupHead head = {0};
        int32_t total = 0;
        int16_t *numbers = (int16_t *)(to + sizeof head);
        uint32_t largest = 0;
        for (int64_t i = 0; i < group; i++) {
            uint32_t size = float_to_bits(x[i]) & 0x7fffffffu;
            largest = size > largest ? size : largest;
        }
        float top = bits_to_float(largest), inverse = top > 1e-30f ? 32767.0f / top : 0.0f;
        int finite = largest < 0x7f800000u;
        for (int64_t i = 0; i < group; i++) {
            int32_t number = finite ? (int32_t)float_to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000 : 0;
            numbers[i] = (int16_t)number;
            total += number;
        }
        head.scale = !finite ? bits_to_float(0x7fc00000u) : inverse > 0 ? top / 32767.0f : 0.0f;
        head.sum = head.scale * (float)total;
        head.centre = -CENTRE(CENTRED_OF_32) * total;
        memcpy(to, &head, sizeof head);
    }
}

/* The head of the group at x of token i. */
INLINE const GroupHead *head_of(const char *x, int64_t row, int i) { return (const GroupHead *)(x + i * row); }

/* sums [m, n * 16] of rounded tokens by n panels of so many bytes: whole numbers within a group, and float32 from group to group. */
INLINE void tile_in_groups(int form, int m, int n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,
                           const char *next, int64_t share) {
    const int registers = n * PARTS, group = GROUP_OF(form), steps = group / INPUTS_OF_STEP(form);
    const int64_t row = width / group * ROUNDED_BYTES(group), lines = (FACTOR_BYTES(form) + 63) / 64 + (steps + 1) / 2;
    Asked asked = lines_asked(w, panel, n, GROUP_BYTES(form) / lines, width / group * lines, next, share);
    reg sum[GROUP_TOKENS][PANELS * PARTS];
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) sum[i][p] = (reg){};
    for (int64_t at = 0; at < width; at += group, w += GROUP_BYTES(form), x += ROUNDED_BYTES(group)) {
        const char *numbers = w + FACTOR_BYTES(form), *features = x + sizeof(GroupHead);
        ireg whole[GROUP_TOKENS][PANELS * PARTS];
        UNROLL for (int i = 0; i < m; i++)
            UNROLL for (int p = 0; p < registers; p++)
                whole[i][p] = CENTRE(form) ? (ireg){} + head_of(x, row, i)->centre : (ireg){};
        for (int line = 0; line < FACTOR_BYTES(form); line += 64) ask(&asked, n);
        for (int step = 0; step < steps; step++, numbers += STEP) {
            if (step % 2 == 0) ask(&asked, n);
            UNROLL for (int half = 0; half < INPUTS_OF_STEP(form) / 2; half++, features += 4) {
                ireg pairs[PANELS * PARTS];
                UNROLL for (int p = 0; p < registers; p++)
                    pairs[p] = numbers_of(form, numbers + p / PARTS * panel + p % PARTS * 2 * WIDTH, half);
                UNROLL for (int i = 0; i < m; i++) {
                    int32_t pair;
                    memcpy(&pair, features + i * row, sizeof pair);
                    UNROLL for (int p = 0; p < registers; p++) whole[i][p] = add_pairs(whole[i][p], pairs[p], (ireg){} + pair);
                }
            }
        }
        UNROLL for (int p = 0; p < registers; p++) {
            const char *factors = w + p / PARTS * panel + p % PARTS * FACTOR_SIZE(form) * WIDTH;
            reg scales = factors_of(form, factors, 0), minima = HAS_MINIMA(form) ? factors_of(form, factors, 1) : (reg){};
            UNROLL for (int i = 0; i < m; i++) {
                const GroupHead *head = head_of(x, row, i);
                sum[i][p] += floats_of_ints(whole[i][p]) * (scales * head->scale);
                if (HAS_MINIMA(form)) sum[i][p] += minima * head->sum;
            }
        }
    }
    UNROLL for (int i = 0; i < m; i++)
        UNROLL for (int p = 0; p < registers; p++) memcpy(sums + (i * registers + p) * WIDTH, &sum[i][p], sizeof(reg));
}

/* A function that makes the sums [m, n * 16] of tokens x [m, width] by n panels of so many bytes each. The weights of the next panels
   come to the cache meanwhile, a share of them with each tile, so that memory is never at rest while there are products to make. */
typedef void Tile(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,
                  const char *next, int64_t share);

/* A function that unpacks so many weights of bytes. */
typedef void Unpack(void *to, const int8_t *w, int64_t count);

/* The tiles of a product: the most tokens, the registers for sums (0: a tile has PANELS panels), the bytes of a token's features, and
   of a weight that is unpacked. */
typedef struct {
    Tile *tile;
    int64_t tokens, sums, row, size;
    Unpack *unpack; /* or NULL: the tile reads the weights where they are */
} Tiling;

/* A Tile of a macro or function that the compiler must tell the numbers of tokens and panels. */
#define CASE(sums_of, m, n) case 8 * m + n: if (m * n * PARTS <= SUMS) sums_of(m, n, w, panel, x, width, sums, next, share); break;
#define CASES(sums_of, m) CASE(sums_of, m, 1) CASE(sums_of, m, 2) CASE(sums_of, m, 3) CASE(sums_of, m, 4)
#define TILE(name, sums_of)                                                                                           \
    static void name(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,   \
                     const char *next, int64_t share) {                                                               \
        switch (8 * m + n) {                                                                                          \
            CASES(sums_of, 1) CASES(sums_of, 2) CASES(sums_of, 3) CASES(sums_of, 4)                                   \
            CASES(sums_of, 5) CASES(sums_of, 6) CASES(sums_of, 7) CASES(sums_of, 8)                                   \
        }                                                                                                             \
    }
TILE(tile_float32, FLOAT32_TILE)
TILE(tile_bfloat16, BFLOAT16_TILE)
TILE(tile_bytes, BYTES_TILE)

#define GROUP_CASE(m, n, form) \
    case 8 * m + n:                                                                               \
        if (m <= GROUP_TOKENS && n <= PANELS_OF(GROUP_SUMS, m))                                   \
            tile_in_groups(form, m, n, w, panel, x, width, sums, next, share);                    \
        break;
#define GROUP_CASES(m, form) GROUP_CASE(m, 1, form) GROUP_CASE(m, 2, form) GROUP_CASE(m, 3, form) GROUP_CASE(m, 4, form)
#define GROUP_TILE(name, form)                                                                                        \
    static void name(int64_t m, int64_t n, const char *w, int64_t panel, const char *x, int64_t width, float *sums,   \
                     const char *next, int64_t share) {                                                               \
        switch (8 * m + n) {                                                                                          \
            GROUP_CASES(1, form) GROUP_CASES(2, form) GROUP_CASES(3, form) GROUP_CASES(4, form)                       \
            GROUP_CASES(5, form) GROUP_CASES(6, form) GROUP_CASES(7, form) GROUP_CASES(8, form)               \
        }                                                                                                             \
    }
GROUP_TILE(tile_bytes_16, BYTES_OF_16)
GROUP_TILE(tile_bytes_32, BYTES_OF_32)
GROUP_TILE(tile_nibbles_32, NIBBLES_OF_32)
GROUP_TILE(tile_halves_32, HALVES_OF_32)
GROUP_TILE(tile_centred_32, CENTRED_OF_32)

static void floats_of_bytes(void *to, const int8_t *w, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        reg x = weights_bytes((const char *)w + i, 0);
        memcpy((float *)to + i, &x, sizeof x);
        __builtin_prefetch(w + i + FETCHED);
    }
}

/* So many weights in groups. */
INLINE void floats_of_groups(int form, float *to, const char *w, int64_t count) {
    for (int64_t group = 0; group < count / (GROUP_OF(form) * LANES); group++, w += GROUP_BYTES(form)) {
        const char *numbers = w + FACTOR_BYTES(form);
        for (int inner = 0; inner < GROUP_OF(form); inner += INPUTS_OF_STEP(form), numbers += STEP) {
            __builtin_prefetch(numbers + FETCHED);
            UNROLL for (int k = 0; k < INPUTS_OF_STEP(form); k++)
                UNROLL for (int p = 0; p < PARTS; p++, to += WIDTH) {
                    reg x = weights_in_group(form, w + p * FACTOR_SIZE(form) * WIDTH, numbers + p * 2 * WIDTH, k);
                    memcpy(to, &x, sizeof x);
                }
        }
    }
}
static void floats_of_bytes_16(void *to, const int8_t *w, int64_t n) { floats_of_groups(BYTES_OF_16, to, (const char *)w, n); }
static void floats_of_bytes_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(BYTES_OF_32, to, (const char *)w, n); }
static void floats_of_nibbles_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(NIBBLES_OF_32, to, (const char *)w, n); }
static void floats_of_halves_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(HALVES_OF_32, to, (const char *)w, n); }
static void floats_of_centred_32(void *to, const int8_t *w, int64_t n) { floats_of_groups(CENTRED_OF_32, to, (const char *)w, n); }

/* By form; WHOLE: signed bytes. */
static Tile *const tiles_in_groups[] = {
    tile_bytes, tile_bytes_16, tile_bytes_32, tile_nibbles_32, tile_halves_32, tile_centred_32,
};
static Unpack *const floats_of[] = {
    floats_of_bytes, floats_of_bytes_16, floats_of_bytes_32, floats_of_nibbles_32, floats_of_halves_32, floats_of_centred_32,
};
