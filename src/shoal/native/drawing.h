/* Logits -> the declared distribution of each position, and a token drawn from it (shoal.sampling.native_draws). Positions do not depend
   on each other, and every sum has one order, so that a position's bits do not depend on its batch. */

#define BINS 1024
#define SUMMED 256 /* tokens whose weights are summed before one of them is searched for */

/* What a position works on. scores: as given, float; weights: e^((score - highest) / temperature), 0 for what is cut off. Both have
   room for whole buckets, filled up with -inf and 0. */
typedef struct {
    int64_t vocab, room;
    float *scores, *weights;
    uint64_t *items; /* candidates of a cut: order of the score, then id */
    double *sums;
    float highest, lowest; /* of the finite scores */
    double total;          /* of the weights */
    double before;         /* total of e^(score - highest) */
} Position;

typedef double dvec __attribute__((vector_size(8 * LANES)));

static double total_of(const float *weights, int64_t n) {
    dvec sums = {0};
    for (int64_t i = 0; i < n; i += LANES) sums += __builtin_convertvector(load(weights + i), dvec);
    double total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

/* The highest and the lowest finite score. Returns 1 if there is none, or a NaN, or +inf: no distribution. */
static int bounds_of(Position *at) {
    reg most = (reg){} - INFINITY, least = (reg){} + INFINITY;
    ireg strange = {0};
    for (int64_t i = 0; i < at->room; i += WIDTH) {
        reg x = some_float32(at->scores + i), low = choose(x > -INFINITY, x, (reg){} + INFINITY);
        strange |= x != x;
        most = choose(x > most, x, most);
        least = choose(low < least, low, least);
    }
    at->highest = -INFINITY, at->lowest = INFINITY;
    for (int i = 0; i < WIDTH; i++) {
        if (strange[i]) return 1;
        at->highest = most[i] > at->highest ? most[i] : at->highest;
        at->lowest = least[i] < at->lowest ? least[i] : at->lowest;
    }
    return !(at->highest > -INFINITY && at->highest < INFINITY);
}

/* Divided by the temperature after the highest score is taken away: nothing overflows, whatever the temperature is. */
static void weigh(Position *at, double temperature) {
    float coldness = (float)(1 / temperature);
    for (int64_t i = 0; i < at->room; i += WIDTH)
        put_float32(at->weights + i, exponential((some_float32(at->scores + i) - at->highest) * coldness));
    at->total = total_of(at->weights, at->room);
}

/* Numbers in the reverse order of the scores; -0 is 0. */
static uint32_t order_of(float score) {
    uint32_t bits = float_to_bits(score + 0.0f);
    return bits >> 31 ? bits : 0x7fffffffu - bits;
}

static double weight_of(const float *weights, uint64_t item) { return weights ? weights[item & 0xffffffffu] : 1.0; }

/* Of n items in rising order, the one at which the sum of their weights reaches `needed`; the last one if it never does. No
   weights: 1 each. */
static uint64_t last_needed(uint64_t *items, int64_t n, const float *weights, double needed) {
    uint64_t pivot = items[0];
    while (n > 0) {
        uint64_t a = items[0], b = items[n / 2], c = items[n - 1];
        pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t below = 0, place = 0;
        double sum = 0;
        for (int64_t i = 0; i < n; i++) {
            uint64_t item = items[i];
            if (item < pivot) {
                items[i] = items[below], items[below++] = item;
                sum += weight_of(weights, item);
            }
        }
        if (sum >= needed) {
            n = below;
            continue;
        }
        needed -= sum + weight_of(weights, pivot);
        if (needed <= 0) return pivot;
        for (place = below; items[place] != pivot; place++) {}
        items[place] = items[below];
        items += below + 1, n -= below + 1;
    }
    return pivot;
}

/* Where the highest scores reach `needed`: counted, or by their weights. Those below `lowest` are never needed. Returns the item of
   the last one; all before it are needed. By way of bins of equal width: only one of them has to be looked into. */
static uint64_t cut_at(Position *at, const float *weights, double needed, float lowest) {
    double *sums = at->sums, scale = at->highest > lowest ? (BINS - 1) / ((double)at->highest - lowest) : 0.0, highest = at->highest;
    memset(sums, 0, BINS * sizeof(double));
    for (int64_t i = 0; i < at->vocab; i++)
        if (at->scores[i] >= lowest) sums[(int64_t)((highest - at->scores[i]) * scale)] += weights ? weights[i] : 1.0;
    int64_t bin = 0;
    while (bin < BINS - 1 && sums[bin] < needed) needed -= sums[bin++];
    while (bin > 0 && sums[bin] == 0) bin--; /* rounding has left something to be needed */
    int64_t n = 0;
    for (int64_t i = 0; i < at->vocab; i++)
        if (at->scores[i] >= lowest && (int64_t)((highest - at->scores[i]) * scale) == bin)
            at->items[n++] = (uint64_t)order_of(at->scores[i]) << 32 | (uint64_t)i;
    return last_needed(at->items, n, weights, needed);
}

/* Only the tokens up to that item keep their weights. */
static void keep_until(Position *at, uint64_t item) {
    int32_t id = (int32_t)(item & 0xffffffffu);
    float score = at->scores[id];
    ireg ids, last = (ireg){} + id;
    for (int i = 0; i < WIDTH; i++) ids[i] = i;
    for (int64_t i = 0; i < at->room; i += WIDTH, ids += WIDTH) {
        reg x = some_float32(at->scores + i);
        ireg kept = (x > score) | ((x == score) & (ids <= last));
        put_float32(at->weights + i, choose(kept, some_float32(at->weights + i), (reg){}));
        put_float32(at->scores + i, choose(kept, x, (reg){} - INFINITY));
    }
    at->total = total_of(at->weights, at->room);
}

/* top_k, top_p, min_p in this order, as shoal.sampling.truncation has them: all that tie with the k-th are kept; of equal scores
   top_p takes the lower id first. */
static void truncate_position(Position *at, const Setting *a) {
    if (a->top_k > 0 && a->top_k < at->vocab) {
        uint64_t item = cut_at(at, NULL, (double)a->top_k, at->lowest);
        float score = at->scores[item & 0xffffffffu];
        int64_t last = at->vocab - 1;
        while (at->scores[last] != score) last--;
        keep_until(at, (item >> 32 << 32) | (uint64_t)last);
    }
    if (a->top_p < 1) {
        /* All that are so much less probable than the first hold less than 1 - top_p together. */
        double least = log((1 - a->top_p) * at->total / (2.0 * (double)at->vocab)) * a->temperature;
        double lowest = at->highest + least;
        keep_until(at, cut_at(at, at->weights, a->top_p * at->total, lowest > at->lowest ? (float)lowest : at->lowest));
    }
    if (a->min_p > 0) {
        for (int64_t i = 0; i < at->room; i += WIDTH) {
            reg x = some_float32(at->weights + i);
            put_float32(at->weights + i, choose(x < (float)a->min_p, (reg){}, x));
        }
        at->total = total_of(at->weights, at->room);
    }
}

/* The first of n weights, `stride` apart, at which their sum exceeds the threshold. Where rounding leaves none, the last that is
   not 0. */
static int64_t first_above(const float *weights, int64_t n, int64_t stride, double threshold) {
    double sum = 0;
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++)
        if (weights[i * stride] > 0) {
            sum += weights[i * stride], found = i;
            if (sum > threshold) break;
        }
    return found;
}

