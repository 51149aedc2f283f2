// Preparation of a product's input, row by row: norm or activation, then quantization to int8.
//
// 32 values share a scale (their maximum / 127). Their sums are stored, because offsets and minima
// of weights are multiplied by the sum of the activations.
#pragma once
#include <cmath>

#include "../plan.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

// The order of the sum does not depend on the batch.
inline float row_dot(const float* a, const float* b, int64_t count) {
    F32x16 total = zero();
    for (int64_t i = 0; i < count; i += kLanes)
        total = fma(load_first(a + i, count - i, 0.0f), load_first(b + i, count - i, 0.0f), total);
    return sum(total);
}

// RMSNorm or LayerNorm of one row; the sums run over sixteen lanes, then over the lanes.
inline void norm_row(const float* x, int64_t width, const float* weight, const float* bias,
                     bool centred, float epsilon, float* out) {
    F32x16 mean = zero();
    if (centred) {
        F32x16 total = zero();
        for (int64_t i = 0; i < width; i += kLanes)
            total = add(total, load_first(x + i, width - i, 0.0f));
        mean = set1(sum(total) / static_cast<float>(width));
    }
    F32x16 squares = zero();
    for (int64_t i = 0; i < width; i += kLanes) {
        const F32x16 part = sub(load_first(x + i, width - i, 0.0f), mean);
        if (centred && width - i < kLanes) {  // lanes past the end do not count
            float lanes[kLanes];
            store(lanes, part);
            squares = fma(load_first(lanes, width - i, 0.0f), load_first(lanes, width - i, 0.0f),
                          squares);
        } else {
            squares = fma(part, part, squares);
        }
    }
    const F32x16 factor =
        set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = width - i;
        F32x16 part = mul(sub(load_first(x + i, count, 0.0f), mean), factor);
        if (weight != nullptr) part = mul(part, load_first(weight + i, count, 0.0f));
        if (bias != nullptr) part = add(part, load_first(bias + i, count, 0.0f));
        store_first(out + i, count, part);
    }
}

inline F32x16 activate(int32_t kind, F32x16 x) {
    switch (kind) {
        case kSilu:
            return div(x, add(set1(1.0f), exp16(sub(zero(), x))));
        case kRelu:
            return vmax(zero(), x);
        case kRelu2: {
            const F32x16 positive = vmax(zero(), x);
            return mul(positive, positive);
        }
        case kSigmoid:
            return div(set1(1.0f), add(set1(1.0f), exp16(sub(zero(), x))));
        case kGeluTanh: {
            const F32x16 cube = mul(mul(x, x), x);
            const F32x16 inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
            return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh16(inner)));
        }
        default: {
            const F32x16 inner = erf16(mul(x, set1(0.7071067812f)));
            return mul(mul(set1(0.5f), x), add(set1(1.0f), inner));
        }
    }
}

// Activation of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate), both clamped.
inline F32x16 swiglu_clamped(F32x16 gate, F32x16 up, F32x16 limit) {
    gate = vmin(gate, limit);
    up = vmax(sub(zero(), limit), vmin(up, limit));
    const F32x16 denominator = add(set1(1.0f), exp16(mul(set1(-1.702f), gate)));
    return mul(add(up, set1(1.0f)), div(gate, denominator));
}

inline void activate_row(const float* x, int64_t width, int32_t kind, bool gated, float limit,
                         float* out) {
    if (kind == kSwigluClamped) {  // always gated
        for (int64_t i = 0; i < width; i += kLanes) {
            const F32x16 gate = load_first(x + i, width - i, 0.0f);
            const F32x16 up = load_first(x + width + i, width - i, 0.0f);
            store_first(out + i, width - i, swiglu_clamped(gate, up, set1(limit)));
        }
        return;
    }
    for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = width - i;
        F32x16 part = activate(kind, load_first(x + i, count, 0.0f));
        if (gated) part = mul(part, load_first(x + width + i, count, 0.0f));
        store_first(out + i, count, part);
    }
}

