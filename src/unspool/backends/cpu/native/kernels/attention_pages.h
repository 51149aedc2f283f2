// Inner loops of attention.cpp: queries against KV cache pages.
//
// Keys of a page are [head_width][16 tokens], so that sixteen scores accumulate in the lanes of a
// register without a horizontal sum; values are [16 tokens][head_width].
#pragma once
#include "../plan.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

// Queries per task: heads of several tokens that share keys. More queries share the conversion of a
// page; their scores must fit the cache.
#if defined(ISA_neon)
constexpr int kTileRows = 32;
#else
constexpr int kTileRows = 16;
#endif
// As many accumulators as fit the registers:
#if defined(ISA_avx512) || defined(ISA_amx)
constexpr int kMaxRows = 8;                                        // queries,
constexpr int pages_for(int rows) { return rows <= 4 ? 2 : 1; }    // pages of keys,
constexpr int columns_for(int rows) { return rows <= 4 ? 4 : 2; }  // vectors of values
#else
constexpr int kMaxRows = 4;
constexpr int pages_for(int) { return 1; }
constexpr int columns_for(int) { return 1; }
#endif
constexpr int kPages = pages_for(1);
// Where converting halves is slow, convert once even for few queries.
#if defined(ISA_plain) || defined(ISA_wasm)
constexpr bool kConvertFirst = true;
#else
constexpr bool kConvertFirst = false;
#endif

// Loads of keys and values by precision.
struct Float {
    static constexpr int64_t bytes = 4;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* page, int64_t i) {
        return load(reinterpret_cast<const float*>(page) + i);
    }
};
struct Half {
    static constexpr int64_t bytes = 2;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* page, int64_t i) {
        return load_half(reinterpret_cast<const uint16_t*>(page) + i);
    }
};
struct Byte {
    static constexpr int64_t bytes = 1;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* page, int64_t i) {
        return load_i8(reinterpret_cast<const int8_t*>(page) + i);
    }
};

// Queries that share keys: consecutive tokens of one sequence, all heads of one key head.
struct Tile {
    const RunContext* run;
    const Op* op;
    const int64_t* pages;
    int64_t first_token, tokens, kv_head, group, rows;
    int64_t width, padded;  // of a head, and padded to whole registers
    int64_t first_position;
    int64_t last;    // the last position that any row attends to
    float* queries;  // [rows / kMaxRows][filled][kMaxRows], scaled
    float* scores;   // [rows][kSegment]
    float* page;     // memory for pages converted to floats
    float* sums;     // [rows][filled], of the current segment

    int64_t position(int64_t row) const { return first_position + row / group; }
    int64_t oldest(int64_t row) const {
        const int64_t first = position(row) + 1 - op->window;
        return op->window > 0 && first > 0 ? first : 0;
    }
    // Last position visible to a row: its own, or the end of a bidirectional block.
    int64_t visible(int64_t row) const {
        return run->batch.visible_end[first_token + row / group] - 1;
    }
    // Last position it attends to: a window may end earlier.
    int64_t newest(int64_t row) const {
        const int64_t window_end = position(row) + op->window - 1, end = visible(row);
        return op->flags & kBidirectional && op->window > 0 && window_end < end ? window_end : end;
    }
    int64_t newest() const { return last; }
};

// Softcap of scores to +-cap (Gemma 2).
inline UNSPOOL_NOINLINE void cap_scores(float* scores, int count, float limit) {
    const F32x16 cap = set1(limit);
    for (int i = 0; i < count; i += kLanes)
        store(scores + i, mul(cap, tanh16(div(load(scores + i), cap))));
}

// Scores of R queries against the keys of P pages.
template <class Kind, int R, int P>
UNSPOOL_NOINLINE void page_scores(const Tile& tile, const uint8_t* const* pages, int64_t row,
                                  int64_t at) {
    const int64_t padded = tile.padded;
    const float* q = tile.queries + row / kMaxRows * kMaxRows * padded + row % kMaxRows;
    F32x16 total[R * P];
    for_each_index<R * P>([&](auto i) UNSPOOL_LAMBDA { total[i] = zero(); });
#pragma GCC unroll 8
    for (int64_t d = 0; d < padded; ++d, q += kMaxRows) {  // padding is zero
        const Four column = load_four(q);
        for_each_index<P>([&](auto p) UNSPOOL_LAMBDA {
            const F32x16 keys = Kind::at(pages[p], d * kPage);
            fma_lanes<R, P>(keys, column, total + p);
        });
    }
    for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
        float* scores = tile.scores + (row + r) * kSegment + at;
        for_each_index<P>([&](auto p) UNSPOOL_LAMBDA {
            F32x16 score = total[r * P + p];
            if constexpr (Kind::bytes == 1)
                score = mul(score, load(reinterpret_cast<const float*>(pages[p] + kPage * padded)));
            store(scores + p * kPage, score);
        });
        if (tile.op->cap > 0.0f) cap_scores(scores, P * kPage, tile.op->cap);
    });
}

