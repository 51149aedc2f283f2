// Sixteen lanes in four 128-bit registers, with the dot product of ARMv8.2.
#pragma once
#include <arm_neon.h>

namespace unspool {
namespace ISA {

struct F32x16 {
    float32x4_t v[4];
};
struct I32x16 {
    int32x4_t v[4];
};
struct U8x64 {
    uint8x16_t v[4];
};  // four columns of sixteen rows

// No loop: before a loop is unrolled, compilers decide to keep arrays in memory.
#define UNSPOOL_EACH(Type, expression)                                                   \
    const auto each = [&]([[maybe_unused]] int i) UNSPOOL_LAMBDA { return expression; }; \
    return Type {                                                                        \
        {                                                                                \
            each(0), each(1), each(2), each(3)                                           \
        }                                                                                \
    }

UNSPOOL_INLINE F32x16 load(const float* p) { UNSPOOL_EACH(F32x16, vld1q_f32(p + 4 * i)); }
UNSPOOL_INLINE F32x16 set1(float x) { UNSPOOL_EACH(F32x16, vdupq_n_f32(x)); }
UNSPOOL_INLINE F32x16 add(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vaddq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 sub(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vsubq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 mul(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vmulq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 div(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vdivq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    UNSPOOL_EACH(F32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i]));
}
UNSPOOL_INLINE F32x16 vmax(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vmaxq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 vmin(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, vminq_f32(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 abs16(F32x16 a) { UNSPOOL_EACH(F32x16, vabsq_f32(a.v[i])); }
// Numbers of at most 2^22: added to this, they are rounded to integers, which are then the lowest
// bits of the sum. Instructions that round or convert take four times as long as an addition.
constexpr float kRoundingBase = 12582912.0f;
UNSPOOL_INLINE F32x16 round16(F32x16 a) {
    return sub(add(a, set1(kRoundingBase)), set1(kRoundingBase));
}
UNSPOOL_INLINE F32x16 where_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    UNSPOOL_EACH(F32x16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]));
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
UNSPOOL_INLINE F32x16 to_float(I32x16 a) { UNSPOOL_EACH(F32x16, vcvtq_f32_s32(a.v[i])); }
// p * 2^n, n an integer within the range of a float.
UNSPOOL_INLINE F32x16 scale_by_power(F32x16 p, F32x16 n) {
    const F32x16 exponent = add(n, set1(kRoundingBase + 127.0f));
    UNSPOOL_EACH(F32x16, vmulq_f32(p.v[i], vreinterpretq_f32_s32(vshlq_n_s32(
                                               vreinterpretq_s32_f32(exponent.v[i]), 23))));
}
UNSPOOL_INLINE void store(float* p, F32x16 a) {
    vst1q_f32(p, a.v[0]);
    vst1q_f32(p + 4, a.v[1]);
    vst1q_f32(p + 8, a.v[2]);
    vst1q_f32(p + 12, a.v[3]);
}
UNSPOOL_INLINE void store_half(uint16_t* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
// Sixteen bytes as the lowest bits of the float 2^23. Subtracting 2^23 makes floats of them: exact,
// and quicker than instructions that convert.
constexpr float kBytesBase = 8388608.0f;
UNSPOOL_INLINE F32x16 bytes_above_base(uint8x16_t bytes) {
    const uint16x8_t high = vdupq_n_u16(0x4b00);  // the highest bits of 2^23
    const uint16x8_t front = vreinterpretq_u16_u8(vzip1q_u8(bytes, vdupq_n_u8(0)));
    const uint16x8_t back = vreinterpretq_u16_u8(vzip2q_u8(bytes, vdupq_n_u8(0)));
    const uint16x8_t bits[4] = {vzip1q_u16(front, high), vzip2q_u16(front, high),
                                vzip1q_u16(back, high), vzip2q_u16(back, high)};
    UNSPOOL_EACH(F32x16, vreinterpretq_f32_u16(bits[i]));
}
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) {
    return sub(bytes_above_base(vld1q_u8(p)), set1(kBytesBase));
}
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) {  // 128 more, to have no sign
    const uint8x16_t bytes = veorq_u8(vreinterpretq_u8_s8(vld1q_s8(p)), vdupq_n_u8(128));
    return sub(bytes_above_base(bytes), set1(kBytesBase + 128.0f));
}
// A factor of unsigned bytes, which are converted and multiplied in one step.
struct ByteFactor {
    F32x16 factor, base;
};
UNSPOOL_INLINE ByteFactor byte_factor(F32x16 x) { return {x, mul(x, set1(-kBytesBase))}; }
UNSPOOL_INLINE F32x16 scale_bytes(const uint8_t* p, const ByteFactor& by) {
    return fma(bytes_above_base(vld1q_u8(p)), by.factor, by.base);
}
// Sixteen bytes, each shifted into the bits of a float.
template <int Bits>
UNSPOOL_INLINE F32x16 load_shifted(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    const auto shifted = [](uint16x4_t four) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(four), Bits));
    };
    return {{shifted(vget_low_u16(low)), shifted(vget_high_u16(low)), shifted(vget_low_u16(high)),
             shifted(vget_high_u16(high))}};
}
// Rounds sixteen floats within the range of int8 and stores them; the lanes add up to their sum.
UNSPOOL_INLINE int32x4_t store_i8_lanes(int8_t* p, F32x16 a) {
    const F32x16 n = add(a, set1(kRoundingBase));
    const auto low_halves = [](float32x4_t x, float32x4_t y) UNSPOOL_LAMBDA {
        return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_f32(x), vreinterpretq_s16_f32(y)));
    };
    const int8x16_t bytes = vuzp1q_s8(low_halves(n.v[0], n.v[1]), low_halves(n.v[2], n.v[3]));
    vst1q_s8(p, bytes);
    return vdotq_s32(vdupq_n_s32(0), bytes, vdupq_n_s8(1));
}
UNSPOOL_INLINE int32_t store_i8(int8_t* p, F32x16 a) { return vaddvq_s32(store_i8_lanes(p, a)); }
// The same for 32 floats, with two sums.
UNSPOOL_INLINE void store_i8_pair(int8_t* p, F32x16 a, F32x16 b, int32_t* sums) {
    const int32x4_t lanes = vpaddq_s32(store_i8_lanes(p, a), store_i8_lanes(p + 16, b));
    vst1_s32(sums, vget_low_s32(vpaddq_s32(lanes, lanes)));
}
UNSPOOL_INLINE float sum(F32x16 a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
UNSPOOL_INLINE float largest(F32x16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

// Four floats, from which a product selects one by index.
struct Four {
    float32x4_t v;
};
UNSPOOL_INLINE Four load_four(const float* p) { return {vld1q_f32(p)}; }

// -- integers -----------------------------------------------------------------------------------

// Dot products use signed weights: subtracted from a stored byte before multiplying.
constexpr int kByteBias = 128;

// Sums of dot products, all of which start at x; they are below 2^22. Added to the bits of the
// float 2^23 + 2^22, an integer adds itself to the float, so that subtracting the float converts
// it.
constexpr float kSumsBase = 12582912.0f;
template <class Sums>
UNSPOOL_INLINE Sums start_sums(int32_t x) {
    const int32x4_t start = vdupq_n_s32(0x4b400000 + x);
    return {{start, start, start, start}};
}
UNSPOOL_INLINE F32x16 sums_to_float(const I32x16& sums) {
    UNSPOOL_EACH(F32x16, vsubq_f32(vreinterpretq_f32_s32(sums.v[i]), vdupq_n_f32(kSumsBase)));
}
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) {
    return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
template <int Bits>  // to the right, or to the left if negative
UNSPOOL_INLINE uint8x16_t shift_bytes(uint8x16_t a) {
    if constexpr (Bits > 0) return vshrq_n_u8(a, Bits);
    if constexpr (Bits < 0) return vshlq_n_u8(a, -Bits);
    return a;
}
// The `Count` bits of every byte from bit `From` on.
template <int From, int Count>
UNSPOOL_INLINE U8x64 take_bits(U8x64 a) {
    const auto take = [](uint8x16_t v) UNSPOOL_LAMBDA {
        v = shift_bytes<From>(v);
        return From + Count < 8 ? vandq_u8(v, vdupq_n_u8((1 << Count) - 1)) : v;
    };
    UNSPOOL_EACH(U8x64, take(a.v[i]));
}
// Adds these bits to the bytes of `low`, from bit `To` on.
template <int From, int To, int Count>
UNSPOOL_INLINE U8x64 insert_bits(U8x64 low, U8x64 a) {
    const uint8x16_t mask = vdupq_n_u8(((1 << Count) - 1) << To);
    UNSPOOL_EACH(U8x64, vbslq_u8(mask, shift_bytes<From - To>(a.v[i]), low.v[i]));
}
// The `Count` highest bits of `high`, with the highest bits of `low` below them.
template <int Count>
UNSPOOL_INLINE U8x64 append_bits(U8x64 high, U8x64 low) {
    UNSPOOL_EACH(U8x64, vsriq_n_u8(high.v[i], low.v[i], Count));
}
// Sixteen activations, from which a dot product selects four by index.
struct Columns {
    int8x16_t v;
};
UNSPOOL_INLINE Columns load_columns(const int8_t* p) { return {vld1q_s8(p)}; }
// Weights of 0 to 15 times activations 4 * J to 4 * J + 3, added to each row's sum.
template <int J>
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, Columns a) {
    UNSPOOL_EACH(I32x16, vdotq_laneq_s32(total.v[i], vreinterpretq_s8_u8(w.v[i]), a.v, J));
}
// The same for stored bytes of 0 to 255, minus kByteBias.
template <int J>
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, Columns a) {
    const auto row = [&](int i) UNSPOOL_LAMBDA {
        return vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(128)));
    };
    UNSPOOL_EACH(I32x16, vdotq_laneq_s32(total.v[i], row(i), a.v, J));
}
// Signed weights times activations 4 * J to 4 * J + 3.
template <int J>
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, Columns a) {
    return dot_small<J>(total, w, a);
}
// Values of the codes 0 to 15.
struct Table {
    uint8x16_t v;
};
UNSPOOL_INLINE Table load_table(const int8_t* p, int bias) {
    return {vaddq_u8(vreinterpretq_u8_s8(vld1q_s8(p)), vdupq_n_u8(static_cast<uint8_t>(bias)))};
}
UNSPOOL_INLINE U8x64 look_up(Table table, U8x64 codes) {
    UNSPOOL_EACH(U8x64, vqtbl1q_u8(table.v, codes.v[i]));
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, U8x64 a) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
// Subtracts a number from every byte; signed results.
UNSPOOL_INLINE U8x64 subtract_from_bytes(U8x64 a, int number) {
    UNSPOOL_EACH(U8x64, vsubq_u8(a.v[i], vdupq_n_u8(static_cast<uint8_t>(number))));
}
#undef UNSPOOL_EACH
constexpr bool kSignedDot = true;  // see gemm_neon.h
constexpr int kRowsPerPass = 8;    // rows of activations that share a block's weights
UNSPOOL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace ISA
}  // namespace unspool
