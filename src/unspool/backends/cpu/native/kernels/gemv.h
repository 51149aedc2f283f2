// GEMV: sixteen rows of quantized weights times a few rows of activations, from the packed layout.
// Decode time is spent here: every weight is read once, in order.
//
// The arithmetic of one output value is the same in every kernel and every batch:
//   for each group of columns, in order:  total += float(integer dot product) * (scale * a)
//                                         low   += minimum * (a * sum of activations)
//   result = total + low
// Integers are exact, so the order within a dot product does not matter; the order of float
// operations is fixed. So a row's result is batch-invariant.
#pragma once
#include "../plan.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

// Packed format of a quantized matrix at compile time: see layout.h.
template <int32_t Format, int Bits, int Group, int32_t ScaleKind, int32_t Minima>
struct Spec {
    static constexpr int32_t format = Format, scale_kind = ScaleKind, minima_kind = Minima;
    static constexpr int bits = Bits, group = Group;
    static constexpr bool super = ScaleKind == kSuper, has_minima = Minima != kNoMinima;
    static constexpr int stored = stored_bytes(Bits);
    static constexpr int scale_bytes = unspool::scale_bytes(ScaleKind, Group);
    static constexpr int tile = stored + scale_bytes + minima_bytes(Minima, ScaleKind, Group);
    static constexpr int factors = super ? kLanes * 2 * (has_minima ? 2 : 1) : 0;
};

// Adds the bits of piece I from part `Number` on to those below bit `To`.
template <int Bits, int I, int Number, int To>
UNSPOOL_INLINE U8x64 insert_parts(U8x64 low, const uint8_t* p) {
    constexpr Part part = part_of(Bits, I, Number);
    if constexpr (part.count == 0) {
        return low;
    } else {
        low = insert_bits<part.from, To, part.count>(low, load_bytes(p + 64 * part.plane));
        return insert_parts<Bits, I, Number + 1, To + part.count>(low, p);
    }
}

#if defined(ISA_neon)  // it has an instruction for this
// Puts the parts from `Number` on, which are the highest bits of their planes, above the highest
// bits of `low`.
template <int Bits, int I, int Number>
UNSPOOL_INLINE U8x64 append_parts(U8x64 low, const uint8_t* p) {
    constexpr Part part = part_of(Bits, I, Number);
    if constexpr (part.count == 0) {
        return low;
    } else {
        low = append_bits<part.count>(load_bytes(p + 64 * part.plane), low);
        return append_parts<Bits, I, Number + 1>(low, p);
    }
}
#endif

// Stored values of piece I (columns 4 * I to 4 * I + 3) of the tile at p, a byte each.
template <int Bits, int I>
UNSPOOL_INLINE U8x64 load_piece(const uint8_t* p) {
    constexpr Part part = part_of(Bits, I, 0);
    const U8x64 plane = load_bytes(p + 64 * part.plane);
    if constexpr (Bits == 8) return plane;
#if defined(ISA_neon)
    constexpr Part next = part_of(Bits, I, 1);
    constexpr bool highest = part.from + part.count == 8 && next.from + next.count == 8;
    if constexpr (highest) return take_bits<8 - Bits, Bits>(append_parts<Bits, I, 1>(plane, p));
#endif
    return insert_parts<Bits, I, 1, part.count>(take_bits<part.from, part.count>(plane), p);
}

// Common factors of the scales and minima of eight tiles; that of the minima is negated.
template <class S>
struct Factors {
    F32x16 scale = zero();
    ByteFactor unsigned_scale, minimum;  // with minima, scales have no sign

    // Reads them if they precede this tile; returns the start of the tile itself.
    UNSPOOL_INLINE const uint8_t* read_before(int64_t tile, const uint8_t* p) {
        if constexpr (S::super) {
            if (tile % kSuperTiles != 0) return p;
            const auto* factors = reinterpret_cast<const uint16_t*>(p);
            scale = load_half(factors);
            if constexpr (S::has_minima) {
                unsigned_scale = byte_factor(scale);
                minimum = byte_factor(sub(zero(), load_half(factors + kLanes)));
            }
        }
        return p + S::factors;
    }
};

// Scales and minima of one tile, as floats.
template <class S>
struct TileScales {
    F32x16 scale[kTile / S::group], minimum[kTile / S::group];

    // With minima, `offset` was subtracted only to make values signed: the minimum adds it back.
    UNSPOOL_INLINE void read(const uint8_t* p, const Factors<S>& factors, int32_t offset) {
        for (int g = 0; g < kTile / S::group; ++g) {
            if constexpr (S::scale_kind == kPowers) {
                scale[g] = load_shifted<23>(p);
            } else if constexpr (S::scale_kind == kFloat8) {
                // Exponent bias 15 there, 127 here.
                scale[g] = mul(load_shifted<20>(p + g * kLanes), set1(0x1p112f));
            } else if constexpr (S::super) {
                const uint8_t* bytes = p + g * kLanes;
                if constexpr (S::has_minima) {
                    scale[g] = scale_bytes(bytes, factors.unsigned_scale);
                    minimum[g] = scale_bytes(bytes + S::scale_bytes, factors.minimum);
                } else {
                    scale[g] = mul(factors.scale, load_i8(reinterpret_cast<const int8_t*>(bytes)));
                }
            } else {
                scale[g] = load_half(reinterpret_cast<const uint16_t*>(p));
                if constexpr (S::minima_kind == kZeroPoints)
                    minimum[g] = sub(zero(), mul(scale[g], load_u8(p + S::scale_bytes)));
                else if constexpr (S::has_minima)
                    minimum[g] = load_half(reinterpret_cast<const uint16_t*>(p + S::scale_bytes));
                if constexpr (S::has_minima && S::bits == 8)
                    minimum[g] = fma(scale[g], set1(static_cast<float>(offset)), minimum[g]);
            }
        }
    }
};

