// From a file's blocks to tiles: common code of all types. A type defines the offsets in its
// blocks, and returns the stored values of a tile (32 columns of one row) as 4-byte words, in the
// order of the layout:
//   four bits: word j holds columns 4 * j to 4 * j + 3 in its low halves and the sixteen further on
//       in its high halves (which is how Q4_0 and Q4_1 have them in the file).
//   others: word j holds columns 4 * j to 4 * j + 3, a byte each; or, with kInPlanes, word j is
//       the row's word of plane j.
// Four columns are processed at a time. Bits are moved, no value is computed.
#pragma once
#include <cstring>

#include "half.h"
#include "repack.h"

namespace unspool {

constexpr uint32_t kLow4 = 0x0f0f0f0fu;  // the low half of each of four bytes
constexpr uint32_t kLow2 = 0x03030303u;
constexpr uint32_t kLow1 = 0x01010101u;

inline uint32_t word(const uint8_t* bytes, int number) {
    uint32_t value;
    std::memcpy(&value, bytes + 4 * number, sizeof value);
    return value;
}

inline uint16_t half(const uint8_t* bytes) {
    uint16_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// From eight words, a byte for each value, to the planes of `kBits` bits.
template <int kBits>
inline void join_planes(const uint32_t* words, uint32_t* planes) {
    int known = 0;  // bits stored so far
    for (int width = 4; width > 0; width /= 2) {
        if ((kBits & width) == 0) continue;
        const uint32_t mask = kLow1 * ((1u << width) - 1);
        for (int plane = 0; plane < width; ++plane, ++planes) {
            *planes = 0;
            for (int piece = plane; piece < 8; piece += width)
                *planes |= ((words[piece] >> known) & mask) << (piece - plane);
        }
        known += width;
    }
}

// One scale for a block of 32 columns.
struct Plain {
    static constexpr int32_t kFormat = kIntegers, kScales = kHalves, kMinimaKind = kNoMinima;
    static constexpr int kTiles = 1;   // tiles of a block
    static constexpr int kGroups = 1;  // groups of a tile
    static constexpr int kOffset = 0;
    static constexpr int kFactor = 0;  // offsets of the scale and the minimum in a block
    static constexpr int kMinimum = 2;
    static constexpr bool kInPlanes = false;
};

// 256 columns, whose scales are small integers with a common factor.
struct Super {
    static constexpr int32_t kFormat = kIntegers, kScales = kSuper, kMinimaKind = kNoMinima;
    static constexpr int kTiles = kSuperTiles;
    static constexpr int kGroups = 1;
    static constexpr int kOffset = 0;
    static constexpr int kFactor = 0;
    static constexpr int kMinimum = 0;
    static constexpr bool kInPlanes = false;
};

template <class T>
bool repack_block(const Matrix& m, const uint8_t* source, int64_t row_bytes, int rows,
                  uint8_t* target) {
    constexpr int kBits = T::kBits, kStored = stored_bytes(kBits);
    constexpr int kScaleBytes = scale_bytes(T::kScales, kTile / T::kGroups);
    constexpr int kTileBytes =
        kStored + kScaleBytes + minima_bytes(T::kMinimaKind, T::kScales, kTile / T::kGroups);
    constexpr bool kIsSuper = T::kScales == kSuper;
    constexpr int kFactors = kIsSuper ? 2 * kLanes * (T::kMinimaKind ? 2 : 1) : 0;
    if (rows < kLanes) std::memset(target, 0, static_cast<size_t>(block_bytes(m)));
    bool finite = true;
    const auto put_half = [&finite](uint16_t bits, uint8_t* to) {
        finite &= half_is_finite(bits);
        std::memcpy(to, &bits, 2);
    };
    // Eight tiles at a time: the target stays in the cache, and at least two cache lines of a row
    // are read together.
    const int64_t tiles = tiles_of(m);
    for (int64_t start = 0; start < tiles; start += kSuperTiles) {
        const int64_t end = start + kSuperTiles < tiles ? start + kSuperTiles : tiles;
        for (int row = 0; row < rows; ++row) {
            const uint8_t* first = source + row * row_bytes + start / T::kTiles * T::kBytes;
            uint8_t* tile = target + kFactors;
            uint8_t scales[16], minima[16];
            if constexpr (kIsSuper) {
                put_half(T::factor(first), target + 2 * row);
                if (T::kMinimaKind)
                    put_half(half(first + T::kMinimum), target + 2 * (kLanes + row));
                T::scales(first, scales, minima);
            }
            for (int t = 0; t < end - start; ++t, tile += kTileBytes) {
                const uint8_t* block = first + t / T::kTiles * T::kBytes;
                uint32_t words[8], planes[8];
                T::stored(block, t % T::kTiles, words);
                constexpr bool kJoin = kBits != 4 && kBits != 8 && !T::kInPlanes;
                if constexpr (kJoin) join_planes<kBits>(words, planes);
                for (int j = 0; j < kBits; ++j)
                    std::memcpy(tile + 4 * (kLanes * j + row), (kJoin ? planes : words) + j, 4);
                uint8_t* after = tile + kStored;
                for (int g = 0; g < T::kGroups; ++g) {
                    if constexpr (kIsSuper) {
                        after[kLanes * g + row] = scales[T::kGroups * t + g];
                        if (T::kMinimaKind)
                            after[kScaleBytes + kLanes * g + row] = minima[T::kGroups * t + g];
                    } else if constexpr (T::kScales != kHalves) {
                        finite &= T::scale(block, T::kGroups * (t % T::kTiles) + g,
                                           after + kLanes * g + row);
                    }
                }
                if constexpr (T::kScales == kHalves) {
                    put_half(half(block + T::kFactor), after + 2 * row);
                    if (T::kMinimaKind == kMinima)
                        put_half(half(block + T::kMinimum), after + kScaleBytes + 2 * row);
                    if (T::kMinimaKind == kZeroPoints)
                        after[kScaleBytes + row] = block[T::kMinimum];
                }
            }
        }
        target += kFactors + (end - start) * kTileBytes;
    }
    return finite;
}

template <class T>
RepackBlock repacker(const Matrix& m) {
    const bool matches = m.format == T::kFormat && m.bits == T::kBits &&
                         m.group == kTile / T::kGroups && m.offset == T::kOffset &&
                         m.minima == T::kMinimaKind && m.scales == T::kScales;
    return matches ? repack_block<T> : nullptr;
}

}  // namespace unspool
