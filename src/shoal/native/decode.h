/* A decoder's pass over elements of type T, in one parallel region; see kernels.c. All threads run all functions. */

/* The workspace: where the tokens go, and what is between the operations of a layer, [tokens, ...] each. */
typedef struct {
    int64_t *query_rows, *key_rows;   /* [rows], as in Attention */
    int64_t *ids, *positions, *cells, *logit_rows; /* [tokens] */
    T *x;                             /* width of the model */
    T *normed;                        /* the same */
    T *states;                        /* queries, keys and values of all heads */
    T *attended;                      /* heads * dim */
    T *gated;                         /* outputs of gate and up */
} NAME(Between);

static NAME(Between) NAME(between)(const Pass *a) {
    const Model *model = a->model;
    NAME(Between) at;
    at.query_rows = a->workspace;
    at.key_rows = at.query_rows + a->rows;
    at.ids = at.key_rows + a->rows;
    at.positions = at.ids + a->tokens;
    at.cells = at.positions + a->tokens;
    at.logit_rows = at.cells + a->tokens;
    at.x = (T *)(at.logit_rows + a->tokens);
    at.normed = at.x + a->tokens * model->width;
    at.states = at.normed + a->tokens * model->width;
    at.attended = at.states + a->tokens * (model->heads + 2 * model->kv_heads) * model->dim;
    at.gated = at.attended + a->tokens * model->heads * model->dim;
    return at;
}

/* From one head of the stores to the next, in elements; in bytes where they are rounded. */
static int64_t NAME(stored_dim)(const Pass *a) { return a->rounded ? NAME(head_bytes)(1, a->model->dim) : a->model->dim; }

/* Fills in where the tokens go. An id beyond the head's outputs is their last: a drafter may lack some of the target's. Returns 0,
   or 2: a token that is not in the vocabulary. */
static int NAME(place)(const Pass *a, NAME(Between) at) {
    const Model *model = a->model;
    int64_t token = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t start = a->bounds[row], count = a->packed ? a->bounds[a->rows + row] : a->columns;
        int64_t first = a->bounds[4 * a->rows + row] * a->capacity;
        at.query_rows[row] = token;
        at.key_rows[row] = first * model->kv_heads * NAME(stored_dim)(a);
        for (int64_t column = 0; column < count; column++, token++) {
            int64_t id = a->ids[row * a->id_row + column];
            if (id >= model->head.outputs) id = model->head.outputs - 1;
            if (id < -a->vector_count || id >= model->vocabulary) return 2;
            at.ids[token] = id;
            at.positions[token] = a->tree_positions ? a->tree_positions[row * a->columns + column] : start + column;
            at.logit_rows[token] = row * a->scored_columns + column;
            at.cells[token] = first + start + column - a->bounds[2 * a->rows + row];
        }
    }
    return 0;
}

static void NAME(embed)(const Pass *a, NAME(Between) at) {
    int64_t width = a->model->width;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->tokens; t++) {
        int64_t id = at.ids[t];
        const T *from = id < 0 ? (const T *)a->vectors + (-1 - id) * width : (const T *)a->model->embedding + id * width;
        memcpy(at.x + t * width, from, width * sizeof(T));
    }
}

static void NAME(norm)(const Pass *a, const Norm *norm, const T *x, T *out) {
    NAME(share_of_rms_norm)(x, norm->weight, out, a->tokens, a->model->width, norm->eps);
}

static Product NAME(product_of)(const Weights *w, int64_t tokens, int64_t threads) {
    return (Product){
        .tokens = tokens, .width = w->width, .outputs = w->outputs, .kind = NAME(PLAIN), .threads = threads, .form = w->form, .exact = w->exact,
        .weight = w->weight, .bias = w->bias, .scales = w->scales,
    };
}

static void NAME(multiply)(const Pass *a, const Weights *w, int64_t kind, const T *x, const T *other, T *y, int *failed) {
    Product product = NAME(product_of)(w, a->tokens, a->threads);
    product.kind = kind, product.x = x, product.other = other, product.y = y;
    NAME(share_of_product)(&product, failed);
}

