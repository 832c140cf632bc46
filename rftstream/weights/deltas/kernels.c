/* What changed between two states of a model, as a stream of bits, and back; taking.c notes what changed.

   The form is written down in docs/weights-format.md, in the words and with the names that are used here. Elements are
   compared as bit patterns, never as numbers. Nothing here keeps state between two calls, so that any number of threads
   may call. All sizes are checked by the caller, but for the stream of `rft_apply`: that may be anything. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "coding.h"
#if defined(__x86_64__) && !defined(RFT_NARROW)
#include <immintrin.h>
#endif

enum { TOO_LONG = -1, NO_MEMORY = -2, DAMAGED = -3 };

enum { BLOCK = 64 }; /* as in taking.c: elements of a word */

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

#if defined(__x86_64__) && !defined(RFT_NARROW)
/* For processors with wide vectors: the elements of a block that are of a class are found at once, as the bits of a word.
   Elsewhere, and for what is left of a run, each element is looked at. Both do the same; RFT_NARROW is for tests that
   compare them. */
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,bmi,bmi2,popcnt,lzcnt")))

static int is_wide(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

/* A byte for the class of each of BLOCK elements of 16 bits. */
WIDE static inline __m512i classes_of(const uint8_t *data, int mantissa) {
    __m128i by = _mm_cvtsi32_si128(mantissa + 1); /* after the sign has gone */
    __m512i low = _mm512_srl_epi16(_mm512_slli_epi16(_mm512_loadu_si512(data), 1), by);
    __m512i high = _mm512_srl_epi16(_mm512_slli_epi16(_mm512_loadu_si512(data + BLOCK), 1), by);
    __m512i half = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(low));
    return _mm512_inserti64x4(half, _mm512_cvtepi16_epi8(high), 1);
}

WIDE static inline uint64_t are_of(__m512i classes, uint32_t class) {
    return _mm512_cmpeq_epi8_mask(classes, _mm512_set1_epi8((char)class));
}
#endif

/* The classes that were seen, the usual ones first, so that most blocks are done after a few. */
typedef struct {
    uint8_t class[CLASSES];
    int count;
    uint32_t elements[CLASSES];
} Order;

static inline void add_class(Order *order, uint32_t class) { order->class[order->count++] = (uint8_t)class; }

static void sort_classes(Order *order) {
    for (int i = 1; i < order->count; i++) {
        uint8_t class = order->class[i];
        int place = i;
        for (; place > 0 && order->elements[order->class[place - 1]] < order->elements[class]; place--) {
            order->class[place] = order->class[place - 1];
        }
        order->class[place] = class;
    }
}

enum { SORT_EVERY = 256 * BLOCK }; /* elements */

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
    Order order;
} Scan;

