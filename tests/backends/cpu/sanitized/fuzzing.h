// Common code of the fuzzers: random numbers, and code tables.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <random>

#include "repack.h"

namespace unspool {

inline std::mt19937_64 random_bits;

inline int64_t random(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1));
}

// Grids of random codes; the library keeps only their address.
inline void set_grids() {
    static uint8_t codes[2048 * 8], large_codes[512 * 4];
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random(0, 3));
    for (uint8_t& code : large_codes) code = static_cast<uint8_t>(random(0, 7));
    const int64_t sizes[][2] = {{kTypeIQ2_XXS, 256 * 8}, {kTypeIQ2_XS, 512 * 8},
                                {kTypeIQ2_S, 1024 * 8},  {kTypeIQ3_XXS, 256 * 4},
                                {kTypeIQ3_S, 512 * 4},   {kTypeIQ1_S, 2048 * 8},
                                {kTypeIQ1_M, 2048 * 8}};
    for (const auto& [type, size] : sizes) {
        const bool is_large = type == kTypeIQ3_XXS || type == kTypeIQ3_S;
        if (!unspool_set_grid(static_cast<int32_t>(type), is_large ? large_codes : codes, size))
            std::abort();
    }
}

}  // namespace unspool
