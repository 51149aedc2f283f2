// Heads with a key-value matrix S each: common code of gated DeltaNet and Mamba-2.
//
// Columns of S are independent: a task takes some of them through all tokens of a row, in local
// memory. Results are bit-identical for any division of a sequence into steps.
#pragma once
#include "../portable_math.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

constexpr int64_t kMaxKeyWidth = 256;  // the plan builder rejects wider ones
constexpr int64_t kColumns = 2 * kLanes;

// Widths of one head and of all keys, and number of tasks per head.
struct HeadShape {
    int64_t key, value, keys, heads, blocks;

    explicit HeadShape(const Op& op)
        : key(op.width),
          value(op.value_width),
          keys(op.key_heads * key),
          heads(op.heads),
          blocks((value + kColumns - 1) / kColumns) {}
};

// Offsets of queries, keys and values in the rows of the source.
struct HeadPlaces {
    int64_t query, key, value;
};

// A row of S in 32 columns.
struct Row {
    F32x16 a, b;
};
UNSPOOL_INLINE Row load_row(const float* row) { return {load(row), load(row + kLanes)}; }
UNSPOOL_INLINE Row add_row(const Row& x, const Row& y) { return {add(x.a, y.a), add(x.b, y.b)}; }
// x * by + to
UNSPOOL_INLINE Row fma_row(const Row& x, const F32x16& factor, const Row& target) {
    return {fma(x.a, factor, target.a), fma(x.b, factor, target.b)};
}
UNSPOOL_INLINE Row mul_row(const Row& x, const F32x16& factor) {
    return {mul(x.a, factor), mul(x.b, factor)};
}

// One row of S: decay, add the update, accumulate the read.
UNSPOOL_INLINE Row update_row(float* row, const Row& update, F32x16 decay, float key, float query,
                              const Row& sum) {
    const Row updated = fma_row(update, set1(key), mul_row(load_row(row), decay));
    store(row, updated.a);
    store(row + kLanes, updated.b);
    return fma_row(updated, set1(query), sum);
}

// S = decay S + k update; returns q S. Even and odd rows have separate sums, to shorten the
// dependency chain.
UNSPOOL_INLINE Row update_and_read(float* columns, int64_t rows, const float* key,
                                   const float* query, F32x16 decay, const Row& update) {
    Row even = {zero(), zero()}, odd = even;
    int64_t i = 0;
    for (; i + 1 < rows; i += 2) {
        even = update_row(columns + i * kColumns, update, decay, key[i], query[i], even);
        odd =
            update_row(columns + (i + 1) * kColumns, update, decay, key[i + 1], query[i + 1], odd);
    }
    if (i < rows) even = update_row(columns + i * kColumns, update, decay, key[i], query[i], even);
    return add_row(even, odd);
}

inline float squares_of(const float* columns, int64_t rows) {
    F32x16 total = zero();
    for (int64_t i = 0; i < rows * kColumns; i += kLanes)
        total = fma(load(columns + i), load(columns + i), total);
    return sum(total);
}

// All tokens of a row of the batch, in 32 columns of one head's matrix. Rows of `op.second_source`
// hold at `op.offset` the write gate of each head, then the decay. `step(columns, key, query,
// decay, write_gate, value)` computes one token.
template <class Step>
void head_columns(const RunContext& run, const Op& op, const HeadPlaces& places, int64_t row,
                  int64_t head, int64_t block, Step step) {
    const Batch& batch = run.batch;
    const HeadShape shape(op);
    const int64_t first = block * kColumns, group = shape.heads / op.key_heads;
    const int64_t key_head = op.flags & kTiledHeads ? head % op.key_heads : head / group;
    const int64_t offset = op.state_offset + head * shape.key * shape.value + first;
    const int64_t remaining[2] = {shape.value - first, shape.value - first - kLanes};
    alignas(64) float columns[kMaxKeyWidth * kColumns];
    const int64_t read_slot = batch.states[2 * row];
    for (int64_t i = 0; i < shape.key; ++i)
        for (int part = 0; part < 2; ++part) {
            F32x16 initial = zero();
            if (read_slot >= 0 && remaining[part] > 0)
                initial =
                    load_first(batch.state(read_slot) + offset + i * shape.value + part * kLanes,
                               remaining[part], 0.0f);
            store(columns + i * kColumns + part * kLanes, initial);
        }
    const Buffer& gates = run.buffers[op.second_source];
    for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
        const float* source = run.buffers[op.source].row(token);
        const float* write_gate = gates.row(token) + op.offset;
        const float* decay = write_gate + shape.heads;
        const float* value = source + places.value + head * shape.value + first;
        float* target = run.buffers[op.target].row(token) + head * shape.value + first;
        Row values = {load_first(value, remaining[0], 0.0f), zero()};
        if (remaining[1] > 0) values.b = load_first(value + kLanes, remaining[1], 0.0f);
        const Row out = step(columns, source + places.key + key_head * shape.key,
                             source + places.query + key_head * shape.key, decay[head],
                             write_gate[head], values);
        store_first(target, remaining[0], out.a);
        if (remaining[1] > 0) store_first(target + kLanes, remaining[1], out.b);
        for_each_state_slot(batch, row, token, [&](float* state) {
            for (int64_t i = 0; i < shape.key; ++i)
                for (int part = 0; part < 2; ++part)
                    if (remaining[part] > 0)
                        store_first(state + offset + i * shape.value + part * kLanes,
                                    remaining[part], load(columns + i * kColumns + part * kLanes));
        });
        float* stats = stats_of(run, op, token);
        if (stats == nullptr) continue;
        stats += head * (2 + shape.blocks);
        stats[0] = write_gate[head];
        stats[1] = decay[head];
        stats[2 + block] = squares_of(columns, shape.key);
    }
}

// log(1 + e^x)
inline float softplus(float x) {
    return x > 20.0f ? x : static_cast<float>(portable_log1p(portable_exp(static_cast<double>(x))));
}

}  // namespace ISA
}  // namespace unspool
