// Vectors of sixteen lanes on any processor: one 512-bit register, two of 256 bits, four of 128
// bits, or a plain loop. Kernels are written once with these functions.
//
// Sixteen is the number of rows in a block of weights and of tokens in a page, so most kernels need
// no horizontal sums. Where they do, the order is fixed.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../layout.h"

#if defined(ISA_amx) || defined(ISA_avx512)
#include "vec16_avx512.h"
#elif defined(ISA_avx2) || defined(ISA_avxvnni)
#include "vec16_avx2.h"
#elif defined(ISA_neon)
#include "vec16_neon.h"
#elif defined(ISA_wasm)
#include "vec16_wasm.h"
#else
#include "vec16_plain.h"
#endif

namespace unspool {
namespace ISA {

#if !defined(ISA_avx2)  // AVX2 accumulates small products in 16 bits
using SmallSums = I32x16;
#endif

#if !defined(ISA_neon)  // NEON has a quicker way
// Sums of dot products, all of which start at x; they are below 2^22.
template <class Sums>
UNSPOOL_INLINE Sums start_sums(int32_t x) {
    if constexpr (std::is_same_v<Sums, I32x16>) {
        return iset1(x);
    } else {
        Sums sums{};
        sums.start = x;
        return sums;
    }
}
UNSPOOL_INLINE F32x16 sums_to_float(const I32x16& sums) { return to_float(sums); }

// A factor of unsigned bytes.
struct ByteFactor {
    F32x16 factor;
};
UNSPOOL_INLINE ByteFactor byte_factor(const F32x16& x) { return {x}; }
UNSPOOL_INLINE F32x16 scale_bytes(const uint8_t* p, const ByteFactor& by) {
    return mul(by.factor, load_u8(p));
}
#endif

#if !defined(ISA_neon)  // NEON has instructions for these
UNSPOOL_INLINE F32x16 abs16(const F32x16& x) { return vmax(x, sub(set1(0.0f), x)); }
// Rounds 32 floats within the range of int8 and stores them, with the sums of both halves.
UNSPOOL_INLINE void store_i8_pair(int8_t* p, const F32x16& a, const F32x16& b, int32_t* sums) {
    sums[0] = store_i8(p, a);
    sums[1] = store_i8(p + kLanes, b);
}
#endif

#if !defined(ISA_neon)  // NEON can select a lane

// Four floats, from which a product selects one by index.
struct Four {
    const float* v;
};
UNSPOOL_INLINE Four load_four(const float* p) { return {p}; }

// Sixteen activations, from which a dot product selects four by index.
struct Columns {
    const int8_t* v;
};
UNSPOOL_INLINE Columns load_columns(const int8_t* p) { return {p}; }
template <int J, class Sums>
UNSPOOL_INLINE Sums dot_small(const Sums& total, const U8x64& w, Columns a) {
    return dot_small(total, w, a.v + 4 * J);
}
template <int J>
UNSPOOL_INLINE I32x16 dot_bytes(const I32x16& total, const U8x64& w, Columns a) {
    return dot_bytes(total, w, a.v + 4 * J);
}
template <int J>
UNSPOOL_INLINE I32x16 dot_signed(const I32x16& total, const U8x64& w, Columns a) {
    return dot_signed(total, w, a.v + 4 * J);
}

#endif

// Calls f with the integers from 0 to N - 1 as types: a loop whose arrays stay in registers.
template <class F, int... I>
UNSPOOL_INLINE void for_each_index(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
UNSPOOL_INLINE void for_each_index(F f) {
    for_each_index(f, std::make_integer_sequence<int, N>());
}

// totals[r * Stride] += a * fours[r][I], for R rows.
template <int I, int R, int Stride>
UNSPOOL_INLINE void fma_rows(const F32x16& a, const Four* fours, F32x16* totals) {
#if defined(ISA_neon)  // quickest in this order: a register with all rows, then the next
    for_each_index<4>([&](auto part) UNSPOOL_LAMBDA {
        for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
            float32x4_t& total = totals[r * Stride].v[part];
            total = vfmaq_laneq_f32(total, a.v[part], fours[r].v, I);
        });
    });
#else
    for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
        totals[r * Stride] = fma(a, set1(fours[r].v[I]), totals[r * Stride]);
    });
#endif
}

