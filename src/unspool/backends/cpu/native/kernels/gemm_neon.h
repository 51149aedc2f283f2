// gemm.h for NEON: four rows of weights (a quarter of a block, one register) times eight rows of
// activations, with all sums in registers. Activations are packed by eight rows (see prepare.h), so
// that two loads serve eight dot products.
#pragma once
#include "gemm.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

// Eight rows of activations.
struct PackedRows {
    const int8_t* quants;  // [tiles][8 pieces][8 rows][4 columns]
    const float* factors;  // [tiles][scales, scaled sums][8 rows]
};

// Rows [first, first + 8). Rows of an expert may start anywhere: these are packed into `memory`.
inline PackedRows packed_rows(const QuantizedRows& acts, int64_t tiles, int64_t first,
                              float* memory) {
    const int64_t stride = acts.columns / kTile;
    if (first % kPackedRows == 0)
        return {acts.tiled + first * acts.columns, acts.tile_scales + first * stride * 2};
    float* factors = memory;
    int8_t* quants = reinterpret_cast<int8_t*>(factors + tiles * 2 * kPackedRows);
    for (int64_t row = 0; row < kPackedRows; ++row)
        pack_row(acts.quants + (first + row) * acts.columns, acts.scales + (first + row) * stride,
                 acts.scaled_sums + (first + row) * stride, tiles, row, quants, factors);
    return {quants, factors};
}

// Starts of dot products (see start_sums), to be loaded: loads cost no time here.
struct Starts {
    float v[4 * kPackedRows];
    constexpr Starts() : v() {
        for (float& start : v) start = kSumsBase;
    }
};
constexpr Starts kStarts;

// Rows 4 * quarter to 4 * quarter + 3 of the block times T rows, without minima.
template <int Group, int T>
UNSPOOL_INLINE void multiply_quarter(const UnpackedBlock& block, int64_t tiles,
                                     const PackedRows& rows, int quarter, float32x4_t* out) {
    const int8_t* w = reinterpret_cast<const int8_t*>(block.bytes) + quarter * tiles * kTile * 4;
    const int8_t* a = rows.quants;
    const float* factors = rows.factors;
    const float* scales = block.scales + 4 * quarter;
    float32x4_t total[T];
    for (int t = 0; t < T; ++t) total[t] = vdupq_n_f32(0.0f);
    for (int64_t tile = 0; tile < tiles; ++tile, factors += 2 * kPackedRows) {
        for (int g = 0; g < kTile / Group; ++g, scales += kLanes) {
            const float* starts = kStarts.v;
            asm("" : "+r"(starts));  // else the compiler copies registers
            int32x4_t dots[T];
            for (int t = 0; t < T; ++t) dots[t] = vreinterpretq_s32_f32(vld1q_f32(starts + 4 * t));
#if defined(ISA_i8mm)  // sums of two rows of activations with the first or last two of weights
            for (int piece = 0; piece < Group / 8; ++piece, w += 32, a += 8 * kPackedRows) {
                const int8x16_t weights[2] = {vld1q_s8(w), vld1q_s8(w + 16)};
                for_each_index<T>([&](auto index) UNSPOOL_LAMBDA {
                    constexpr int t = decltype(index)::value;
                    dots[t] = vmmlaq_s32(dots[t], vld1q_s8(a + t / 2 * 16), weights[t % 2]);
                });
            }
#else
#pragma GCC unroll 8
            for (int piece = 0; piece < Group / 4; ++piece, w += 16, a += 4 * kPackedRows) {
                const int8x16_t weights = vld1q_s8(w);
                const int8x16_t numbers[2] = {vld1q_s8(a), vld1q_s8(a + 16)};
                for_each_index<T>([&](auto index) UNSPOOL_LAMBDA {
                    constexpr int t = decltype(index)::value;
                    dots[t] = vdotq_laneq_s32(dots[t], weights, numbers[t / 4], t % 4);
                });
            }
#endif
            const float32x4_t scale = vld1q_f32(scales);
            const float32x4_t factor[2] = {vld1q_f32(factors), vld1q_f32(factors + 4)};
            for_each_index<T>([&](auto index) UNSPOOL_LAMBDA {
                constexpr int t = decltype(index)::value;
#if defined(ISA_i8mm)
                const float64x2_t pair = vreinterpretq_f64_f32(scale);
                const float32x4_t four = factor[t / 4];
                const float32x4_t packed =
                    vmulq_f32(vreinterpretq_f32_f64(vdupq_laneq_f64(pair, t % 2)),
                              t / 2 % 2 == 0 ? vzip1q_f32(four, four) : vzip2q_f32(four, four));
#else
                const float32x4_t packed = vmulq_laneq_f32(scale, factor[t / 4], t % 4);
#endif
                const float32x4_t dot =
                    vsubq_f32(vreinterpretq_f32_s32(dots[t]), vdupq_n_f32(kSumsBase));
                total[t] = vfmaq_f32(total[t], dot, packed);
            });
        }
    }
#if defined(ISA_i8mm)
    for (int t = 0; t < T; t += 2) {  // back to a register for each row of activations
        const float64x2_t first = vreinterpretq_f64_f32(total[t]);
        const float64x2_t last = vreinterpretq_f64_f32(total[t + 1]);
        out[t] = vreinterpretq_f32_f64(vzip1q_f64(first, last));
        out[t + 1] = vreinterpretq_f32_f64(vzip2q_f64(first, last));
    }
#else
    for (int t = 0; t < T; ++t) out[t] = total[t];
#endif
}

// An unpacked block times rows [first, first + T).
template <int Group, bool Minima, int T>
UNSPOOL_INLINE void multiply_by_quarters(const UnpackedBlock& block, int64_t tiles,
                                         const QuantizedRows& acts, int64_t first, F32x16* out) {
    const PackedRows rows = packed_rows(acts, tiles, first, block.tile_scales);
    for (int quarter = 0; quarter < 4; ++quarter) {
        float32x4_t total[T];
        multiply_quarter<Group, T>(block, tiles, rows, quarter, total);
        if constexpr (Minima) {  // a separate sum, as in gemv.h
            const float* minima = block.minima + 4 * quarter;
            float32x4_t low[T];
            for (int t = 0; t < T; ++t) low[t] = vdupq_n_f32(0.0f);
            for (int64_t group = 0; group < tiles * (kTile / Group); ++group, minima += kLanes) {
                const float32x4_t minimum = vld1q_f32(minima);
                float sums[kPackedRows];
                const float* sum = rows.factors + (2 * group + 1) * kPackedRows;
                if constexpr (Group == 16) {
                    for (int t = 0; t < T; ++t)
                        sums[t] = rows.factors[group / 2 * 2 * kPackedRows + t] *
                                  static_cast<float>(
                                      acts.sums[(first + t) * (acts.columns / kLanes) + group]);
                    sum = sums;
                }
                const float32x4_t factor[2] = {vld1q_f32(sum), vld1q_f32(sum + 4)};
                for_each_index<T>([&](auto index) UNSPOOL_LAMBDA {
                    constexpr int t = decltype(index)::value;
                    low[t] = vfmaq_laneq_f32(low[t], minimum, factor[t / 4], t % 4);
                });
            }
            for (int t = 0; t < T; ++t) total[t] = vaddq_f32(total[t], low[t]);
        }
        for (int t = 0; t < T; ++t) out[t].v[quarter] = total[t];
    }
}

}  // namespace ISA
}  // namespace unspool
