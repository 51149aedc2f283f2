// Code types of GGUF into tiles (repack_block.h).
//
// IQ1, IQ2 and IQ3 store indices into a codebook grid, whose entries are four or eight magnitudes,
// and separate signs. A code is the index of a magnitude in the type's list; its highest bit is set
// if the value is negative. With eight magnitudes it has four bits, with up to four it has three.
#include "repack_block.h"

namespace unspool {
namespace {

// -- codes of 4 bits -------------------------------------------------------------------------

struct IQ4_NL : Plain {
    static constexpr int kBytes = 18, kBits = 4;
    static constexpr int32_t kFormat = kCodes;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + 2, j);
    }
};

struct MXFP4 : Plain {
    static constexpr int kBytes = 17, kBits = 4;
    static constexpr int32_t kFormat = kCodes, kScales = kPowers;
    static void stored(const uint8_t* block, int, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + 1, j);
    }
    static bool scale(const uint8_t* block, int, uint8_t* to) {
        *to = *block;
        return *block <= 250;  // 255 is NaN, and others exceed the range of a float
    }
};

struct NVFP4 : Plain {
    static constexpr int kBytes = 36, kBits = 4, kTiles = 2, kGroups = 2;
    static constexpr int32_t kFormat = kCodes, kScales = kFloat8;
    // Sixteen columns have eight bytes: the first eight in the low halves.
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* numbers = block + 4 + 16 * tile;
        for (int j = 0; j < 4; ++j) {
            const int shift = j < 2 ? 0 : 4;
            words[j] = ((word(numbers, j % 2) >> shift) & kLow4) |
                       ((word(numbers + 8, j % 2) >> shift) & kLow4) << 4;
        }
    }
    // With one more exponent bit no value is subnormal.
    static bool scale(const uint8_t* block, int group, uint8_t* to) {
        const int byte = block[group] & 127;
        const int exponent = byte >> 3, fraction = byte & 7;
        if (block[group] == 127 || byte == 0) {
            *to = 0;
        } else if (exponent > 0) {
            *to = static_cast<uint8_t>((exponent + 8) << 3 | fraction);
        } else {
            const int top = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0;  // the highest bit set
            *to = static_cast<uint8_t>((6 + top) << 3 | ((fraction << (3 - top)) & 7));
        }
        return true;
    }
};

struct IQ4_XS : Super {
    static constexpr int kBytes = 136, kBits = 4;
    static constexpr int32_t kFormat = kCodes;
    static uint16_t factor(const uint8_t* block) { return half(block); }
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        for (int j = 0; j < 4; ++j) words[j] = word(block + 8 + 16 * tile, j);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        const int high = half(block + 2);
        for (int i = 0; i < 8; ++i) {
            const int low = (block[4 + i / 2] >> (4 * (i % 2))) & 15;
            scales[i] = static_cast<uint8_t>((low | ((high >> (2 * i)) & 3) << 4) - 32);
        }
    }
};

// -- codes of fewer bits -----------------------------------------------------------------------

// 32 codes, a byte each, in the order of the layout.
template <int kBits>
inline void pack_words(const uint8_t* codes, uint32_t* words) {
    if (kBits == 4)
        for (int j = 0; j < 4; ++j) words[j] = word(codes, j) | word(codes, 4 + j) << 4;
    else
        std::memcpy(words, codes, 32);
}

// Sets the highest bit of each code from eight sign bits.
template <int kBits>
inline void add_signs(uint8_t* codes, int bits) {
    for (int i = 0; i < 8; ++i) codes[i] |= static_cast<uint8_t>(((bits >> i) & 1) << (kBits - 1));
}

// Seven sign bits; the eighth makes the parity even.
inline int eight_signs(uint32_t bits) {
    return static_cast<int>(bits & 127) | __builtin_parity(bits & 127) << 7;
}

// Codes of a grid's entries, set by Python; an entry has `width` of them.
struct Grid {
    int32_t type;
    int entries, width;
    const uint8_t* codes;
};
Grid grids[] = {
    {kTypeIQ2_XXS, 256, 8, nullptr}, {kTypeIQ2_XS, 512, 8, nullptr}, {kTypeIQ2_S, 1024, 8, nullptr},
    {kTypeIQ3_XXS, 256, 4, nullptr}, {kTypeIQ3_S, 512, 4, nullptr},  {kTypeIQ1_S, 2048, 8, nullptr},
    {kTypeIQ1_M, 2048, 8, nullptr},
};

Grid* grid_of(int32_t type) {
    for (Grid& grid : grids)
        if (grid.type == type) return &grid;
    return nullptr;
}

template <int32_t kType, int kWidth>
inline void copy_entry(int entry, uint8_t* codes) {
    static const uint8_t* const grid = grid_of(kType)->codes;
    std::memcpy(codes, grid + entry * kWidth, kWidth);
}

