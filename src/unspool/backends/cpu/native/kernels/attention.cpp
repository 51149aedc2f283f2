// Attention over KV cache pages of sixteen tokens.
//
// Softmax is computed over segments of 512 positions, counted from the start of the sequence, and
// segments are merged in order. So results are the same whether segments are split over threads
// (decode with a long context) or processed by one (prefill), and in any batch.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../portable_math.h"
#include "attention_pages.h"
#include "kernels.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Softmax state of a row: maximum score, sum of exponentials, weighted sum of values.
struct SoftmaxState {
    float max_score, total;
    float* values;
};

// Merges the state of the next segment.
inline void merge(SoftmaxState& target, const SoftmaxState& segment_state, int64_t width) {
    if (segment_state.total == 0.0f) return;
    if (target.total == 0.0f) {
        target.max_score = segment_state.max_score;
        target.total = segment_state.total;
        for (int64_t i = 0; i < width; ++i) target.values[i] = segment_state.values[i];
        return;
    }
    const float max_score =
        target.max_score > segment_state.max_score ? target.max_score : segment_state.max_score;
    const float target_factor = portable_exp(target.max_score - max_score),
                segment_factor = portable_exp(segment_state.max_score - max_score);
    target.max_score = max_score;
    target.total = target.total * target_factor + segment_state.total * segment_factor;
    for (int64_t i = 0; i < width; ++i)
        target.values[i] =
            target.values[i] * target_factor + segment_state.values[i] * segment_factor;
}

// Masks positions of the page at `start` that a row may not attend to.
inline void apply_mask(const Tile& tile, int64_t start, int64_t at) {
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t newest = tile.newest(row), oldest = tile.oldest(row);
        if (start >= oldest && start + kPage - 1 <= newest) continue;
        float* scores = tile.scores + row * kSegment + at;
        for (int64_t slot = 0; slot < kPage; ++slot)
            if (start + slot < oldest || start + slot > newest) scores[slot] = kMasked;
    }
}

// Target of a row's observed weights: raw scores first, weights once the sum is known.
inline float* attention_tap(const Tile& tile, int64_t row) {
    const RunContext& run = *tile.run;
    if (run.taps == nullptr || run.taps->attention_offsets == nullptr) return nullptr;
    const int64_t at = run.taps->attention_offsets[tile.first_token + row / tile.group];
    if (at < 0) return nullptr;
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    return run.taps->weights + at +
           (tile.op->layer * run.taps->heads + head) * (tile.visible(row) + 1);
}

inline void store_raw_scores(const Tile& tile, int64_t first, int64_t last) {
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* to = attention_tap(tile, row);
        if (to == nullptr) continue;
        const int64_t end = std::min(last, tile.newest(row) + 1);
        for (int64_t at = first; at < end; ++at)
            to[at] = tile.scores[row * kSegment + at % kSegment];
    }
}

inline void scores_to_weights(const Tile& tile, int64_t row, const SoftmaxState& merged) {
    float* to = attention_tap(tile, row);
    if (to == nullptr) return;
    const int64_t oldest = tile.oldest(row), newest = tile.newest(row);
    for (int64_t at = 0; at <= tile.visible(row); ++at) {
        const bool is_visible = at >= oldest && at <= newest;
        to[at] = is_visible ? portable_exp(to[at] - merged.max_score) / merged.total : 0.0f;
    }
}

