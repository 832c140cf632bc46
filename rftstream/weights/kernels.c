/* What changed between two states of a model, as a stream of bits, and back; taking.c notes what changed.

   The form is written down in docs/weights-format.md, in the words and with the names that are used here. Elements are
   compared as bit patterns, never as numbers. Nothing here keeps state between two calls, so that any number of threads
   may call. All sizes are checked by the caller, but for the stream of `rft_apply`: that may be anything. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TOO_LONG = -1, NO_MEMORY = -2, DAMAGED = -3 };

enum { BLOCK = 64 }; /* as in taking.c: elements of a word */

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
    int64_t away = (value ? 65535 : 0) - (int64_t)bit->one;
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
    if (value) {
        w->range = bound;
    } else {
        w->low += bound;
        w->range -= bound;
    }
    learn(bit, value);
    while (w->range < (1u << 24)) {
        w->range <<= 8;
        shift_low(w);
    }
}

static inline void write_even(Writer *w, uint32_t value, int bits) {
    while (bits-- > 0) {
        w->range >>= 1;
        if ((value >> bits) & 1) w->low += w->range;
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
    int value = r->code < bound;
    if (value) {
        r->range = bound;
    } else {
        r->code -= bound;
        r->range -= bound;
    }
    learn(bit, value);
    while (r->range < (1u << 24)) {
        r->range <<= 8;
        r->code = (r->code << 8) | get_byte(r);
    }
    return value;
}

static inline uint32_t read_even(Reader *r, int bits) {
    uint32_t value = 0;
    while (bits-- > 0) {
        r->range >>= 1;
        uint32_t bit = r->code >= r->range;
        if (bit) r->code -= r->range;
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

/* ------------------------------------------------------------------------------------------------- elements */

static inline uint32_t load(const uint8_t *data, int64_t i, int width) {
    if (width == 2) {
        uint16_t value;
        memcpy(&value, data + 2 * i, 2);
        return value;
    }
    uint32_t value;
    memcpy(&value, data + 4 * i, 4);
    return value;
}

static inline void store(uint8_t *data, int64_t i, int width, uint32_t value) {
    if (width == 2) {
        uint16_t half = (uint16_t)value;
        memcpy(data + 2 * i, &half, 2);
    } else {
        memcpy(data + 4 * i, &value, 4);
    }
}

/* ------------------------------------------------------------------------------------------------- writing */

/* A change, or the first element of its class (then before = after). */
typedef struct {
    uint32_t before, after;
    uint32_t gap; /* unchanged elements of the class since its last event; after look_ahead: before the next change */
    uint8_t class;
} Event;

typedef struct {
    Event *events; /* room for all: of changes and of each class a first one */
    int64_t count;
    uint32_t gap[CLASSES]; /* unchanged elements since the last event */
    uint8_t seen[CLASSES];
} Scan;

static inline void see(Scan *scan, uint32_t class) {
    if (__builtin_expect(scan->seen[class], 1)) return;
    scan->seen[class] = 1;
    scan->events[scan->count++] = (Event){0, 0, 0, (uint8_t)class};
}

static inline __attribute__((always_inline)) const uint8_t *scan_piece(
    Scan *scan, const uint8_t *now, int64_t count, const uint64_t *changed, const uint8_t *before,
    int width, int mantissa, uint32_t exponents
) {
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t end = count - start < BLOCK ? count : start + BLOCK;
        uint64_t left = *changed++;
        for (int64_t i = start;; i++, left &= left - 1) {
            int64_t stop = left != 0 ? start + __builtin_ctzll(left) : end;
            for (; i < stop; i++) {
                uint32_t class = (load(now, i, width) >> mantissa) & exponents;
                see(scan, class);
                scan->gap[class]++;
            }
            if (left == 0) break;
            uint32_t was = load(before, 0, width), class = (was >> mantissa) & exponents;
            before += width;
            see(scan, class);
            scan->events[scan->count++] = (Event){was, load(now, i, width), scan->gap[class], (uint8_t)class};
            scan->gap[class] = 0;
        }
    }
    return before;
}

/* A reader needs the gap before a change at the change before it: each event gets the gap of the next one. */
static void look_ahead(Scan *scan) {
    uint32_t next[CLASSES];
    memset(next, 0xff, sizeof(next));
    for (int64_t i = scan->count - 1; i >= 0; i--) {
        Event *event = &scan->events[i];
        uint32_t gap = event->gap;
        event->gap = next[event->class];
        next[event->class] = gap;
    }
}

/* Sign and the rest of the bits, the magnitude, apart: magnitudes are compared as whole numbers. */
static void write_change(Writer *w, Model *model, int class, uint32_t before, uint32_t after, int width) {
    Class *of = &model->classes[class];
    uint32_t sign = 1u << (8 * width - 1);
    int flip = ((before ^ after) & sign) != 0;
    int down = (after & ~sign) < (before & ~sign);
    uint32_t size = down ? (before & ~sign) - (after & ~sign) : (after & ~sign) - (before & ~sign);
    write_bit(w, &of->flip, flip);
    write_bit(w, &of->down[flip][model->downs[class]], down);
    model->downs[class] = (uint8_t)((2 * model->downs[class] + down) & 3);
    write_number(w, &of->size[flip], size + (uint32_t)flip); /* without a flip it is never 0 */
}

static void write_gap(Writer *w, Model *model, int class, uint32_t gap) {
    Number *of = &model->classes[class].gap;
    if (gap == UINT32_MAX) {
        write_length(w, of, END);
    } else {
        write_number(w, of, gap + 1);
    }
}

/* Writes how elements became what they are `now`, from what `rft_take` noted when it made them so: together fewer than
   2^31 - 1, `total` of them changed. Returns the bytes written to `out`, or TOO_LONG or NO_MEMORY. */
int64_t rft_code(
    int64_t pieces, const uint8_t *const *now, const int64_t *counts, int width, int mantissa,
    const uint64_t *changed, const uint8_t *before, int64_t total, uint8_t *out, int64_t capacity
) {
    Scan scan = {0};
    Model *model = new_model();
    int64_t result = NO_MEMORY;
    scan.events = malloc((size_t)(total + CLASSES) * sizeof(Event));
    if (model == NULL || scan.events == NULL) goto done;
    for (int64_t piece = 0; piece < pieces; piece++) {
        if (width == 2 && mantissa == 7) {
            before = scan_piece(&scan, now[piece], counts[piece], changed, before, 2, 7, 255);
        } else if (width == 2) {
            before = scan_piece(&scan, now[piece], counts[piece], changed, before, 2, 10, 31);
        } else {
            before = scan_piece(&scan, now[piece], counts[piece], changed, before, 4, 23, 255);
        }
        changed += (counts[piece] + BLOCK - 1) / BLOCK;
    }
    look_ahead(&scan);
    Writer writer = {0, 0xffffffffu, 0, 1, out, 0, capacity};
    for (int64_t i = 0; i < scan.count && writer.place <= capacity; i++) {
        const Event *event = &scan.events[i];
        if (event->before != event->after) write_change(&writer, model, event->class, event->before, event->after, width);
        write_gap(&writer, model, event->class, event->gap);
    }
    for (int i = 0; i < 5; i++) shift_low(&writer);
    result = writer.place <= capacity ? writer.place : TOO_LONG;
done:
    free(scan.events);
    free(model);
    return result;
}

/* ------------------------------------------------------------------------------------------------- reading */

static uint64_t read_gap(Reader *r, Model *model, int class) {
    Number *of = &model->classes[class].gap;
    int length = read_length(r, of);
    return length == END ? UINT64_MAX : (uint64_t)read_rest(r, of, length) - 1;
}

static uint32_t read_change(Reader *r, Model *model, int class, uint32_t before, int width) {
    Class *of = &model->classes[class];
    uint32_t sign = 1u << (8 * width - 1);
    int flip = read_bit(r, &of->flip);
    int down = read_bit(r, &of->down[flip][model->downs[class]]);
    model->downs[class] = (uint8_t)((2 * model->downs[class] + down) & 3);
    uint32_t size = read_rest(r, &of->size[flip], read_length(r, &of->size[flip])) - (uint32_t)flip;
    uint32_t magnitude = (before & ~sign) + (down ? 0u - size : size);
    return (magnitude & ~sign) | ((before & sign) ^ (flip ? sign : 0));
}

typedef struct {
    uint64_t left[CLASSES]; /* unchanged elements before the next change; 0 for a class that was not seen, too */
    uint8_t seen[CLASSES];
    int64_t changed;
} Places;

static inline __attribute__((always_inline)) int apply_piece(
    Places *places, Model *model, Reader *r, uint8_t *data, int64_t count, int width, int mantissa, uint32_t exponents
) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t before = load(data, i, width);
        uint32_t class = (before >> mantissa) & exponents;
        if (__builtin_expect(places->left[class] != 0, 1)) {
            places->left[class]--;
            continue;
        }
        if (!places->seen[class]) {
            places->seen[class] = 1;
            places->left[class] = read_gap(r, model, (int)class);
            if (places->left[class] != 0) {
                places->left[class]--;
                continue;
            }
        }
        store(data, i, width, read_change(r, model, (int)class, before, width));
        places->changed++;
        places->left[class] = read_gap(r, model, (int)class);
        if (r->place > r->length) return 0;
    }
    return 1;
}

