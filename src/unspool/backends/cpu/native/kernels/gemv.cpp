// Products from packed weights: floats, and up to kMaxDirectRows rows with quantized weights.
#include "gemv_float.h"
#include "linear.h"

namespace unspool {
namespace ISA {

namespace {

// Called once per block, so not inlined into each product.
UNSPOOL_NOINLINE void epilogue_rows(const GemmArgs& args, const Matrix& m, int64_t column,
                                    int64_t block, int64_t row, const F32x16* out, int count) {
    for (int t = 0; t < count; ++t) epilogue(args, m, column, block, row + t, out[t]);
}

// T rows together.
template <class S, int T>
inline void gemv_rows(const GemmArgs& args, const Matrix& m, int64_t column, int64_t block,
                      int64_t row) {
    F32x16 out[T];
    multiply_block<S, T>(m, m.data + block * block_bytes(m), *args.acts, row, out);
    epilogue_rows(args, m, column, block, row, out, T);
}

template <class S>
inline void gemv_quantized(const GemmArgs& args, const Matrix& m, int64_t column, int64_t first,
                           int64_t last) {
    for (int64_t block = first; block < last; ++block) {
        int64_t row = args.first;
#if defined(ISA_wasm)  // without products of two and three rows: less code to download
        for (; row + 3 < args.last; row += kSmallBatch)
            gemv_rows<S, kSmallBatch>(args, m, column, block, row);
        for (; row < args.last; ++row) gemv_rows<S, 1>(args, m, column, block, row);
#else
        if constexpr (kMaxDirectRows > 2) {
            for (; row + 3 < args.last; row += kSmallBatch)
                gemv_rows<S, kSmallBatch>(args, m, column, block, row);
            if (row + 3 == args.last) gemv_rows<S, 3>(args, m, column, block, row);
        }
        if constexpr (kMaxDirectRows > 1)
            if (row + 2 == args.last) gemv_rows<S, 2>(args, m, column, block, row);
        if (row + 1 == args.last) gemv_rows<S, 1>(args, m, column, block, row);
#endif
    }
}

template <class Read, int B, int T>
inline void gemm_float_rows(const GemmArgs& args, const Matrix& m, int64_t column, int64_t block,
                            int64_t row) {
    F32x16 out[B * T];
    multiply_floats<Read, B, T>(m, m.data + block * block_bytes(m), *args.acts, row, out);
    for (int b = 0; b < B; ++b)
        for (int t = 0; t < T; ++t) epilogue(args, m, column, block + b, row + t, out[b * T + t]);
}

template <class Read>
inline void gemm_floats(const GemmArgs& args, const Matrix& m, int64_t column, int64_t first,
                        int64_t last) {
    int64_t row = args.first;
    for (; row + 4 <= args.last; row += 4) {
        int64_t block = first;
        for (; block + 2 <= last; block += 2)
            gemm_float_rows<Read, 2, 4>(args, m, column, block, row);
        for (; block < last; ++block) gemm_float_rows<Read, 1, 4>(args, m, column, block, row);
    }
    for (; row < args.last; ++row) {
        int64_t block = first;
        for (; block + 4 <= last; block += 4)
            gemm_float_rows<Read, 4, 1>(args, m, column, block, row);
        for (; block < last; ++block) gemm_float_rows<Read, 1, 1>(args, m, column, block, row);
    }
}

}  // namespace

// Blocks [first, last) of one matrix times the rows of `args`.
void multiply_packed(const GemmArgs& args, const Matrix& m, int64_t column, int64_t first,
                     int64_t last) {
    switch (m.format) {
        case kF32:
            return gemm_floats<ReadF32>(args, m, column, first, last);
        case kF16:
            return gemm_floats<ReadF16>(args, m, column, first, last);
        case kBF16:
            return gemm_floats<ReadBF16>(args, m, column, first, last);
        default:
            dispatch_format(m, [&](auto spec) {
                gemv_quantized<decltype(spec)>(args, m, column, first, last);
            });
    }
}

}  // namespace ISA
}  // namespace unspool