static double share_of(double uniform) { return uniform < 1 - 0x1p-52 ? uniform : 1 - 0x1p-52; }

/* Inverse transform: a block of tokens by the blocks' sums, then a token of it. */
static int64_t drawn_by_inverse(const Position *at, const float *weights, double uniform) {
    int64_t blocks = (at->room + SUMMED - 1) / SUMMED, block = 0;
    double total = 0, before = 0;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * SUMMED, n = at->room - first < SUMMED ? at->room - first : SUMMED;
        total += at->sums[b] = total_of(weights + first, n);
    }
    double threshold = share_of(uniform) * total;
    for (block = 0; block < blocks - 1 && before + at->sums[block] <= threshold; block++) before += at->sums[block];
    while (block > 0 && at->sums[block] == 0) before -= at->sums[--block];
    int64_t first = block * SUMMED, n = at->room - first < SUMMED ? at->room - first : SUMMED;
    return first + first_above(weights + first, n, 1, threshold - before);
}

/* Exponential race over buckets (token i is in bucket i modulo their number), then inverse transform inside the first to arrive. */
static int64_t drawn_by_race(const Position *at, const double *uniforms, int64_t buckets) {
    double *speed = at->sums, fastest = -1;
    int64_t bucket = 0;
    memset(speed, 0, buckets * sizeof(double));
    for (int64_t i = 0; i < at->vocab; i += buckets)
        for (int64_t b = 0; b < buckets; b++) speed[b] += at->weights[i + b];
    for (int64_t b = 0; b < buckets; b++)
        if (speed[b] / uniforms[1 + b] > fastest) fastest = speed[b] / uniforms[1 + b], bucket = b;
    int64_t n = (at->vocab - bucket + buckets - 1) / buckets;
    return bucket + buckets * first_above(at->weights + bucket, n, buckets, share_of(uniforms[0]) * speed[bucket]);
}

