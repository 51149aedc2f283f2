// Common parts of matrix products: arguments, epilogue, dispatch by format. A few rows are
// multiplied from the packed weights (gemv.cpp), many from an unpacked block (linear.cpp).
#pragma once
#include <limits>
#include <tuple>

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
#elif defined(ISA_neon) || defined(ISA_avxvnni)
constexpr int kMaxDirectRows = 4;
#elif defined(ISA_avx2) || defined(ISA_wasm)
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

template <class S>
UNSPOOL_INLINE bool matches(const Matrix& m) {
    return m.format == S::format && m.bits == S::bits && m.group == S::group &&
           m.scales == S::scale_kind && m.minima == S::minima_kind;
}

template <class F, class... S>
UNSPOOL_INLINE void dispatch_among(const Matrix& m, F f, std::tuple<S...>) {
    static_cast<void>(((matches<S>(m) && (f(S()), true)) || ...));
}

// Calls f with the Spec of a quantized matrix.
template <class F>
UNSPOOL_INLINE void dispatch_format(const Matrix& m, F f) {
    dispatch_among(m, f,
                   std::tuple<Spec<kIntegers, 4, 32, kHalves, kNoMinima>,  // Q4_0
                              Spec<kIntegers, 4, 32, kSuper, kMinima>,     // Q4_K
                              Spec<kIntegers, 8, 32, kHalves, kNoMinima>,  // Q8_0
                              Spec<kIntegers, 6, 16, kSuper, kNoMinima>,   // Q6_K
                              Spec<kIntegers, 5, 32, kSuper, kMinima>,     // Q5_K
                              Spec<kIntegers, 5, 32, kHalves, kNoMinima>,  // Q5_0
                              Spec<kIntegers, 4, 32, kHalves, kMinima>,    // Q4_1
                              Spec<kIntegers, 5, 32, kHalves, kMinima>,    // Q5_1
                              Spec<kIntegers, 2, 16, kSuper, kMinima>,     // Q2_K
                              Spec<kIntegers, 3, 16, kSuper, kNoMinima>,   // Q3_K
                              Spec<kCodes, 4, 32, kHalves, kNoMinima>,     // IQ4_NL
#if !defined(ISA_wasm)  // the browser's engine has only the most frequent formats
                              Spec<kIntegers, 4, 32, kHalves, kZeroPoints>,  // other files
                              Spec<kIntegers, 8, 32, kHalves, kZeroPoints>,
                              Spec<kIntegers, 8, 32, kHalves, kMinima>,
                              Spec<kCodes, 4, 32, kPowers, kNoMinima>,  // MXFP4
                              Spec<kCodes, 4, 16, kFloat8, kNoMinima>,  // NVFP4
                              Spec<kCodes, 3, 32, kSuper, kNoMinima>,   // IQ1_S, IQ2_XXS
                              Spec<kCodes, 3, 16, kSuper, kNoMinima>,   // IQ1_M, IQ2_XS, IQ2_S
                              Spec<kCodes, 2, 32, kSuper, kNoMinima>,   // TQ1_0, TQ2_0
                              Spec<kCodes, 1, 32, kHalves, kNoMinima>,  // Q1_0
#endif
                              Spec<kCodes, 4, 32, kSuper, kNoMinima>>());  // IQ4_XS, IQ3
}

}  // namespace ISA
}  // namespace unspool
