// target = matrices * prepared source (+ bias), or target += that.
//
// Up to four rows: each worker prepares them for itself, which is quicker than waiting for one
// another. More rows are prepared together first. Then blocks of weights are shared out. A few
// rows are multiplied straight from the packed weights; for more it pays to unpack a block first,
// but on AVX2, whose products cost so much that unpacking them again for every four rows does not
// matter.
#include "linear.h"
#include "prepare.h"
#include "product_many.h"
#if defined(ISA_neon)
#include "product_neon.h"
#endif
#include "table.h"

namespace unspool {

namespace UNSPOOL_SHARED {
void multiply_directly(const Part& part, const Matrix& m, int64_t column, int64_t first,
                       int64_t last);
}

namespace ISA {

namespace {

#if !defined(ISA_amx)
template <int Group, bool Minima, int T>
inline void some_rows(const Part& part, const Matrix& m, int64_t column, int64_t block, int64_t row,
                      const Unpacked& unpacked) {
    F32x16 out[T];
#if defined(ISA_neon)
    multiply_by_quarters<Group, Minima, T>(unpacked, tiles_of(m), *part.acts, row, out);
#else
    multiply_unpacked<Group, Minima, T>(unpacked, tiles_of(m), *part.acts, row, out);
#endif
    for (int t = 0; t < T; ++t) put(part, m, column, block, row + t, out[t]);
}
#endif

// All rows times an unpacked block: the same for every format whose groups are alike, so it is
// compiled once for them.
template <int Group, bool Minima>
UNSPOOL_APART void many_rows(const Part& part, const Matrix& m, int64_t column, int64_t block,
                             const Unpacked& unpacked) {
    int64_t row = part.first;
#if defined(ISA_amx)
    while (row < part.last) {  // a tile may reach past the last row: there is room behind it
        F32x16 out[kLanes];
        multiply_tiles<Group, Minima>(unpacked, tiles_of(m), *part.acts, row, out);
        for (int t = 0; t < kLanes && row < part.last; ++t, ++row)
            put(part, m, column, block, row, out[t]);
    }
#else
    for (; row + kRowsAtOnce <= part.last; row += kRowsAtOnce)
        some_rows<Group, Minima, kRowsAtOnce>(part, m, column, block, row, unpacked);
    if constexpr (kRowsAtOnce > 4)
        for (; row + 4 <= part.last; row += 4)
            some_rows<Group, Minima, 4>(part, m, column, block, row, unpacked);
    if constexpr (kRowsAtOnce > 2)
        for (; row + 2 <= part.last; row += 2)
            some_rows<Group, Minima, 2>(part, m, column, block, row, unpacked);
    for (; row < part.last; ++row)
        some_rows<Group, Minima, 1>(part, m, column, block, row, unpacked);
#endif
}

void multiply(const Part& part, const Matrix& m, int64_t column, int64_t first, int64_t last,
              uint8_t* scratch) {
    if (!is_quantized(m) || part.last - part.first <= kDirect)
        return UNSPOOL_SHARED::multiply_directly(part, m, column, first, last);
    if constexpr (kDirect < kAny) {
        for (int64_t block = first; block < last; ++block) {
            Unpacked unpacked = room_for_block(scratch, tiles_of(m));
            by_format(m, [&](auto spec) {
                using S = decltype(spec);
                unpack_block<S>(m, m.data + block * block_bytes(m), unpacked);
                many_rows<S::group, S::minima>(part, m, column, block, unpacked);
            });
        }
    }
}

// Blocks [first, last) of all matrices of a part, counted through.
void multiply_range(const Part& part, int64_t first, int64_t last, uint8_t* scratch) {
    int64_t before = 0, column = 0;
    for (int32_t i = 0; i < part.op->matrix_count; ++i) {
        const Matrix& m = part.run->matrices[part.matrix + i];
        const int64_t blocks = blocks_of(m);
        const int64_t from = first > before ? first - before : 0;
        const int64_t to = last - before < blocks ? last - before : blocks;
        if (from < to) multiply(part, m, column, from, to, scratch);
        before += blocks;
        column += m.rows;
    }
}

int64_t all_blocks(const Run& run, int64_t matrix, int32_t count) {
    int64_t blocks = 0;
    for (int32_t i = 0; i < count; ++i) blocks += blocks_of(run.matrices[matrix + i]);
    return blocks;
}

// The source row of a prepared row: with experts, the token whose pick it is.
const float* source_row(const Run& run, const Op& op, int64_t row) {
    const bool gathered = op.kind == kExperts && op.prepare != kActivated;
    return run.buffers[op.source].row(gathered ? run.picks.token[row] : row);
}

QuantizedRows own_rows(const Run& run, uint8_t* scratch) {
    QuantizedRows own;
    own.columns = run.prepared.columns;
    own.numbers = reinterpret_cast<int8_t*>(lined_up(scratch));
    own.scales = reinterpret_cast<float*>(own.numbers + kFew * own.columns);
    own.lows = own.scales + kFew * (own.columns / kTile);
    own.sums = reinterpret_cast<int32_t*>(own.lows + kFew * (own.columns / kTile));
    own.tiled = nullptr;
    own.turned = nullptr;
    own.values = reinterpret_cast<float*>(own.sums + kFew * (own.columns / kLanes));
    return own;
}

// Where the scratch memory behind a worker's own rows begins: both may be in use.
int64_t own_rows_bytes(const Run& run) {
    const int64_t columns = run.prepared.columns;
    return kFew * (columns * 5 + columns / kTile * 8 + columns / kLanes * 4) + 128;
}

}  // namespace

void linear(const Run& run, const Op& op, Worker& worker) {
    const int64_t rows = rows_of(run, op);
    if (rows == 0) return;
    bool as_bytes = false;
    for (int32_t i = 0; i < op.matrix_count; ++i)
        as_bytes = as_bytes || is_quantized(run.matrices[op.matrix + i]);
    const bool few = rows <= kFew;
    const QuantizedRows acts = few ? own_rows(run, worker.scratch) : run.prepared;
    const auto prepare = [&](int64_t row) {
        prepare_row(run, op, source_row(run, op, row), acts, row, as_bytes);
    };
    if (!few) each_row(worker, 0, rows, [&](int64_t row) { prepare(row); });
    bool ready = !few;
    uint8_t* scratch = worker.scratch + own_rows_bytes(run);
    const int64_t blocks = all_blocks(run, op.matrix, op.matrix_count);
    const int64_t tasks = cut(blocks, worker, few ? 2 : 16);
    worker.each(1, tasks, [&](int64_t task) {
        for (int64_t row = 0; !ready && row < rows; ++row) prepare(row);
        ready = true;
        const int64_t first = blocks * task / tasks, last = blocks * (task + 1) / tasks;
        if (op.kind != kExperts) {
            multiply_range({&run, &op, &acts, 0, rows, op.matrix}, first, last, scratch);
            return;
        }
        for (int32_t expert = 0; expert < op.experts; ++expert) {
            const int64_t matrix = op.matrix + static_cast<int64_t>(expert) * op.matrix_count;
            const Part part{
                &run, &op, &acts, run.picks.starts[expert], run.picks.starts[expert + 1], matrix};
            if (part.first < part.last) multiply_range(part, first, last, scratch);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