static inline void see(Scan *scan, uint32_t class) {
    if (__builtin_expect(scan->seen[class], 1)) return;
    scan->seen[class] = 1;
    add_class(&scan->order, class);
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

#if defined(__x86_64__) && !defined(RFT_NARROW)
WIDE static const uint8_t *scan_blocks(
    Scan *scan, const uint8_t *now, int64_t count, const uint64_t *changed, const uint8_t *before, int mantissa
) {
    uint32_t exponents = mantissa == 7 ? 255 : 31;
    int64_t start = 0;
    for (; start + BLOCK <= count; start += BLOCK, changed++) {
        if (start % SORT_EVERY == 0) sort_classes(&scan->order);
        __m512i classes = classes_of(now + 2 * start, mantissa);
        if (*changed != 0) { /* the classes are those from before */
            uint8_t bytes[BLOCK];
            _mm512_storeu_si512(bytes, classes);
            const uint8_t *was = before;
            for (uint64_t left = *changed; left != 0; left &= left - 1, was += 2) {
                bytes[__builtin_ctzll(left)] = (uint8_t)((load(was, 0, 2) >> mantissa) & exponents);
            }
            classes = _mm512_loadu_si512(bytes);
        }
        uint64_t rest = ~0ull;
        uint32_t counts[CLASSES];
        int compared = 0;
        for (; compared < scan->order.count && rest != 0; compared++) {
            uint64_t mine = are_of(classes, scan->order.class[compared]);
            rest &= ~mine;
            counts[compared] = (uint32_t)__builtin_popcountll(mine);
        }
        if (__builtin_expect(rest != 0, 0)) { /* a class for the first time */
            before = scan_piece(scan, now + 2 * start, BLOCK, changed, before, 2, mantissa, exponents);
            continue;
        }
        for (int i = 0; i < compared; i++) {
            uint32_t class = scan->order.class[i];
            scan->gap[class] += counts[i];
            scan->order.elements[class] += counts[i];
        }
        for (uint64_t left = *changed; left != 0; left &= left - 1, before += 2) {
            int place = __builtin_ctzll(left);
            uint32_t was = load(before, 0, 2), class = (was >> mantissa) & exponents;
            uint32_t onward = (uint32_t)__builtin_popcountll(are_of(classes, class) >> place);
            uint32_t gap = scan->gap[class] - onward;
            scan->events[scan->count++] = (Event){was, load(now, start + place, 2), gap, (uint8_t)class};
            scan->gap[class] = onward - 1;
        }
    }
    return scan_piece(scan, now + 2 * start, count - start, changed, before, 2, mantissa, exponents);
}
#endif

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
#if defined(__x86_64__) && !defined(RFT_NARROW)
        if (width == 2 && is_wide()) {
            before = scan_blocks(&scan, now[piece], counts[piece], changed, before, mantissa);
        } else
#endif
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
    Order order;
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
            add_class(&places->order, class);
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

#if defined(__x86_64__) && !defined(RFT_NARROW)
/* The elements of a class in a block that are still to come, if one of them is the next event of the class. */
typedef struct {
    uint64_t mine;
    uint32_t class;
    int at; /* place of the event */
} Hit;

WIDE static inline int is_hit(Places *places, Hit *hit) {
    uint64_t left = places->left[hit->class], count = (uint64_t)__builtin_popcountll(hit->mine);
    if (left >= count) {
        places->left[hit->class] = left - count;
        return 0;
    }
    hit->at = __builtin_ctzll(_pdep_u64(1ull << left, hit->mine));
    return 1;
}

WIDE static int apply_blocks(Places *places, Model *model, Reader *r, uint8_t *data, int64_t count, int mantissa) {
    Order *order = &places->order;
    int64_t start = 0;
    for (; start + BLOCK <= count; start += BLOCK) {
        if (start % SORT_EVERY == 0) sort_classes(order);
        __m512i classes = classes_of(data + 2 * start, mantissa);
        Hit hits[BLOCK];
        int num = 0;
        uint64_t rest = ~0ull;
        for (int i = 0; i < order->count && rest != 0; i++) {
            Hit hit = {are_of(classes, order->class[i]), order->class[i], 0};
            rest &= ~hit.mine;
            order->elements[hit.class] += (uint32_t)__builtin_popcountll(hit.mine);
            if (__builtin_expect(is_hit(places, &hit), 0)) hits[num++] = hit;
        }
        while (__builtin_expect(rest != 0, 0)) { /* a class for the first time: its gap is read at the first element */
            int at = __builtin_ctzll(rest);
            uint32_t class = (load(data, start + at, 2) & 0x7fff) >> mantissa;
            hits[num] = (Hit){are_of(classes, class), class, at};
            rest &= ~hits[num++].mine;
        }
        while (num != 0) {
            int next = 0;
            for (int i = 1; i < num; i++) next = hits[i].at < hits[next].at ? i : next;
            Hit *hit = &hits[next];
            if (!places->seen[hit->class]) {
                places->seen[hit->class] = 1;
                add_class(order, hit->class);
            } else {
                uint32_t before = load(data, start + hit->at, 2);
                store(data, start + hit->at, 2, read_change(r, model, (int)hit->class, before, 2));
                places->changed++;
                hit->mine &= ~1ull << hit->at;
            }
            places->left[hit->class] = read_gap(r, model, (int)hit->class);
            if (r->place > r->length) return 0;
            if (!is_hit(places, hit)) *hit = hits[--num];
        }
    }
    return apply_piece(places, model, r, data + 2 * start, count - start, 2, mantissa, mantissa == 7 ? 255 : 31);
}
#endif

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
#if defined(__x86_64__) && !defined(RFT_NARROW)
        if (width == 2 && is_wide()) {
            ok = apply_blocks(&places, model, &reader, data[piece], counts[piece], mantissa);
        } else
#endif
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
