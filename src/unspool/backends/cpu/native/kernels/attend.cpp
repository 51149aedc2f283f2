// Each query gathers values from the tokens before it, over pages of sixteen.
//
// Softmax is taken over segments of 512 positions, counted from the text's beginning, and segments
// are merged in order. So a text's numbers are the same whether its segments are spread over
// threads (a long past, one new token) or walked through by one (a prompt), and whatever else is
// in the batch.
#include <algorithm>
#include <cmath>
#include <limits>

#include "pages.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The state of a row's softmax: the largest score, the sum of the exponentials, the sum of values.
struct Gathered {
    float most, total;
    float* values;
};

// Adds a segment's share to what was gathered before it.
inline void merge(Gathered& into, const Gathered& more, int64_t width) {
    if (more.total == 0.0f) return;
    if (into.total == 0.0f) {
        into.most = more.most;
        into.total = more.total;
        for (int64_t i = 0; i < width; ++i) into.values[i] = more.values[i];
        return;
    }
    const float most = into.most > more.most ? into.most : more.most;
    const float ours = std::exp(into.most - most), theirs = std::exp(more.most - most);
    into.most = most;
    into.total = into.total * ours + more.total * theirs;
    for (int64_t i = 0; i < width; ++i)
        into.values[i] = into.values[i] * ours + more.values[i] * theirs;
}

// Hide what a row may not see of the page at `start`.
inline void mask(const Tile& tile, int64_t start, int64_t at) {
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t newest = tile.newest(row), oldest = tile.oldest(row);
        if (start >= oldest && start + kPage - 1 <= newest) continue;
        float* scores = tile.scores + row * kSegment + at;
        for (int64_t slot = 0; slot < kPage; ++slot)
            if (start + slot < oldest || start + slot > newest) scores[slot] = kNothing;
    }
}

// For those who look: a row's raw scores; they become weights when the whole sum is known.
inline float* tapped(const Tile& tile, int64_t row) {
    const Run& run = *tile.run;
    if (run.taps == nullptr || run.taps->attention == nullptr) return nullptr;
    const int64_t at = run.taps->attention[tile.first_token + row / tile.group];
    if (at < 0) return nullptr;
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    return run.taps->weights + at +
           (tile.op->layer * run.taps->heads + head) * (tile.visible(row) + 1);
}

inline void keep_scores(const Tile& tile, int64_t first, int64_t last) {
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* to = tapped(tile, row);
        if (to == nullptr) continue;
        const int64_t end = std::min(last, tile.newest(row) + 1);
        for (int64_t at = first; at < end; ++at)
            to[at] = tile.scores[row * kSegment + at % kSegment];
    }
}

inline void scores_to_weights(const Tile& tile, int64_t row, const Gathered& whole) {
    float* to = tapped(tile, row);
    if (to == nullptr) return;
    const int64_t oldest = tile.oldest(row), newest = tile.newest(row);
    for (int64_t at = 0; at <= tile.visible(row); ++at) {
        const bool seen = at >= oldest && at <= newest;
        to[at] = seen ? std::exp(to[at] - whole.most) / whole.total : 0.0f;
    }
}