// One segment for all rows of a tile: states[row] gets the result; tile.sums holds the values.
template <class Kind>
inline void attend_segment(const Tile& tile, int64_t segment, SoftmaxState* states) {
    const KvCache& kv = tile.run->kv;
    const int64_t padded = tile.padded, bytes = kv_head_bytes(kv, tile.op->layer);
    const int64_t newest = tile.newest();
    int64_t first = segment * kSegment;
    if (tile.oldest(0) > first) first = tile.oldest(0) / kPage * kPage;
    int64_t last = (segment + 1) * kSegment;
    if (newest + 1 < last) last = newest + 1;
    const int64_t begin = first % kSegment;
    const int64_t size = kPage * padded;
    // With many queries it pays to convert a page's halves to floats first.
    constexpr bool is_half = std::is_same_v<Kind, Half>, always_convert = is_half && kConvertFirst;
    const bool convert_first = always_convert || (is_half && tile.rows > 2 * kMaxRows);
    const auto keys_at = [&](int64_t position) {
        return kv_page(kv, tile.op->layer, 0, tile.kv_head, tile.pages[position / kPage]);
    };
    for (int64_t start = first; start < last;) {
        const bool full = start + kPages * kPage <= last;
        const uint8_t* pages[kPages];
        for (int p = 0; p < (full ? kPages : 1); ++p) pages[p] = keys_at(start + p * kPage);
        const int64_t next = start + (full ? kPages : 1) * kPage;
        for (int64_t at = next; at < last && at < next + kPages * kPage; at += kPage)
            prefetch_page(keys_at(at), bytes);
        const auto score = [&](auto kind, const uint8_t* const* keys) {
            using Keys = decltype(kind);
            dispatch_rows<Keys>(tile.rows, [&](int64_t row, auto count) {
                constexpr int R = decltype(count)::value;
                if constexpr (pages_for(R) == kPages)
                    if (full)
                        return page_scores<Keys, R, kPages>(tile, keys, row, start % kSegment);
                for (int p = 0; p < (full ? kPages : 1); ++p)
                    page_scores<Keys, R, 1>(tile, keys + p, row, start % kSegment + p * kPage);
            });
        };
        if (convert_first) {
            for (int p = 0; p < (full ? kPages : 1); ++p)
                pages[p] = page_to_floats<Kind>(pages[p], size, tile.page + p * size);
            score(Float(), pages);
        } else if constexpr (!always_convert) {
            score(Kind(), pages);
        }
        for (; start < next; start += kPage) apply_mask(tile, start, start % kSegment);
    }
    const int64_t end = begin + (last - first + kPage - 1) / kPage * kPage;
    store_raw_scores(tile, first, last);
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* scores = tile.scores + row * kSegment;
        F32x16 max_score = set1(kMasked);
        for (int64_t at = begin; at < end; at += kLanes)
            max_score = vmax(max_score, load(scores + at));
        states[row].max_score = largest(max_score);
        states[row].values = tile.sums + row * padded;
        for (int64_t i = 0; i < padded; ++i) states[row].values[i] = 0.0f;
        if (states[row].max_score == kMasked) {  // nothing visible in this segment
            states[row].total = 0.0f;
            for (int64_t at = begin; at < end; ++at) {
                if (scores[at] != kMasked) states[row].total = scores[at];  // NaN: propagate it
                scores[at] = 0.0f;
            }
            continue;
        }
        const F32x16 peak = set1(states[row].max_score);
        F32x16 total = zero();
        for (int64_t at = begin; at < end; at += kLanes) {
            const F32x16 e = exp16(sub(load(scores + at), peak));
            store(scores + at, e);
            total = add(total, e);
        }
        states[row].total = sum(total);
    }
    for (int64_t start = first; start < last; start += kPage) {
        const uint8_t* page =
            kv_page(kv, tile.op->layer, 1, tile.kv_head, tile.pages[start / kPage]);
        const int64_t slots = last - start < kPage ? last - start : kPage;
        if (start + kPage < last)
            prefetch_page(
                kv_page(kv, tile.op->layer, 1, tile.kv_head, tile.pages[start / kPage + 1]), bytes);
        const auto gather = [&](auto kind, const uint8_t* values) {
            dispatch_rows<decltype(kind)>(tile.rows, [&](int64_t row, auto count) {
                constexpr int R = decltype(count)::value;
                accumulate_values<decltype(kind), R>(tile, values, row, start % kSegment, slots);
            });
        };
        if (convert_first)
            gather(Float(), page_to_floats<Kind>(page, size, tile.page));
        else if constexpr (!always_convert)
            gather(Kind(), page);
    }
}

