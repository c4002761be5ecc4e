/* What Python fills in: src/shoal/native/__init__.py has the same fields in the same order. */
#include <stdint.h>

/* One layer's ragged attention. Strides and offsets count elements. A row is a sequence of the batch; its columns are the tokens
   that it feeds in this pass. */
typedef struct {
    int64_t rows, heads, kv_heads, dim, value_dim, threads;
    double scale, softcap;            /* softcap 0: none */
    int64_t window;                   /* most recent positions that a query sees, itself included; 0: all */
    const int32_t *bounds;            /* [4, rows]: starts, counts, offsets, bases (shoal.models.attention.fused) */
    const int64_t *query_rows;        /* [rows]: token of each row's column 0 in query and out */
    const int64_t *key_rows;          /* [rows]: where each row's keys begin */
    const int64_t *value_rows;
    const int64_t *positions, *words; /* [rows, columns]: draft trees; NULL: all rows are chains */
    int64_t columns;
    int64_t rounded;                  /* 1: keys and values are rounded heads (typed.h), whose strides and offsets count bytes */
    const float *sinks;               /* [heads], or NULL */
    const void *query, *key, *value, *shared_key, *shared_value;
    int64_t query_token, query_head;
    int64_t key_token, key_head, value_token, value_head;
    int64_t shared_key_token, shared_key_head, shared_value_token, shared_value_head;
    void *out;                        /* [tokens, heads, value dim], contiguous */
} Attention;

/* Heads of one layer: rotary embedding of queries and keys, keys and values to their cells. */
typedef struct {
    int64_t tokens, heads, kv_heads, dim, rotary, threads;
    int64_t rounded;                  /* 1: keys and values are rounded when they are written */
    double eps;
    const float *cos, *sin;           /* [positions, rotary] */
    const int64_t *positions;         /* [tokens] */
    const int64_t *cells;             /* [tokens] */
    const void *query_norm, *key_norm;/* [dim], RMS norm of each head before the rotation; NULL: none */
    void *states;                     /* [tokens, heads + 2 kv_heads, dim]; queries are rotated in place */
    void *keys, *values;              /* [cells, kv_heads, dim] each; rounded: [cells, kv_heads, dim + 4] bytes */
} Heads;

/* How packed weights lie: of the type of x, or signed bytes with `scales`; or whole numbers by groups of inputs, with scales and
   minima of their own. */
enum { WHOLE, BYTES_OF_16, BYTES_OF_32, NIBBLES_OF_32, HALVES_OF_32, CENTRED_OF_32 };

/* A product by packed weights: y = x W^T + b, then by `kind` an activation, a sum or a product. */
typedef struct {
    int64_t tokens, width, outputs, kind, threads; /* width: features of x; even but for float32 */
    int64_t form;                     /* how the weights lie: WHOLE, or by groups of inputs */
    int64_t exact;                    /* 1: features that meet groups stay float32; 0: they get 16 bits and a scale a group */
    const void *weight;               /* [panels, width, 16]; bfloat16: [panels, width / 2, 16, 2]; groups: see tile.h */
    const void *bias;                 /* [outputs], or NULL */
    const float *scales;              /* [outputs]: the weights are signed bytes times these; NULL: of the type of x */
    const void *x;                    /* [tokens, width] */
    const void *other;                /* [tokens, outputs]: what is added or multiplied; NULL: nothing */
    void *y;                          /* [tokens, outputs] */
    const int64_t *y_rows;            /* [tokens]: where in y each token's result goes; NULL: in their order */
} Product;

/* One weight matrix, packed as `Product` takes it; an RMS norm. */
typedef struct {
    int64_t width, outputs, form, exact;
    const void *weight, *bias;
    const float *scales;
} Weights;
typedef struct { const void *weight; double eps; } Norm;

/* What a pass reads of one layer. */
typedef struct {
    Weights states, out, gate, up, down;
    Norm attention_norm, mlp_norm, query_norm, key_norm; /* of heads: weight NULL: none */
    int64_t window;                   /* as in Attention */
} Layer;

