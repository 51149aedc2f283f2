// Mamba-2: each head has a key-value matrix S. Each token decays it, adds its value at its key, and
// reads it with the query; the value also has a skip connection:
//
//     S = decay S + k (dt v)        o = q S + d v        decay = e^(rate dt)
#include "kernels.h"
#include "recurrent_heads.h"

namespace unspool {
namespace ISA {

void mamba(const RunContext& run, const Op& op, Worker& worker) {
    const HeadShape shape(op);
    const float* rate = run.vectors[op.vector].data;
    const float* shift = run.vectors[op.second_vector].data;
    const float* skips = run.vectors[op.third_vector].data;
    for_each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* dt = run.buffers[op.second_source].row(token) + op.offset;
        float* decay = dt + shape.heads;
        for (int64_t head = 0; head < shape.heads; ++head) {
            dt[head] = softplus(dt[head] + shift[head]);
            decay[head] = portable_exp(rate[head] * dt[head]);
        }
    });
    const int64_t values = shape.heads * shape.value;
    const HeadPlaces places = {values + shape.keys, values, 0};
    const int64_t tasks = shape.heads * shape.blocks;
    for_each_row(worker, 1, run.batch.rows * tasks, [&](int64_t task) {
        const int64_t index = task % tasks, head = index / shape.blocks;
        const F32x16 skip = set1(skips[head]);
        head_columns(run, op, places, task / tasks, head, index % shape.blocks,
                     [&](float* columns, const float* key, const float* query, float decay,
                         float dt, const Row& value) {
                         const Row read = update_and_read(columns, shape.key, key, query,
                                                          set1(decay), mul_row(value, set1(dt)));
                         return fma_row(value, skip, read);
                     });
    });
}

}  // namespace ISA
}  // namespace unspool
