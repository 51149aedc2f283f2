// Unpacks rows, bit-identical to the reference dequantization.
//
// Used for embedding lookups of one or a few rows, so it works row by row.
#include <cstring>

#include "half.h"
#include "repack.h"

namespace unspool {
namespace {

uint16_t half_at(const uint8_t* bytes, int number) {
    uint16_t value;
    std::memcpy(&value, bytes + 2 * number, sizeof value);
    return value;
}

void unpack_floats(const Matrix& m, const uint8_t* block, int lane, float* out) {
    for (int64_t column = 0; column < m.columns; ++column) {
        const int64_t at = column * kLanes + lane;
        if (m.format == kF32) {
            std::memcpy(out + column, block + 4 * at, 4);
        } else {
            const uint16_t bits = half_at(block + 2 * at, 0);
            out[column] = m.format == kF16 ? half_to_float(bits) : bf16_to_float(bits);
        }
    }
}

// The 32 stored values of one row of a tile.
void stored_numbers(const Matrix& m, const uint8_t* tile, int lane, uint8_t* out) {
    for (int column = 0; column < kTile; ++column) {
        const uint8_t* first = tile + 4 * lane + column % 4;  // the byte in the first plane
        int number = 0, known = 0;                            // bits known so far
        for (int i = 0; known < m.bits; ++i) {
            const Part part = part_of(m.bits, column / 4, i);
            const int bits = (first[64 * part.plane] >> part.from) & ((1 << part.count) - 1);
            number |= bits << known;
            known += part.count;
        }
        out[column] = static_cast<uint8_t>(number);
    }
}

// A scale stored as a byte: the exponent of a power of two, or an 8-bit float.
float scale_of_byte(int32_t scales, uint8_t byte) {
    return scales == kPowers ? float_of(static_cast<uint32_t>(byte) << 23)
                             : float_of(static_cast<uint32_t>(byte) << 20) * 0x1p112f;
}

void unpack_quantized(const Matrix& m, const uint8_t* block, int lane, float* out) {
    const int width = m.group, groups = kTile / m.group;
    float factor = 0, minimum_factor = 0;
    for (int64_t tile = 0; tile < tiles_of(m); ++tile) {
        if (m.scales == kSuper && tile % kSuperTiles == 0) {
            factor = half_to_float(half_at(block, lane));
            if (m.minima) minimum_factor = half_to_float(half_at(block, kLanes + lane));
            block += factor_bytes(m);
        }
        uint8_t stored[kTile];
        stored_numbers(m, block, lane, stored);
        const uint8_t* scales = block + stored_bytes(m.bits);
        const uint8_t* minima = scales + scale_bytes(m.scales, m.group);
        for (int group = 0; group < groups; ++group) {
            const int at = kLanes * group + lane;
            float scale, minimum = 0;
            if (m.scales == kSuper) {
                scale = factor * static_cast<float>(static_cast<int8_t>(scales[at]));
                if (m.minima) minimum = -(minimum_factor * static_cast<float>(minima[at]));
            } else if (m.scales != kHalves) {
                scale = scale_of_byte(m.scales, scales[at]);
            } else {
                scale = half_to_float(half_at(scales, lane));
                if (m.minima == kMinima) minimum = half_to_float(half_at(minima, lane));
                if (m.minima == kZeroPoints) minimum = -(scale * static_cast<float>(minima[lane]));
            }
            const int64_t column = kTile * tile + width * group;
            const int64_t left = m.columns - column;
            for (int i = 0; i < width && i < left; ++i) {
                const int number = stored[width * group + i];
                const int value_or_code = m.format == kCodes ? m.table[number] : number - m.offset;
                // Without minima add nothing: -0 + 0 would lose its sign.
                const float value = m.minima ? scale * static_cast<float>(number) + minimum
                                             : scale * static_cast<float>(value_or_code);
                out[column + i] = value * m.factor;
            }
        }
        block += tile_bytes(m);
    }
}

}  // namespace
}  // namespace unspool

using namespace unspool;

void unspool_unpack(const Matrix* m, int64_t first, int64_t last, float* out) {
    for (int64_t row = first; row < last; ++row, out += m->columns) {
        const uint8_t* block = m->data + row / kLanes * block_bytes(*m);
        const int lane = static_cast<int>(row % kLanes);
        if (is_quantized(*m)) {
            unpack_quantized(*m, block, lane, out);
        } else {
            unpack_floats(*m, block, lane, out);
        }
    }
}