// One segment for all rows of a tile: found[row] gets its share; tile.sums holds the values.
template <class Kind>
inline void attend_segment(const Tile& tile, int64_t segment, Gathered* found) {
    const KeyValues& kv = tile.run->kv;
    const int64_t filled = tile.filled, bytes = kv_head_bytes(kv, tile.op->layer);
    const int64_t newest = tile.newest();
    int64_t first = segment * kSegment;
    if (tile.oldest(0) > first) first = tile.oldest(0) / kPage * kPage;
    int64_t last = (segment + 1) * kSegment;
    if (newest + 1 < last) last = newest + 1;
    const int64_t begin = first % kSegment;
    const int64_t size = kPage * filled;
    // Read by so many queries that it pays to make floats of a page's halves first.
    constexpr bool halves = std::is_same_v<Kind, Half>, always = halves && kFloatsFirst;
    const bool many = always || (halves && tile.rows > 2 * kMostRows);
    const auto keys_at = [&](int64_t position) {
        return kv_page(kv, tile.op->layer, 0, tile.kv_head, tile.pages[position / kPage]);
    };
    for (int64_t start = first; start < last;) {
        const bool whole = start + kPages * kPage <= last;
        const uint8_t* pages[kPages];
        for (int p = 0; p < (whole ? kPages : 1); ++p) pages[p] = keys_at(start + p * kPage);
        const int64_t next = start + (whole ? kPages : 1) * kPage;
        for (int64_t at = next; at < last && at < next + kPages * kPage; at += kPage)
            fetch(keys_at(at), bytes);
        const auto score = [&](auto kind, const uint8_t* const* keys) {
            using Keys = decltype(kind);
            by_rows<Keys>(tile.rows, [&](int64_t row, auto count) {
                constexpr int R = decltype(count)::value;
                if constexpr (pages_for(R) == kPages)
                    if (whole)
                        return page_scores<Keys, R, kPages>(tile, keys, row, start % kSegment);
                for (int p = 0; p < (whole ? kPages : 1); ++p)
                    page_scores<Keys, R, 1>(tile, keys + p, row, start % kSegment + p * kPage);
            });
        };
        if (many) {
            for (int p = 0; p < (whole ? kPages : 1); ++p)
                pages[p] = as_floats<Kind>(pages[p], size, tile.page + p * size);
            score(Float(), pages);
        } else if constexpr (!always) {
            score(Kind(), pages);
        }
        for (; start < next; start += kPage) mask(tile, start, start % kSegment);
    }
    const int64_t end = begin + (last - first + kPage - 1) / kPage * kPage;
    keep_scores(tile, first, last);
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* scores = tile.scores + row * kSegment;
        F32x16 most = set1(kNothing);
        for (int64_t at = begin; at < end; at += kLanes) most = vmax(most, load(scores + at));
        found[row].most = largest(most);
        found[row].values = tile.sums + row * filled;
        for (int64_t i = 0; i < filled; ++i) found[row].values[i] = 0.0f;
        if (found[row].most == kNothing) {  // it sees nothing here
            found[row].total = 0.0f;
            for (int64_t at = begin; at < end; ++at) {
                if (scores[at] != kNothing) found[row].total = scores[at];  // no number: it shows
                scores[at] = 0.0f;
            }
            continue;
        }
        const F32x16 peak = set1(found[row].most);
        F32x16 total = zero();
        for (int64_t at = begin; at < end; at += kLanes) {
            const F32x16 e = exp16(sub(load(scores + at), peak));
            store(scores + at, e);
            total = add(total, e);
        }
        found[row].total = sum(total);
    }
    for (int64_t start = first; start < last; start += kPage) {
        const uint8_t* page =
            kv_page(kv, tile.op->layer, 1, tile.kv_head, tile.pages[start / kPage]);
        const int64_t slots = last - start < kPage ? last - start : kPage;
        if (start + kPage < last)
            fetch(kv_page(kv, tile.op->layer, 1, tile.kv_head, tile.pages[start / kPage + 1]),
                  bytes);
        const auto gather = [&](auto kind, const uint8_t* values) {
            by_rows<decltype(kind)>(tile.rows, [&](int64_t row, auto count) {
                constexpr int R = decltype(count)::value;
                all_values<decltype(kind), R>(tile, values, row, start % kSegment, slots);
            });
        };
        if (many)
            gather(Float(), as_floats<Kind>(page, size, tile.page));
        else if constexpr (!always)
            gather(Kind(), page);
    }
}

inline void attend_segment(const Tile& tile, int64_t segment, Gathered* found) {
    if (tile.run->kv.bits == 16) return attend_segment<Half>(tile, segment, found);
    if (tile.run->kv.bits == 8) return attend_segment<Byte>(tile, segment, found);
    return attend_segment<Float>(tile, segment, found);
}

// One more term of the softmax, which has no value: what a head gives away when nothing fits.
inline void add_sink(Gathered& whole, float sink, int64_t width) {
    const float most = whole.most > sink ? whole.most : sink;
    const float ours = std::exp(whole.most - most);
    whole.most = most;
    whole.total = whole.total * ours + std::exp(sink - most);
    for (int64_t i = 0; i < width; ++i) whole.values[i] *= ours;
}

inline void finish(const Tile& tile, int64_t row, Gathered whole) {
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    if (tile.op->vector >= 0)
        add_sink(whole, tile.run->vectors[tile.op->vector].data[head], tile.width);
    float* to = tile.run->buffers[tile.op->target].row(tile.first_token + row / tile.group) +
                head * tile.width;
    const float inverse = 1.0f / whole.total;
    for (int64_t i = 0; i < tile.width; ++i) to[i] = whole.values[i] * inverse;
    scores_to_weights(tile, row, whole);
}

// The tile of `tokens` tokens from `token` on, its queries scaled.
Tile open_tile(const Run& run, const Op& op, int64_t token, int64_t tokens, int64_t kv_head,
               uint8_t* scratch) {
    Tile tile;
    tile.run = &run;
    tile.op = &op;
    tile.first_token = token;
    tile.tokens = tokens;
    tile.kv_head = kv_head;
    tile.group = op.heads / run.kv.layers[op.layer].heads;
    tile.width = run.kv.layers[op.layer].head_width;
    tile.filled = filled_width(tile.width);
    tile.rows = tokens * tile.group;
    tile.first_position = run.batch.positions[token];
    tile.last = 0;
    for (int64_t row = 0; row < tile.rows; row += tile.group)
        tile.last = std::max(tile.last, tile.newest(row));
    tile.pages = run.batch.pages(run.row_of[token]);
    tile.queries = reinterpret_cast<float*>(scratch);
    tile.scores = tile.queries + tile.rows * tile.filled;
    tile.page = tile.scores + tile.rows * kSegment;
    tile.sums = tile.page + kPages * kPage * tile.filled;
    for (int64_t row = 0; row < tile.rows; ++row) {
        const float* from = run.buffers[op.source].row(token + row / tile.group) +
                            (kv_head * tile.group + row % tile.group) * tile.width;
        for (int64_t i = 0; i < tile.filled; ++i)
            tile.queries[row * tile.filled + i] = i < tile.width ? from[i] * op.scale : 0.0f;
    }
    return tile;
}

