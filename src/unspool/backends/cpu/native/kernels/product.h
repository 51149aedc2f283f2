// Sixteen rows of quantized weights times a few rows of activations, straight from the packed
// layout. This is where a next token's time goes: every weight is read once, in order.
//
// The arithmetic of one output number is the same in every kernel, whatever is computed beside it:
//   for each group of columns, in order:  total += float(whole-number dot product) * (scale * a)
//                                         low   += minimum * (a * sum of activations)
//   result = total + low
// Whole numbers are exact, so how a dot product is taken does not matter; the order of the floats
// is fixed. That is what makes a row's result independent of the batch it is computed in.
#pragma once
#include <type_traits>

#include "../plan.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

template <int Bits, int Group, bool Super, bool Minima>
struct Spec {
    static constexpr int bits = Bits, group = Group;
    static constexpr bool super = Super, minima = Minima;
    static constexpr int stored = kLanes * kTile * Bits / 8;
    static constexpr int scale_bytes = Super ? kLanes * (kTile / Group) : kLanes * 2;
    static constexpr int tile = stored + scale_bytes * (Minima ? 2 : 1);
    static constexpr int factors = Super ? kLanes * 2 * (Minima ? 2 : 1) : 0;
};

// What the scales and minima of eight tiles are multiplied with.
template <class S>
struct Factors {
    F32x16 scale = zero(), low = zero();

    // Reads them where they stand before this tile; gives where the tile itself begins.
    UNSPOOL_INLINE const uint8_t* before(int64_t tile, const uint8_t* p) {
        if constexpr (S::super) {
            if (tile % kSuperTiles != 0) return p;
            scale = load_half(reinterpret_cast<const uint16_t*>(p));
            if constexpr (S::minima)
                low = load_half(reinterpret_cast<const uint16_t*>(p + kLanes * 2));
        }
        return p + S::factors;
    }
};

// Scales and minima of one tile, as floats.
template <class S>
struct TileScales {
    F32x16 scale[kTile / S::group], minimum[kTile / S::group];

    UNSPOOL_INLINE void read(const uint8_t* p, const Factors<S>& factors) {
        for (int g = 0; g < kTile / S::group; ++g) {
            if constexpr (S::super) {
                scale[g] =
                    mul(factors.scale, load_i8(reinterpret_cast<const int8_t*>(p) + g * kLanes));
                if constexpr (S::minima)
                    minimum[g] =
                        sub(zero(), mul(factors.low, load_u8(p + S::scale_bytes + g * kLanes)));
            } else {
                scale[g] = load_half(reinterpret_cast<const uint16_t*>(p));
                if constexpr (S::minima)
                    minimum[g] = load_half(reinterpret_cast<const uint16_t*>(p + S::scale_bytes));
            }
        }
    }
};

// What the offset takes from a dot product, for each activation's sum of one.
template <int Bits>
UNSPOOL_INLINE int32_t correction(const Matrix& m) {
    return Bits == 4 ? m.offset : m.offset - kByteBias;
}

// Adds one group's share to a row's result.
template <bool Minima>
UNSPOOL_INLINE void add_group(F32x16& total, F32x16& low, I32x16 dots, int32_t taken,
                              const F32x16& scale, const F32x16& minimum, float a, int32_t a_sum) {
    if (taken != 0) dots = isub(dots, iset1(taken * a_sum));
    total = fma(to_float(dots), mul(scale, set1(a)), total);
    if constexpr (Minima) low = fma(minimum, set1(a * static_cast<float>(a_sum)), low);
}

constexpr int kAhead = 2560;  // bytes: far enough for memory to answer, near enough for the cache

// One block times rows [first, first + T): out[t] gets sixteen numbers.
template <class S, int T>
UNSPOOL_INLINE void multiply_block(const Matrix& m, const uint8_t* p, const QuantizedRows& acts,
                                   int64_t first, F32x16* out) {
    const int64_t tiles = tiles_of(m);
    const int32_t taken = correction<S::bits>(m);
    const int8_t* numbers = acts.numbers + first * acts.columns;
    const float* scales = acts.scales + first * (acts.columns / kTile);
    const int32_t* sums = acts.sums + first * (acts.columns / kLanes);
    F32x16 total[T], low[T];
    for (int t = 0; t < T; ++t) total[t] = low[t] = zero();
    Factors<S> factors;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        p = factors.before(tile, p);
        for (int line = 0; line < S::tile; line += 64) prefetch(p + kAhead + line);
        // Where all 32 columns share a scale, one sum serves for both halves.
        constexpr bool apart = S::group < kTile;
        I32x16 front[T], behind[apart ? T : 1];
        I32x16* back = apart ? behind : front;
        for (int t = 0; t < T; ++t) front[t] = back[t] = iset1(0);
        Columns a[T], b[T];
        for (int t = 0; t < T; ++t) {
            a[t] = load_columns(numbers + t * acts.columns + tile * kTile);
            b[t] = load_columns(numbers + t * acts.columns + tile * kTile + kLanes);
        }
        const auto piece = [&](auto number) {
            constexpr int j = decltype(number)::value;
            if constexpr (S::bits == 4) {
                const U8x64 both = load_bytes(p + 64 * j);
                const U8x64 one = low_halves(both), other = high_halves(both);
                for (int t = 0; t < T; ++t) {
                    front[t] = dot_small<j>(front[t], one, a[t]);
                    back[t] = dot_small<j>(back[t], other, b[t]);
                }
            } else {
                const U8x64 one = load_bytes(p + 64 * j), other = load_bytes(p + 64 * (j + 4));
                for (int t = 0; t < T; ++t) {
                    front[t] = dot_bytes<j>(front[t], one, a[t]);
                    back[t] = dot_bytes<j>(back[t], other, b[t]);
                }
            }
        };
        piece(std::integral_constant<int, 0>());
        piece(std::integral_constant<int, 1>());
        piece(std::integral_constant<int, 2>());
        piece(std::integral_constant<int, 3>());
        TileScales<S> s;
        s.read(p + S::stored, factors);
        for (int t = 0; t < T; ++t) {
            const float a = scales[t * (acts.columns / kTile) + tile];
            const int32_t* sum = sums + t * (acts.columns / kLanes) + 2 * tile;
            if constexpr (S::group == kTile) {
                add_group<S::minima>(total[t], low[t], front[t], taken, s.scale[0], s.minimum[0], a,
                                     sum[0] + sum[1]);
            } else {
                add_group<S::minima>(total[t], low[t], front[t], taken, s.scale[0], s.minimum[0], a,
                                     sum[0]);
                add_group<S::minima>(total[t], low[t], back[t], taken, s.scale[1], s.minimum[1], a,
                                     sum[1]);
            }
        }
        p += S::tile;
    }
    for (int t = 0; t < T; ++t) out[t] = S::minima ? add(total[t], low[t]) : total[t];
}

}  // namespace ISA
}  // namespace unspool
