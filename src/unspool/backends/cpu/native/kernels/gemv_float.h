// Sixteen rows of float32, float16 or bfloat16 weights times a few rows of float32 activations.
// Columns are added in order, one chain per output, so that results are batch-invariant.
#pragma once
#include "../plan.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

struct ReadF32 {
    static constexpr int bytes = 4;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* p) {
        return load(reinterpret_cast<const float*>(p));
    }
};
struct ReadF16 {
    static constexpr int bytes = 2;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* p) {
        return load_half(reinterpret_cast<const uint16_t*>(p));
    }
};
struct ReadBF16 {
    static constexpr int bytes = 2;
    static UNSPOOL_INLINE F32x16 at(const uint8_t* p) {
        return load_bf16(reinterpret_cast<const uint16_t*>(p));
    }
};

// Blocks [0, B) at p times rows [first, first + T): out[b * T + t] gets sixteen values.
template <class Read, int B, int T>
UNSPOOL_INLINE void multiply_floats(const Matrix& m, const uint8_t* p, const QuantizedRows& acts,
                                    int64_t first, F32x16* out) {
    constexpr int step = kLanes * Read::bytes;
    const int64_t block = m.columns * step;
    const float* x = acts.values + first * acts.columns;
    F32x16 total[B * T];
    for (auto& sum : total) sum = zero();
    for (int64_t k = 0; k < m.columns; ++k) {
        for (int b = 0; b < B; ++b) {
            const uint8_t* at = p + b * block + k * step;
            prefetch(at + 1024);
            const F32x16 w = Read::at(at);
            for (int t = 0; t < T; ++t)
                total[b * T + t] = fma(w, set1(x[t * acts.columns + k]), total[b * T + t]);
        }
    }
    for (int i = 0; i < B * T; ++i) out[i] = total[i];
}

}  // namespace ISA
}  // namespace unspool
