// target = matrices * prepared source (+ bias), or target += that.
//
// Up to four rows: each worker prepares them for itself, which is quicker than waiting for one
// another. More rows are prepared together first. Then blocks of weights are shared out. A few
// rows are multiplied straight from the packed weights; for more it pays to unpack a block first.
#include "prepare.h"
#include "product.h"
#include "product_float.h"
#include "product_many.h"
#if defined(ISA_neon)
#include "product_neon.h"
#endif
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr int kFew = 4;  // rows that a worker prepares for itself, or multiplies at once
#if defined(ISA_amx) || defined(ISA_avx512)
constexpr int kDirect = 8;  // rows that are multiplied without unpacking: registers for them
#elif defined(ISA_neon)
constexpr int kDirect = 2;
#else
constexpr int kDirect = 1;
#endif

// Rows [first, last) go through matrices [matrix, matrix + count).
struct Part {
    const Run* run;
    const Op* op;
    const QuantizedRows* acts;
    int64_t first, last;
    int64_t matrix;
};

// Where a block's sixteen outputs for one row go.
inline void put(const Part& part, const Matrix& m, int64_t column, int64_t block, int64_t row,
                F32x16 result) {
    const int64_t at = block * kLanes, left = m.rows - at;
    float* target = part.run->buffers[part.op->target].row(row) + column + at;
    if (m.bias >= 0)
        result = add(result, load_first(part.run->vectors[m.bias].data + at, left, 0.0f));
    if (part.op->flags & kAddToTarget) result = add(load_first(target, left, 0.0f), result);
    store_first(target, left, result);
}

// T rows at once; where fewer are left, what comes of the others is not used.
template <class S, int T>
inline void few_rows(const Part& part, const Matrix& m, int64_t column, int64_t block,
                     int64_t row) {
    F32x16 out[T];
    multiply_block<S, T>(m, m.data + block * block_bytes(m), *part.acts, row, out);
    for (int t = 0; t < T && row + t < part.last; ++t) put(part, m, column, block, row + t, out[t]);
}

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

template <class S>
inline void quantized(const Part& part, const Matrix& m, int64_t column, int64_t first,
                      int64_t last, uint8_t* scratch) {
    const bool direct = part.last - part.first <= kDirect;
    for (int64_t block = first; block < last; ++block) {
        if (!direct) {
            Unpacked unpacked = room_for_block(scratch, tiles_of(m));
            unpack_block<S>(m, m.data + block * block_bytes(m), unpacked);
            many_rows<S::group, S::minima>(part, m, column, block, unpacked);
            continue;
        }
        int64_t row = part.first;
        if constexpr (kDirect > 2)
            for (; row + 2 < part.last; row += kFew) few_rows<S, kFew>(part, m, column, block, row);
        if constexpr (kDirect > 1)
            if (row + 2 == part.last) few_rows<S, 2>(part, m, column, block, row);
        if (row + 1 == part.last) few_rows<S, 1>(part, m, column, block, row);
    }
}

template <class Read, int B, int T>
inline void float_rows(const Part& part, const Matrix& m, int64_t column, int64_t block,
                       int64_t row) {
    F32x16 out[B * T];
    multiply_floats<Read, B, T>(m, m.data + block * block_bytes(m), *part.acts, row, out);
    for (int b = 0; b < B; ++b)
        for (int t = 0; t < T; ++t) put(part, m, column, block + b, row + t, out[b * T + t]);
}

template <class Read>
inline void floats(const Part& part, const Matrix& m, int64_t column, int64_t first, int64_t last) {
    int64_t row = part.first;
    for (; row + 4 <= part.last; row += 4) {
        int64_t block = first;
        for (; block + 2 <= last; block += 2) float_rows<Read, 2, 4>(part, m, column, block, row);
        for (; block < last; ++block) float_rows<Read, 1, 4>(part, m, column, block, row);
    }
    for (; row < part.last; ++row) {
        int64_t block = first;
        for (; block + 4 <= last; block += 4) float_rows<Read, 4, 1>(part, m, column, block, row);
        for (; block < last; ++block) float_rows<Read, 1, 1>(part, m, column, block, row);
    }
}

void multiply(const Part& part, const Matrix& m, int64_t column, int64_t first, int64_t last,
              uint8_t* scratch) {
    switch (m.format) {
        case kF32:
            return floats<ReadF32>(part, m, column, first, last);
        case kF16:
            return floats<ReadF16>(part, m, column, first, last);
        case kBF16:
            return floats<ReadBF16>(part, m, column, first, last);
        default:
            break;
    }
    const bool four = m.format == kQ4;
    if (!m.is_super) {
        if (m.has_minima)
            return four
                       ? quantized<Spec<4, 32, false, true>>(part, m, column, first, last, scratch)
                       : quantized<Spec<8, 32, false, true>>(part, m, column, first, last, scratch);
        return four ? quantized<Spec<4, 32, false, false>>(part, m, column, first, last, scratch)
                    : quantized<Spec<8, 32, false, false>>(part, m, column, first, last, scratch);
    }
    if (m.group == 32)  // Q4_K and Q5_K
        return four ? quantized<Spec<4, 32, true, true>>(part, m, column, first, last, scratch)
                    : quantized<Spec<8, 32, true, true>>(part, m, column, first, last, scratch);
    if (m.has_minima)  // Q2_K
        return quantized<Spec<4, 16, true, true>>(part, m, column, first, last, scratch);
    return four
               ? quantized<Spec<4, 16, true, false>>(part, m, column, first, last, scratch)  // Q3_K
               : quantized<Spec<8, 16, true, false>>(part, m, column, first, last,
                                                     scratch);  // Q6_K
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
