// Row-wise operations: embedding, norms, gather, activations, gates, scales.
#include <cstring>

#include "../repack.h"
#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

void embed(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    const Matrix& table = run.matrices[op.matrix];
    for_each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* row = x.row(token);
        unspool_unpack(&table, run.batch.tokens[token], run.batch.tokens[token] + 1, row);
        if (op.scale != 1.0f)
            for (int64_t i = 0; i < x.width; ++i) row[i] *= op.scale;
        if (op.vector >= 0) {
            const float* position_row =
                run.vectors[op.vector].data + run.batch.positions[token] * x.width;
            for (int64_t i = 0; i < x.width; ++i) row[i] += position_row[i];
        }
    });
}

void norm(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    const float* weight = run.vectors[op.vector].data;
    const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
    const int64_t parts = op.heads > 0 ? op.heads : 1;
    for_each_row(worker, 0, rows_of(run, op) * parts, [&](int64_t task) {
        const int64_t row = task / parts, offset = op.offset + task % parts * op.width;
        float* to = target.row(row) + offset;
        float* normed = source.row(row) + offset;  // in place, also when it is added afterwards
        const float* group_weight =
            op.flags & kGroupWeights ? weight + task % parts * op.width : weight;
        norm_row(normed, op.width, group_weight, bias, op.flags & kCentred, op.epsilon, normed);
        if (to == normed) return;
        for (int32_t i = 0; i < op.width; ++i)
            to[i] = op.flags & kAddToTarget ? to[i] + normed[i] : normed[i];
    });
}

void gather(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    for_each_row(worker, 0, run.batch.selected_count, [&](int64_t row) {
        std::memcpy(target.row(row), source.row(run.batch.selected[row]),
                    source.width * sizeof(float));
    });
}

void activate(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    for_each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        activate_row(x.row(row), x.width, op.activation, false, op.cap, x.row(row));
        if (op.source < 0) return;
        const float* factor = run.buffers[op.source].row(row) + op.offset;
        for (int64_t i = 0; i < x.width; ++i) x.row(row)[i] *= factor[i];
    });
}

void gate(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& target = run.buffers[op.target];
    const Buffer& source = run.buffers[op.source];
    for_each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        const float* factor = source.row(row) + op.offset;
        float* x = target.row(row);
        const int64_t width = op.heads == 1 ? target.width : op.width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t count = width - i;
            const F32x16 gate =
                op.heads == 1 ? set1(factor[0]) : load_first(factor + i, count, 0.0f);
            store_first(x + i, count,
                        mul(load_first(x + i, count, 0.0f), activate(op.activation, gate)));
        }
    });
}

void scale(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    const F32x16 factor =
        set1(op.vector >= 0 ? op.scale * run.vectors[op.vector].data[0] : op.scale);
    for_each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        const float* from = source.row(row);
        float* to = target.row(row);
        for (int64_t i = 0; i < target.width; i += kLanes) {
            const int64_t count = target.width - i;
            F32x16 part = mul(load_first(from + i, count, 0.0f), factor);
            if (op.flags & kAddToTarget) part = add(load_first(to + i, count, 0.0f), part);
            store_first(to + i, count, part);
        }
    });
}

void softcap(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    const F32x16 cap = set1(op.cap);
    for_each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        for (int64_t offset = 0; offset < x.width; offset += kLanes) {
            const int64_t count = x.width - offset;
            float* p = x.row(row) + offset;
            store_first(p, count, mul(cap, tanh16(div(load_first(p, count, 0.0f), cap))));
        }
    });
}

}  // namespace ISA
}  // namespace unspool
