// GGUF's quantized types into tiles: bits are moved, no number is computed.
//
// Each type below says where the parts of its blocks lie, and gives the stored numbers of a tile
// (32 columns of one row) as words of four bytes, in the order the layout wants them:
//   Q8: word j holds columns 4 * j to 4 * j + 3.
//   Q4: word j holds columns 4 * j to 4 * j + 3 in its low halves and the sixteen further on in
//       its high halves (which is how Q4_0 and Q4_1 have them in the file).
// Four columns go through every operation at a time.
#include <cstring>

#include "half.h"
#include "repack.h"

namespace unspool {
namespace {

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

// The lowest four bits, one in each of four bytes.
inline uint32_t spread(uint32_t bits) { return ((bits & 0xfu) * 0x00204081u) & kLow1; }

// -- one scale for a block of 32 columns -----------------------------------------------------

struct Plain {
    static constexpr bool kSuper = false;
    static constexpr int kTiles = 1;   // tiles of a block
    static constexpr int kGroups = 1;  // groups of a tile
    static constexpr int kFactor = 0;  // where the scale lies in a block, and the minimum
    static constexpr int kMinimum = 2;
};

template <int kSize, int kNumbers, bool kMinima>
struct Four : Plain {
    static constexpr int kBytes = kSize;
    static constexpr int kWords = 4;
    static constexpr bool kHasMinima = kMinima;
    static constexpr int kOffset = kMinima ? 0 : 8;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + kNumbers, j);
    }
};
using Q4_0 = Four<18, 2, false>;
using Q4_1 = Four<20, 4, true>;

template <int kSize, int kHigh, bool kMinima>
struct Five : Plain {
    static constexpr int kBytes = kSize;
    static constexpr int kWords = 8;
    static constexpr bool kHasMinima = kMinima;
    static constexpr int kOffset = kMinima ? 0 : 16;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        const uint32_t high = word(block + kHigh, 0);
        for (int j = 0; j < 4; ++j) {
            const uint32_t low = word(block + kHigh + 4, j);
            words[j] = (low & kLow4) | spread(high >> (4 * j)) << 4;
            words[4 + j] = ((low >> 4) & kLow4) | spread(high >> (16 + 4 * j)) << 4;
        }
    }
};
using Q5_0 = Five<22, 2, false>;
using Q5_1 = Five<24, 4, true>;

struct Q8_0 : Plain {
    static constexpr int kBytes = 34;
    static constexpr int kWords = 8;
    static constexpr bool kHasMinima = false;
    static constexpr int kOffset = 128;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 8; ++j) words[j] = word(block + 2, j) ^ 0x80808080u;  // + 128
    }
};

// -- 256 columns, whose scales are small numbers with a common factor ------------------------

struct Super {
    static constexpr bool kSuper = true;
    static constexpr int kTiles = kSuperTiles;
};

struct Q2_K : Super {
    static constexpr int kBytes = 84, kWords = 4, kGroups = 2, kOffset = 0;
    static constexpr int kFactor = 80, kMinimum = 82;
    static constexpr bool kHasMinima = true;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 16 + 32 * (tile / 4);
        const int shift = 2 * (tile % 4);
        for (int j = 0; j < 4; ++j) {
            words[j] = ((word(numbers, j) >> shift) & kLow2) |
                       ((word(numbers, 4 + j) >> shift) & kLow2) << 4;
        }
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
        for (int i = 0; i < 16; ++i) scales[i] = block[i] & 15, minima[i] = block[i] >> 4;
    }
};

struct Q3_K : Super {
    static constexpr int kBytes = 110, kWords = 4, kGroups = 2, kOffset = 4;
    static constexpr int kFactor = 108, kMinimum = 0;
    static constexpr bool kHasMinima = false;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 32 + 32 * (tile / 4);
        const int shift = 2 * (tile % 4);
        const auto four = [&](int j) {  // the third bit is set where nothing is to be taken off
            return ((word(numbers, j) >> shift) & kLow2) | ((word(block, j) >> tile) & kLow1) << 2;
        };
        for (int j = 0; j < 4; ++j) words[j] = four(j) | four(4 + j) << 4;
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        const uint8_t* packed = block + 96;
        for (int i = 0; i < 16; ++i) {
            const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
            const int high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;
            scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
        }
    }
};

struct Q4_K : Super {
    static constexpr int kBytes = 144, kWords = 4, kGroups = 1, kOffset = 0;
    static constexpr int kFactor = 0, kMinimum = 2;
    static constexpr bool kHasMinima = true;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 16 + 32 * (tile / 2);
        const int shift = 4 * (tile % 2);
        for (int j = 0; j < 4; ++j) {
            words[j] = ((word(numbers, j) >> shift) & kLow4) |
                       ((word(numbers, 4 + j) >> shift) & kLow4) << 4;
        }
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
        const uint8_t* packed = block + 4;
        for (int i = 0; i < 4; ++i) {
            scales[i] = packed[i] & 63;
            minima[i] = packed[4 + i] & 63;
            scales[4 + i] = (packed[8 + i] & 15) | ((packed[i] >> 2) & 0x30);
            minima[4 + i] = (packed[8 + i] >> 4) | ((packed[4 + i] >> 2) & 0x30);
        }
    }
};

