// Gated DeltaNet: each head keeps a matrix in which values are found by keys. Token by token, it
// fades, is corrected towards the token's value at its key, and is read with its query:
//
//     S *= decay        S += k (beta (v - k S))        o = q S
//
// Columns of S know nothing of each other: a task takes some of them through all tokens of a row,
// in memory that stays close. So a text's bits are the same however it is cut.
#include <cmath>

#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr int64_t kWidestKey = 256;  // plan_recurrent.py refuses wider ones
constexpr int64_t kColumns = 2 * kLanes;
constexpr float kKeyEpsilon = 1e-6f;

// Widths of a head and of all, and how many tasks go over the columns of one.
struct Shape {
    int64_t key, value, keys, heads, blocks;

    explicit Shape(const Op& op)
        : key(op.width),
          value(op.value_width),
          keys(op.key_heads * key),
          heads(op.heads),
          blocks((value + kColumns - 1) / kColumns) {}
};

// A key or query of length one, times a factor.
void make_unit(float* x, int64_t width, float factor) {
    F32x16 squares = zero();
    for (int64_t i = 0; i < width; i += kLanes) {
        const F32x16 part = load_first(x + i, width - i, 0.0f);
        squares = fma(part, part, squares);
    }
    const F32x16 by = set1(factor / std::sqrt(sum(squares) + kKeyEpsilon));
    for (int64_t i = 0; i < width; i += kLanes)
        store_first(x + i, width - i, mul(load_first(x + i, width - i, 0.0f), by));
}

// How much of each head's matrix stays and how much is corrected, in place of a and b.
void make_gates(const Run& run, const Op& op, float* beta, float* decay) {
    const float* rate = run.vectors[op.vector].data;
    const float* shift = run.vectors[op.second_vector].data;
    for (int64_t head = 0; head < op.heads; ++head) {
        const float x = decay[head] + shift[head];
        const float soft = x > 20.0f ? x : std::log1p(std::exp(x));
        decay[head] = std::exp(rate[head] * soft);
        beta[head] = 1.0f / (1.0f + std::exp(-beta[head]));
    }
}

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

// The second half of a token in one row of S: it fades, is corrected and read.
UNSPOOL_INLINE Row correct(float* at, const Row& wrong, F32x16 stays, float key, float query,
                           const Row& read) {
    const Row now = fma_row(wrong, set1(key), mul_row(load_row(at), stays));
    store(at, now.a);
    store(at + kLanes, now.b);
    return fma_row(now, set1(query), read);
}

// One token: found = k S, S = decay S + k (beta (v - decay found)), o = q S, in 32 columns of S.
// Even and odd rows are summed each by themselves, so that no sum waits for the one before it.
UNSPOOL_INLINE Row step(float* columns, int64_t rows, const float* key, const float* query,
                        float decay, float beta, const Row& value) {
    const Row nothing = {zero(), zero()};
    Row even = nothing, odd = nothing;
    int64_t i = 0;
    for (; i + 1 < rows; i += 2) {
        even = fma_row(load_row(columns + i * kColumns), set1(key[i]), even);
        odd = fma_row(load_row(columns + (i + 1) * kColumns), set1(key[i + 1]), odd);
    }
    if (i < rows) even = fma_row(load_row(columns + i * kColumns), set1(key[i]), even);
    const F32x16 stays = set1(decay);
    const Row found = mul_row(add_row(even, odd), stays);
    const Row wrong = mul_row({sub(value.a, found.a), sub(value.b, found.b)}, set1(beta));
    even = odd = nothing;
    for (i = 0; i + 1 < rows; i += 2) {
        even = correct(columns + i * kColumns, wrong, stays, key[i], query[i], even);
        odd = correct(columns + (i + 1) * kColumns, wrong, stays, key[i + 1], query[i + 1], odd);
    }
    if (i < rows) even = correct(columns + i * kColumns, wrong, stays, key[i], query[i], even);
    return add_row(even, odd);
}

float squares_of(const float* columns, int64_t rows) {
    F32x16 total = zero();
    for (int64_t i = 0; i < rows * kColumns; i += kLanes)
        total = fma(load(columns + i), load(columns + i), total);
    return sum(total);
}

// All tokens of a row, in 32 columns of one head's matrix.
void delta_block(const Run& run, const Op& op, int64_t row, int64_t head, int64_t block) {
    const Batch& batch = run.batch;
    const Shape shape(op);
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
        const float* beta = other.row(token) + op.offset;
        const float* decay = beta + shape.heads;
        const float* value = from + 2 * shape.keys + head * shape.value + first;
        float* to = run.buffers[op.target].row(token) + head * shape.value + first;
        Row values = {load_first(value, left[0], 0.0f), zero()};
        if (left[1] > 0) values.b = load_first(value + kLanes, left[1], 0.0f);
        const Row out = step(columns, shape.key, from + shape.keys + key_head * shape.key,
                             from + key_head * shape.key, decay[head], beta[head], values);
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
        seen[0] = beta[head];
        seen[1] = decay[head];
        seen[2 + block] = squares_of(columns, shape.key);
    }
}

}  // namespace

void delta(const Run& run, const Op& op, Worker& worker) {
    const Shape shape(op);
    const float factor = 1.0f / std::sqrt(static_cast<float>(shape.key));
    each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* x = run.buffers[op.source].row(token);
        for (int64_t head = 0; head < 2 * op.key_heads; ++head)
            make_unit(x + head * shape.key, shape.key, head < op.key_heads ? factor : 1.0f);
        float* beta = run.buffers[op.other].row(token) + op.offset;
        make_gates(run, op, beta, beta + shape.heads);
    });
    const int64_t tasks = shape.heads * shape.blocks;
    each_row(worker, 1, run.batch.rows * tasks, [&](int64_t task) {
        const int64_t within = task % tasks;
        delta_block(run, op, task / tasks, within / shape.blocks, within % shape.blocks);
    });
}

}  // namespace ISA
}  // namespace unspool
