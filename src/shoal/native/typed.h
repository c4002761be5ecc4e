/* Products, norms and rotary embedding over elements of type T; see kernels.c. A function `share_of_...` is run by all threads of a
   parallel region, which then meet at its end, or by one thread alone. */

/* n elements as floats, zeros behind them up to a whole number of lanes. */
INLINE void NAME(widened)(float *to, const T *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, NAME(lanes)(from + i));
    if (i < n) {
        store(to + i, (vec){});
        for (; i < n; i++) to[i] = NAME(widen)(from[i]);
    }
}

/* Asks for n elements that will be read later; the address need not be valid. */
INLINE void NAME(fetch)(const T *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + i);
}

/* `to` may be `x`. */
static NOINLINE void NAME(normalize)(T *to, const T *x, const T *restrict weight, int64_t n, double eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += NAME(widen)(x[i]) * NAME(widen)(x[i]);
    float scale = 1.0f / sqrtf(sum / (float)n + (float)eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        to[i] = NAME(narrow)(NAME(widen)(NAME(narrow)(NAME(widen)(x[i]) * scale)) * NAME(widen)(weight[i]));
}

/* x, out: [tokens, width]; weight: [width]. */
static void NAME(share_of_rms_norm)(const void *x, const void *weight, void *out, int64_t tokens, int64_t width, double eps) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        NAME(normalize)((T *)out + t * width, (const T *)x + t * width, weight, width, eps);
}

/* Zhang and Sennrich 2019, as Llama has it: rounded to T before the weight. */
void NAME(rms_norm)(const void *x, const void *weight, void *out, int64_t tokens, int64_t width, double eps, int64_t threads) {
#pragma omp parallel num_threads(threads) if (tokens * width > PARALLEL)
    NAME(share_of_rms_norm)(x, weight, out, tokens, width, eps);
}

/* What a product does with its result. */
enum { NAME(PLAIN), NAME(SILU), NAME(ADD), NAME(MUL) };

/* The products of m tokens from `token` on by some panels of weights from output `first` on. */
INLINE void NAME(products)(int m, int panels, vec result[TOKENS][PANELS], const Product *a, int64_t token, int64_t first) {
    int64_t width = a->width, panel = width * LANES;
    const T *w = (const T *)a->weight + first * width, *x = (const T *)a->x + token * width;
    vec sum[TOKENS][PANELS] = {{{0}}}; /* in registers: nothing else has its address */
    for (int64_t k = 0; k < width; k += GROUP) NAME(step)(m, panels, sum, w + k * LANES, panel, x + k, width);
    for (int i = 0; i < m; i++)
        for (int p = 0; p < panels; p++) result[i][p] = sum[i][p];
}

/* m tokens by some panels of weights, and what the product does with the result; `outputs`: of these panels. */
INLINE void NAME(tile)(int m, int panels, const Product *a, int64_t token, int64_t first, int64_t outputs) {
    vec results[TOKENS][PANELS];
    if (a->scales) products_of_bytes(m, panels, results, a, token, first);
    else NAME(products)(m, panels, results, a, token, first);
    for (int i = 0; i < m; i++)
        for (int p = 0; p < panels; p++) {
            int64_t place = (a->y_rows ? a->y_rows[token + i] : token + i) * a->outputs + first + p * LANES;
            int64_t lanes = outputs - p * LANES < LANES ? outputs - p * LANES : LANES;
            T bias[LANES] = {0}, other[LANES] = {0}, y[LANES];
            vec result = results[i][p];
            if (a->bias) {
                memcpy(bias, (const T *)a->bias + first + p * LANES, lanes * sizeof(T));
                result += NAME(lanes)(bias);
            }
            if (a->kind >= NAME(ADD)) memcpy(other, (const T *)a->other + place, lanes * sizeof(T));
            if (a->kind == NAME(SILU)) result = silu(result);
            if (a->kind == NAME(ADD)) result += NAME(lanes)(other);
            if (a->kind == NAME(MUL)) result *= NAME(lanes)(other);
            NAME(put)(y, result);
            memcpy((T *)a->y + place, y, lanes * sizeof(T));
        }
}

/* m tokens by the outputs from `first` to `last`, as many panels at once as there are sums for. */
INLINE void NAME(tiles)(int m, const Product *a, int64_t token, int64_t first, int64_t last) {
    const int most = PANELS_OF(m);
    for (; first + most * LANES <= last; first += most * LANES) NAME(tile)(m, most, a, token, first, most * LANES);
    if (most > 2 && first + 2 * LANES <= last) NAME(tile)(m, 2, a, token, first, 2 * LANES), first += 2 * LANES;
    for (; first < last; first += LANES) NAME(tile)(m, 1, a, token, first, last - first);
}

