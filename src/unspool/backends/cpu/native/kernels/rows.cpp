// Operations that go row by row: tokens to vectors, norms, the rows whose logits are wanted.
#include <cstring>

#include "../repack.h"
#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

void embed(const Run& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    const Matrix& table = run.matrices[op.matrix];
    each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* row = x.row(token);
        unspool_unpack(&table, run.batch.tokens[token], run.batch.tokens[token] + 1, row);
        if (op.scale != 1.0f)
            for (int64_t i = 0; i < x.width; ++i) row[i] *= op.scale;
        if (op.vector >= 0) {
            const float* place = run.vectors[op.vector].data + run.batch.positions[token] * x.width;
            for (int64_t i = 0; i < x.width; ++i) row[i] += place[i];
        }
    });
}

void norm(const Run& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    const float* weight = run.vectors[op.vector].data;
    const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
    const int64_t parts = op.heads > 0 ? op.heads : 1;
    each_row(worker, 0, rows_of(run, op) * parts, [&](int64_t task) {
        const int64_t row = task / parts, at = op.offset + task % parts * op.width;
        float* to = target.row(row) + at;
        float* normed = source.row(row) + at;  // in place, also where it is then added
        const float* its = op.flags & kOwnWeights ? weight + task % parts * op.width : weight;
        norm_row(normed, op.width, its, bias, op.flags & kCentred, op.epsilon, normed);
        if (to == normed) return;
        for (int32_t i = 0; i < op.width; ++i)
            to[i] = op.flags & kAddToTarget ? to[i] + normed[i] : normed[i];
    });
}

void gather(const Run& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    each_row(worker, 0, run.batch.wanted_count, [&](int64_t row) {
        std::memcpy(target.row(row), source.row(run.batch.wanted[row]),
                    source.width * sizeof(float));
    });
}

void activate(const Run& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        activate_row(x.row(row), x.width, op.activation, false, op.cap, x.row(row));
        if (op.source < 0) return;
        const float* by = run.buffers[op.source].row(row) + op.offset;
        for (int64_t i = 0; i < x.width; ++i) x.row(row)[i] *= by[i];
    });
}

void gate(const Run& run, const Op& op, Worker& worker) {
    const Buffer& target = run.buffers[op.target];
    const Buffer& source = run.buffers[op.source];
    each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        const float* by = source.row(row) + op.offset;
        float* x = target.row(row);
        const int64_t width = op.heads == 1 ? target.width : op.width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t left = width - i;
            const F32x16 gate = op.heads == 1 ? set1(by[0]) : load_first(by + i, left, 0.0f);
            store_first(x + i, left,
                        mul(load_first(x + i, left, 0.0f), activate(op.activation, gate)));
        }
    });
}

void scale(const Run& run, const Op& op, Worker& worker) {
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    const F32x16 by = set1(op.vector >= 0 ? op.scale * run.vectors[op.vector].data[0] : op.scale);
    each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        const float* from = source.row(row);
        float* to = target.row(row);
        for (int64_t i = 0; i < target.width; i += kLanes) {
            const int64_t left = target.width - i;
            F32x16 part = mul(load_first(from + i, left, 0.0f), by);
            if (op.flags & kAddToTarget) part = add(load_first(to + i, left, 0.0f), part);
            store_first(to + i, left, part);
        }
    });
}

void softcap(const Run& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.target];
    const F32x16 cap = set1(op.cap);
    each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        for (int64_t at = 0; at < x.width; at += kLanes) {
            const int64_t left = x.width - at;
            float* p = x.row(row) + at;
            store_first(p, left, mul(cap, tanh16(div(load_first(p, left, 0.0f), cap))));
        }
    });
}

}  // namespace ISA
}  // namespace unspool
