/* The arithmetic coder of streams of changes and its models, as docs/weights-format.md has them, for kernels.c alone. */

#ifndef RFT_CODING_H
#define RFT_CODING_H

#include <stdint.h>
#include <stdlib.h>

enum { CLASSES = 256, LENGTHS = 32, TOP = 2, END = 31, MOST_SEEN = 255 };

/* ------------------------------------------------------------------------------------------------- probabilities */

/* Of a bit being 1: of 65536, learned from those seen so far. */
typedef struct {
    uint16_t one, seen;
} Bit;

static int32_t rates[MOST_SEEN + 1]; /* how far one bit moves the estimate, of 65536 */

__attribute__((constructor)) static void make_rates(void) {
    for (int seen = 0; seen <= MOST_SEEN; seen++) rates[seen] = 131072 / (2 * seen + 3);
}

/* Of 32768, never certain. */
static inline uint32_t chance(const Bit *bit) {
    uint32_t one = bit->one >> 1;
    return one < 16 ? 16 : one > 32752 ? 32752 : one;
}

static inline void learn(Bit *bit, int value) {
    int64_t away = (int64_t)(65535 & -value) - (int64_t)bit->one;
    bit->one = (uint16_t)(bit->one + ((away * rates[bit->seen]) >> 16));
    if (bit->seen < MOST_SEEN) bit->seen++;
}

/* A number n >= 1: its length in bits, less one, and the bits below the highest, of which the first TOP are learned. */
typedef struct {
    Bit length[LENGTHS]; /* a binary tree; place 0 is not used */
    Bit top[LENGTHS][1 << TOP]; /* likewise, one for each length */
} Number;

typedef struct {
    Number gap;
    Number size[2];
    Bit flip, down[2][4];
} Class;

typedef struct {
    Class classes[CLASSES];
    uint8_t downs[CLASSES]; /* the last two */
} Model;

static Model *new_model(void) {
    Model *model = calloc(1, sizeof(Model));
    if (model == NULL) return NULL;
    Bit *bits = (Bit *)model->classes;
    for (size_t i = 0; i < sizeof(model->classes) / (sizeof(Bit)); i++) bits[i].one = 32768;
    return model;
}

/* ------------------------------------------------------------------------------------------------- range coder */

typedef struct {
    uint64_t low;
    uint32_t range;
    uint8_t cache;
    uint64_t pending;
    uint8_t *out;
    int64_t place, capacity; /* `place` may run beyond the capacity; nothing is written there */
} Writer;

static void put_byte(Writer *w, uint8_t byte) {
    if (w->place < w->capacity) w->out[w->place] = byte;
    w->place++;
}

static void shift_low(Writer *w) {
    if ((uint32_t)w->low < 0xff000000u || (w->low >> 32) != 0) {
        uint8_t carry = (uint8_t)(w->low >> 32), byte = w->cache;
        do {
            put_byte(w, (uint8_t)(byte + carry));
            byte = 0xff;
        } while (--w->pending != 0);
        w->cache = (uint8_t)(w->low >> 24);
    }
    w->pending++;
    w->low = (w->low & 0x00ffffffu) << 8;
}

static inline void write_bit(Writer *w, Bit *bit, int value) {
    uint32_t bound = (w->range >> 15) * chance(bit);
    uint32_t no = (uint32_t)value - 1;
    w->range = (bound & ~no) | ((w->range - bound) & no);
    w->low += bound & no;
    learn(bit, value);
    while (w->range < (1u << 24)) {
        w->range <<= 8;
        shift_low(w);
    }
}

static inline void write_even(Writer *w, uint32_t value, int bits) {
    while (bits-- > 0) {
        w->range >>= 1;
        w->low += w->range & (0 - ((value >> bits) & 1));
        while (w->range < (1u << 24)) {
            w->range <<= 8;
            shift_low(w);
        }
    }
}

typedef struct {
    uint32_t range, code;
    const uint8_t *in;
    int64_t place, length; /* `place` may run beyond the length: then the stream is damaged */
} Reader;

static inline uint32_t get_byte(Reader *r) {
    uint32_t byte = r->place < r->length ? r->in[r->place] : 0;
    r->place++;
    return byte;
}

static inline int read_bit(Reader *r, Bit *bit) {
    uint32_t bound = (r->range >> 15) * chance(bit);
    uint32_t value = r->code < bound, no = value - 1; /* without branches, which nobody could foretell */
    r->range = (bound & ~no) | ((r->range - bound) & no);
    r->code -= bound & no;
    learn(bit, (int)value);
    while (r->range < (1u << 24)) {
        r->range <<= 8;
        r->code = (r->code << 8) | get_byte(r);
    }
    return (int)value;
}

static inline uint32_t read_even(Reader *r, int bits) {
    uint32_t value = 0;
    while (bits-- > 0) {
        r->range >>= 1;
        uint32_t bit = r->code >= r->range;
        r->code -= r->range & (0 - bit);
        value = (value << 1) | bit;
        while (r->range < (1u << 24)) {
            r->range <<= 8;
            r->code = (r->code << 8) | get_byte(r);
        }
    }
    return value;
}

/* ------------------------------------------------------------------------------------------------- numbers */

static inline int length_of(uint32_t number) { return 31 - __builtin_clz(number); }

static void write_length(Writer *w, Number *model, int length) {
    uint32_t node = 1;
    for (int place = 4; place >= 0; place--) {
        int bit = (length >> place) & 1;
        write_bit(w, &model->length[node], bit);
        node = 2 * node + (uint32_t)bit;
    }
}

static void write_number(Writer *w, Number *model, uint32_t number) {
    int length = length_of(number), top = length < TOP ? length : TOP;
    write_length(w, model, length);
    uint32_t node = 1;
    for (int place = length - 1; place >= length - top; place--) {
        int bit = (number >> place) & 1;
        write_bit(w, &model->top[length][node], bit);
        node = 2 * node + (uint32_t)bit;
    }
    write_even(w, number & ((1u << (length - top)) - 1), length - top);
}

static int read_length(Reader *r, Number *model) {
    uint32_t node = 1;
    for (int place = 0; place < 5; place++) node = 2 * node + (uint32_t)read_bit(r, &model->length[node]);
    return (int)(node - 32);
}

static uint32_t read_rest(Reader *r, Number *model, int length) {
    int top = length < TOP ? length : TOP;
    uint32_t node = 1;
    for (int i = 0; i < top; i++) node = 2 * node + (uint32_t)read_bit(r, &model->top[length][node]);
    return (node << (length - top)) | read_even(r, length - top);
}

#endif