/* Rotates, writes keys and values to the cache, and attends. */
static void NAME(attend_layer)(const Pass *a, int64_t index, NAME(Between) at, int *failed) {
    const Model *model = a->model;
    const Layer *layer = model->layers + index;
    const Store *store = a->stores + index;
    int64_t heads = model->heads, kv_heads = model->kv_heads, dim = model->dim, stored = NAME(stored_dim)(a), token = kv_heads * stored;
    Heads turned = {
        .tokens = a->tokens, .heads = heads, .kv_heads = kv_heads, .dim = dim, .rotary = model->rotary, .threads = a->threads,
        .rounded = a->rounded, .eps = layer->query_norm.eps, .cos = a->cos, .sin = a->sin, .positions = at.positions, .cells = at.cells,
        .query_norm = layer->query_norm.weight, .key_norm = layer->key_norm.weight, .states = at.states,
        .keys = store->keys, .values = store->values,
    };
    NAME(share_of_heads)(&turned);
    Attention attention = {
        .rows = a->rows, .heads = heads, .kv_heads = kv_heads, .dim = dim, .value_dim = dim, .threads = a->threads,
        .scale = model->scale, .window = layer->window, .bounds = a->bounds, .query_rows = at.query_rows,
        .key_rows = at.key_rows, .value_rows = at.key_rows, .positions = a->tree_positions,
        .words = a->words ? a->words[index] : NULL, .columns = a->columns, .rounded = a->rounded, .query = at.states, .key = store->keys,
        .value = store->values, .shared_key = store->shared_keys, .shared_value = store->shared_values,
        .query_token = (heads + 2 * kv_heads) * dim, .query_head = dim, .key_token = token, .key_head = stored,
        .value_token = token, .value_head = stored, .shared_key_token = token, .shared_key_head = stored,
        .shared_value_token = token, .shared_value_head = stored, .out = at.attended,
    };
    NAME(share_of_attend)(&attention, failed);
}

static void NAME(layer)(const Pass *a, int64_t index, NAME(Between) at, int *failed) {
    const Layer *layer = a->model->layers + index;
    NAME(norm)(a, &layer->attention_norm, at.x, at.normed);
    NAME(multiply)(a, &layer->states, NAME(PLAIN), at.normed, NULL, at.states, failed);
    NAME(attend_layer)(a, index, at, failed);
    NAME(multiply)(a, &layer->out, NAME(ADD), at.attended, at.x, at.x, failed);
    NAME(norm)(a, &layer->mlp_norm, at.x, at.normed);
    NAME(multiply)(a, &layer->gate, NAME(SILU), at.normed, NULL, at.gated, failed);
    NAME(multiply)(a, &layer->up, NAME(MUL), at.normed, at.gated, at.gated, failed);
    NAME(multiply)(a, &layer->down, NAME(ADD), at.gated, at.x, at.x, failed);
}

/* Columns that a packed pass leaves out get the logits of the row's last. */
static void NAME(repeat_last)(const Pass *a) {
    int64_t outputs = a->model->head.outputs;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->scored_rows; row++) {
        int64_t count = a->bounds[a->rows + row];
        T *last = (T *)a->logits + (row * a->scored_columns + count - 1) * outputs;
        for (int64_t column = 1; column <= a->scored_columns - count; column++)
            memcpy(last + column * outputs, last, outputs * sizeof(T));
    }
}

/* Norm and head, of the rows that have logits. */
static void NAME(predict)(const Pass *a, NAME(Between) at, int *failed) {
    const Model *model = a->model;
    const T *x = at.x;
    T *normed = at.normed;
    int64_t tokens = a->scored_rows < a->rows ? at.query_rows[a->scored_rows] : a->tokens, width = model->width;
    const int64_t *rows = a->last_only ? NULL : at.logit_rows;
    if (a->last_only) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++) {
            int64_t last = at.query_rows[row] + a->bounds[a->rows + row] - 1;
            memcpy(at.normed + row * width, at.x + last * width, width * sizeof(T));
        }
        x = at.normed, normed = at.x, tokens = a->rows;
    }
    NAME(share_of_rms_norm)(x, model->norm.weight, normed, tokens, width, model->norm.eps);
    Product head = NAME(product_of)(&model->head, tokens, a->threads);
    head.x = normed, head.y = a->logits, head.y_rows = rows;
    NAME(share_of_product)(&head, failed);
    if (rows && a->packed) NAME(repeat_last)(a);
}

/* As many as have work between two meetings: more would wait longer than they compute. */
static int64_t NAME(threads_of)(const Pass *a) {
    int64_t least = a->model->layers->states.outputs * a->model->width * a->tokens / (PARALLEL / 4) + 1;
    return a->threads < least ? a->threads : least;
}

/* Embedding, layers, norm and head. Returns 0, 1: no memory, or 2: a token that is not in the vocabulary. */
int NAME(decode)(const Pass *a) {
    const Model *model = a->model;
    NAME(Between) at = NAME(between)(a);
    int failed = NAME(place)(a, at);
    if (failed) return failed;
    int64_t threads = team(NAME(threads_of)(a)), lost = 0;
#pragma omp parallel num_threads(threads)
    {
        Clocks begin = clocks();
        NAME(embed)(a, at);
        for (int64_t index = 0; index < model->layer_count; index++) NAME(layer)(a, index, at, &failed);
        if (a->logits) NAME(predict)(a, at, &failed);
        keep_lost(begin, &lost);
    }
    judge_team(threads, lost);
    return failed;
}