// Added to the values of a code table: some dot products need unsigned weights.
constexpr int kTableBias = kSignedDot ? 0 : 128;

// Offset of the stored bytes; times the sum of activations it is subtracted from a dot product.
template <class S>
UNSPOOL_INLINE int32_t byte_offset(const Matrix& m) {
    if (S::format == kCodes) return kTableBias;
    return S::bits < 8 ? m.offset : m.offset - kByteBias;
}

// Adds the product of one group to a row's result.
template <bool Minima>
UNSPOOL_INLINE void add_group(F32x16& total, F32x16& low, const F32x16& dots, const F32x16& scale,
                              const F32x16& minimum, float a, float a_low) {
    total = fma(dots, mul(scale, set1(a)), total);
    if constexpr (Minima) low = fma(minimum, set1(a_low), low);
}

// Prefetches a tile ahead: far enough to cover memory latency, near enough to fit the cache.
template <class S>
UNSPOOL_INLINE void prefetch_tile([[maybe_unused]] const uint8_t* p) {
#if !defined(ISA_neon)  // ARM processors prefetch better themselves
    constexpr int distance = 2560;
    for (int line = 0; line < S::tile; line += 64) prefetch(p + distance + line);
#endif
}

// One block times rows [first, first + T): out[t] gets sixteen values.
template <class S, int T>
UNSPOOL_INLINE void multiply_block(const Matrix& m, const uint8_t* p, const QuantizedRows& acts,
                                   int64_t first, F32x16* out) {
    const int64_t tiles = tiles_of(m);
    const int32_t offset_correction = byte_offset<S>(m);
    [[maybe_unused]] Table table;
    if constexpr (S::format == kCodes) table = load_table(m.table, kTableBias);
    const int8_t* numbers = acts.quants + first * acts.columns;
    const float* scales = acts.scales + first * (acts.columns / kTile);
    const float* lows = acts.scaled_sums + first * (acts.columns / kTile);
    const int32_t* sums = acts.sums + first * (acts.columns / kLanes);
    F32x16 total[T], low[T];
    for_each_index<T>([&](auto t) UNSPOOL_LAMBDA { total[t] = low[t] = zero(); });
    Factors<S> factors;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        p = factors.read_before(tile, p);
        prefetch_tile<S>(p);
        // If all 32 columns share a scale, both halves share a sum.
        constexpr bool split = S::group < kTile;
        constexpr bool small = S::format == kIntegers && S::bits <= 4;
        using Sums = std::conditional_t<small, SmallSums, I32x16>;
        Sums front[T], second[split ? T : 1];
        Sums* back = split ? second : front;
        Columns a[T], b[T];
        for_each_index<T>([&](auto t) UNSPOOL_LAMBDA {
            // Sums start with what the stored bytes' offset adds to them, negated.
            const int32_t* sum = sums + t * (acts.columns / kLanes) + 2 * tile;
            front[t] = start_sums<Sums>(-offset_correction * (split ? sum[0] : sum[0] + sum[1]));
            if constexpr (split) back[t] = start_sums<Sums>(-offset_correction * sum[1]);
            a[t] = load_columns(numbers + t * acts.columns + tile * kTile);
            b[t] = load_columns(numbers + t * acts.columns + tile * kTile + kLanes);
        });
        for_each_index<4>([&](auto piece_index) UNSPOOL_LAMBDA {
            constexpr int j = decltype(piece_index)::value;
            U8x64 low_columns = load_piece<S::bits, j>(p),
                  high_columns = load_piece<S::bits, j + 4>(p);
            if constexpr (S::format == kCodes) {
                low_columns = look_up(table, low_columns);
                high_columns = look_up(table, high_columns);
            }
            for_each_index<T>([&](auto t) UNSPOOL_LAMBDA {
                if constexpr (S::format == kCodes) {
                    front[t] = dot_signed<j>(front[t], low_columns, a[t]);
                    back[t] = dot_signed<j>(back[t], high_columns, b[t]);
                } else if constexpr (S::bits < 8) {
                    front[t] = dot_small<j>(front[t], low_columns, a[t]);
                    back[t] = dot_small<j>(back[t], high_columns, b[t]);
                } else {
                    front[t] = dot_bytes<j>(front[t], low_columns, a[t]);
                    back[t] = dot_bytes<j>(back[t], high_columns, b[t]);
                }
            });
        });
        TileScales<S> s;
        s.read(p + S::stored, factors, m.offset);
        for_each_index<T>([&](auto t) UNSPOOL_LAMBDA {
            const float a = scales[t * (acts.columns / kTile) + tile];
            [[maybe_unused]] const int32_t* sum = sums + t * (acts.columns / kLanes) + 2 * tile;
            if constexpr (split) {
                add_group<S::has_minima>(total[t], low[t], sums_to_float(front[t]), s.scale[0],
                                         s.minimum[0], a, a * static_cast<float>(sum[0]));
                add_group<S::has_minima>(total[t], low[t], sums_to_float(back[t]), s.scale[1],
                                         s.minimum[1], a, a * static_cast<float>(sum[1]));
            } else {
                add_group<S::has_minima>(total[t], low[t], sums_to_float(front[t]), s.scale[0],
                                         s.minimum[0], a, lows[t * (acts.columns / kTile) + tile]);
            }
        });
        p += S::tile;
    }
    for_each_index<T>(
        [&](auto t) UNSPOOL_LAMBDA { out[t] = S::has_minima ? add(total[t], low[t]) : total[t]; });
}

}  // namespace ISA
}  // namespace unspool
