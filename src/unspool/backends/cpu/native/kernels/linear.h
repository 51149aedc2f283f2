// Common parts of matrix products: arguments, epilogue, dispatch by format. A few rows are
// multiplied from the packed weights (gemv.cpp), many from an unpacked block (linear.cpp).
#pragma once
#include <limits>

#include "../plan.h"
#include "gemv.h"

namespace unspool {

// Rows [first, last) times the matrices of an operation, from `matrix` on.
struct GemmArgs {
    const RunContext* run;
    const Op* op;
    const QuantizedRows* acts;
    int64_t first, last;
    int64_t matrix;
};

namespace ISA {

constexpr int kSmallBatch =
    4;  // rows that each worker prepares for itself, and multiplies together
constexpr int kUnlimited = std::numeric_limits<int>::max();
#if defined(ISA_amx) || defined(ISA_avx512)
constexpr int kMaxDirectRows = 8;  // rows multiplied without unpacking: limited by registers
#elif defined(ISA_neon)
constexpr int kMaxDirectRows = 4;
#elif defined(ISA_avx2)
constexpr int kMaxDirectRows = kUnlimited;  // unpacking per four rows is cheap enough
#else
constexpr int kMaxDirectRows = 1;
#endif

// Epilogue: scale, bias, add to the target, store sixteen outputs of one row.
inline void epilogue(const GemmArgs& args, const Matrix& m, int64_t column, int64_t block,
                     int64_t row, F32x16 result) {
    const int64_t offset = block * kLanes, count = m.rows - offset;
    float* target = args.run->buffers[args.op->target].row(row) + column + offset;
    if (m.factor != 1.0f) result = mul(result, set1(m.factor));
    if (m.bias >= 0)
        result = add(result, load_first(args.run->vectors[m.bias].data + offset, count, 0.0f));
    if (args.op->flags & kAddToTarget) result = add(load_first(target, count, 0.0f), result);
    store_first(target, count, result);
}

// Calls f with the Spec of a quantized matrix.
template <class F>
UNSPOOL_INLINE void dispatch_format(const Matrix& m, F f) {
    const bool is_q4 = m.format == kQ4;
    if (m.format == kCodes) {
        if (m.scales == kHalves) return f(Spec<kCodes, 32, kHalves, kNoMinima>());
        if (m.scales == kPowers) return f(Spec<kCodes, 32, kPowers, kNoMinima>());
        if (m.scales == kFloat8) return f(Spec<kCodes, 16, kFloat8, kNoMinima>());
        return m.group == 32 ? f(Spec<kCodes, 32, kSuper, kNoMinima>())
                             : f(Spec<kCodes, 16, kSuper, kNoMinima>());
    }
    if (m.scales == kHalves) {
        if (m.minima == kZeroPoints)
            return is_q4 ? f(Spec<kQ4, 32, kHalves, kZeroPoints>())
                         : f(Spec<kQ8, 32, kHalves, kZeroPoints>());
        if (m.minima == kMinima)
            return is_q4 ? f(Spec<kQ4, 32, kHalves, kMinima>())
                         : f(Spec<kQ8, 32, kHalves, kMinima>());
        return is_q4 ? f(Spec<kQ4, 32, kHalves, kNoMinima>())
                     : f(Spec<kQ8, 32, kHalves, kNoMinima>());
    }
    if (m.group == 32)  // Q4_K and Q5_K
        return is_q4 ? f(Spec<kQ4, 32, kSuper, kMinima>()) : f(Spec<kQ8, 32, kSuper, kMinima>());
    if (m.minima) return f(Spec<kQ4, 16, kSuper, kMinima>());  // Q2_K
    return is_q4 ? f(Spec<kQ4, 16, kSuper, kNoMinima>())       // Q3_K
                 : f(Spec<kQ8, 16, kSuper, kNoMinima>());      // Q6_K
}

}  // namespace ISA
}  // namespace unspool
