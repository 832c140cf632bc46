/* Takes new weights over and notes what changed: the one pass over a model that training waits for.

   Elements are compared as bit patterns, after rounding where the new ones are still float32. What is noted is put into
   bits by kernels.c, later. All sizes are checked by the caller; nothing keeps state between two calls. */

#include <stdint.h>
#include <string.h>

enum { BLOCK = 64 }; /* elements, of which a word says which changed */

/* Float32 to the nearest, of two that are as near to the even one, as bits; a NaN becomes `nan`. */
static inline uint16_t to_bfloat16(uint32_t bits, uint16_t nan) {
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : (uint16_t)rounded;
}

/* Likewise; a NaN keeps its sign and what it can of its payload, and is quiet. What becomes a denormal is rounded by an
   addition whose last bit is worth as much as the last one of denormals. */
static inline uint16_t to_float16(uint32_t bits) {
    uint32_t size = bits & 0x7fffffffu, small, half = 0x3f000000u;
    uint32_t normal = (size + 0xfffu + ((size >> 13) & 1) - (112u << 23)) >> 13;
    float value, bias;
    memcpy(&value, &size, 4);
    memcpy(&bias, &half, 4);
    value += bias;
    memcpy(&small, &value, 4);
    uint32_t rounded = size < 0x38800000u ? small - half : normal;
    rounded = size >= 0x477ff000u ? 0x7c00u : rounded;
    rounded = size > 0x7f800000u ? 0x7e00u | (size >> 13 & 0x3ffu) : rounded;
    return (uint16_t)(rounded | (bits >> 16 & 0x8000u));
}

enum { AS_IT_IS = -1, FROM_FLOAT32_TO_FLOAT16 = -2 }; /* any other way: from float32 to bfloat16, NaNs to this */

/* Of up to BLOCK elements: makes `old` what `new` is, and returns which were not so. The loops are of a fixed length and
   without branches, so that compilers make vectors of them. */
static inline __attribute__((always_inline)) uint64_t take_block(
    uint8_t *old, const uint8_t *new, size_t count, int width, int way, uint8_t **before
) {
    uint8_t differs[BLOCK];
    uint16_t was[BLOCK], is[BLOCK];
    uint32_t wide_was[BLOCK], wide_is[BLOCK];
    if (count < BLOCK) {
        memset(was, 0, sizeof(was));
        memset(is, 0, sizeof(is));
        memset(wide_was, 0, sizeof(wide_was));
        memset(wide_is, 0, sizeof(wide_is));
    }
    if (width == 4) {
        memcpy(wide_was, old, 4 * count);
        memcpy(wide_is, new, 4 * count);
        for (int i = 0; i < BLOCK; i++) differs[i] = wide_was[i] != wide_is[i];
    } else {
        memcpy(was, old, 2 * count);
        if (way == AS_IT_IS) {
            memcpy(is, new, 2 * count);
        } else {
            memcpy(wide_is, new, 4 * count);
            if (way == FROM_FLOAT32_TO_FLOAT16) {
                for (int i = 0; i < BLOCK; i++) is[i] = to_float16(wide_is[i]);
            } else {
                for (int i = 0; i < BLOCK; i++) is[i] = to_bfloat16(wide_is[i], (uint16_t)way);
            }
        }
        for (int i = 0; i < BLOCK; i++) differs[i] = was[i] != is[i];
    }
    uint64_t changed = 0;
    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t eight;
        memcpy(&eight, differs + i, 8);
        changed |= (eight * 0x0102040810204080u >> 56) << i; /* a bit of each byte */
    }
    if (changed == 0) return 0;
    for (uint64_t left = changed; left != 0; left &= left - 1) {
        int i = __builtin_ctzll(left);
        memcpy(*before, width == 4 ? (const void *)&wide_was[i] : (const void *)&was[i], (size_t)width);
        *before += width;
    }
    memcpy(old, width == 4 ? (const void *)wide_is : (const void *)is, (size_t)width * count);
    return changed;
}

static inline __attribute__((always_inline)) int64_t take_piece(
    uint8_t *old, const uint8_t *new, int64_t count, int width, int way, uint64_t *changed, uint8_t **before
) {
    int step = way == AS_IT_IS ? width : 4;
    int64_t total = 0, start = 0;
    for (; start + BLOCK <= count; start += BLOCK) {
        *changed = take_block(old + width * start, new + step * start, BLOCK, width, way, before);
        total += __builtin_popcountll(*changed++);
    }
    if (start < count) {
        *changed = take_block(old + width * start, new + step * start, (size_t)(count - start), width, way, before);
        total += __builtin_popcountll(*changed);
    }
    return total;
}

static inline __attribute__((always_inline)) void take_pieces(
    int64_t pieces, uint8_t *const *old, const uint8_t *const *new, const int64_t *counts, const int *ways,
    int width, uint64_t *changed, uint8_t *before, int64_t *totals
) {
    for (int64_t i = 0; i < pieces; i++) {
        if (width == 4) {
            totals[i] = take_piece(old[i], new[i], counts[i], 4, AS_IT_IS, changed, &before);
        } else if (ways[i] == AS_IT_IS) {
            totals[i] = take_piece(old[i], new[i], counts[i], 2, AS_IT_IS, changed, &before);
        } else if (ways[i] == FROM_FLOAT32_TO_FLOAT16) {
            totals[i] = take_piece(old[i], new[i], counts[i], 2, FROM_FLOAT32_TO_FLOAT16, changed, &before);
        } else {
            totals[i] = take_piece(old[i], new[i], counts[i], 2, ways[i] & 0xffff, changed, &before);
        }
        changed += (counts[i] + BLOCK - 1) / BLOCK;
    }
}

#if defined(__x86_64__)
/* The same for processors with wide vectors and masks of them: in less than half of the time. (AVX2 saves nothing.) */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,bmi,popcnt"))) static void take_pieces_avx512(
    int64_t pieces, uint8_t *const *old, const uint8_t *const *new, const int64_t *counts, const int *ways,
    int width, uint64_t *changed, uint8_t *before, int64_t *totals
) {
    take_pieces(pieces, old, new, counts, ways, width, changed, before, totals);
}
#endif

/* Makes `old` what `new` is, and notes all that `rft_code` needs to say how. `pieces` runs of `counts[i]` elements;
   `ways[i]` says what lies in `new[i]`. Of each element a bit goes to `changed`, in words of BLOCK elements, each piece
   in words of its own; the bits from before of those that changed go to `before`, which has room for all, one after
   another; how many of each piece they are, to `totals`. */
void rft_take(
    int64_t pieces, uint8_t *const *old, const uint8_t *const *new, const int64_t *counts, const int *ways,
    int width, uint64_t *changed, uint8_t *before, int64_t *totals
) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt")) {
        take_pieces_avx512(pieces, old, new, counts, ways, width, changed, before, totals);
        return;
    }
#endif
    take_pieces(pieces, old, new, counts, ways, width, changed, before, totals);
}