/* The compiler needs to know how many tokens there are: fewer than TOKENS cost less. */
static void NAME(few_tokens)(int64_t tokens, const Product *a, int64_t token, int64_t first, int64_t last) {
    switch (tokens) {
    case 1: NAME(tiles)(1, a, token, first, last); break;
    case 2: NAME(tiles)(2, a, token, first, last); break;
    case 3: NAME(tiles)(3, a, token, first, last); break;
    case 4: NAME(tiles)(4, a, token, first, last); break;
#if TOKENS > 4
    case 5: NAME(tiles)(5, a, token, first, last); break;
    case 6: NAME(tiles)(6, a, token, first, last); break;
    case 7: NAME(tiles)(7, a, token, first, last); break;
    case 8: NAME(tiles)(8, a, token, first, last); break;
#endif
    }
}

/* Rounds a token to bytes. Returns its scale: the largest feature has the byte 127; NaN where one is infinite or NaN. */
static NOINLINE float NAME(round_token)(uint8_t *to, const T *x, int64_t n) {
    vec most = {}, strange = {};
    float largest = 0, scale = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        T part[LANES] = {0};
        memcpy(part, x + i, (n - i < LANES ? n - i : LANES) * sizeof(T));
        vec v = NAME(lanes)(part), size = (vec)((ivec)v & 0x7fffffff);
        most = choose(size > most, size, most);
        strange += v - v; /* 0, or NaN */
    }
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    scale = (largest > 1e-12f ? largest : 1e-12f) / 127 + sum_of(strange);
    if (scale != scale) {
        memset(to, ZERO, n);
        return scale;
    }
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t lanes = n - i < LANES ? n - i : LANES;
        T part[LANES] = {0};
        memcpy(part, x + i, lanes * sizeof(T));
        vec rounded = (NAME(lanes)(part) / scale + 12582912.0f) - 12582912.0f; /* to nearest, ties to even */
        bvec bytes = __builtin_convertvector(__builtin_convertvector(rounded, ivec) + ZERO, bvec);
        memcpy(to + i, &bytes, lanes);
    }
    return scale;
}

/* x W^T + b, and what follows it. Each sum runs over the inputs in their order, so that its bits do not depend on the other tokens.
   A thread has whole panels, and reads each from memory once. */
static void NAME(share_of_product)(const Product *a) {
    int64_t panels = (a->outputs + LANES - 1) / LANES, panel = panels * own_thread() / all_threads();
    int64_t end = panels * (own_thread() + 1) / all_threads();
    if (a->scales) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a->tokens; t++)
            a->token_scales[t] = NAME(round_token)(a->bytes + t * a->width, (const T *)a->x + t * a->width, a->width);
    }
    for (; panel < end; panel += PANELS) {
        int64_t last = (panel + PANELS < end ? panel + PANELS : end) * LANES;
        for (int64_t t = 0; t < a->tokens; t += TOKENS)
            NAME(few_tokens)(a->tokens - t < TOKENS ? a->tokens - t : TOKENS, a, t, panel * LANES, last < a->outputs ? last : a->outputs);
    }
#pragma omp barrier
}

void NAME(product)(const Product *a) {
#pragma omp parallel num_threads(a->threads) if (a->tokens * a->width * a->outputs > PARALLEL / 4)
    NAME(share_of_product)(a);
}

/* x cos + rotate_half(x) sin over the first `rotary` features (Su et al. 2021). */
static NOINLINE void NAME(rotate)(T *restrict to, const T *restrict x, const float *restrict cos, const float *restrict sin,
                                int64_t rotary, int64_t dim) {
    int64_t half = rotary / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = NAME(widen)(x[i]), b = NAME(widen)(x[half + i]);
        to[i] = NAME(narrow)(a * cos[i] - b * sin[i]);
        to[half + i] = NAME(narrow)(b * cos[half + i] + a * sin[half + i]);
    }
    if (to != x) memcpy(to + rotary, x + rotary, (dim - rotary) * sizeof(T));
}

static void NAME(share_of_heads)(const Heads *a) {
    int64_t dim = a->dim, all = a->heads + 2 * a->kv_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *cos = a->cos + a->positions[t] * a->rotary, *sin = a->sin + a->positions[t] * a->rotary;
        T *states = (T *)a->states + t * all * dim, turned[1024];
        int64_t cell = a->cells[t] * a->kv_heads * dim;
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++) {
            T *x = states + h * dim;
            const T *norm = h < a->heads ? a->query_norm : a->key_norm;
            if (norm) NAME(normalize)(x, x, norm, dim, a->eps);
            NAME(rotate)(turned, x, cos, sin, a->rotary, dim);
            T *to = h < a->heads ? x : (T *)a->keys + cell + (h - a->heads) * dim;
            memcpy(to, turned, dim * sizeof(T));
        }
        memcpy((T *)a->values + cell, states + (a->heads + a->kv_heads) * dim, a->kv_heads * dim * sizeof(T));
    }
}

void NAME(heads)(const Heads *a) {
#pragma omp parallel num_threads(a->threads) if (a->tokens * (a->heads + 2 * a->kv_heads) * a->dim > PARALLEL)
    NAME(share_of_heads)(a);
}
