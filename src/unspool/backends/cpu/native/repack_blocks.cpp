// Integer types of GGUF, and similar ones of other file formats, into tiles (repack_block.h).
#include "repack_block.h"

namespace unspool {
namespace {

// Exchanges the bits under the mask with those `distance` further up.
inline uint32_t exchange(uint32_t bits, uint32_t mask, int distance) {
    const uint32_t different = ((bits >> distance) ^ bits) & mask;
    return bits ^ different ^ (different << distance);
}

// From the bits of 32 columns in order to the plane of one bit: bit 4 * s + t becomes bit s of
// byte t. Each exchange swaps two digits of a bit's number.
inline uint32_t bit_plane(uint32_t bits) {
    bits = exchange(bits, 0x0000ccccu, 14);
    bits = exchange(bits, 0x00aa00aau, 7);
    bits = exchange(bits, 0x0c0c0c0cu, 2);
    return exchange(bits, 0x22222222u, 1);
}

// -- one scale for a block of 32 columns -----------------------------------------------------

template <int kSize, int kNumbers, bool kHasMinima>
struct Four : Plain {
    static constexpr int kBytes = kSize, kBits = 4;
    static constexpr int32_t kMinimaKind = kHasMinima ? kMinima : kNoMinima;
    static constexpr int kOffset = kHasMinima ? 0 : 8;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + kNumbers, j);
    }
};
using Q4_0 = Four<18, 2, false>;
using Q4_1 = Four<20, 4, true>;

template <int kSize, int kHigh, bool kHasMinima>
struct Five : Plain {
    static constexpr int kBytes = kSize, kBits = 5;
    static constexpr int32_t kMinimaKind = kHasMinima ? kMinima : kNoMinima;
    static constexpr int kOffset = kHasMinima ? 0 : 16;
    static constexpr bool kInPlanes = true;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + kHigh + 4, j);
        words[4] = bit_plane(word(block + kHigh, 0));
    }
};
using Q5_0 = Five<22, 2, false>;
using Q5_1 = Five<24, 4, true>;

struct Q8_0 : Plain {
    static constexpr int kBytes = 34, kBits = 8;
    static constexpr int kOffset = 128;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 8; ++j) words[j] = word(block + 2, j) ^ 0x80808080u;  // + 128
    }
};

// -- other file formats, with a zero point or a minimum ---------------------------------

struct Zero4 : Plain {
    static constexpr int kBytes = 19, kBits = 4;
    static constexpr int32_t kMinimaKind = kZeroPoints;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + 3, j);
    }
};

template <int kSize, int kNumbers, int32_t kHow>
struct Eight : Plain {
    static constexpr int kBytes = kSize, kBits = 8;
    static constexpr int kOffset = 128;
    static constexpr int32_t kMinimaKind = kHow;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 8; ++j) words[j] = word(block + kNumbers, j);
    }
};
using Zero8 = Eight<35, 3, kZeroPoints>;
using Affine8 = Eight<36, 4, kMinima>;

// -- 256 columns, whose scales are small integers with a common factor ------------------------

struct Q2_K : Super {
    static constexpr int kBytes = 84, kBits = 2, kGroups = 2, kOffset = 0;
    static constexpr int kFactor = 80, kMinimum = 82;
    static constexpr int32_t kMinimaKind = kMinima;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 16 + 32 * (tile / 4);
        const int shift = 2 * (tile % 4);
        for (int j = 0; j < 8; ++j) words[j] = (word(numbers, j) >> shift) & kLow2;
    }
    static uint16_t factor(const uint8_t* block) { return half(block + kFactor); }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
        for (int i = 0; i < 16; ++i) scales[i] = block[i] & 15, minima[i] = block[i] >> 4;
    }
};

struct Q3_K : Super {
    static constexpr int kBytes = 110, kBits = 3, kGroups = 2, kOffset = 4;
    static constexpr int kFactor = 108, kMinimum = 0;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 32 + 32 * (tile / 4);
        const int shift = 2 * (tile % 4);
        for (int j = 0; j < 8; ++j) {  // the third bit is set where 4 is not subtracted
            words[j] = ((word(numbers, j) >> shift) & kLow2) | ((word(block, j) >> tile) & kLow1)
                                                                   << 2;
        }
    }
    static uint16_t factor(const uint8_t* block) { return half(block + kFactor); }
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
    static constexpr int kBytes = 144, kBits = 4, kGroups = 1, kOffset = 0;
    static constexpr int kFactor = 0, kMinimum = 2;
    static constexpr int32_t kMinimaKind = kMinima;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 16 + 32 * (tile / 2);
        const int shift = 4 * (tile % 2);
        for (int j = 0; j < 4; ++j) {
            words[j] = ((word(numbers, j) >> shift) & kLow4) |
                       ((word(numbers, 4 + j) >> shift) & kLow4) << 4;
        }
    }
    static uint16_t factor(const uint8_t* block) { return half(block + kFactor); }
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
    static constexpr int kBytes = 176, kBits = 5, kGroups = 1, kOffset = 0;
    static constexpr int kFactor = 0, kMinimum = 2;
    static constexpr int32_t kMinimaKind = kMinima;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* low = block + 48 + 32 * (tile / 2);
        const int shift = 4 * (tile % 2);
        for (int j = 0; j < 8; ++j) {
            words[j] = ((word(low, j) >> shift) & kLow4) | ((word(block + 16, j) >> tile) & kLow1)
                                                               << 4;
        }
    }
    static uint16_t factor(const uint8_t* block) { return half(block + kFactor); }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
        Q4_K::scales(block, scales, minima);
    }
};

struct Q6_K : Super {
    static constexpr int kBytes = 210, kBits = 6, kGroups = 2, kOffset = 32;
    static constexpr bool kInPlanes = true;
    static constexpr int kFactor = 208, kMinimum = 0;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* low = block + 64 * (tile / 4) + 32 * (tile % 2);
        const uint8_t* high = block + 128 + 32 * (tile / 4);
        const int low_shift = 4 * (tile % 4 / 2), high_shift = 2 * (tile % 4);
        for (int j = 0; j < 4; ++j) {
            words[j] = ((word(low, j) >> low_shift) & kLow4) |
                       ((word(low, 4 + j) >> low_shift) & kLow4) << 4;
        }
        for (int j = 0; j < 2; ++j) {
            words[4 + j] = 0;
            for (int i = 0; i < 4; ++i)
                words[4 + j] |= ((word(high, 2 * i + j) >> high_shift) & kLow2) << (2 * i);
        }
    }
    static uint16_t factor(const uint8_t* block) { return half(block + kFactor); }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        std::memcpy(scales, block + 192, 16);
    }
};

// -- dispatch ---------------------------------------------------------------------------------

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
        case kTypeZero4:
            return repacker<Zero4>(m);
        case kTypeZero8:
            return repacker<Zero8>(m);
        case kTypeAffine8:
            return repacker<Affine8>(m);
        default:
            return nullptr;
    }
}

}  // namespace unspool
