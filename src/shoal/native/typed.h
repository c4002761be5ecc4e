/* Products, norms and rotary embedding over elements of type T; see kernels.c. A function `share_of_...` is run by all threads of a
   parallel region, which then meet at its end, or by one thread alone. */

/* n elements as floats, zeros behind them up to a whole number of lanes. */
INLINE void NAME(widened)(float *to, const T *from, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) put_float32(to + i, NAME(some)(from + i));
    if (n % LANES) {
        memset(to + i, 0, (rounded_up(n) - i) * sizeof(float));
        for (; i < n; i++) to[i] = NAME(widen)(from[i]);
    }
}

/* The elements of a register, or the n that are left and zeros behind them. */
INLINE reg NAME(some_left)(const T *from, int64_t n) {
    if (n >= WIDTH) return NAME(some)(from);
    T few[WIDTH] = {0};
    memcpy(few, from, n * sizeof(T));
    return NAME(some)(few);
}

/* Asks for bytes that will be read later; the address need not be valid. */
INLINE void NAME(fetch)(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
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
#pragma omp parallel num_threads(team(threads)) if (tokens * width > PARALLEL)
    NAME(share_of_rms_norm)(x, weight, out, tokens, width, eps);
}

/* What a product does with its result. */
enum { NAME(PLAIN), NAME(SILU), NAME(ADD), NAME(MUL) };

/* Finishes the sums of a register's outputs of one token, or of the n that are left, at `place` in y. */
INLINE void NAME(finish_some)(const Product *a, reg sums, int64_t first, int64_t place, int64_t n) {
    T *y = (T *)a->y + place, made[WIDTH];
    if (a->scales) sums *= some_left_float32(a->scales + first, n);
    if (a->bias) sums += NAME(some_left)((const T *)a->bias + first, n);
    if (a->kind == NAME(SILU)) sums = silu(sums);
    if (a->kind == NAME(ADD)) sums += NAME(some_left)((const T *)a->other + place, n);
    if (a->kind == NAME(MUL)) sums *= NAME(some_left)((const T *)a->other + place, n);
    NAME(put)(made, sums);
    if (n >= WIDTH) memcpy(y, made, sizeof made);
    else memcpy(y, made, n * sizeof(T));
}

/* The end of n panels of outputs from `first` on. */
INLINE int64_t NAME(end_of)(const Product *a, int64_t first, int64_t n) {
    return first + n * LANES < a->outputs ? first + n * LANES : a->outputs;
}

/* The place of a token's first output. */
INLINE int64_t NAME(place_of)(const Product *a, int64_t token) { return (a->y_rows ? a->y_rows[token] : token) * a->outputs; }

/* The same with the sums [m, n * 16] of m tokens by n panels from output `first` on. */
static NOINLINE void NAME(finish)(const Product *a, int64_t token, int64_t m, int64_t first, int64_t n, const float *sums) {
    int64_t last = NAME(end_of)(a, first, n);
    for (int64_t i = 0; i < m; i++) {
        int64_t row = NAME(place_of)(a, token + i);
        const float *from = sums + i * n * LANES;
        for (int64_t out = first; out < last; out += WIDTH, from += WIDTH)
            NAME(finish_some)(a, some_float32(from), out, row + out, last - out);
    }
}

/* Asks memory for the places that `finish` will write, and for what it reads beside them. */
INLINE void NAME(ask)(const Product *a, int64_t token, int64_t m, int64_t first, int64_t n) {
    int64_t last = NAME(end_of)(a, first, n);
    for (int64_t i = 0; i < m; i++) {
        int64_t row = NAME(place_of)(a, token + i);
        for (int64_t out = first; out < last; out += 64 / sizeof(T)) {
            __builtin_prefetch((T *)a->y + row + out, 1);
            if (a->other) __builtin_prefetch((const T *)a->other + row + out);
        }
    }
}

