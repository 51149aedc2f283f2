// Heads that keep a matrix S each, in which values are found by keys: what gated DeltaNet and
// Mamba-2 have in common.
//
// Columns of S know nothing of each other: a task takes some of them through all tokens of a row,
// in memory that stays close. So a text's bits are the same however it is cut.
#pragma once
#include "prepare.h"

namespace unspool {
namespace ISA {

constexpr int64_t kWidestKey = 256;  // plan_recurrent.py refuses wider ones
constexpr int64_t kColumns = 2 * kLanes;

// Widths of a head and of all, and how many tasks go over the columns of one.
struct HeadShape {
    int64_t key, value, keys, heads, blocks;

    explicit HeadShape(const Op& op)
        : key(op.width),
          value(op.value_width),
          keys(op.key_heads * key),
          heads(op.heads),
          blocks((value + kColumns - 1) / kColumns) {}
};

// Where queries, keys and values begin in the rows of the source.
struct HeadPlaces {
    int64_t query, key, value;
};

// A row of S in 32 columns.
struct Row {
    F32x16 a, b;
};
UNSPOOL_INLINE Row load_row(const float* at) { return {load(at), load(at + kLanes)}; }
UNSPOOL_INLINE Row add_row(const Row& x, const Row& y) { return {add(x.a, y.a), add(x.b, y.b)}; }
// x * by + to
UNSPOOL_INLINE Row fma_row(const Row& x, const F32x16& by, const Row& to) {
    return {fma(x.a, by, to.a), fma(x.b, by, to.b)};
}
UNSPOOL_INLINE Row mul_row(const Row& x, const F32x16& by) { return {mul(x.a, by), mul(x.b, by)}; }

// One row of S: it fades, what is written is added, and it is read.
UNSPOOL_INLINE Row write_row(float* at, const Row& written, F32x16 stays, float key, float query,
                             const Row& read) {
    const Row now = fma_row(written, set1(key), mul_row(load_row(at), stays));
    store(at, now.a);
    store(at + kLanes, now.b);
    return fma_row(now, set1(query), read);
}

// S = stays S + k written; gives q S. Even and odd rows are summed each by themselves, so that no
// sum waits for the one before it.
UNSPOOL_INLINE Row write_and_read(float* columns, int64_t rows, const float* key,
                                  const float* query, F32x16 stays, const Row& written) {
    Row even = {zero(), zero()}, odd = even;
    int64_t i = 0;
    for (; i + 1 < rows; i += 2) {
        even = write_row(columns + i * kColumns, written, stays, key[i], query[i], even);
        odd =
            write_row(columns + (i + 1) * kColumns, written, stays, key[i + 1], query[i + 1], odd);
    }
    if (i < rows) even = write_row(columns + i * kColumns, written, stays, key[i], query[i], even);
    return add_row(even, odd);
}

inline float squares_of(const float* columns, int64_t rows) {
    F32x16 total = zero();
    for (int64_t i = 0; i < rows * kColumns; i += kLanes)
        total = fma(load(columns + i), load(columns + i), total);
    return sum(total);
}

// All tokens of a row of the batch, in 32 columns of one head's matrix. Rows of the buffer
// `op.other` hold at `op.offset` how much each head writes, then how much stays in each.
// `step(columns, key, query, stays, writes, value)` takes one token.
template <class Step>
void head_columns(const Run& run, const Op& op, const HeadPlaces& places, int64_t row, int64_t head,
                  int64_t block, Step step) {
    const Batch& batch = run.batch;
    const HeadShape shape(op);
    const int64_t first = block * kColumns, group = shape.heads / op.key_heads;
    const int64_t key_head = op.flags & kTiledHeads ? head % op.key_heads : head / group;
    const int64_t at = op.state + head * shape.key * shape.value + first;
    const int64_t left[2] = {shape.value - first, shape.value - first - kLanes};
    alignas(64) float columns[kWidestKey * kColumns];
    const int64_t read = batch.states[2 * row];
    for (int64_t i = 0; i < shape.key; ++i)
        for (int part = 0; part < 2; ++part) {
            F32x16 known = zero();
            if (read >= 0 && left[part] > 0)
                known = load_first(batch.state(read) + at + i * shape.value + part * kLanes,
                                   left[part], 0.0f);
            store(columns + i * kColumns + part * kLanes, known);
        }
    const Buffer& other = run.buffers[op.other];
    for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
        const float* from = run.buffers[op.source].row(token);
        const float* writes = other.row(token) + op.offset;
        const float* stays = writes + shape.heads;
        const float* value = from + places.value + head * shape.value + first;
        float* to = run.buffers[op.target].row(token) + head * shape.value + first;
        Row values = {load_first(value, left[0], 0.0f), zero()};
        if (left[1] > 0) values.b = load_first(value + kLanes, left[1], 0.0f);
        const Row out =
            step(columns, from + places.key + key_head * shape.key,
                 from + places.query + key_head * shape.key, stays[head], writes[head], values);
        store_first(to, left[0], out.a);
        if (left[1] > 0) store_first(to + kLanes, left[1], out.b);
        each_state_slot(batch, row, token, [&](float* state) {
            for (int64_t i = 0; i < shape.key; ++i)
                for (int part = 0; part < 2; ++part)
                    if (left[part] > 0)
                        store_first(state + at + i * shape.value + part * kLanes, left[part],
                                    load(columns + i * kColumns + part * kLanes));
        });
        float* seen = seen_of(run, op, token);
        if (seen == nullptr) continue;
        seen += head * (2 + shape.blocks);
        seen[0] = writes[head];
        seen[1] = stays[head];
        seen[2 + block] = squares_of(columns, shape.key);
    }
}

// log(1 + e^x)
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace ISA
}  // namespace unspool
