/* Ragged attention over elements of type T; see kernels.c. */

/* Which keys a column sees: [first, last), but of the row's own block only those in `word`. `end`: behind its own position. */
typedef struct {
    int64_t first, last, end;
    uint64_t word;
} NAME(Sight);

INLINE NAME(Sight) NAME(sight)(const Attention *a, int64_t row, int64_t column) {
    int64_t start = a->bounds[row], count = a->bounds[a->rows + row], position = start + column;
    NAME(Sight) seen = {0, position + 1, position + 1, ~(uint64_t)0};
    if (a->words) {
        position = a->positions[row * a->columns + column];
        seen.word = (uint64_t)a->words[row * a->columns + column];
        seen.last = start + count, seen.end = position + 1;
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
    reg most = (reg){} - INFINITY, sums[PARTS] = {};
    for (int64_t t = 0; t < span; t += WIDTH) {
        reg x = some_float32(scores + t);
        most = choose(x > most, x, most);
    }
    float highest = sink, sum[LANES];
    for (int i = 0; i < WIDTH; i++) highest = most[i] > highest ? most[i] : highest;
    if (highest == -INFINITY) highest = 0; /* only NaN are left */
    int64_t before = start - origin, whole = a->words ? before / LANES * LANES : span;
    for (int64_t t = 0; t < span; t += LANES) {
        UNROLL for (int p = 0; p < PARTS; p++) {
            reg x = exponential(some_float32(scores + t + p * WIDTH) - highest);
            if (t < whole) sums[p] += x;
            put_float32(scores + t + p * WIDTH, x);
        }
    }
    memcpy(sum, sums, sizeof sum);
    if (a->words) { /* the path of a tree's node in the lanes of a chain: the sum has the same bits */
        int64_t place = seen.end - origin - __builtin_popcountll(seen.word);
        for (int64_t t = whole; t < before; t++) sum[t % LANES] += scores[t];
        for (int64_t c = 0; c < count; c++)
            if (seen.word >> c & 1) sum[place++ % LANES] += scores[before + c];
    }
    float total = sum_of(sum) + (sink == -INFINITY ? 0.0f : expf(sink - highest)), share = 1.0f / total;
    for (int64_t t = 0; t < span; t += LANES) store(scores + t, load(scores + t) * share);
}

/* Where the keys, or the values, of one head of a row are. */
typedef struct {
    const char *shared, *own;         /* token 0 of the shared prompt, of the slot */
    int64_t shared_token, token, size; /* bytes from one to the next, and of this head */
    int64_t offset, least, total;     /* tokens of the shared prompt, first and last + 1 that is read: others may be NaN */
    const char *zeros;                /* [size] */
} NAME(Tokens);

INLINE const char *NAME(token_at)(const NAME(Tokens) *a, int64_t place) {
    return place < a->offset ? a->shared + place * a->shared_token : a->own + (place - a->offset) * a->token;
}

/* The first LANES tokens from `first` on, zeros for those that are not read. Asks for what comes AHEAD: of the same, and behind
   their end of those that are read `next` from `origin` on. */
INLINE void NAME(block)(const char *rows[LANES], const NAME(Tokens) *a, int64_t first, const NAME(Tokens) *next, int64_t origin) {
    for (int i = 0; i < LANES; i++) {
        int64_t place = first + i, ahead = place + AHEAD;
        if (ahead < a->total) NAME(fetch)(NAME(token_at)(a, ahead), a->size);
        else if (next && (ahead += origin - a->total) < next->total) NAME(fetch)(NAME(token_at)(next, ahead), next->size);
        rows[i] = place >= a->least && place < a->total ? NAME(token_at)(a, place) : a->zeros;
    }
}

/* The features of a register, of a token from feature d on, of n that are left; rounded ones lack their scale. */
INLINE reg NAME(features_at)(int rounded, const char *token, int64_t d, int64_t n) {
    const int64_t size = rounded ? 1 : sizeof(T);
    T few[WIDTH] = {0};
    token += d * size;
    if (n < WIDTH) {
        if (n > 0) memcpy(few, token, n * size);
        token = (const char *)few;
    }
    return rounded ? some_int8((const int8_t *)token) : NAME(some)((const T *)token);
}

/* LANES features of a block of tokens from feature d on, of n that are left: [feature, token]. */
INLINE void NAME(features_of)(int rounded, const char *rows[LANES], int64_t d, int64_t n, reg features[LANES][PARTS]) {
    for (int p = 0; p < PARTS; p++)
        for (int q = 0; q < LANES; q += WIDTH) {
            reg square[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++)
                square[i] = NAME(features_at)(rounded, rows[p * WIDTH + i], d + q, n - q);
            transpose(square);
            UNROLL for (int i = 0; i < WIDTH; i++) features[q + i][p] = square[i];
        }
}

/* Multiplies numbers [queries, span] of a block of rounded tokens, of so many features, by the scales of these. */
INLINE void NAME(scale_block)(const char *rows[LANES], int64_t dim, int64_t queries, float *numbers, int64_t span) {
    float scales[LANES];
    for (int i = 0; i < LANES; i++) memcpy(scales + i, rows[i] + dim, sizeof(float));
    for (int64_t i = 0; i < queries; i++) store(numbers + i * span, load(numbers + i * span) * load(scales));
}

/* scores [queries, span] of a block of keys; query: [queries, width]. */
INLINE void NAME(score)(int rounded, const char *rows[LANES], int64_t queries, const float *query, float *scores, int64_t dim,
                        int64_t width, int64_t span) {
    for (int64_t i = 0; i < queries; i++) store(scores + i * span, (vec){});
    for (int64_t d = 0; d < dim; d += LANES) {
        reg keys[LANES][PARTS];
        NAME(features_of)(rounded, rows, d, dim - d, keys);
        int64_t i = 0;
        for (; i + 4 <= queries; i += 4) add_products(4, query + i * width + d, keys, scores + i * span, width, span);
        for (; i + 2 <= queries; i += 2) add_products(2, query + i * width + d, keys, scores + i * span, width, span);
        for (; i < queries; i++) add_products(1, query + i * width + d, keys, scores + i * span, width, span);
    }
    if (rounded) NAME(scale_block)(rows, dim, queries, scores, span);
}

/* sums [queries, width] += weights [queries, span] of a block times its values; so many registers of the first n features. */
INLINE void NAME(add_weighted)(int rounded, int queries, int registers, const char *rows[LANES], int64_t first, int64_t n,
                               const float *weights, float *sums, int64_t width, int64_t span) {
    reg sum[4][4];
    UNROLL for (int i = 0; i < queries; i++)
        UNROLL for (int d = 0; d < registers; d++) sum[i][d] = some_float32(sums + i * width + first + d * WIDTH);
    for (int t = 0; t < LANES; t++)
        UNROLL for (int d = 0; d < registers; d++) {
            reg value = NAME(features_at)(rounded, rows[t], first + d * WIDTH, n - d * WIDTH);
            UNROLL for (int i = 0; i < queries; i++) sum[i][d] += weights[i * span + t] * value;
        }
    UNROLL for (int i = 0; i < queries; i++)
        UNROLL for (int d = 0; d < registers; d++) memcpy(sums + i * width + first + d * WIDTH, &sum[i][d], sizeof(reg));
}

INLINE void NAME(add_values)(int rounded, int queries, const char *rows[LANES], int64_t dim, const float *weights, float *sums,
                             int64_t width, int64_t span) {
    const int registers = 4 * queries <= SUMS ? 4 : 2;
    int64_t d = 0, step = registers * WIDTH;
    for (; d + step <= dim; d += step) NAME(add_weighted)(rounded, queries, registers, rows, d, step, weights, sums, width, span);
    for (; d < dim; d += WIDTH) NAME(add_weighted)(rounded, queries, 1, rows, d, dim - d, weights, sums, width, span);
}

/* One row of a bundle: its part of the scratch memory, and where its keys and values are. */
typedef struct {
    int64_t row, queries, from;       /* the queries before it in the bundle */
    int64_t start, count, origin, span;
    NAME(Tokens) keys, values;
} NAME(Member);

INLINE NAME(Member) NAME(member)(const Attention *a, int64_t row, int64_t head, int64_t from) {
    int64_t start = a->bounds[row], count = a->bounds[a->rows + row], total = start + count;
    int64_t offset = a->bounds[2 * a->rows + row], base = a->bounds[3 * a->rows + row], least = total;
    for (int64_t j = 0; j < count; j++) {
        int64_t first = NAME(sight)(a, row, j).first;
        if (first < least) least = first;
    }
    int64_t origin = least / LANES * LANES; /* a key has the same lane in every pass: sums have the same order */
    int64_t element = a->rounded ? 1 : sizeof(T);
    NAME(Member) made = {row, a->heads / a->kv_heads * count, from, start, count, origin, rounded_up(total - origin)};
    made.keys = (NAME(Tokens)){
        (const char *)a->shared_key + (base * a->shared_key_token + head * a->shared_key_head) * element,
        (const char *)a->key + (a->key_rows[row] + head * a->key_head) * element, a->shared_key_token * element,
        a->key_token * element, NAME(head_bytes)(a->rounded, a->dim), offset, least, total, NULL,
    };
    made.values = (NAME(Tokens)){
        (const char *)a->shared_value + (base * a->shared_value_token + head * a->shared_value_head) * element,
        (const char *)a->value + (a->value_rows[row] + head * a->value_head) * element, a->shared_value_token * element,
        a->value_token * element, NAME(head_bytes)(a->rounded, a->value_dim), offset, least, total, NULL,
    };
    return made;
}

/* Overwrites the weights where the values are rounded. */
INLINE void NAME(add_all_values)(int rounded, int64_t queries, const char *rows[LANES], int64_t dim, float *weights, float *sums,
                                 int64_t width, int64_t span) {
    int64_t i = 0;
    if (rounded) NAME(scale_block)(rows, dim, queries, weights, span);
    for (; i + 4 <= queries; i += 4) NAME(add_values)(rounded, 4, rows, dim, weights + i * span, sums + i * width, width, span);
    for (; i + 2 <= queries; i += 2) NAME(add_values)(rounded, 2, rows, dim, weights + i * span, sums + i * width, width, span);
    for (; i < queries; i++) NAME(add_values)(rounded, 1, rows, dim, weights + i * span, sums + i * width, width, span);
}

/* Weights [queries, span] of the queries of a bundle; see attend_bundle. */
INLINE void NAME(score_bundle)(int rounded, const Attention *a, const NAME(Member) *bundle, int64_t members, int64_t head,
                               int64_t together, const float *query, float *scores, int64_t span) {
    int64_t group = a->heads / a->kv_heads, width = rounded_up(a->dim);
    int64_t all = bundle[members - 1].from + bundle[members - 1].queries;
    const char *rows[LANES];
    for (int64_t t = 0; t < together; t += LANES) {
        NAME(block)(rows, &bundle->keys, t, NULL, 0);
        NAME(score)(rounded, rows, all, query, scores + t, a->dim, width, span);
    }
    for (const NAME(Member) *own = bundle; own < bundle + members; own++) {
        int last = own + 1 == bundle + members;
        const NAME(Tokens) *next = last ? &bundle->values : &own[1].keys;
        float *theirs = scores + own->from * span;
        for (int64_t t = together; t < own->span; t += LANES) {
            NAME(block)(rows, &own->keys, own->origin + t, next, last ? bundle->origin : together);
            NAME(score)(rounded, rows, own->queries, query + own->from * width, theirs + t, a->dim, width, span);
        }
        for (int64_t i = 0; i < own->queries; i++) {
            float sink = a->sinks ? a->sinks[head * group + i / own->count] : -INFINITY;
            NAME(Sight) seen = NAME(sight)(a, own->row, i % own->count);
            NAME(soften)(a, theirs + i * span, own->span, own->origin, seen, own->start, own->count, sink);
        }
    }
}

/* The sums of values [queries, width] by these weights. */
INLINE void NAME(add_bundle)(int rounded, const Attention *a, const NAME(Member) *bundle, int64_t members, int64_t together,
                             float *scores, float *sums, int64_t span) {
    int64_t width = rounded_up(a->value_dim), all = bundle[members - 1].from + bundle[members - 1].queries;
    const char *rows[LANES];
    for (int64_t t = 0; t < together; t += LANES) {
        NAME(block)(rows, &bundle->values, t, NULL, 0);
        NAME(add_all_values)(rounded, all, rows, a->value_dim, scores + t, sums, width, span);
    }
    for (const NAME(Member) *own = bundle; own < bundle + members; own++) {
        const NAME(Tokens) *next = own + 1 == bundle + members ? NULL : &own[1].values;
        for (int64_t t = together; t < own->span; t += LANES) {
            NAME(block)(rows, &own->values, own->origin + t, next, together);
            NAME(add_all_values)(rounded, own->queries, rows, a->value_dim, scores + own->from * span + t,
                                 sums + own->from * width, width, span);
        }
    }
}

/* One KV head of the rows of a bundle: the scores of all their queries, their softmax, the sums of values. Keys come in blocks of
   LANES; behind the last there are zeros, which nobody sees. The blocks before key `together` are the same for all rows and are read
   once. Returns 0, or 1: no memory. */
static int NAME(attend_bundle)(const Attention *a, int64_t first, int64_t members, int64_t head, int64_t together) {
    int64_t group = a->heads / a->kv_heads, width = rounded_up(a->dim), to = rounded_up(a->value_dim), all = 0, span = 0;
    NAME(Member) bundle[BUNDLE];
    for (int64_t m = 0; m < members; m++) {
        bundle[m] = NAME(member)(a, first + m, head, all);
        all += bundle[m].queries;
        if (bundle[m].span > span) span = bundle[m].span;
    }
    int64_t wide = width > to ? width : to;
    float *query = scratch(all * (width + span + to) + wide);
    if (!query) return 1;
    float *scores = query + all * width, *sums = scores + all * span, *zeros = sums + all * to;
    memset(sums, 0, (all * to + wide) * sizeof(float));
    for (int64_t m = 0; m < members; m++) {
        NAME(Member) *own = bundle + m;
        own->keys.zeros = own->values.zeros = (const char *)zeros;
        const T *from = (const T *)a->query + a->query_rows[own->row] * a->query_token + head * group * a->query_head;
        for (int64_t i = 0; i < own->queries; i++)
            NAME(widened)(query + (own->from + i) * width, from + i / own->count * a->query_head + i % own->count * a->query_token,
                          a->dim);
    }
    if (a->rounded) {
        NAME(score_bundle)(1, a, bundle, members, head, together, query, scores, span);
        NAME(add_bundle)(1, a, bundle, members, together, scores, sums, span);
    } else {
        NAME(score_bundle)(0, a, bundle, members, head, together, query, scores, span);
        NAME(add_bundle)(0, a, bundle, members, together, scores, sums, span);
    }
    for (int64_t m = 0; m < members; m++) {
        const NAME(Member) *own = bundle + m;
        for (int64_t i = 0; i < own->queries; i++) {
            int64_t token = a->query_rows[own->row] + i % own->count;
            T *out = (T *)a->out + (token * a->heads + head * group + i / own->count) * a->value_dim;
            for (int64_t d = 0; d < a->value_dim; d++) out[d] = NAME(narrow)(sums[(own->from + i) * to + d]);
        }
    }
    return 0;
}

/* How many rows from `row` on, before `end`, share its prompt and are few enough queries to be worth reading it once. */
INLINE int64_t NAME(members)(const Attention *a, int64_t row, int64_t end) {
    const int32_t *counts = a->bounds + a->rows, *offsets = counts + a->rows, *bases = offsets + a->rows;
    int64_t group = a->heads / a->kv_heads, queries = group * counts[row], next = row + 1;
    if (a->window || offsets[row] < LANES || a->bounds[row] < offsets[row]) return 1;
    while (next < end && bases[next] == bases[row] && offsets[next] == offsets[row] && a->bounds[next] >= offsets[row]) {
        queries += group * counts[next];
        if (queries > QUERIES) break;
        next++;
    }
    return next - row;
}

/* Sets `failed` where there is no memory. Rows come in parts of at most BUNDLE, several for each thread where there are as many. A
   thread computes all heads of a part, which lie side by side in a token: memory brings the next head with the one that is read.
   Few parts that threads cannot share evenly come head by head, so that no thread waits for another's row. */
static void NAME(share_of_attend)(const Attention *a, int *failed) {
    int64_t each = a->rows / a->threads, part = each < 2 * FEW ? (each < FEW ? each : FEW) : each / 2;
    part = part < 1 ? 1 : part > BUNDLE ? BUNDLE : part;
    int64_t parts = (a->rows + part - 1) / part, heads = parts % a->threads && parts < 4 * a->threads ? 1 : a->kv_heads;
#pragma omp for collapse(2) schedule(dynamic, heads)
    for (int64_t begin = 0; begin < a->rows; begin += part)
        for (int64_t head = 0; head < a->kv_heads; head++) {
            int64_t end = begin + part < a->rows ? begin + part : a->rows, members;
            for (int64_t row = begin; row < end; row += members) {
                members = NAME(members)(a, row, end);
                int64_t together = members > 1 ? a->bounds[2 * a->rows + row] / LANES * LANES : 0;
                if (NAME(attend_bundle)(a, row, members, head, together)) {
#pragma omp atomic write
                    *failed = 1;
                }
            }
        }
}

/* Returns 0, or 1: no memory. */
int NAME(attend)(const Attention *a) {
    int failed = 0;
    int64_t work = 0;
    for (int64_t row = 0; row < a->rows; row++) work += (a->bounds[row] + a->bounds[a->rows + row]) * a->bounds[a->rows + row];
    int64_t threads = work * a->heads * a->dim > PARALLEL / 4 ? team(a->threads) : 1, lost = 0;
#pragma omp parallel num_threads(threads)
    {
        Clocks begin = clocks();
        NAME(share_of_attend)(a, &failed);
        keep_lost(begin, &lost);
    }
    judge_team(threads, lost);
    return failed;
}