/* Who multiplies so many tokens. */
static Tiling NAME(tiling)(const Product *a, int64_t count) {
    int64_t floats = 4 * a->width, group = GROUP_OF(a->form);
#ifdef READS_BYTES
    if (sizeof(T) == 2 && a->form == WHOLE && a->scales && count <= READS_BYTES)
        return (Tiling){tile_of_pairs_in_bytes, PAIR_TOKENS, PAIR_SUMS, 2 * a->width, 0, NULL};
#endif
#ifdef PAIR_TOKENS
    if (sizeof(T) == 2 && a->form == WHOLE && multiplies_pairs())
        return (Tiling){tile_of_pairs, PAIR_TOKENS, PAIR_SUMS, 2 * a->width, 2, a->scales ? pairs_of_bytes : NULL};
#endif
    if (a->form == WHOLE && !a->scales) return (Tiling){NAME(tile), NAME(TILE_TOKENS), NAME(TILE_SUMS), floats, sizeof(T), NULL};
    if (a->form == WHOLE && count <= TOKENS) return (Tiling){tile_bytes, TOKENS, SUMS, floats, 0, NULL};
    if (a->form == WHOLE || a->exact) return (Tiling){tile_float32, TOKENS, SUMS, floats, 4, floats_of[a->form]};
    return (Tiling){tiles_in_groups[a->form], GROUP_TOKENS, GROUP_SUMS, a->width / group * ROUNDED_BYTES(group), 0, NULL};
}

/* Features of `count` tokens as the tiles take them: where they are, or in the room. */
static const char *NAME(features)(const Product *a, int64_t token, int64_t count, const Tiling *by, float *room) {
    const T *x = (const T *)a->x + token * a->width;
    if (by->row == a->width * (int64_t)sizeof(T)) return (const char *)x;
    if (a->form == WHOLE || by->unpack) {
        NAME(widened)(room, x, count * a->width);
        return (const char *)room;
    }
    float *wide = room + count * by->row / 4;
    for (int64_t i = 0; i < count; i++) {
        NAME(widened)(wide, x + i * a->width, a->width);
        round_features((char *)room + i * by->row, wide, a->width, GROUP_OF(a->form));
    }
    return (const char *)room;
}

/* `count` tokens from `token` on by panels `panel` to `end`, in tiles of nearly equal numbers of tokens. */
static void NAME(multiply_block)(const Product *a, int64_t token, int64_t count, int64_t panel, int64_t end, int *failed) {
    const Tiling by = NAME(tiling)(a, count);
    int64_t tiles = (count + by.tokens - 1) / by.tokens, m = (count + tiles - 1) / tiles;
    int64_t panels = by.sums ? PANELS_OF(by.sums, m) : PANELS;
    int64_t width = a->width, weights = width * LANES, wide = count * by.row / 4 + width + LANES;
    int64_t stored = a->form ? bytes_of_groups(a->form, width) : weights * (a->scales ? 1 : (int64_t)sizeof(T));
    float *room = scratch(wide + (by.unpack ? panels * weights : 0) + LANES), sums[16 * PANELS * LANES] __attribute__((aligned(64)));
    if (!room) {
        *failed = 1;
        return;
    }
    const char *x = NAME(features)(a, token, count, &by, room);
    for (int64_t n = panels; panel < end; panel += n) {
        if (n > end - panel) n = end - panel;
        const char *w = (const char *)a->weight + panel * stored;
        const char *next = w + n * stored;
        int64_t share = tiles > 1 && panel + n < end ? n * stored / tiles : 0;
        int64_t stride = by.unpack ? weights * by.size : stored;
        if (by.unpack) by.unpack(room + wide, (const int8_t *)w, n * weights), w = (const char *)(room + wide);
        for (int64_t i = 0; i < tiles; i++) {
            int64_t from = count * i / tiles, m = count * (i + 1) / tiles - from;
            NAME(ask)(a, token + from, m, panel * LANES, n);
            by.tile(m, n, w, stride, x + from * by.row, width, sums, next + share * i, share);
            NAME(finish)(a, token + from, m, panel * LANES, n, sums);
        }
    }
}

