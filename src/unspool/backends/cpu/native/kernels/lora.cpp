// LoRA after a product: target += up * (down * prepared source), with each row's adapter.
//
// Ranks are small: first a row's `down` is one task, then workers take blocks of sixteen outputs.
// The order of a row's sums does not depend on the batch.
#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

namespace {

// Updates of the operation's matrices by a row's adapter; null: none.
const LowRank* row_updates(const RunContext& run, const Op& op, int64_t row) {
    const Adapters& adapters = *run.batch.adapters;
    const int64_t token = op.rows == kSelected ? run.batch.selected[row] : row;
    const int64_t adapter = adapters.row_adapters[run.row_of[token]];
    if (adapter < 0) return nullptr;
    const LowRank* parts = adapters.parts + adapter * run.matrix_count + op.matrix;
    for (int32_t i = 0; i < op.matrix_count; ++i)
        if (parts[i].down != nullptr) return parts;
    return nullptr;
}

void project_down(const RunContext& run, const Op& op, int64_t row) {
    const LowRank* parts = row_updates(run, op, row);
    if (parts == nullptr) return;
    float* x = run.prepared.values + row * run.prepared.columns;
    prepare_row(run, op, run.buffers[op.source].row(row), run.prepared, row, false, x);
    float* low = run.low + row * run.batch.adapters->max_rank;
    for (int32_t i = 0; i < op.matrix_count; ++i) {
        if (parts[i].down == nullptr) continue;
        for (int64_t j = 0; j < parts[i].rank; ++j)
            *low++ = row_dot(x, parts[i].down + j * op.width, op.width);
    }
}

// Blocks [first, last), counted over the operation's matrices.
void project_up(const RunContext& run, const Op& op, int64_t row, int64_t first, int64_t last) {
    const LowRank* parts = row_updates(run, op, row);
    if (parts == nullptr) return;
    const float* low = run.low + row * run.batch.adapters->max_rank;
    float* target = run.buffers[op.target].row(row);
    int64_t block_offset = 0;
    for (int32_t i = 0; i < op.matrix_count; ++i) {
        const Matrix& m = run.matrices[op.matrix + i];
        const int64_t blocks = blocks_of(m), rank = parts[i].rank;
        const bool has_update = parts[i].down != nullptr;
        for (int64_t block = first > block_offset ? first - block_offset : 0;
             has_update && block < blocks && block < last - block_offset; ++block) {
            float* to = target + block * kLanes;
            const int64_t count = m.rows - block * kLanes;
            F32x16 total = zero();
            for (int64_t j = 0; j < rank; ++j)
                total = fma(load(parts[i].up + (block * rank + j) * kLanes), set1(low[j]), total);
            store_first(to, count, add(load_first(to, count, 0.0f), total));
        }
        if (has_update) low += rank;
        block_offset += blocks;
        target += m.rows;
    }
}

}  // namespace

void lora(const RunContext& run, const Op& op, Worker& worker) {
    const int64_t rows = rows_of(run, op);
    for_each_row(worker, 2, rows, [&](int64_t row) { project_down(run, op, row); });
    int64_t blocks = 0;
    for (int32_t i = 0; i < op.matrix_count; ++i) blocks += blocks_of(run.matrices[op.matrix + i]);
    const int64_t tasks = num_tasks(blocks, worker, 2);
    worker.for_each(3, tasks, [&](int64_t task) {
        for (int64_t row = 0; row < rows; ++row)
            project_up(run, op, row, blocks * task / tasks, blocks * (task + 1) / tasks);
    });
}

}  // namespace ISA
}  // namespace unspool
