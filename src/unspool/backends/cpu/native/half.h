// Sixteen-bit floats in software: float16 (half) and bfloat16, to and from float32.
//
// Branch-free, so that loops vectorize. Independent of subnormal float32 numbers: a thread that
// flushes them gets the same results.
#pragma once
#include <cstdint>
#include <cstring>

namespace unspool {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t shifted = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t exponent = shifted & 0x0f800000u;
    const uint32_t normal = shifted + ((127u - 15u) << 23);
    const uint32_t special = normal + ((128u - 16u) << 23);  // infinity or NaN
    // The mantissa of a subnormal, read as 2^-14 * 1.xxx, is too large by 2^-14.
    const uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
    const uint32_t small = exponent == 0 ? subnormal : normal;
    return float_of(sign | (exponent == 0x0f800000u ? special : small));
}

// Rounds to nearest even; overflow becomes infinity.
inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value) & 0x7fffffffu;
    const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    // Adding 0.5 aligns the mantissa of a subnormal half; the addition rounds.
    const uint32_t magic = 126u << 23;
    const uint32_t subnormal = bits_of(float_of(bits) + float_of(magic)) - magic;
    const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    const uint32_t small = bits < (113u << 23) ? subnormal : normal;
    return static_cast<uint16_t>(sign | (bits >= 0x47800000u ? special : small));
}

inline float bf16_to_float(uint16_t number) {
    return float_of(static_cast<uint32_t>(number) << 16);
}

// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t none = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? none : rounded);
}

inline bool half_is_finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

}  // namespace unspool