/* x W^T + b, and what follows it. A thread has whole panels, and reads each from memory once. `failed`: 1, no memory. */
static void NAME(share_of_product)(const Product *a, int *failed) {
    int64_t panels = (a->outputs + LANES - 1) / LANES, panel = panels * own_thread() / all_threads();
    int64_t end = panels * (own_thread() + 1) / all_threads();
    for (int64_t t = 0; t < a->tokens; t += BLOCK)
        NAME(multiply_block)(a, t, a->tokens - t < BLOCK ? a->tokens - t : BLOCK, panel, end, failed);
#pragma omp barrier
}

/* Returns 0, or 1: no memory. */
int NAME(product)(const Product *a) {
    int64_t threads = a->tokens * a->width * a->outputs > PARALLEL / 4 ? team(a->threads) : 1, lost = 0;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        Clocks begin = clocks();
        NAME(share_of_product)(a, &failed);
        keep_lost(begin, &lost);
    }
    judge_team(threads, lost);
    return failed;
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

/* A head of one token's keys or values in a cache takes so many bytes. Rounded, it is signed bytes, and behind them the float32 that
   makes them features again. */
INLINE int64_t NAME(head_bytes)(int64_t rounded, int64_t dim) {
    return rounded ? dim + (int64_t)sizeof(float) : dim * (int64_t)sizeof(T);
}

/* Rounds n features, the scale being that with which the largest is 127. NaN and infinities make all NaN. */
static NOINLINE void NAME(round_head)(char *to, const T *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t size = float_to_bits(NAME(widen)(x[i])) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    float scale = bits_to_float(largest < 0x7f800000u ? largest : 0x7fc00000u) / 127.0f;
    if (scale < 0x1p-126f) scale = 0x1p-126f;
    for (int64_t i = 0; i < n; i++)
        ((int8_t *)to)[i] = (int8_t)((int32_t)float_to_bits(NAME(widen)(x[i]) / scale + 12582912.0f) - 0x4b400000);
    memcpy(to + n, &scale, sizeof scale);
}

/* Writes a head of a token's keys or values, the `number`-th of a store. */
INLINE void NAME(write_head)(const Heads *a, void *store, int64_t number, const T *x) {
    char *to = (char *)store + number * NAME(head_bytes)(a->rounded, a->dim);
    if (a->rounded) NAME(round_head)(to, x, a->dim);
    else memcpy(to, x, a->dim * sizeof(T));
}

static void NAME(share_of_heads)(const Heads *a) {
    int64_t dim = a->dim, all = a->heads + 2 * a->kv_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *cos = a->cos + a->positions[t] * a->rotary, *sin = a->sin + a->positions[t] * a->rotary;
        T *states = (T *)a->states + t * all * dim, turned[1024];
        int64_t cell = a->cells[t] * a->kv_heads;
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++) {
            T *x = states + h * dim;
            const T *norm = h < a->heads ? a->query_norm : a->key_norm;
            if (norm) NAME(normalize)(x, x, norm, dim, a->eps);
            NAME(rotate)(turned, x, cos, sin, a->rotary, dim);
            if (h < a->heads) memcpy(x, turned, dim * sizeof(T));
            else NAME(write_head)(a, a->keys, cell + h - a->heads, turned);
        }
        const T *values = states + (a->heads + a->kv_heads) * dim;
        for (int64_t h = 0; h < a->kv_heads; h++) NAME(write_head)(a, a->values, cell + h, values + h * dim);
    }
}

void NAME(heads)(const Heads *a) {
#pragma omp parallel num_threads(team(a->threads)) if (a->tokens * (a->heads + 2 * a->kv_heads) * a->dim > PARALLEL)
    NAME(share_of_heads)(a);
}
