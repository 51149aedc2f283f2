// Gated DeltaNet: each head has a key-value matrix S. Each token decays it, corrects its value at
// the token's key, and reads it with the query:
//
//     S *= decay        S += k (beta (v - k S))        o = q S
#include "kernels.h"
#include "recurrent_heads.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kKeyEpsilon = 1e-6f;

// Normalizes a key or query to length one, times a factor.
void normalize(float* x, int64_t width, float factor) {
    F32x16 squares = zero();
    for (int64_t i = 0; i < width; i += kLanes) {
        const F32x16 part = load_first(x + i, width - i, 0.0f);
        squares = fma(part, part, squares);
    }
    const F32x16 scale16 = set1(factor / std::sqrt(sum(squares) + kKeyEpsilon));
    for (int64_t i = 0; i < width; i += kLanes)
        store_first(x + i, width - i, mul(load_first(x + i, width - i, 0.0f), scale16));
}

// Decay and write gate of each head, in place of a and b.
void compute_gates(const RunContext& run, const Op& op, float* beta, float* decay) {
    const float* rate = run.vectors[op.vector].data;
    const float* shift = run.vectors[op.second_vector].data;
    for (int64_t head = 0; head < op.heads; ++head) {
        decay[head] = portable_exp(rate[head] * softplus(decay[head] + shift[head]));
        beta[head] = 1.0f / (1.0f + portable_exp(-beta[head]));
    }
}

// One token: predicted = k S, S = decay S + k (beta (v - decay predicted)), o = q S, in 32 columns
// of S.
UNSPOOL_INLINE Row delta_step(float* columns, int64_t rows, const float* key, const float* query,
                              float decay, float beta, const Row& value) {
    Row even = {zero(), zero()}, odd = even;
    int64_t i = 0;
    for (; i + 1 < rows; i += 2) {
        even = fma_row(load_row(columns + i * kColumns), set1(key[i]), even);
        odd = fma_row(load_row(columns + (i + 1) * kColumns), set1(key[i + 1]), odd);
    }
    if (i < rows) even = fma_row(load_row(columns + i * kColumns), set1(key[i]), even);
    const F32x16 decay16 = set1(decay);
    const Row predicted = mul_row(add_row(even, odd), decay16);
    const Row correction =
        mul_row({sub(value.a, predicted.a), sub(value.b, predicted.b)}, set1(beta));
    return update_and_read(columns, rows, key, query, decay16, correction);
}

}  // namespace

void delta(const RunContext& run, const Op& op, Worker& worker) {
    const HeadShape shape(op);
    const float factor = 1.0f / std::sqrt(static_cast<float>(shape.key));
    for_each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* x = run.buffers[op.source].row(token);
        for (int64_t head = 0; head < 2 * op.key_heads; ++head)
            normalize(x + head * shape.key, shape.key, head < op.key_heads ? factor : 1.0f);
        float* beta = run.buffers[op.second_source].row(token) + op.offset;
        compute_gates(run, op, beta, beta + shape.heads);
    });
    const HeadPlaces places = {0, shape.keys, 2 * shape.keys};
    const int64_t tasks = shape.heads * shape.blocks;
    for_each_row(worker, 1, run.batch.rows * tasks, [&](int64_t task) {
        const int64_t index = task % tasks;
        head_columns(run, op, places, task / tasks, index / shape.blocks, index % shape.blocks,
                     [&](float* columns, const float* key, const float* query, float decay,
                         float beta, const Row& value) {
                         return delta_step(columns, shape.key, key, query, decay, beta, value);
                     });
    });
}

}  // namespace ISA
}  // namespace unspool
