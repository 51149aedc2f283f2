// target = matrices * prepared source (+ bias), or target += that.
//
// Up to four rows: each worker prepares all of them, which is quicker than synchronizing. More rows
// are prepared in parallel first. Then workers take blocks of weights. A few rows are multiplied
// from the packed weights; for more, a block is unpacked first, except on AVX2, where products are
// so slow that unpacking for every four rows does not matter.
#include "linear.h"
#include "gemm.h"
#include "prepare.h"
#if defined(ISA_neon)
#include "gemm_neon.h"
#endif
#include "kernels.h"

namespace unspool {

namespace UNSPOOL_GEMV {
void multiply_packed(const GemmArgs& args, const Matrix& m, int64_t column, int64_t first,
                     int64_t last);
}

namespace ISA {

namespace {

// An unpacked block times rows [row, row + T); a pack may extend past the last row, since buffers
// have slack.
template <int Group, bool Minima, int T>
inline void gemm_row_group(const GemmArgs& args, const Matrix& m, int64_t column, int64_t block,
                           int64_t row, const UnpackedBlock& unpacked) {
    float* target = args.run->buffers[args.op->target].row(row) + column + block * kLanes;
    for (int t = 0; t < T; ++t) prefetch(target + t * args.run->buffers[args.op->target].width);
    F32x16 out[T];
#if defined(ISA_amx)
    multiply_tiles<Group, Minima>(unpacked, tiles_of(m), *args.acts, row, out);
#elif defined(ISA_neon)
    multiply_by_quarters<Group, Minima, T>(unpacked, tiles_of(m), *args.acts, row, out);
#else
    multiply_unpacked<Group, Minima, T>(unpacked, tiles_of(m), *args.acts, row, out);
#endif
    for (int t = 0; t < T && row + t < args.last; ++t)
        epilogue(args, m, column, block, row + t, out[t]);
}

// All rows times an unpacked block: compiled once for all formats with the same groups.
template <int Group, bool Minima>
UNSPOOL_NOINLINE void gemm_rows(const GemmArgs& args, const Matrix& m, int64_t column,
                                int64_t block, const UnpackedBlock& unpacked) {
    int64_t row = args.first;
    if constexpr (kPackedRows > 0) {
        constexpr int half = kPackedRows == 8 ? 4 : kPackedRows;
        for (; row < args.last; row += kPackedRows) {
            if (row + half < args.last)
                gemm_row_group<Group, Minima, kPackedRows>(args, m, column, block, row, unpacked);
            else
                gemm_row_group<Group, Minima, half>(args, m, column, block, row, unpacked);
        }
    } else {
        for (; row + kRowsPerPass <= args.last; row += kRowsPerPass)
            gemm_row_group<Group, Minima, kRowsPerPass>(args, m, column, block, row, unpacked);
        if constexpr (kRowsPerPass > 4)
            for (; row + 4 <= args.last; row += 4)
                gemm_row_group<Group, Minima, 4>(args, m, column, block, row, unpacked);
        if constexpr (kRowsPerPass > 2)
            for (; row + 2 <= args.last; row += 2)
                gemm_row_group<Group, Minima, 2>(args, m, column, block, row, unpacked);
        for (; row < args.last; ++row)
            gemm_row_group<Group, Minima, 1>(args, m, column, block, row, unpacked);
    }
}

void multiply_blocks(const GemmArgs& args, const Matrix& m, int64_t column, int64_t first,
                     int64_t last, uint8_t* scratch) {
    if (!is_quantized(m) || args.last - args.first <= kMaxDirectRows)
        return UNSPOOL_GEMV::multiply_packed(args, m, column, first, last);
    if constexpr (kMaxDirectRows < kUnlimited) {
        for (int64_t block = first; block < last; ++block) {
            UnpackedBlock unpacked = allocate_block(scratch, tiles_of(m));
            dispatch_format(m, [&](auto spec) {
                using S = decltype(spec);
                unpack_block<S>(m, m.data + block * block_bytes(m), unpacked);
                gemm_rows<S::group, S::has_minima>(args, m, column, block, unpacked);
            });
        }
    }
}

// Blocks [first, last), counted over all matrices of the operation.
void multiply_range(const GemmArgs& args, int64_t first, int64_t last, uint8_t* scratch) {
    int64_t offset = 0, column = 0;
    for (int32_t i = 0; i < args.op->matrix_count; ++i) {
        const Matrix& m = args.run->matrices[args.matrix + i];
        const int64_t blocks = blocks_of(m);
        const int64_t first_block = first > offset ? first - offset : 0;
        const int64_t last_block = last - offset < blocks ? last - offset : blocks;
        if (first_block < last_block)
            multiply_blocks(args, m, column, first_block, last_block, scratch);
        offset += blocks;
        column += m.rows;
    }
}

int64_t all_blocks(const RunContext& run, int64_t matrix, int32_t count) {
    int64_t blocks = 0;
    for (int32_t i = 0; i < count; ++i) blocks += blocks_of(run.matrices[matrix + i]);
    return blocks;
}

// The source row of a prepared row; with experts, the row of its token.
const float* source_row(const RunContext& run, const Op& op, int64_t row) {
    const bool by_token = op.kind == kExperts && op.prepare != kPrepareActivation;
    return run.buffers[op.source].row(by_token ? run.routing.token[row] : row);
}

QuantizedRows scratch_rows(const RunContext& run, uint8_t* scratch) {
    QuantizedRows rows;
    rows.columns = run.prepared.columns;
    rows.quants = reinterpret_cast<int8_t*>(align_to_cache_line(scratch));
    rows.scales = reinterpret_cast<float*>(rows.quants + kSmallBatch * rows.columns);
    rows.scaled_sums = rows.scales + kSmallBatch * (rows.columns / kTile);
    rows.sums = reinterpret_cast<int32_t*>(rows.scaled_sums + kSmallBatch * (rows.columns / kTile));
    rows.tiled = nullptr;
    rows.tile_scales = nullptr;
    rows.values = reinterpret_cast<float*>(rows.sums + kSmallBatch * (rows.columns / kLanes));
    return rows;
}

// Bytes of a worker's prepared rows; the remaining scratch memory follows.
int64_t scratch_rows_bytes(const RunContext& run) {
    const int64_t columns = run.prepared.columns;
    return kSmallBatch * (columns * 5 + columns / kTile * 8 + columns / kLanes * 4) + 128;
}

}  // namespace

void linear(const RunContext& run, const Op& op, Worker& worker) {
    const int64_t rows = rows_of(run, op);
    if (rows == 0) return;
    bool quantize = false, has_floats = false;
    for (int32_t i = 0; i < op.matrix_count; ++i)
        (is_quantized(run.matrices[op.matrix + i]) ? quantize : has_floats) = true;
    const bool is_small_batch = rows <= kSmallBatch;
    const QuantizedRows acts = is_small_batch ? scratch_rows(run, worker.scratch) : run.prepared;
    // Only float matrices read the rows as floats; otherwise one row is enough, in the cache.
    float* values = has_floats ? acts.values : scratch_rows(run, worker.scratch).values;
    const int64_t values_stride = has_floats ? acts.columns : 0;
    const auto prepare = [&](int64_t row) {
        prepare_row(run, op, source_row(run, op, row), acts, row, quantize,
                    values + row * values_stride);
    };
    if (!is_small_batch) {
        // Rows of a pack share cache lines: one worker writes them all if there are enough packs.
        const int64_t unit =
            kPackedRows > 0 && rows >= worker.count * kPackedRows ? kPackedRows : 1;
        for_each_row(worker, 0, (rows + unit - 1) / unit, [&](int64_t pack) {
            for (int64_t row = pack * unit; row < rows && row < (pack + 1) * unit; ++row)
                prepare(row);
        });
    }
    bool is_prepared = !is_small_batch;
    uint8_t* scratch = worker.scratch + scratch_rows_bytes(run);
    const int64_t blocks = all_blocks(run, op.matrix, op.matrix_count);
    const int64_t tasks = num_tasks(blocks, worker, is_small_batch ? 2 : 64);
    worker.for_each(1, tasks, [&](int64_t task) {
        for (int64_t row = 0; !is_prepared && row < rows; ++row) prepare(row);
        is_prepared = true;
        const int64_t first = blocks * task / tasks, last = blocks * (task + 1) / tasks;
        if (op.kind != kExperts) {
            multiply_range({&run, &op, &acts, 0, rows, op.matrix}, first, last, scratch);
            return;
        }
        for (int32_t expert = 0; expert < op.experts; ++expert) {
            const int64_t matrix = op.matrix + static_cast<int64_t>(expert) * op.matrix_count;
            const GemmArgs args{
                &run,  &op, &acts, run.routing.starts[expert], run.routing.starts[expert + 1],
                matrix};
            if (args.first < args.last) multiply_range(args, first, last, scratch);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