// R weights times the values of one page, C * 16 columns at a time.
template <class Kind, int R, int C>
UNSPOOL_INLINE void page_values(const Tile& tile, const uint8_t* page, int64_t row, int64_t at,
                                int64_t slots, int64_t column) {
    const int64_t padded = tile.padded;
    float* sums = tile.sums + row * padded + column;
    F32x16 total[R * C];
    for_each_index<R * C>(
        [&](auto i) UNSPOOL_LAMBDA { total[i] = load(sums + i / C * padded + i % C * kLanes); });
    const float* weights = tile.scores + row * kSegment + at;
    float scaled_weights[R][kPage];
    if constexpr (Kind::bytes == 1) {  // multiply the token's scale into its weight
        const F32x16 factors = load(reinterpret_cast<const float*>(page + kPage * padded));
        for (int r = 0; r < R; ++r)
            store(scaled_weights[r], mul(load(weights + r * kSegment), factors));
    }
    const auto weight = [&](int r, int64_t slot) {
        return Kind::bytes == 1 ? scaled_weights[r] + slot : weights + r * kSegment + slot;
    };
    int64_t slot = 0;
    for (; slot + 4 <= slots; slot += 4) {
        Four quad[R];
        for_each_index<R>([&](auto r) UNSPOOL_LAMBDA { quad[r] = load_four(weight(r, slot)); });
        for_each_index<4>([&](auto i) UNSPOOL_LAMBDA {
            for_each_index<C>([&](auto c) UNSPOOL_LAMBDA {
                const F32x16 values = Kind::at(page, (slot + i) * padded + column + c * kLanes);
                fma_rows<decltype(i)::value, R, C>(values, quad, total + c);
            });
        });
    }
    for (; slot < slots; ++slot) {
        for_each_index<C>([&](auto c) UNSPOOL_LAMBDA {
            const F32x16 values = Kind::at(page, slot * padded + column + c * kLanes);
            for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
                total[r * C + c] = fma(values, set1(*weight(r, slot)), total[r * C + c]);
            });
        });
    }
    for_each_index<R * C>(
        [&](auto i) UNSPOOL_LAMBDA { store(sums + i / C * padded + i % C * kLanes, total[i]); });
}

template <class Kind, int R>
UNSPOOL_NOINLINE void accumulate_values(const Tile& tile, const uint8_t* page, int64_t row,
                                        int64_t at, int64_t slots) {
    constexpr int C = columns_for(R);
    int64_t column = 0;
    for (; column + C * kLanes <= tile.padded; column += C * kLanes)
        page_values<Kind, R, C>(tile, page, row, at, slots, column);
    for (; column < tile.padded; column += kLanes)
        page_values<Kind, R, 1>(tile, page, row, at, slots, column);
}

// Converts a page's head to floats: worth it if many queries read it.
template <class Kind>
UNSPOOL_INLINE const uint8_t* page_to_floats(const uint8_t* page, int64_t count,
                                             float* scaled_weights) {
    for (int64_t i = 0; i < count; i += kLanes) store(scaled_weights + i, Kind::at(page, i));
    return reinterpret_cast<const uint8_t*>(scaled_weights);
}

// Prefetches a page's head: pages are scattered, so hardware cannot predict them.
UNSPOOL_INLINE void prefetch_page(const uint8_t* page, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) prefetch(page + line);
}

// Calls f with a compile-time number of rows. Halves, the usual precision, have code for every
// number; for others five to seven rows are split into four and the remainder.
template <class Kind, class F>
UNSPOOL_INLINE void dispatch_rows(int64_t rows, F f) {
    int64_t row = 0;
    for (; row + kMaxRows <= rows; row += kMaxRows) f(row, std::integral_constant<int, kMaxRows>());
    if constexpr (kMaxRows > 4 && std::is_same_v<Kind, Half>) {
        switch (rows - row) {
            case 5:
                return f(row, std::integral_constant<int, 5>());
            case 6:
                return f(row, std::integral_constant<int, 6>());
            case 7:
                return f(row, std::integral_constant<int, 7>());
            default:
                break;
        }
    } else if constexpr (kMaxRows > 4) {
        if (row + 4 < rows) f((row += 4) - 4, std::integral_constant<int, 4>());
    }
    switch (rows - row) {
        case 1:
            return f(row, std::integral_constant<int, 1>());
        case 2:
            return f(row, std::integral_constant<int, 2>());
        case 3:
            return f(row, std::integral_constant<int, 3>());
        case 4:
            return f(row, std::integral_constant<int, 4>());
        default:
            return;
    }
}

}  // namespace ISA
}  // namespace unspool