template <int kCodeBits>
struct SuperCodes : Super {
    static constexpr int kBits = kCodeBits;
    static constexpr int32_t kFormat = kCodes;
    static uint16_t factor(const uint8_t* block) { return half(block); }
};

inline uint8_t twice_plus_one(int number) { return static_cast<uint8_t>(2 * number + 1); }

struct IQ2_XXS : SuperCodes<3> {
    static constexpr int kBytes = 66;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* from = block + 2 + 8 * tile;
        uint8_t codes[32];
        for (int i = 0; i < 4; ++i) {
            copy_entry<kTypeIQ2_XXS, 8>(from[i], codes + 8 * i);
            add_signs<kBits>(codes + 8 * i, eight_signs(word(from, 1) >> (7 * i)));
        }
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        for (int i = 0; i < 8; ++i)
            scales[i] = twice_plus_one(static_cast<int>(word(block + 6 + 8 * i, 0) >> 28));
    }
};

// Two scales of 4 bits in a byte, one for sixteen columns.
inline void scales_of_halves(const uint8_t* from, uint8_t* scales) {
    for (int i = 0; i < 16; ++i) scales[i] = twice_plus_one((from[i / 2] >> (4 * (i % 2))) & 15);
}

struct IQ2_XS : SuperCodes<3> {
    static constexpr int kBytes = 74, kGroups = 2;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 4; ++i) {
            const int both = half(block + 2 + 2 * (4 * tile + i));
            copy_entry<kTypeIQ2_XS, 8>(both & 511, codes + 8 * i);
            add_signs<kBits>(codes + 8 * i, eight_signs(static_cast<uint32_t>(both >> 9)));
        }
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        scales_of_halves(block + 66, scales);
    }
};

struct IQ2_S : SuperCodes<3> {
    static constexpr int kBytes = 82, kGroups = 2;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 4; ++i) {
            const int high = (block[66 + tile] >> (2 * i)) & 3;
            copy_entry<kTypeIQ2_S, 8>(block[2 + 4 * tile + i] | high << 8, codes + 8 * i);
            add_signs<kBits>(codes + 8 * i, block[34 + 4 * tile + i]);
        }
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        scales_of_halves(block + 74, scales);
    }
};

struct IQ3_XXS : SuperCodes<4> {
    static constexpr int kBytes = 98;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 8; ++i)
            copy_entry<kTypeIQ3_XXS, 4>(block[2 + 8 * tile + i], codes + 4 * i);
        for (int i = 0; i < 4; ++i)
            add_signs<kBits>(codes + 8 * i, eight_signs(word(block + 66, tile) >> (7 * i)));
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        for (int i = 0; i < 8; ++i)
            scales[i] = twice_plus_one(static_cast<int>(word(block + 66, i) >> 28));
    }
};

struct IQ3_S : SuperCodes<4> {
    static constexpr int kBytes = 110;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 8; ++i) {
            const int high = (block[66 + tile] >> i) & 1;
            copy_entry<kTypeIQ3_S, 4>(block[2 + 8 * tile + i] | high << 8, codes + 4 * i);
        }
        for (int i = 0; i < 4; ++i) add_signs<kBits>(codes + 8 * i, block[74 + 4 * tile + i]);
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        for (int i = 0; i < 8; ++i)
            scales[i] = twice_plus_one((block[106 + i / 2] >> (4 * (i % 2))) & 15);
    }
};

// Values -1, 0 and 1, all shifted up by an eighth, or down (codes of 4 and more).
struct IQ1_S : SuperCodes<3> {
    static constexpr int kBytes = 50;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const int high = half(block + 34 + 2 * tile);
        uint8_t codes[32];
        for (int i = 0; i < 4; ++i) {
            const int entry = block[2 + 4 * tile + i] | ((high >> (3 * i)) & 7) << 8;
            copy_entry<kTypeIQ1_S, 8>(entry, codes + 8 * i);
            add_signs<kBits>(codes + 8 * i, high & 0x8000 ? 255 : 0);
        }
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        for (int i = 0; i < 8; ++i)
            scales[i] = twice_plus_one((half(block + 34 + 2 * i) >> 12) & 7);
    }
};