// totals[r * Stride] += a * row_factors[r], for R rows (at most four on NEON).
template <int R, int Stride>
UNSPOOL_INLINE void fma_lanes(const F32x16& a, Four row_factors, F32x16* totals) {
#if defined(ISA_neon)
    for_each_index<4>([&](auto part) UNSPOOL_LAMBDA {
        for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
            float32x4_t& total = totals[r * Stride].v[part];
            total = vfmaq_laneq_f32(total, a.v[part], row_factors.v, r);
        });
    });
#else
    for_each_index<R>([&](auto r) UNSPOOL_LAMBDA {
        totals[r * Stride] = fma(a, set1(row_factors.v[r]), totals[r * Stride]);
    });
#endif
}

// Activations are packed by this many rows, with this many columns of a row together (0: not
// packed).
#if defined(ISA_amx)
constexpr int kPackedRows = 16, kPackedColumns = 32;
#elif defined(ISA_i8mm)
constexpr int kPackedRows = 8, kPackedColumns = 8;
#elif defined(ISA_neon)
constexpr int kPackedRows = 8, kPackedColumns = 4;
#else
constexpr int kPackedRows = 0, kPackedColumns = 32;
#endif

UNSPOOL_INLINE F32x16 zero() { return set1(0.0f); }

// Coefficients of exp16, highest power first, repeated for every lane.
struct ExpCoefficients {
    float v[6][kLanes];
    constexpr ExpCoefficients() : v() {
        constexpr float numbers[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
        for (int i = 0; i < 6; ++i)
            for (float& lane : v[i]) lane = numbers[i];
    }
};
constexpr ExpCoefficients kExpCoefficients;

// exp(x) with a relative error of about 1e-7; 0 below -87.3, the range of a float.
UNSPOOL_INLINE F32x16 exp16(F32x16 x) {
    const F32x16 lowest = set1(-87.3f);
    const F32x16 bounded = vmin(set1(88.7f), vmax(lowest, x));
    const F32x16 n = round16(mul(bounded, set1(1.44269504f)));
    F32x16 r = fma(n, set1(-0.693359375f), bounded);  // ln 2 in two parts
    r = fma(n, set1(2.12194440e-4f), r);
    const float* coefficients = kExpCoefficients.v[0];
#if defined(ISA_neon)  // a multiply-add overwrites its addend: load it, do not copy it
    asm volatile("" : "+r"(coefficients));
#endif
    F32x16 p = load(coefficients);
    for_each_index<5>([&](auto i)
                          UNSPOOL_LAMBDA { p = fma(p, r, load(coefficients + (i + 1) * kLanes)); });
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return where_less(x, lowest, zero(), scale_by_power(p, n));
}

UNSPOOL_INLINE F32x16 tanh16(F32x16 x) {
    const F32x16 e = exp16(add(x, x));
    return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

// The error function, within 1.5e-7 (Abramowitz and Stegun 7.1.26).
UNSPOOL_INLINE F32x16 erf16(F32x16 x) {
    const F32x16 size = abs16(x);
    const F32x16 t = div(set1(1.0f), fma(size, set1(0.3275911f), set1(1.0f)));
    F32x16 p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const F32x16 tail = mul(mul(p, t), exp16(sub(zero(), mul(x, x))));
    const F32x16 positive = sub(set1(1.0f), tail);
    return where_less(x, zero(), sub(zero(), positive), positive);
}

// The first `count` of sixteen floats; the other lanes hold `fill`. Reads nothing past them. Only
// the last block of a row is partial: that case is not inlined.
inline UNSPOOL_NOINLINE void load_part(const float* from, int64_t count, float fill, float* lanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane < count ? from[lane] : fill;
}
inline UNSPOOL_NOINLINE void store_part(float* to, int64_t count, const float* lanes) {
    for (int lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}

UNSPOOL_INLINE F32x16 load_first(const float* from, int64_t count, float fill) {
    if (count >= kLanes) return load(from);
    float lanes[kLanes];
    load_part(from, count, fill, lanes);
    return load(lanes);
}

UNSPOOL_INLINE void store_first(float* to, int64_t count, F32x16 x) {
    if (count >= kLanes) {
        store(to, x);
        return;
    }
    float lanes[kLanes];
    store(lanes, x);
    store_part(to, count, lanes);
}

}  // namespace ISA
}  // namespace unspool