/* Changes `data` as the stream `in` says. Returns 0, or DAMAGED or NO_MEMORY; then `data` is of no use any more. */
int64_t rft_apply(
    int64_t pieces, uint8_t *const *data, const int64_t *counts, int width, int mantissa, const uint8_t *in, int64_t length, int64_t *changed
) {
    Model *model = new_model();
    int64_t result = DAMAGED;
    if (model == NULL) return NO_MEMORY;
    Places places = {0};
    Reader reader = {0xffffffffu, 0, in, 0, length};
    for (int i = 0; i < 5; i++) reader.code = (reader.code << 8) | get_byte(&reader);
    for (int64_t piece = 0; piece < pieces; piece++) {
        int ok;
        if (width == 2 && mantissa == 7) {
            ok = apply_piece(&places, model, &reader, data[piece], counts[piece], 2, 7, 255);
        } else if (width == 2) {
            ok = apply_piece(&places, model, &reader, data[piece], counts[piece], 2, 10, 31);
        } else {
            ok = apply_piece(&places, model, &reader, data[piece], counts[piece], 4, 23, 255);
        }
        if (!ok) goto done;
        changed[piece] = places.changed;
        places.changed = 0;
    }
    for (int class = 0; class < CLASSES; class ++) {
        if (places.seen[class] && places.left[class] < (1ull << 32)) goto done;
    }
    if (reader.place == length && reader.code == 0) result = 0;
done:
    free(model);
    return result;
}
