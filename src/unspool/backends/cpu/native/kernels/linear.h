// What the two halves of a product share: which rows and matrices, and where results go. A few rows
// are multiplied straight from the packed weights (linear_few.cpp), many from an unpacked block
// (linear.cpp).
#pragma once
#include <limits>

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
constexpr int kAny = std::numeric_limits<int>::max();
#if defined(ISA_amx) || defined(ISA_avx512)
constexpr int kDirect = 8;  // rows that are multiplied without unpacking: registers for them
#elif defined(ISA_neon)
constexpr int kDirect = 4;
#elif defined(ISA_avx2)
constexpr int kDirect = kAny;  // four rows are enough to make unpacking cheap each time
#else
constexpr int kDirect = 1;
#endif

// Where a block's sixteen outputs for one row go.
inline void put(const Part& part, const Matrix& m, int64_t column, int64_t block, int64_t row,
                F32x16 result) {
    const int64_t at = block * kLanes, left = m.rows - at;
    float* target = part.run->buffers[part.op->target].row(row) + column + at;
    if (m.factor != 1.0f) result = mul(result, set1(m.factor));
    if (m.bias >= 0)
        result = add(result, load_first(part.run->vectors[m.bias].data + at, left, 0.0f));
    if (part.op->flags & kAddToTarget) result = add(load_first(target, left, 0.0f), result);
    store_first(target, left, result);
}

// Calls f with a type that says how a quantized matrix is packed.
template <class F>
UNSPOOL_INLINE void by_format(const Matrix& m, F f) {
    const bool four = m.format == kQ4;
    if (m.format == kCodes) {
        if (m.scales == kHalves) return f(Spec<kCodes, 32, kHalves, kNone>());
        if (m.scales == kPowers) return f(Spec<kCodes, 32, kPowers, kNone>());
        if (m.scales == kFloat8) return f(Spec<kCodes, 16, kFloat8, kNone>());
        return m.group == 32 ? f(Spec<kCodes, 32, kSuper, kNone>())
                             : f(Spec<kCodes, 16, kSuper, kNone>());
    }
    if (m.scales == kHalves) {
        if (m.lows == kZeros)
            return four ? f(Spec<kQ4, 32, kHalves, kZeros>()) : f(Spec<kQ8, 32, kHalves, kZeros>());
        if (m.lows == kMinima)
            return four ? f(Spec<kQ4, 32, kHalves, kMinima>())
                        : f(Spec<kQ8, 32, kHalves, kMinima>());
        return four ? f(Spec<kQ4, 32, kHalves, kNone>()) : f(Spec<kQ8, 32, kHalves, kNone>());
    }
    if (m.group == 32)  // Q4_K and Q5_K
        return four ? f(Spec<kQ4, 32, kSuper, kMinima>()) : f(Spec<kQ8, 32, kSuper, kMinima>());
    if (m.lows) return f(Spec<kQ4, 16, kSuper, kMinima>());  // Q2_K
    return four ? f(Spec<kQ4, 16, kSuper, kNone>())          // Q3_K
                : f(Spec<kQ8, 16, kSuper, kNone>());         // Q6_K
}

}  // namespace ISA
}  // namespace unspool
