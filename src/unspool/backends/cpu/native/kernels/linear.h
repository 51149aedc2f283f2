// What the two halves of a product share: which rows and matrices, and where results go. A few rows
// are multiplied straight from the packed weights (linear_few.cpp), many from an unpacked block
// (linear.cpp).
#pragma once
#include "../plan.h"
#include "product.h"

namespace unspool {

// Rows [first, last) go through matrices [matrix, matrix + count).
struct Part {
    const Run* run;
    const Op* op;
    const QuantizedRows* acts;
    int64_t first, last;
    int64_t matrix;
};

namespace ISA {

constexpr int kFew = 4;  // rows that a worker prepares for itself, or multiplies at once
#if defined(ISA_amx) || defined(ISA_avx512)
constexpr int kDirect = 8;  // rows that are multiplied without unpacking: registers for them
#elif defined(ISA_neon)
constexpr int kDirect = 2;
#else
constexpr int kDirect = 1;
#endif

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

// Calls f with a type that says how a quantized matrix is packed.
template <class F>
UNSPOOL_INLINE void by_format(const Matrix& m, F f) {
    const bool four = m.format == kQ4;
    if (!m.is_super) {
        if (m.has_minima)
            return four ? f(Spec<4, 32, false, true>()) : f(Spec<8, 32, false, true>());
        return four ? f(Spec<4, 32, false, false>()) : f(Spec<8, 32, false, false>());
    }
    if (m.group == 32)  // Q4_K and Q5_K
        return four ? f(Spec<4, 32, true, true>()) : f(Spec<8, 32, true, true>());
    if (m.has_minima) return f(Spec<4, 16, true, true>());  // Q2_K
    return four ? f(Spec<4, 16, true, false>())             // Q3_K
                : f(Spec<8, 16, true, false>());            // Q6_K
}

}  // namespace ISA
}  // namespace unspool