/* What is the same in all passes of a decoder. */
typedef struct {
    int64_t layer_count, heads, kv_heads, dim, rotary, width, vocabulary;
    double scale;
    const void *embedding;            /* [vocabulary, width] */
    const Layer *layers;
    Norm norm;
    Weights head;
} Model;

/* Where one layer's keys and values are, as in Heads: those of the slots, and of shared prompts. */
typedef struct { void *keys, *values, *shared_keys, *shared_values; } Store;

/* One pass. Arrays that other structs have too are the same there. */
typedef struct {
    const Model *model;
    const Store *stores;              /* [layers] */
    int64_t tokens, rows, columns, threads;
    int64_t packed;                   /* 1: unused columns are left out of the pass */
    int64_t capacity;                 /* cells of a slot */
    int64_t rounded;                  /* 1: the stores hold rounded keys and values */
    int64_t id_row;                   /* ids from one row to the next */
    int64_t vector_count;
    const int64_t *ids;               /* [rows, columns or more]; -1 - i: vector i */
    const void *vectors;              /* [vector_count, width]: inputs that are no tokens */
    const int32_t *bounds;            /* [5, rows]: as in Attention, and slots */
    const int64_t *tree_positions;    /* [rows, columns]; NULL: a column is at its row's start and its own number */
    const int64_t *const *words;      /* [layers]: each [rows, columns]; NULL: all rows are chains */
    const float *cos, *sin;           /* [positions, rotary] */
    void *workspace;                  /* see decode.h */
    void *logits;                     /* [scored_rows, scored_columns, outputs of the head]; NULL: not wanted */
    int64_t last_only;                /* 1: of each row's last token only, [rows, outputs of the head] */
    int64_t scored_rows, scored_columns; /* the first rows, which have logits, and their columns */
} Pass;

/* What of a row's sampling settings the kernels know. */
typedef struct {
    double temperature, top_p, min_p; /* temperature 0: greedy */
    int64_t top_k;                    /* 0: all */
} Setting;

/* Scores of the positions of a block, and what tokens are drawn by. Strides count elements. */
typedef struct {
    int64_t rows, columns, vocab, threads, bfloat16;
    int64_t buckets;                  /* of an exponential race; 0: inverse transform by the first uniform of a position */
    int64_t settings_row;             /* 0: all rows have one setting */
    int64_t scores_row, scores_column, uniforms_row, uniforms_column;
    const Setting *settings;          /* [rows] or [1] */
    const void *scores;               /* [rows, columns, vocab], float32 or bfloat16 */
    const double *uniforms;           /* [rows, columns, ...]; NULL: nothing is drawn */
} Block;

/* Draws at every position: [rows, columns] each, probs with vocab behind. */
typedef struct {
    Block block;
    int64_t *tokens;                  /* -1: no distribution */
    float *chosen;                    /* probabilities of the tokens */
    float *highest;                   /* highest probabilities, of greedy rows those at temperature 1; or NULL */
    float *probs;                     /* or NULL */
    float *logprobs;                  /* of the tokens before temperature and truncation, natural logarithms; or NULL */
} Draws;

/* The verdict on chains of drafts, columns 0 to m of a block. */
typedef struct {
    Block block;
    int64_t q_row;                    /* stride of the rows of each q */
    const int64_t *drafts, *lengths;  /* [rows, m], [rows] */
    const float *const *q;            /* [m] of [rows, vocab]: rejection sampling; NULL: exact match */
    int64_t *accepted, *tokens;       /* [rows] each; token -1: the column behind the accepted drafts has no distribution */
    float *chosen;                    /* [rows, columns]: probabilities of the accepted drafts and the token; 1 elsewhere */
    float *logprobs;                  /* the same before temperature and truncation, natural logarithms; 0 elsewhere */
} Verdicts;

/* A drafter's step: a pass, a draw from its last logits, and what the next step feeds. All are those of the step to come. */
typedef struct {
    Pass pass;                        /* with last_only */
    Draws draws;                      /* one column */
    int32_t *bounds;                  /* of the pass */
    int64_t *positions;               /* of the pass, or NULL: rows are where their bounds say */
} DraftStep;
