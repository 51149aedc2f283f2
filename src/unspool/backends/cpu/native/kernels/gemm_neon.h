// gemm.h for NEON: four rows of weights (one register) times up to eight rows of activations, with
// all sums in registers. Four activations are selected from a register by lane, so that each is
// loaded once for sixteen columns.
#pragma once
#include "gemm.h"

namespace unspool {
namespace ISA {

template <int T>
UNSPOOL_INLINE void dot_columns(int32x4_t* dots, const uint8_t* w, const int8_t* a,
                                int64_t stride) {
    int8x16_t rows[T];
    for (int t = 0; t < T; ++t) rows[t] = vld1q_s8(a + t * stride);
#define UNSPOOL_PIECE(j)                                                                     \
    {                                                                                        \
        const int8x16_t weights = vreinterpretq_s8_u8(vld1q_u8(w + 64 * j));                 \
        for (int t = 0; t < T; ++t) dots[t] = vdotq_laneq_s32(dots[t], weights, rows[t], j); \
    }
    UNSPOOL_PIECE(0)
    UNSPOOL_PIECE(1)
    UNSPOOL_PIECE(2)
    UNSPOOL_PIECE(3)
#undef UNSPOOL_PIECE
}

// Rows 4 * quarter to 4 * quarter + 3 of the block.
template <int Group, bool Minima, int T>
UNSPOOL_INLINE void multiply_quarter(const UnpackedBlock& block, int64_t tiles,
                                     const QuantizedRows& acts, int64_t first, int quarter,
                                     F32x16* out) {
    const int64_t tile_stride = acts.columns / kTile;
    const int8_t* a = acts.quants + first * acts.columns;
    const float* scales = acts.scales + first * tile_stride;
    float32x4_t total[T], low[T];
    for (int t = 0; t < T; ++t) total[t] = vdupq_n_f32(0.0f);
    const auto add_group_dots = [&](int64_t group, int64_t tile, const int32x4_t* dots) {
        const float32x4_t scale = vld1q_f32(block.scales + group * kLanes + 4 * quarter);
        for (int t = 0; t < T; ++t) {
            const float32x4_t packed = vmulq_n_f32(scale, scales[t * tile_stride + tile]);
            total[t] = vfmaq_f32(total[t], vcvtq_f32_s32(dots[t]), packed);
        }
    };
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const uint8_t* w = block.bytes + tile * kTile * kLanes + 16 * quarter;
        int32x4_t dots[T];
        for (int t = 0; t < T; ++t) dots[t] = vdupq_n_s32(0);
        dot_columns<T>(dots, w, a + tile * kTile, acts.columns);
        if constexpr (Group == 16) {
            add_group_dots(2 * tile, tile, dots);
            for (int t = 0; t < T; ++t) dots[t] = vdupq_n_s32(0);
        }
        dot_columns<T>(dots, w + 256, a + tile * kTile + 16, acts.columns);
        add_group_dots(Group == 16 ? 2 * tile + 1 : tile, tile, dots);
    }
    if constexpr (Minima) {
        for (int t = 0; t < T; ++t) low[t] = vdupq_n_f32(0.0f);
        for (int64_t group = 0; group < tiles * (kTile / Group); ++group) {
            const float32x4_t minimum = vld1q_f32(block.minima + group * kLanes + 4 * quarter);
            for (int t = 0; t < T; ++t) {
                const int64_t row = first + t;
                const float factor =
                    Group == kTile
                        ? acts.scaled_sums[row * tile_stride + group]
                        : acts.scales[row * tile_stride + group / 2] *
                              static_cast<float>(acts.sums[row * (acts.columns / kLanes) + group]);
                low[t] = vfmaq_n_f32(low[t], minimum, factor);
            }
        }
        for (int t = 0; t < T; ++t) total[t] = vaddq_f32(total[t], low[t]);
    }
    for (int t = 0; t < T; ++t) out[t].v[quarter] = total[t];
}

// An unpacked block times rows [first, first + T).
template <int Group, bool Minima, int T>
UNSPOOL_INLINE void multiply_by_quarters(const UnpackedBlock& block, int64_t tiles,
                                         const QuantizedRows& acts, int64_t first, F32x16* out) {
    for (int quarter = 0; quarter < 4; ++quarter)
        multiply_quarter<Group, Minima, T>(block, tiles, acts, first, quarter, out);
}

}  // namespace ISA
}  // namespace unspool