struct IQ1_M : SuperCodes<3> {
    static constexpr int kBytes = 56, kGroups = 2;
    static uint16_t factor(const uint8_t* block) {  // four bits of it in each of four places
        int bits = 0;
        for (int i = 0; i < 4; ++i) bits |= (half(block + 48 + 2 * i) >> 12) << (4 * i);
        return static_cast<uint16_t>(bits);
    }
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 4; ++i) {
            const int high = block[32 + 2 * tile + i / 2] >> (4 * (i % 2));
            copy_entry<kTypeIQ1_M, 8>(block[4 * tile + i] | (high & 7) << 8, codes + 8 * i);
            add_signs<kBits>(codes + 8 * i, high & 8 ? 255 : 0);
        }
        pack_words<kBits>(codes, words);
    }
    static void scales(const uint8_t* block, uint8_t* scales, uint8_t*) {
        for (int i = 0; i < 16; ++i)
            scales[i] = twice_plus_one((half(block + 48 + 2 * (i / 4)) >> (3 * (i % 4))) & 7);
    }
};

// -- ternary ------------------------------------------------------------------------------

struct Ternary : SuperCodes<2> {
    static void scales(const uint8_t*, uint8_t* scales, uint8_t*) { std::memset(scales, 1, 8); }
};

struct TQ2_0 : Ternary {
    static constexpr int kBytes = 66;
    static uint16_t factor(const uint8_t* block) { return half(block + 64); }
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        const uint8_t* from = block + 32 * (tile / 4);
        const int shift = 2 * (tile % 4);
        for (int j = 0; j < 8; ++j) words[j] = (word(from, j) >> shift) & kLow2;
    }
};

struct TQ1_0 : Ternary {
    static constexpr int kBytes = 54;
    static uint16_t factor(const uint8_t* block) { return half(block + 52); }
    // Five ternary digits per byte: 160 columns in 32 bytes, 80 in 16, and the last 16 in 4.
    static int code(const uint8_t* block, int column) {
        static constexpr uint8_t kPowers3[5] = {1, 3, 9, 27, 81};
        const int width = column < 160 ? 32 : column < 240 ? 16 : 4;
        const int within = column < 160 ? column : column < 240 ? column - 160 : column - 240;
        const int first = column < 160 ? 0 : column < 240 ? 32 : 48;
        const uint8_t shifted =
            static_cast<uint8_t>(block[first + within % width] * kPowers3[within / width]);
        return (shifted * 3) >> 8;
    }
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(code(block, 32 * tile + i));
        pack_words<kBits>(codes, words);
    }
};

// One bit per value: plus or minus the scale.
struct Q1_0 : Plain {
    static constexpr int kBytes = 18, kBits = 1, kTiles = 4;
    static constexpr int32_t kFormat = kCodes;
    static void stored(const uint8_t* block, int tile, uint32_t* words) {
        uint8_t codes[32];
        for (int i = 0; i < 32; ++i) codes[i] = (block[2 + 4 * tile + i / 8] >> (i % 8)) & 1;
        pack_words<kBits>(codes, words);
    }
};

// The repacker of a type with a grid, once the grid is set.
template <class T>
RepackBlock with_grid(const Matrix& m, int32_t type) {
    return grid_of(type)->codes != nullptr ? repacker<T>(m) : nullptr;
}

}  // namespace

RepackBlock codes_repacker(const Matrix& m, int32_t type) {
    switch (type) {
        case kTypeIQ4_NL:
            return repacker<IQ4_NL>(m);
        case kTypeIQ4_XS:
            return repacker<IQ4_XS>(m);
#if !defined(__wasm__)  // the page in a browser tab does not read these
        case kTypeMXFP4:
            return repacker<MXFP4>(m);
        case kTypeNVFP4:
            return repacker<NVFP4>(m);
        case kTypeIQ2_XXS:
            return with_grid<IQ2_XXS>(m, type);
        case kTypeIQ2_XS:
            return with_grid<IQ2_XS>(m, type);
        case kTypeIQ2_S:
            return with_grid<IQ2_S>(m, type);
        case kTypeIQ3_XXS:
            return with_grid<IQ3_XXS>(m, type);
        case kTypeIQ3_S:
            return with_grid<IQ3_S>(m, type);
        case kTypeIQ1_S:
            return with_grid<IQ1_S>(m, type);
        case kTypeIQ1_M:
            return with_grid<IQ1_M>(m, type);
        case kTypeTQ1_0:
            return repacker<TQ1_0>(m);
        case kTypeTQ2_0:
            return repacker<TQ2_0>(m);
        case kTypeQ1_0:
            return repacker<Q1_0>(m);
#endif
        default:
            return nullptr;
    }
}

}  // namespace unspool

using namespace unspool;

int32_t unspool_set_grid(int32_t type, const uint8_t* codes, int64_t count) {
    Grid* grid = grid_of(type);
    if (grid == nullptr || count != static_cast<int64_t>(grid->entries) * grid->width) return 0;
    const int largest = type == kTypeIQ3_XXS || type == kTypeIQ3_S ? 7 : 3;
    for (int64_t i = 0; i < count; ++i)
        if (codes[i] > largest) return 0;
    grid->codes = codes;
    return 1;
}
