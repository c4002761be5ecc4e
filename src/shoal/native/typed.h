/* The kernels for elements of type T; see kernels.c. A function `share_of_...` is run by all threads of a parallel region, which then
   meet at its end, or by one thread alone. */

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

/* m tokens by some panels of weights, and what the product does with the result; `outputs`: of these panels. */
INLINE void NAME(tile)(int m, int panels, const Product *a, const T *x, int64_t first, int64_t outputs) {
    int64_t width = a->width, panel = width * LANES;
    const T *w = (const T *)a->weight + first * width;
    vec sum[TOKENS][PANELS] = {{{0}}};
    for (int64_t k = 0; k < width; k += GROUP) NAME(step)(m, panels, sum, w + k * LANES, panel, x + k, width);
    for (int i = 0; i < m; i++)
        for (int p = 0; p < panels; p++) {
            int64_t place = (x - (const T *)a->x) / width * a->outputs + i * a->outputs + first + p * LANES;
            int64_t lanes = outputs - p * LANES < LANES ? outputs - p * LANES : LANES;
            T bias[LANES] = {0}, other[LANES] = {0}, y[LANES];
            vec result = sum[i][p];
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
INLINE void NAME(tiles)(int m, const Product *a, const T *x, int64_t first, int64_t last) {
    const int most = PANELS_OF(m);
    for (; first + most * LANES <= last; first += most * LANES) NAME(tile)(m, most, a, x, first, most * LANES);
    if (most > 2 && first + 2 * LANES <= last) NAME(tile)(m, 2, a, x, first, 2 * LANES), first += 2 * LANES;
    for (; first < last; first += LANES) NAME(tile)(m, 1, a, x, first, last - first);
}

/* The compiler needs to know how many tokens there are: fewer than TOKENS cost less. */
static void NAME(few_tokens)(int64_t tokens, const Product *a, const T *x, int64_t first, int64_t last) {
    switch (tokens) {
    case 1: NAME(tiles)(1, a, x, first, last); break;
    case 2: NAME(tiles)(2, a, x, first, last); break;
    case 3: NAME(tiles)(3, a, x, first, last); break;
    case 4: NAME(tiles)(4, a, x, first, last); break;
#if TOKENS > 4
    case 5: NAME(tiles)(5, a, x, first, last); break;
    case 6: NAME(tiles)(6, a, x, first, last); break;
    case 7: NAME(tiles)(7, a, x, first, last); break;
    case 8: NAME(tiles)(8, a, x, first, last); break;
#endif
    }
}

/* x W^T + b, and what follows it. Each sum runs over the inputs in their order, so that its bits do not depend on the other tokens.
   A thread has whole panels, and reads each from memory once. */
static void NAME(share_of_product)(const Product *a) {
    int64_t panels = (a->outputs + LANES - 1) / LANES, panel = panels * own_thread() / all_threads();
    int64_t end = panels * (own_thread() + 1) / all_threads();
    for (; panel < end; panel += PANELS) {
        int64_t last = (panel + PANELS < end ? panel + PANELS : end) * LANES;
        for (int64_t t = 0; t < a->tokens; t += TOKENS)
            NAME(few_tokens)(a->tokens - t < TOKENS ? a->tokens - t : TOKENS, a, (const T *)a->x + t * a->width, panel * LANES,
                             last < a->outputs ? last : a->outputs);
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

/* Which keys a column sees: [first, last), but of the row's own block only those in `word`. */
typedef struct {
    int64_t first, last;
    uint64_t word;
} NAME(Sight);

INLINE NAME(Sight) NAME(sight)(const Attention *a, int64_t row, int64_t column) {
    int64_t start = a->bounds[row], count = a->bounds[a->rows + row], position = start + column;
    NAME(Sight) seen = {0, position + 1, ~(uint64_t)0};
    if (a->words) {
        position = a->positions[row * a->columns + column];
        seen.word = (uint64_t)a->words[row * a->columns + column];
        seen.last = start + count;
    }
    if (a->window && position - a->window + 1 > 0) seen.first = position - a->window + 1;
    if (a->words && seen.first > start) seen.first = start; /* the word knows the window in the block */
    return seen;
}

/* Scores [span] of one query become weights: e^(score - highest) over their sum; 0 where nothing is seen. `origin`: the key of the
   first score. `sink`: one more score, of no key; -inf: none. */
INLINE void NAME(soften)(const Attention *a, float *scores, int64_t span, int64_t origin, NAME(Sight) seen, int64_t start,
                         int64_t count, float sink) {
    int64_t low = seen.first - origin, high = seen.last - origin;
    float scale = (float)a->scale, cap = (float)a->softcap;
    if (cap != 0)
        for (int64_t t = low; t < high; t++) scores[t] = cap * tanhf(scores[t] * scale / cap);
    else
        for (int64_t t = 0; t < span; t += LANES) store(scores + t, load(scores + t) * scale);
    for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int64_t t = high; t < span; t++) scores[t] = -INFINITY;
    if (a->words)
        for (int64_t c = 0; c < count; c++)
            if (!(seen.word >> c & 1)) scores[start - origin + c] = -INFINITY;
    vec most = (vec){} - INFINITY, sum = {};
    for (int64_t t = 0; t < span; t += LANES) {
        vec x = load(scores + t);
        most = choose(x > most, x, most);
    }
    float highest = sink;
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    if (highest == -INFINITY) highest = 0; /* only NaN are left */
    for (int64_t t = 0; t < span; t += LANES) {
        vec x = exponential(load(scores + t) - highest);
        sum += x;
        store(scores + t, x);
    }
    float total = sum_of(sum) + (sink == -INFINITY ? 0.0f : expf(sink - highest)), share = 1.0f / total;
    for (int64_t t = 0; t < span; t += LANES) store(scores + t, load(scores + t) * share);
}

/* One row and one KV head: the scores of all its queries, their softmax, the sums of values. Keys come in blocks of LANES; behind
   the last there are zeros, which nobody sees. Returns 0, or 1: no memory. */
static int NAME(attend_head)(const Attention *a, int64_t row, int64_t head) {
    int64_t group = a->heads / a->kv_heads, width = rounded_up(a->dim), value_width = rounded_up(a->value_dim);
    int64_t start = a->bounds[row], count = a->bounds[a->rows + row], total = start + count, queries = group * count;
    int64_t offset = a->bounds[2 * a->rows + row], base = a->bounds[3 * a->rows + row], origin = total;
    for (int64_t j = 0; j < count; j++) {
        int64_t first = NAME(sight)(a, row, j).first;
        if (first < origin) origin = first;
    }
    int64_t least = origin; /* what lies before is not read: it may be NaN */
    origin = origin / LANES * LANES; /* a key has the same lane in every pass: sums have the same order */
    int64_t span = rounded_up(total - origin), wide = width > value_width ? width : value_width;
    float *query = scratch(queries * (width + span + value_width) + (width + wide) * LANES);
    if (!query) return 1;
    float *scores = query + queries * width, *sums = scores + queries * span;
    float *keys = sums + queries * value_width, *block = keys + width * LANES;
    const T *key = (const T *)a->key + a->key_rows[row] + head * a->key_head;
    const T *value = (const T *)a->value + a->value_rows[row] + head * a->value_head;
    const T *shared_key = (const T *)a->shared_key + base * a->shared_key_token + head * a->shared_key_head;
    const T *shared_value = (const T *)a->shared_value + base * a->shared_value_token + head * a->shared_value_head;
    const T *from = (const T *)a->query + a->query_rows[row] * a->query_token + head * group * a->query_head;
    for (int64_t i = 0; i < queries; i++)
        NAME(widened)(query + i * width, from + i / count * a->query_head + i % count * a->query_token, a->dim);

    for (int64_t t = 0; t < span; t += LANES) {
        for (int i = 0; i < LANES; i++) {
            int64_t place = origin + t + i;
            const T *k = place < offset ? shared_key + place * a->shared_key_token : key + (place - offset) * a->key_token;
            if (place + AHEAD < total) NAME(fetch)(k + AHEAD * a->key_token, a->dim);
            if (place >= least && place < total) NAME(widened)(block + i * width, k, a->dim);
            else memset(block + i * width, 0, width * sizeof(float));
        }
        for (int64_t d = 0; d < width; d += LANES) {
            vec square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load(block + i * width + d);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(keys + (d + i) * LANES, square[i]);
        }
        int64_t i = 0;
        for (; i + 4 <= queries; i += 4) dot_products(4, query + i * width, keys, scores + i * span + t, width, span);
        for (; i + 2 <= queries; i += 2) dot_products(2, query + i * width, keys, scores + i * span + t, width, span);
        for (; i < queries; i++) dot_products(1, query + i * width, keys, scores + i * span + t, width, span);
    }
    for (int64_t i = 0; i < queries; i++) {
        float sink = a->sinks ? a->sinks[head * group + i / count] : -INFINITY;
        NAME(soften)(a, scores + i * span, span, origin, NAME(sight)(a, row, i % count), start, count, sink);
    }
    memset(sums, 0, queries * value_width * sizeof(float));
    for (int64_t t = 0; t < span; t += LANES) {
        for (int i = 0; i < LANES; i++) {
            int64_t place = origin + t + i;
            const T *v = place < offset ? shared_value + place * a->shared_value_token : value + (place - offset) * a->value_token;
            if (place + AHEAD < total) NAME(fetch)(v + AHEAD * a->value_token, a->value_dim);
            if (place >= least && place < total) NAME(widened)(block + i * value_width, v, a->value_dim);
            else memset(block + i * value_width, 0, value_width * sizeof(float));
        }
        int64_t i = 0;
        const float *weights = scores + t;
        for (; i + 4 <= queries; i += 4) add_weighted_rows(4, weights + i * span, block, sums + i * value_width, value_width, span);
        for (; i + 2 <= queries; i += 2) add_weighted_rows(2, weights + i * span, block, sums + i * value_width, value_width, span);
        for (; i < queries; i++) add_weighted_rows(1, weights + i * span, block, sums + i * value_width, value_width, span);
    }
    for (int64_t i = 0; i < queries; i++) {
        T *out = (T *)a->out + ((a->query_rows[row] + i % count) * a->heads + head * group + i / count) * a->value_dim;
        for (int64_t d = 0; d < a->value_dim; d++) out[d] = NAME(narrow)(sums[i * value_width + d]);
    }
    return 0;
}

/* Sets `failed` where there is no memory. */
static void NAME(share_of_attend)(const Attention *a, int *failed) {
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t head = 0; head < a->kv_heads; head++)
            if (NAME(attend_head)(a, row, head)) {
#pragma omp atomic write
                *failed = 1;
            }
}

/* Returns 0, or 1: no memory. */
int NAME(attend)(const Attention *a) {
    int failed = 0;
    int64_t work = 0;
    for (int64_t row = 0; row < a->rows; row++) work += (a->bounds[row] + a->bounds[a->rows + row]) * a->bounds[a->rows + row];
#pragma omp parallel num_threads(a->threads) if (work * a->heads * a->dim > PARALLEL / 4)
    NAME(share_of_attend)(a, &failed);
    return failed;
}
