// Queries and keys: optional norm per head, RoPE; keys and values are written to their page.
#include <cmath>

#include "../portable_math.h"
#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

namespace {

// Rotates pairs of values (one of each half) by their angle; the others stay.
void apply_rope(float* x, const float* cosine, const float* sine, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[i], b = x[i + pairs];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + pairs] = b * cosine[i] + a * sine[i];
    }
}

constexpr float kLargestHalf = 65504.0f;

// Writes one head into its page: value i of the token in `slot` goes to first + i * step.
void write_head(const KvCache& kv, int64_t width, uint8_t* page, const float* x, int64_t first,
                int64_t step, int64_t slot) {
    if (kv.bits == 32) {
        float* to = reinterpret_cast<float*>(page);
        for (int64_t i = 0; i < width; ++i) to[first + i * step] = x[i];
    } else if (kv.bits == 16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(page);
        const F32x16 max_abs = set1(kLargestHalf), negative_limit = set1(-kLargestHalf);
        for (int64_t i = 0; i < width; i += kLanes) {
            uint16_t halves[kLanes];
            const F32x16 part = load_first(x + i, width - i, 0.0f);
            store_half(halves, add(vmin(vmax(part, negative_limit), max_abs), sub(part, part)));
            for (int64_t lane = 0; lane < kLanes && i + lane < width; ++lane)
                to[first + (i + lane) * step] = halves[lane];
        }
    } else {
        float max_abs = 0.0f, nan_marker = 0.0f;
        for (int64_t i = 0; i < width; ++i) nan_marker += x[i] - x[i];
        for (int64_t i = 0; i < width; ++i)
            max_abs = x[i] > max_abs ? x[i] : -x[i] > max_abs ? -x[i] : max_abs;
        const float inverse = max_abs > 0.0f ? 127.0f / max_abs : 0.0f;
        int8_t* to = reinterpret_cast<int8_t*>(page);
        for (int64_t i = 0; i < width; i += kLanes) {
            int8_t bytes[kLanes];
            store_i8(bytes, mul(load_first(x + i, width - i, 0.0f), set1(inverse)));
            for (int64_t lane = 0; lane < kLanes && i + lane < width; ++lane)
                to[first + (i + lane) * step] = bytes[lane];
        }
        reinterpret_cast<float*>(page + kPage * padded_width(width))[slot] =
            max_abs / 127.0f + nan_marker;
    }
}

// Factor of queries at a position.
inline float query_scale(const Op& op, int64_t position) {
    if (!(op.cap > 0.0f)) return 1.0f;
    return 1.0f + op.scale * portable_log(1.0f + std::floor(static_cast<float>(position) / op.cap));
}

}  // namespace

void rope(const RunContext& run, const Op& op, Worker& worker) {
    const KvCache& kv = run.kv;
    const Batch& batch = run.batch;
    const Buffer& qkv = run.buffers[op.source];
    const int64_t heads = kv.layers[op.layer].heads, width = kv.layers[op.layer].head_width;
    const int64_t group = op.heads / heads;
    for_each_row(worker, 0, batch.count * heads, [&](int64_t task) {
        const int64_t token = task / heads, head = task % heads;
        const int64_t position = batch.positions[token];
        float* query = qkv.row(token) + head * group * width;
        const bool has_keys = !(op.flags & kQueriesOnly);
        float* key = qkv.row(token) + (op.heads + head) * width;
        float* value = qkv.row(token) + (op.heads + heads + head) * width;
        if (op.flags & kKeysAsValues && has_keys)
            for (int64_t i = 0; i < width; ++i) value[i] = key[i];
        if (op.flags & kNormValues && has_keys)
            norm_row(value, width, nullptr, nullptr, false, op.epsilon, value);
        if (op.vector >= 0) {
            for (int64_t i = 0; i < group; ++i)
                norm_row(query + i * width, width, run.vectors[op.vector].data, nullptr, false,
                         op.epsilon, query + i * width);
            if (has_keys)
                norm_row(key, width, run.vectors[op.second_vector].data, nullptr, false, op.epsilon,
                         key);
        }
        if (op.rotary >= 0) {
            const RopeTable& table = run.rotary[op.rotary];
            const float* cosine = table.cosine + position * table.pairs;
            const float* sine = table.sine + position * table.pairs;
            for (int64_t i = 0; i < group; ++i)
                apply_rope(query + i * width, cosine, sine, table.pairs);
            if (has_keys) apply_rope(key, cosine, sine, table.pairs);
        }
        const float scale = query_scale(op, position);
        if (scale != 1.0f)
            for (int64_t i = 0; i < group * width; ++i) query[i] *= scale;
        if (!has_keys) return;
        const auto write = [&](const int64_t* pages) {
            const int64_t page = pages[position / kPage], slot = position % kPage;
            write_head(kv, width, kv_page(kv, op.layer, 0, head, page), key, slot, kPage, slot);
            write_head(kv, width, kv_page(kv, op.layer, 1, head, page), value,
                       slot * padded_width(width), 1, slot);
        };
        write(batch.pages(run.row_of[token]));
        if (batch.echo_starts == nullptr) return;
        for (int64_t i = batch.echo_starts[token]; i < batch.echo_starts[token + 1]; ++i)
            write(batch.table + batch.echo_slots[i] * batch.table_columns);
    });
}

}  // namespace ISA
}  // namespace unspool