static int64_t best_of(const Position *at) {
    int64_t i = 0;
    while (at->scores[i] != at->highest) i++;
    return i;
}

/* Purposes of the uniforms of a position under rejection sampling (shoal.sampling.uniforms.Purpose, less 1). */
enum { TOKEN, ACCEPT, REPLACE };

static const Setting *setting_of(const Block *a, int64_t row) { return a->settings + row * a->settings_row; }
static const double *uniforms_of(const Block *a, int64_t row, int64_t column) {
    return a->uniforms + row * a->uniforms_row + column * a->uniforms_column;
}

/* Weights of a position, and if asked for the total at temperature 1, before truncation. Returns 1 if there is no distribution. */
static int prepare(const Block *a, Position *at, int64_t row, int64_t column, int want_before) {
    const Setting *setting = setting_of(a, row);
    int64_t from = row * a->scores_row + column * a->scores_column, greedy = setting->temperature == 0;
    if (a->bfloat16) widened_bfloat16(at->scores, (const uint16_t *)a->scores + from, a->vocab);
    else widened_float32(at->scores, (const float *)a->scores + from, a->vocab);
    for (int64_t i = a->vocab; i < at->room; i++) at->scores[i] = -INFINITY;
    if (bounds_of(at)) return 1;
    if (want_before) weigh(at, 1), at->before = at->total;
    if (greedy) return 0;
    if (!want_before || setting->temperature != 1) weigh(at, setting->temperature);
    truncate_position(at, setting);
    return 0;
}

static int64_t token_of(const Block *a, const Position *at, int64_t row, int64_t column) {
    if (setting_of(a, row)->temperature == 0) return best_of(at);
    const double *uniforms = uniforms_of(a, row, column);
    return a->buckets ? drawn_by_race(at, uniforms, a->buckets) : drawn_by_inverse(at, at->weights, uniforms[TOKEN]);
}

static float prob_of(const Block *a, const Position *at, int64_t row, int64_t token) {
    return setting_of(a, row)->temperature == 0 ? 1.0f : at->weights[token] / (float)at->total;
}

/* The scores that `prepare` was given: a cut has changed its own. */
static double score_of(const Block *a, int64_t row, int64_t column, int64_t token) {
    int64_t place = row * a->scores_row + column * a->scores_column + token;
    return a->bfloat16 ? widen_bfloat16(((const uint16_t *)a->scores)[place]) : ((const float *)a->scores)[place];
}

static float logprob_of(const Block *a, const Position *at, int64_t row, int64_t column, int64_t token) {
    return (float)(score_of(a, row, column, token) - at->highest - log(at->before));
}

/* Room for a position in the calling thread's memory. Returns 1: there is none. */
static int make_room(const Block *a, Position *at) {
    int64_t room = (a->vocab + a->buckets + SUMMED - 1) / SUMMED * SUMMED, sums = room / SUMMED + BINS + a->buckets;
    float *held = scratch(4 * room + 2 * sums);
    *at = (Position){.vocab = a->vocab, .room = room, .scores = held, .weights = held + room};
    at->sums = (double *)(held + 2 * room), at->items = (uint64_t *)(at->sums + sums);
    return held == NULL;
}

/* Returns 1 if the position has no distribution: its token is then -1, its probabilities are uniform. */
static int draw_at(const Draws *d, Position *at, int64_t row, int64_t column) {
    const Block *a = &d->block;
    int64_t place = row * a->columns + column, vocab = a->vocab, greedy = setting_of(a, row)->temperature == 0;
    float *probs = d->probs ? d->probs + place * vocab : NULL;
    int strange = prepare(a, at, row, column, (greedy && d->highest) || d->logprobs);
    int64_t token = strange ? -1 : greedy || a->uniforms ? token_of(a, at, row, column) : 0;
    float total = (float)at->total;
    if (probs && strange) for (int64_t i = 0; i < vocab; i++) probs[i] = 1.0f / (float)vocab;
    else if (probs && greedy) memset(probs, 0, vocab * sizeof(float)), probs[token] = 1;
    else if (probs) for (int64_t i = 0; i < vocab; i++) probs[i] = at->weights[i] / total;
    d->tokens[place] = token;
    d->chosen[place] = strange ? 1.0f / (float)vocab : prob_of(a, at, row, token);
    if (d->highest) d->highest[place] = strange ? 0.0f : 1.0f / total;
    if (d->logprobs) d->logprobs[place] = strange ? 0.0f : logprob_of(a, at, row, column, token);
    return strange;
}

