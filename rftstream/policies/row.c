/* One token of one row through a decoder of Llama's kind, in bfloat16, on one thread.

Products are summed in float32. What PyTorch's modules round to bfloat16 is rounded here at the same places, so that
a row has the same logprobs, up to the order of sums, whoever computes it. Weights are read once, and there is
nothing else to wait for: a row alone is as fast as memory is.

Shapes: I inputs and O outputs of a product, E width of the model, H heads of queries, G of keys and values, D width of
a head, F width of the feed-forward part, W columns of a slot of the cache, V vocabulary. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
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

/* out[o] = the rounded sum over i of weight[o][i] * in[i], plus bias[o]. I is a multiple of LANES, O of ROWS. */
#define ROWS 4
#define AHEAD 2304 /* elements that are asked for before they are needed; the processor itself looks less far */
CLONED static void product(const uint16_t *weight, const uint16_t *bias, const float *in, float *out, int64_t num_out,
                           int64_t num_in) {
    for (int64_t o = 0; o < num_out; o += ROWS) {
        const uint16_t *row = weight + o * num_in;
        wide_t sums[ROWS];
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < num_in; i += LANES) {
            wide_t x, w0, w1, w2, w3;
            for (int r = 0; r < ROWS; r++)
                __builtin_prefetch(row + r * num_in + i + AHEAD);
            memcpy(&x, in + i, sizeof x);
            WIDEN(w0, row + i);
            WIDEN(w1, row + num_in + i);
            WIDEN(w2, row + 2 * num_in + i);
            WIDEN(w3, row + 3 * num_in + i);
            sums[0] += w0 * x;
            sums[1] += w1 * x;
            sums[2] += w2 * x;
            sums[3] += w3 * x;
        }
        for (int r = 0; r < ROWS; r++)
            out[o + r] = rounded(total(&sums[r]) + (bias ? widened(bias[o + r]) : 0.0f));
    }
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
enum { LAYERS, WIDTH, HEADS, GROUPS, HEAD, INNER, VOCABULARY, COLUMNS, COLUMN, NUM_SIZES };

/* Write the token's keys and values into column `sizes[COLUMN]` of the slot, and logits [V] into `logits`.

`layers`: NUM_POINTERS of each layer; KEYS and VALUES are [G, W, D] of the slot. `angles`: cosines [D], then sines [D].
Returns 0, or -1 without memory. */
int rft_decode_row(const int64_t *sizes, const float *constants, const void *const *layers, const uint16_t *embedding,
                   const uint16_t *norm, const uint16_t *head, const float *angles, uint16_t *logits) {
    const int64_t width = sizes[WIDTH], inner = sizes[INNER], wide = sizes[HEAD], columns = sizes[COLUMNS];
    const int64_t queries = sizes[HEADS] * wide, groups = sizes[GROUPS] * wide, count = sizes[COLUMN] + 1;
    const float eps = constants[0], scale = constants[1];
    float *room = malloc(sizeof(float) * (size_t)(3 * width + 2 * queries + 2 * groups + 2 * inner + count +
                                                   sizes[VOCABULARY]));
    if (!room)
        return -1;
    float *stream = room, *normed = stream + width, *added = normed + width, *query = added + width;
    float *seen = query + queries, *key = seen + queries, *value = key + groups, *gate = value + groups;
    float *up = gate + inner, *scores = up + inner, *wide_logits = scores + count;
    for (int64_t e = 0; e < width; e++)
        stream[e] = widened(embedding[e]);
    for (int64_t l = 0; l < sizes[LAYERS]; l++) {
        const void *const *of = layers + l * NUM_POINTERS;
        normalise(stream, of[IN_NORM], eps, normed, width);
        product(of[Q], of[Q_BIAS], normed, query, queries, width);
        product(of[K], of[K_BIAS], normed, key, groups, width);
        product(of[V], of[V_BIAS], normed, value, groups, width);
        rotate(query, angles, angles + wide, sizes[HEADS], wide);
        rotate(key, angles, angles + wide, sizes[GROUPS], wide);
        uint16_t *keys = (uint16_t *)of[KEYS], *values = (uint16_t *)of[VALUES];
        for (int64_t g = 0; g < sizes[GROUPS]; g++)
            for (int64_t d = 0; d < wide; d++) {
                keys[(g * columns + sizes[COLUMN]) * wide + d] = narrowed(key[g * wide + d]);
                values[(g * columns + sizes[COLUMN]) * wide + d] = narrowed(value[g * wide + d]);
            }
        for (int64_t h = 0; h < sizes[HEADS]; h++) {
            int64_t place = h / (sizes[HEADS] / sizes[GROUPS]) * columns * wide;
            attend(query + h * wide, keys + place, values + place, scale, scores, seen + h * wide, count, wide);
        }
        product(of[O], NULL, seen, added, width, queries);
        for (int64_t e = 0; e < width; e++)
            stream[e] = rounded(stream[e] + added[e]);
        normalise(stream, of[POST_NORM], eps, normed, width);
        product(of[GATE], NULL, normed, gate, inner, width);
        product(of[UP], NULL, normed, up, inner, width);
        for (int64_t f = 0; f < inner; f++)
            gate[f] = rounded(rounded(gate[f] / (1.0f + expf(-gate[f]))) * up[f]);
        product(of[DOWN], NULL, gate, added, width, inner);
        for (int64_t e = 0; e < width; e++)
            stream[e] = rounded(stream[e] + added[e]);
    }
    normalise(stream, norm, eps, normed, width);
    int64_t whole = sizes[VOCABULARY] / ROWS * ROWS;
    product(head, NULL, normed, wide_logits, whole, width);
    for (int64_t v = whole; v < sizes[VOCABULARY]; v++) {
        float sum = 0;
        for (int64_t e = 0; e < width; e++)
            sum += widened(head[v * width + e]) * normed[e];
        wide_logits[v] = rounded(sum);
    }
    for (int64_t v = 0; v < sizes[VOCABULARY]; v++)
        logits[v] = narrowed(wide_logits[v]);
    free(room);
    return 0;
}