// How many segments a token sees.
inline int64_t segments_of(const Batch& batch, int64_t token) {
    return (batch.visible_end[token] - 1) / kSegment + 1;
}

// All segments, one after the other.
void attend_alone(const Tile& tile) {
    float* values = tile.sums + tile.rows * tile.filled;
    Gathered whole[kTileRows * 4], more[kTileRows * 4];
    for (int64_t row = 0; row < tile.rows; ++row)
        whole[row] = {kNothing, 0.0f, values + row * tile.filled};
    const int64_t last = tile.newest() / kSegment;
    for (int64_t s = tile.oldest(0) / kSegment; s <= last; ++s) {
        attend_segment(tile, s, more);
        for (int64_t row = 0; row < tile.rows; ++row) merge(whole[row], more[row], tile.width);
    }
    for (int64_t row = 0; row < tile.rows; ++row) finish(tile, row, whole[row]);
}

}  // namespace

void attend(const Run& run, const Op& op, Worker& worker) {
    const Batch& batch = run.batch;
    const LayerPages& its = run.kv.layers[op.layer];
    const int64_t kv_heads = its.heads, group = op.heads / kv_heads, width = its.head_width;
    const int64_t per_tile = group >= kTileRows ? 1 : kTileRows / group;
    int64_t tiles = 0, segments = 0;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t count = batch.starts[row + 1] - batch.starts[row];
        tiles += (count + per_tile - 1) / per_tile;
        if (count == 1) segments += segments_of(batch, batch.starts[row]);
    }
    // Few queries with long pasts: one task for each segment, merged afterwards.
    const bool spread = worker.count > 1 && tiles == batch.count && segments > tiles &&
                        tiles * kv_heads < 4 * worker.count &&
                        segments * kv_heads * group * (width + 2) <= run.partial_room;
    if (!spread) {
        worker.each(0, tiles * kv_heads, [&](int64_t task) {
            const int64_t kv_head = task % kv_heads;
            int64_t number = task / kv_heads, row = 0;
            for (;; ++row) {  // which text the tile belongs to
                const int64_t count = batch.starts[row + 1] - batch.starts[row];
                const int64_t its = (count + per_tile - 1) / per_tile;
                if (number < its) break;
                number -= its;
            }
            const int64_t token = batch.starts[row] + number * per_tile;
            const int64_t left = batch.starts[row + 1] - token;
            attend_alone(open_tile(run, op, token, left < per_tile ? left : per_tile, kv_head,
                                   worker.scratch));
        });
        return;
    }
    const int64_t partial = group * (width + 2);  // floats of one segment's share
    worker.each(0, segments * kv_heads, [&](int64_t task) {
        int64_t segment = task / kv_heads, token = 0;
        while (segment >= segments_of(batch, token)) segment -= segments_of(batch, token++);
        const Tile tile = open_tile(run, op, token, 1, task % kv_heads, worker.scratch);
        Gathered found[kTileRows * 4];
        if (segment < tile.oldest(0) / kSegment || segment > tile.newest() / kSegment) {
            for (int64_t row = 0; row < group; ++row)
                found[row] = {kNothing, 0.0f, tile.sums + row * tile.filled};
        } else {
            attend_segment(tile, segment, found);
        }
        float* to = run.partial + task * partial;
        for (int64_t row = 0; row < group; ++row, to += width + 2) {
            to[0] = found[row].most;
            to[1] = found[row].total;
            for (int64_t i = 0; i < width; ++i) to[2 + i] = found[row].values[i];
        }
    });
    worker.each(1, batch.count * kv_heads, [&](int64_t task) {
        const int64_t token = task / kv_heads, kv_head = task % kv_heads;
        int64_t before = 0;
        for (int64_t other = 0; other < token; ++other) before += segments_of(batch, other);
        const Tile tile = open_tile(run, op, token, 1, kv_head, worker.scratch);
        for (int64_t row = 0; row < group; ++row) {
            Gathered whole{kNothing, 0.0f, tile.sums};
            for (int64_t s = 0; s < segments_of(batch, token); ++s) {
                float* from =
                    run.partial + ((before + s) * kv_heads + kv_head) * partial + row * (width + 2);
                merge(whole, {from[0], from[1], from + 2}, width);
            }
            finish(tile, row, whole);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