/* Returns how many positions have no distribution; -1: no memory. */
int64_t draw(const Draws *d) {
    const Block *a = &d->block;
    int64_t strange = 0, failed = 0, positions = a->rows * a->columns;
#pragma omp parallel for schedule(static) reduction(+ : strange, failed) num_threads(team(a->threads)) \
    if (positions > 1 && positions * a->vocab > PARALLEL / 8)
    for (int64_t place = 0; place < positions; place++) {
        Position at;
        if (make_room(a, &at)) failed++;
        else strange += draw_at(d, &at, place / a->columns, place % a->columns);
    }
    return failed ? -1 : strange;
}

/* max(p - q, 0) in place of the scores, which nobody needs any more; p itself where rounding leaves nothing. */
static const float *residual(Position *at, const float *q) {
    float total = (float)at->total;
    ivec some = {0};
    for (int64_t i = 0; i < at->vocab; i++) {
        float rest = at->weights[i] / total - q[i];
        at->scores[i] = rest > 0 ? rest : 0;
    }
    memset(at->scores + at->vocab, 0, (at->room - at->vocab) * sizeof(float));
    for (int64_t i = 0; i < at->room; i += LANES) some |= load(at->scores + i) > 0;
    for (int i = 0; i < LANES; i++)
        if (some[i]) return at->scores;
    return at->weights;
}

/* Whether a draft is accepted (Leviathan et al. 2023, Algorithm 1); else the token in its place. */
static int accepts(const Verdicts *v, Position *at, int64_t row, int64_t column, int64_t *token) {
    const float *q = v->q[column] + row * v->q_row;
    const double *uniforms = uniforms_of(&v->block, row, column);
    if (uniforms[ACCEPT] * (double)q[*token] < (double)prob_of(&v->block, at, row, *token)) return 1;
    *token = drawn_by_inverse(at, residual(at, q), uniforms[REPLACE]);
    return 0;
}

/* One row, draft after draft, until one is rejected, or is not what the target says itself. Returns 1 if a column that is reached
   has no distribution. */
static int verify_row(const Verdicts *v, Position *at, int64_t row) {
    const Block *a = &v->block;
    int64_t m = a->columns - 1, length = v->lengths[row] < m ? v->lengths[row] : m, token = -1, column = 0;
    int rejection = v->q && setting_of(a, row)->temperature != 0, accepted = 1, strange = 0;
    float *chosen = v->chosen + row * a->columns, *logprobs = v->logprobs + row * a->columns;
    for (int64_t i = 0; i <= m; i++) chosen[i] = 1, logprobs[i] = 0;
    while (accepted && !(strange = prepare(a, at, row, column, 1))) {
        int64_t draft = column < length ? v->drafts[row * m + column] : -1;
        if (draft >= a->vocab) draft = -1; /* no q and no p has such a token */
        token = draft;
        if (draft >= 0 && rejection) accepted = accepts(v, at, row, column, &token);
        else accepted = (token = token_of(a, at, row, column)) == draft;
        chosen[column] = prob_of(a, at, row, token);
        logprobs[column] = logprob_of(a, at, row, column, token);
        column += accepted;
    }
    v->accepted[row] = column, v->tokens[row] = strange ? -1 : token;
    return strange;
}

/* Returns how many rows come to a column that has no distribution; -1: no memory. */
int64_t verify(const Verdicts *v) {
    const Block *a = &v->block;
    int64_t strange = 0, failed = 0;
#pragma omp parallel for schedule(static, 1) reduction(+ : strange, failed) num_threads(team(a->threads)) \
    if (a->rows > 1 && a->rows * a->columns * a->vocab > PARALLEL / 8)
    for (int64_t row = 0; row < a->rows; row++) {
        Position at;
        if (make_room(a, &at)) failed++;
        else strange += verify_row(v, &at, row);
    }
    return failed ? -1 : strange;
}