// The largest absolute value of 32 floats, or NaN if one of them is not finite.
inline float max_abs_or_nan(const float* x) {
    const F32x16 a = load(x), b = load(x + kLanes);
    const float max_abs = largest(vmax(abs16(a), abs16(b)));
#if defined(ISA_neon)  // NaN is the maximum here
    return max_abs + (max_abs - max_abs);
#else
    return max_abs + sum(add(sub(a, a), sub(b, b)));
#endif
}

// Quantizes a row to bytes, with a scale for 32 values; if one of them is not finite the scale is
// NaN, so that it propagates. `lows` gets scales times sums. A loop for each step: all steps of one
// tile would wait for each other.
inline void quantize_row(const float* x, int64_t tiles, int8_t* numbers, float* scales,
                         int32_t* sums, float* lows) {
    for (int64_t tile = 0; tile < tiles; ++tile) scales[tile] = max_abs_or_nan(x + tile * kTile);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const float inverse = 127.0f / scales[tile];
        lows[tile] = scales[tile] > 0.0f ? inverse : 0.0f;
        scales[tile] /= 127.0f;
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const F32x16 inverse = set1(lows[tile]);
        const float* from = x + tile * kTile;
        store_i8_pair(numbers + tile * kTile, mul(load(from), inverse),
                      mul(load(from + kLanes), inverse), sums + 2 * tile);
    }
    for (int64_t tile = 0; tile < tiles; ++tile)
        lows[tile] = scales[tile] * static_cast<float>(sums[2 * tile] + sums[2 * tile + 1]);
}

// Writes the quantized values of a row, and its scales and scaled sums, into row `row` of a pack of
// kPackedRows rows, in the order in which gemm.h or gemm_neon.h reads them.
inline void pack_row(const int8_t* numbers, const float* scales, const float* lows, int64_t tiles,
                     int64_t row, int8_t* packed, float* factors) {
    constexpr int columns = kPackedColumns, pieces = kTile / columns;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        int8_t* to = packed + (tile * pieces * kPackedRows + row) * columns;
        for (int piece = 0; piece < pieces; ++piece)
            __builtin_memcpy(to + piece * kPackedRows * columns,
                             numbers + tile * kTile + piece * columns, columns);
        factors[tile * 2 * kPackedRows + row] = scales[tile];
        factors[(tile * 2 + 1) * kPackedRows + row] = lows[tile];
    }
}

// Fills row `row` of `out` from the operation's source row; `values` gets it as floats.
inline void prepare_row(const RunContext& run, const Op& op, const float* source,
                        const QuantizedRows& out, int64_t row, bool quantize, float* values) {
    const int64_t width = op.width, padded = (width + kTile - 1) / kTile * kTile;
    if (op.prepare == kPrepareNorm) {
        const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
        norm_row(source, width, run.vectors[op.vector].data, bias, op.flags & kCentred, op.epsilon,
                 values);
    } else if (op.prepare == kPrepareActivation) {
        activate_row(source, width, op.activation, op.flags & kGated, op.cap, values);
    } else {
        for (int64_t i = 0; i < width; i += kLanes)
            store_first(values + i, width - i, load_first(source + i, width - i, 0.0f));
    }
    for (int64_t i = width; i < padded; ++i) values[i] = 0.0f;
    if (!quantize) return;
    int8_t* numbers = out.quants + row * out.columns;
    float* scales = out.scales + row * (out.columns / kTile);
    int32_t* sums = out.sums + row * (out.columns / kLanes);
    float* lows = out.scaled_sums + row * (out.columns / kTile);
    quantize_row(values, padded / kTile, numbers, scales, sums, lows);
    if constexpr (kPackedRows > 0) {
        if (out.tiled == nullptr) return;
        const int64_t pack = row / kPackedRows * kPackedRows;
        pack_row(numbers, scales, lows, padded / kTile, row % kPackedRows,
                 out.tiled + pack * out.columns,
                 out.tile_scales + pack * (out.columns / kTile) * 2);
    }
}

}  // namespace ISA
}  // namespace unspool