inline void attend_segment(const Tile& tile, int64_t segment, SoftmaxState* states) {
#if !defined(ISA_wasm)  // the browser's engine uses 16 bits
    if (tile.run->kv.bits == 8) return attend_segment<Byte>(tile, segment, states);
    if (tile.run->kv.bits == 32) return attend_segment<Float>(tile, segment, states);
#endif
    return attend_segment<Half>(tile, segment, states);
}

// Attention sink: one more term of the softmax without a value.
inline void add_sink(SoftmaxState& merged, float sink, int64_t width) {
    const float max_score = merged.max_score > sink ? merged.max_score : sink;
    const float target_factor = portable_exp(merged.max_score - max_score);
    merged.max_score = max_score;
    merged.total = merged.total * target_factor + portable_exp(sink - max_score);
    for (int64_t i = 0; i < width; ++i) merged.values[i] *= target_factor;
}

inline void finish(const Tile& tile, int64_t row, SoftmaxState merged) {
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    if (tile.op->vector >= 0)
        add_sink(merged, tile.run->vectors[tile.op->vector].data[head], tile.width);
    float* to = tile.run->buffers[tile.op->target].row(tile.first_token + row / tile.group) +
                head * tile.width;
    const float inverse = 1.0f / merged.total;
    for (int64_t i = 0; i < tile.width; ++i) to[i] = merged.values[i] * inverse;
    scores_to_weights(tile, row, merged);
}

// The tile of `tokens` tokens from `token` on, with scaled queries.
Tile make_tile(const RunContext& run, const Op& op, int64_t token, int64_t tokens, int64_t kv_head,
               uint8_t* scratch) {
    Tile tile;
    tile.run = &run;
    tile.op = &op;
    tile.first_token = token;
    tile.tokens = tokens;
    tile.kv_head = kv_head;
    tile.group = op.heads / run.kv.layers[op.layer].heads;
    tile.width = run.kv.layers[op.layer].head_width;
    tile.padded = padded_width(tile.width);
    tile.rows = tokens * tile.group;
    tile.first_position = run.batch.positions[token];
    tile.last = 0;
    for (int64_t row = 0; row < tile.rows; row += tile.group)
        tile.last = std::max(tile.last, tile.newest(row));
    tile.pages = run.batch.pages(run.row_of[token]);
    tile.queries = reinterpret_cast<float*>(scratch);
    tile.scores = tile.queries + (tile.rows + kMaxRows - 1) / kMaxRows * kMaxRows * tile.padded;
    tile.page = tile.scores + tile.rows * kSegment;
    tile.sums = tile.page + kPages * kPage * tile.padded;
    for (int64_t first = 0; first < tile.rows; first += kMaxRows) {
        const float* from[kMaxRows];
        for (int64_t r = 0; r < kMaxRows; ++r) {  // missing rows are copies of the last
            const int64_t row = std::min(first + r, tile.rows - 1);
            from[r] = run.buffers[op.source].row(token + row / tile.group) +
                      (kv_head * tile.group + row % tile.group) * tile.width;
        }
        float* to = tile.queries + first * tile.padded;
        for (int64_t i = 0; i < tile.width; ++i, to += kMaxRows)
            for (int64_t r = 0; r < kMaxRows; ++r) to[r] = from[r][i] * op.scale;
        std::fill_n(to, (tile.padded - tile.width) * kMaxRows, 0.0f);
    }
    return tile;
}

// Number of segments a token attends to.
inline int64_t segments_of(const Batch& batch, int64_t token) {
    return (batch.visible_end[token] - 1) / kSegment + 1;
}