struct Q5_K : Super {
    static constexpr int kBytes = 176, kWords = 8, kGroups = 1, kOffset = 0;
    static constexpr int kFactor = 0, kMinimum = 2;
    static constexpr bool kHasMinima = true;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* low = block + 48 + 32 * (tile / 2);
        const int shift = 4 * (tile % 2);
        for (int j = 0; j < 8; ++j) {
            words[j] = ((word(low, j) >> shift) & kLow4) | ((word(block + 16, j) >> tile) & kLow1)
                                                               << 4;
        }
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
        Q4_K::scales(block, scales, minima);
    }
};

struct Q6_K : Super {
    static constexpr int kBytes = 210, kWords = 8, kGroups = 2, kOffset = 32;
    static constexpr int kFactor = 208, kMinimum = 0;
    static constexpr bool kHasMinima = false;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* low = block + 64 * (tile / 4) + 32 * (tile % 2);
        const uint8_t* high = block + 128 + 32 * (tile / 4);
        const int low_shift = 4 * (tile % 4 / 2), high_shift = 2 * (tile % 4);
        for (int j = 0; j < 8; ++j) {
            words[j] = ((word(low, j) >> low_shift) & kLow4) |
                       ((word(high, j) >> high_shift) & kLow2) << 4;
        }
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        std::memcpy(scales, block + 192, 16);
    }
};

// -- the same way for all ---------------------------------------------------------------------

template <class T>
bool repack_block(const Matrix& m, const uint8_t* source, int64_t row_bytes, int rows,
                  uint8_t* target) {
    constexpr int kStored = 4 * kLanes * T::kWords;
    constexpr int kScales = T::kSuper ? kLanes * T::kGroups : 2 * kLanes;
    constexpr int kTileBytes = kStored + kScales * (T::kHasMinima ? 2 : 1);
    constexpr int kFactors = T::kSuper ? 2 * kLanes * (T::kHasMinima ? 2 : 1) : 0;
    if (rows < kLanes) std::memset(target, 0, static_cast<size_t>(block_bytes(m)));
    bool finite = true;
    const auto copy_half = [&finite](const uint8_t* from, uint8_t* to) {
        finite &= half_is_finite(half(from));
        std::memcpy(to, from, 2);
    };
    // Eight tiles at a time: what is written stays in the cache, and of a row at least two cache
    // lines are read at once.
    const int64_t tiles = tiles_of(m);
    for (int64_t start = 0; start < tiles; start += kSuperTiles) {
        const int64_t end = start + kSuperTiles < tiles ? start + kSuperTiles : tiles;
        for (int row = 0; row < rows; ++row) {
            const uint8_t* block = source + row * row_bytes + start / T::kTiles * T::kBytes;
            uint8_t* tile = target + kFactors;
            uint8_t scales[16], minima[16];
            if constexpr (T::kSuper) {
                copy_half(block + T::kFactor, target + 2 * row);
                if (T::kHasMinima) copy_half(block + T::kMinimum, target + 2 * (kLanes + row));
                T::scales(block, scales, minima);
            }
            for (int t = 0; t < end - start; ++t, tile += kTileBytes) {
                uint32_t words[T::kWords];
                T::stored(block, t, words);
                for (int j = 0; j < T::kWords; ++j) {
                    std::memcpy(tile + 4 * (kLanes * j + row), words + j, 4);
                }
                uint8_t* after = tile + kStored;
                if constexpr (T::kSuper) {
                    for (int g = 0; g < T::kGroups; ++g) {
                        after[kLanes * g + row] = scales[T::kGroups * t + g];
                        if (T::kHasMinima) {
                            after[kScales + kLanes * g + row] = minima[T::kGroups * t + g];
                        }
                    }
                } else {
                    copy_half(block + T::kFactor, after + 2 * row);
                    if (T::kHasMinima) copy_half(block + T::kMinimum, after + kScales + 2 * row);
                    block += T::kBytes;
                }
            }
        }
        target += kFactors + (end - start) * kTileBytes;
    }
    return finite;
}

template <class T>
RepackBlock repacker(const Matrix& m) {
    const bool matches = m.format == (T::kWords == 4 ? kQ4 : kQ8) &&
                         m.group == kTile / T::kGroups && m.offset == T::kOffset &&
                         (m.has_minima != 0) == T::kHasMinima && (m.is_super != 0) == T::kSuper;
    return matches ? repack_block<T> : nullptr;
}

}  // namespace

RepackBlock quantized_repacker(const Matrix& m, int32_t type) {
    switch (type) {
        case kTypeQ4_0:
            return repacker<Q4_0>(m);
        case kTypeQ4_1:
            return repacker<Q4_1>(m);
        case kTypeQ5_0:
            return repacker<Q5_0>(m);
        case kTypeQ5_1:
            return repacker<Q5_1>(m);
        case kTypeQ8_0:
            return repacker<Q8_0>(m);
        case kTypeQ2_K:
            return repacker<Q2_K>(m);
        case kTypeQ3_K:
            return repacker<Q3_K>(m);
        case kTypeQ4_K:
            return repacker<Q4_K>(m);
        case kTypeQ5_K:
            return repacker<Q5_K>(m);
        case kTypeQ6_K:
            return repacker<Q6_K>(m);
        default:
            return nullptr;
    }
}

}  // namespace unspool
