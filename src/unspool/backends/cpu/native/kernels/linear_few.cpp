// Products straight from the packed weights: floats, and up to kDirect rows of quantized ones.
#include "linear.h"
#include "product_float.h"

namespace unspool {
namespace ISA {

namespace {

// Called once for a whole block, so it need not be compiled into each of the products.
UNSPOOL_APART void put_rows(const Part& part, const Matrix& m, int64_t column, int64_t block,
                            int64_t row, const F32x16* out, int count) {
    for (int t = 0; t < count; ++t) put(part, m, column, block, row + t, out[t]);
}

// T rows at once.
template <class S, int T>
inline void few_rows(const Part& part, const Matrix& m, int64_t column, int64_t block,
                     int64_t row) {
    F32x16 out[T];
    multiply_block<S, T>(m, m.data + block * block_bytes(m), *part.acts, row, out);
    put_rows(part, m, column, block, row, out, T);
}

template <class S>
inline void quantized(const Part& part, const Matrix& m, int64_t column, int64_t first,
                      int64_t last) {
    for (int64_t block = first; block < last; ++block) {
        int64_t row = part.first;
        if constexpr (kDirect > 2) {
            for (; row + 3 < part.last; row += kFew) few_rows<S, kFew>(part, m, column, block, row);
            if (row + 3 == part.last) few_rows<S, 3>(part, m, column, block, row);
        }
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

}  // namespace

// Blocks [first, last) of one matrix times the rows of a part.
void multiply_directly(const Part& part, const Matrix& m, int64_t column, int64_t first,
                       int64_t last) {
    switch (m.format) {
        case kF32:
            return floats<ReadF32>(part, m, column, first, last);
        case kF16:
            return floats<ReadF16>(part, m, column, first, last);
        case kBF16:
            return floats<ReadBF16>(part, m, column, first, last);
        default:
            by_format(m,
                      [&](auto spec) { quantized<decltype(spec)>(part, m, column, first, last); });
    }
}

}  // namespace ISA
}  // namespace unspool