// All segments in order, in one task.
void attend_serial(const Tile& tile) {
    float* values = tile.sums + tile.rows * tile.padded;
    SoftmaxState merged[kTileRows * 4], segment_state[kTileRows * 4];
    for (int64_t row = 0; row < tile.rows; ++row)
        merged[row] = {kMasked, 0.0f, values + row * tile.padded};
    const int64_t last = tile.newest() / kSegment;
    for (int64_t s = tile.oldest(0) / kSegment; s <= last; ++s) {
        attend_segment(tile, s, segment_state);
        for (int64_t row = 0; row < tile.rows; ++row)
            merge(merged[row], segment_state[row], tile.width);
    }
    for (int64_t row = 0; row < tile.rows; ++row) finish(tile, row, merged[row]);
}

}  // namespace

void attention(const RunContext& run, const Op& op, Worker& worker) {
    const Batch& batch = run.batch;
    const LayerPages& layer_pages = run.kv.layers[op.layer];
    const int64_t kv_heads = layer_pages.heads, group = op.heads / kv_heads,
                  width = layer_pages.head_width;
    const int64_t per_tile = group >= kTileRows ? 1 : kTileRows / group;
    int64_t tiles = 0, segments = 0;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t count = batch.starts[row + 1] - batch.starts[row];
        tiles += (count + per_tile - 1) / per_tile;
        if (count == 1) segments += segments_of(batch, batch.starts[row]);
    }
    // Few queries with long contexts: one task per segment, merged afterwards.
    const bool split_segments = worker.count > 1 && tiles == batch.count && segments > tiles &&
                                tiles * kv_heads < 4 * worker.count &&
                                segments * kv_heads * group * (width + 2) <= run.partial_size;
    if (!split_segments) {
        worker.for_each(0, tiles * kv_heads, [&](int64_t task) {
            const int64_t kv_head = task % kv_heads;
            int64_t number = task / kv_heads, row = 0;
            for (;; ++row) {  // find the sequence of the tile
                const int64_t count = batch.starts[row + 1] - batch.starts[row];
                const int64_t row_tiles = (count + per_tile - 1) / per_tile;
                if (number < row_tiles) break;
                number -= row_tiles;
            }
            const int64_t token = batch.starts[row] + number * per_tile;
            const int64_t count = batch.starts[row + 1] - token;
            attend_serial(make_tile(run, op, token, count < per_tile ? count : per_tile, kv_head,
                                    worker.scratch));
        });
        return;
    }
    const int64_t partial = group * (width + 2);  // floats of one segment's state
    worker.for_each(0, segments * kv_heads, [&](int64_t task) {
        int64_t segment = task / kv_heads, token = 0;
        while (segment >= segments_of(batch, token)) segment -= segments_of(batch, token++);
        const Tile tile = make_tile(run, op, token, 1, task % kv_heads, worker.scratch);
        SoftmaxState states[kTileRows * 4];
        if (segment < tile.oldest(0) / kSegment || segment > tile.newest() / kSegment) {
            for (int64_t row = 0; row < group; ++row)
                states[row] = {kMasked, 0.0f, tile.sums + row * tile.padded};
        } else {
            attend_segment(tile, segment, states);
        }
        float* to = run.partial + task * partial;
        for (int64_t row = 0; row < group; ++row, to += width + 2) {
            to[0] = states[row].max_score;
            to[1] = states[row].total;
            for (int64_t i = 0; i < width; ++i) to[2 + i] = states[row].values[i];
        }
    });
    worker.for_each(1, batch.count * kv_heads, [&](int64_t task) {
        const int64_t token = task / kv_heads, kv_head = task % kv_heads;
        int64_t segment_offset = 0;
        for (int64_t other = 0; other < token; ++other) segment_offset += segments_of(batch, other);
        const Tile tile = make_tile(run, op, token, 1, kv_head, worker.scratch);
        for (int64_t row = 0; row < group; ++row) {
            SoftmaxState merged{kMasked, 0.0f, tile.sums};
            for (int64_t s = 0; s < segments_of(batch, token); ++s) {
                float* from = run.partial + ((segment_offset + s) * kv_heads + kv_head) * partial +
                              row * (width + 2);
                merge(merged, {from[0], from[1], from + 2}, width);
            }
            finish(tile, row, merged);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
