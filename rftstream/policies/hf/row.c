/* One token of each of a few rows through a decoder of Llama's kind, in bfloat16, on one thread.

Products are summed in float32. What PyTorch's modules round to bfloat16 is rounded here at the same places, so that
a row has the same logprobs, up to the order of sums, whoever computes it. Weights are read once, and there is
nothing else to wait for: a row alone is as fast as memory is.

Shapes: B rows, S slots of the cache, I inputs and O outputs of a product, E width of the model, H heads of queries, G
of keys and values, D width of a head, F width of the feed-forward part, W columns of a slot of the cache, V
vocabulary. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MAX_BATCH 4
typedef uint16_t narrow_t __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef float wide_t __attribute__((vector_size(4 * LANES)));

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONED __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define CLONED
#endif

/* `wide` = the LANES numbers from `place` on. */
#define WIDEN(wide, place)                                                                                             \
    do {                                                                                                               \
        narrow_t narrow;                                                                                               \
        memcpy(&narrow, (place), sizeof narrow);                                                                       \
        bits_t bits = __builtin_convertvector(narrow, bits_t) << 16;                                                   \
        memcpy(&(wide), &bits, sizeof bits);                                                                           \
    } while (0)

static inline float widened(uint16_t narrow) {
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float rounded(float value) { return widened(narrowed(value)); }

static inline float total(const wide_t *wide) {
    float lanes[LANES];
    memcpy(lanes, wide, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* out[b][o] = the rounded sum over i of weight[o][i] * in[b][i], plus bias[o]. I is a multiple of LANES, O of ROWS.
Each weight is read once for all `num` rows of `in`, which is a constant where this is called. */
#define ROWS 4
#define AHEAD 2304 /* elements that are asked for before they are needed; the processor itself looks less far */
static inline __attribute__((always_inline)) void product_of(const int num, const uint16_t *weight,
                                                             const uint16_t *bias, const float *in, float *out,
                                                             int64_t num_out, int64_t num_in) {
    for (int64_t o = 0; o < num_out; o += ROWS) {
        const uint16_t *row = weight + o * num_in;
        wide_t sums[MAX_BATCH][ROWS];
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < num_in; i += LANES)
            for (int r = 0; r < ROWS; r++) {
                wide_t w;
                __builtin_prefetch(row + r * num_in + i + AHEAD);
                WIDEN(w, row + r * num_in + i);
                for (int b = 0; b < num; b++) {
                    wide_t x;
                    memcpy(&x, in + b * num_in + i, sizeof x);
                    sums[b][r] += w * x;
                }
            }
        for (int b = 0; b < num; b++)
            for (int r = 0; r < ROWS; r++)
                out[b * num_out + o + r] = rounded(total(&sums[b][r]) + (bias ? widened(bias[o + r]) : 0.0f));
    }
}

CLONED static void product(int num, const uint16_t *weight, const uint16_t *bias, const float *in, float *out,
                           int64_t num_out, int64_t num_in) {
    if (num == 1)
        product_of(1, weight, bias, in, out, num_out, num_in);
    else if (num == 2)
        product_of(2, weight, bias, in, out, num_out, num_in);
    else if (num == 3)
        product_of(3, weight, bias, in, out, num_out, num_in);
    else
        product_of(MAX_BATCH, weight, bias, in, out, num_out, num_in);
}

static void normalise(const float *in, const uint16_t *weight, float eps, float *out, int64_t width) {
    float squares = 0;
    for (int64_t e = 0; e < width; e++)
        squares += in[e] * in[e];
    float scale = 1.0f / sqrtf(squares / (float)width + eps);
    for (int64_t e = 0; e < width; e++)
        out[e] = rounded(widened(weight[e]) * rounded(in[e] * scale));
}

/* Turn the heads by the position's angles, in place. */
static void rotate(float *heads, const float *cosines, const float *sines, int64_t num_heads, int64_t width) {
    int64_t half = width / 2;
    for (float *head = heads; head < heads + num_heads * width; head += width)
        for (int64_t d = 0; d < half; d++) {
            float a = head[d], b = head[d + half];
            head[d] = rounded(rounded(a * cosines[d]) + rounded(-b * sines[d]));
            head[d + half] = rounded(rounded(b * cosines[d + half]) + rounded(a * sines[d + half]));
        }
}

/* out [D] = what a head sees in `count` columns [W, D] of keys and values. D is a multiple of LANES. */
CLONED static void attend(const float *query, const uint16_t *keys, const uint16_t *values, float scale, float *scores,
                          float *out, int64_t count, int64_t width) {
    float highest = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; c++) {
        wide_t dot;
        memset(&dot, 0, sizeof dot);
        for (int64_t d = 0; d < width; d += LANES) {
            wide_t q, k;
            memcpy(&q, query + d, sizeof q);
            WIDEN(k, keys + c * width + d);
            dot += q * k;
        }
        scores[c] = total(&dot) * scale;
        if (!(scores[c] <= highest)) /* a NaN, too */
            highest = scores[c];
    }
    for (int64_t c = 0; c < count; c++)
        sum += scores[c] = expf(scores[c] - highest);
    for (int64_t d = 0; d < width; d += LANES) {
        wide_t mixed;
        memset(&mixed, 0, sizeof mixed);
        for (int64_t c = 0; c < count; c++) {
            wide_t v;
            WIDEN(v, values + c * width + d);
            mixed += v * scores[c];
        }
        float lanes[LANES];
        memcpy(lanes, &mixed, sizeof lanes);
        for (int lane = 0; lane < LANES; lane++)
            out[d + lane] = rounded(lanes[lane] / sum);
    }
}

enum { IN_NORM, Q, Q_BIAS, K, K_BIAS, V, V_BIAS, O, POST_NORM, GATE, UP, DOWN, KEYS, VALUES, NUM_POINTERS };
enum { LAYERS, WIDTH, HEADS, GROUPS, HEAD, INNER, VOCABULARY, COLUMNS, NUM_SIZES };

static void add(float *stream, const float *added, int64_t count) {
    for (int64_t e = 0; e < count; e++)
        stream[e] = rounded(stream[e] + added[e]);
}

/* Write the tokens' keys and values into the cache, and logits [B, V] into `logits`. B is at most MAX_BATCH.

`layers`: NUM_POINTERS of each layer; KEYS and VALUES are the cache, [S, G, W, D]. `token_ids`, `slots` and `columns`,
[B]: what each row's token is, and where in the cache it goes. `angles` [B, 2, D]: cosines, then sines, of its
position. Returns 0, or -1 without memory. */
int rft_decode_rows(int num, const int64_t *sizes, const float *constants, const void *const *layers,
                    const uint16_t *embedding, const uint16_t *norm, const uint16_t *head, const int64_t *token_ids,
                    const int64_t *slots, const int64_t *columns, const float *angles, uint16_t *logits) {
    const int64_t width = sizes[WIDTH], inner = sizes[INNER], wide = sizes[HEAD], vocabulary = sizes[VOCABULARY];
    const int64_t queries = sizes[HEADS] * wide, groups = sizes[GROUPS] * wide, room_width = sizes[COLUMNS];
    const int64_t whole = vocabulary / ROWS * ROWS;
    const float eps = constants[0], scale = constants[1];
    float *room = malloc(sizeof(float) * (size_t)(num * (3 * width + 2 * queries + 2 * groups + 2 * inner + whole) +
                                                  room_width));
    if (!room)
        return -1;
    float *stream = room, *normed = stream + num * width, *added = normed + num * width, *query = added + num * width;
    float *seen = query + num * queries, *key = seen + num * queries, *value = key + num * groups;
    float *gate = value + num * groups, *up = gate + num * inner, *wide_logits = up + num * inner;
    float *scores = wide_logits + num * whole;
    for (int b = 0; b < num; b++)
        for (int64_t e = 0; e < width; e++)
            stream[b * width + e] = widened(embedding[token_ids[b] * width + e]);
    for (int64_t l = 0; l < sizes[LAYERS]; l++) {
        const void *const *of = layers + l * NUM_POINTERS;
        for (int b = 0; b < num; b++)
            normalise(stream + b * width, of[IN_NORM], eps, normed + b * width, width);
        product(num, of[Q], of[Q_BIAS], normed, query, queries, width);
        product(num, of[K], of[K_BIAS], normed, key, groups, width);
        product(num, of[V], of[V_BIAS], normed, value, groups, width);
        for (int b = 0; b < num; b++) {
            const float *cosines = angles + 2 * b * wide, *sines = cosines + wide;
            rotate(query + b * queries, cosines, sines, sizes[HEADS], wide);
            rotate(key + b * groups, cosines, sines, sizes[GROUPS], wide);
            uint16_t *keys = (uint16_t *)of[KEYS] + slots[b] * groups * room_width;
            uint16_t *values = (uint16_t *)of[VALUES] + slots[b] * groups * room_width;
            for (int64_t g = 0; g < sizes[GROUPS]; g++)
                for (int64_t d = 0; d < wide; d++) {
                    keys[(g * room_width + columns[b]) * wide + d] = narrowed(key[b * groups + g * wide + d]);
                    values[(g * room_width + columns[b]) * wide + d] = narrowed(value[b * groups + g * wide + d]);
                }
            for (int64_t h = 0; h < sizes[HEADS]; h++) {
                int64_t place = h / (sizes[HEADS] / sizes[GROUPS]) * room_width * wide;
                attend(query + b * queries + h * wide, keys + place, values + place, scale, scores,
                       seen + b * queries + h * wide, columns[b] + 1, wide);
            }
        }
        product(num, of[O], NULL, seen, added, width, queries);
        add(stream, added, num * width);
        for (int b = 0; b < num; b++)
            normalise(stream + b * width, of[POST_NORM], eps, normed + b * width, width);
        product(num, of[GATE], NULL, normed, gate, inner, width);
        product(num, of[UP], NULL, normed, up, inner, width);
        for (int64_t f = 0; f < num * inner; f++)
            gate[f] = rounded(rounded(gate[f] / (1.0f + expf(-gate[f]))) * up[f]);
        product(num, of[DOWN], NULL, gate, added, width, inner);
        add(stream, added, num * width);
    }
    for (int b = 0; b < num; b++)
        normalise(stream + b * width, norm, eps, normed + b * width, width);
    product(num, head, NULL, normed, wide_logits, whole, width);
    for (int b = 0; b < num; b++) {
        for (int64_t v = 0; v < whole; v++)
            logits[b * vocabulary + v] = narrowed(wide_logits[b * whole + v]);
        for (int64_t v = whole; v < vocabulary; v++) {
            float sum = 0;
            for (int64_t e = 0; e < width; e++)
                sum += widened(head[v * width + e]) * normed[b * width + e];
            logits[b * vocabulary + v] = narrowed(sum);
        }
    }
    free(room);
    return 0;
}
