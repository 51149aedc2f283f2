// Sixteen lanes in four 128-bit vectors of WebAssembly. With relaxed SIMD (a second build) products
// of integers and multiply-adds are single instructions; the engine uses that build only where its
// multiply-add rounds once, so that both give the results of vec16_plain.h to the bit.
#pragma once
#include <wasm_simd128.h>

#include "../half.h"

namespace unspool {
namespace ISA {

struct F32x16 {
    v128_t v[4];
};
struct I32x16 {
    v128_t v[4];
};
struct U8x64 {
    v128_t v[4];
};  // four columns of sixteen rows

#define UNSPOOL_EACH(Result, expression)               \
    Result out;                                        \
    for (int i = 0; i < 4; ++i) out.v[i] = expression; \
    return out

UNSPOOL_INLINE F32x16 load(const float* p) { UNSPOOL_EACH(F32x16, wasm_v128_load(p + 4 * i)); }
UNSPOOL_INLINE F32x16 set1(float x) { UNSPOOL_EACH(F32x16, wasm_f32x4_splat(x)); }
UNSPOOL_INLINE F32x16 add(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_add(a.v[i], b.v[i]));
}
UNSPOOL_INLINE F32x16 sub(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_sub(a.v[i], b.v[i]));
}
UNSPOOL_INLINE F32x16 mul(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_mul(a.v[i], b.v[i]));
}
UNSPOOL_INLINE F32x16 div(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_div(a.v[i], b.v[i]));
}
// a * b + c, rounded once.
#if defined(__wasm_relaxed_simd__)
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_relaxed_madd(a.v[i], b.v[i], c.v[i]));
}
#else
inline UNSPOOL_NOINLINE void fma_each(const F32x16& a, const F32x16& b, F32x16& c) {
    float x[kLanes], y[kLanes], z[kLanes];
    __builtin_memcpy(x, &a, sizeof x);
    __builtin_memcpy(y, &b, sizeof y);
    __builtin_memcpy(z, &c, sizeof z);
    for (int i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    __builtin_memcpy(&c, z, sizeof z);
}
// In doubles the product is exact, and the sum is rounded to 53 bits. Rounding that to a float
// rounds twice, which differs only where the first result lies in the middle between two floats:
// then its low 29 bits are a one and zeros. Floats below 2^-126 have fewer bits. Both are rare.
// Not inlined: it would make the library twice as large.
inline UNSPOOL_NOINLINE F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
    F32x16 out;
    v128_t is_rare = wasm_i64x2_const_splat(0);
    const v128_t low_bits = wasm_i64x2_const_splat((int64_t{1} << 29) - 1);
    const v128_t middle = wasm_i64x2_const_splat(int64_t{1} << 28);
    const v128_t smallest = wasm_f64x2_const_splat(0x1p-126);
    const auto sum_of = [&](v128_t x, v128_t y, v128_t z) UNSPOOL_LAMBDA {
        const v128_t sum = wasm_f64x2_add(
            wasm_f64x2_mul(wasm_f64x2_promote_low_f32x4(x), wasm_f64x2_promote_low_f32x4(y)),
            wasm_f64x2_promote_low_f32x4(z));
        const v128_t is_middle = wasm_i64x2_eq(wasm_v128_and(sum, low_bits), middle);
        const v128_t is_small = wasm_f64x2_lt(wasm_f64x2_abs(sum), smallest);
        is_rare = wasm_v128_or(is_rare, wasm_v128_or(is_middle, is_small));
        return wasm_f32x4_demote_f64x2_zero(sum);
    };
    const auto high = [](v128_t x) UNSPOOL_LAMBDA { return wasm_i64x2_shuffle(x, x, 1, 1); };
    for (int i = 0; i < 4; ++i)
        out.v[i] = wasm_i64x2_shuffle(sum_of(a.v[i], b.v[i], c.v[i]),
                                      sum_of(high(a.v[i]), high(b.v[i]), high(c.v[i])), 0, 2);
    if (__builtin_expect(wasm_v128_any_true(is_rare), 0)) {
        out = c;
        fma_each(a, b, out);
    }
    return out;
}
#endif
// As `a > b ? a : b`, also for NaN.
UNSPOOL_INLINE F32x16 vmax(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_pmax(b.v[i], a.v[i]));
}
UNSPOOL_INLINE F32x16 vmin(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, wasm_f32x4_pmin(b.v[i], a.v[i]));
}
// To the nearest integer: adding 1.5 * 2^23 rounds the fraction away.
UNSPOOL_INLINE F32x16 round16(F32x16 a) {
    const F32x16 base = set1(12582912.0f);
    return sub(add(a, base), base);
}
UNSPOOL_INLINE F32x16 where_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    UNSPOOL_EACH(F32x16, wasm_v128_bitselect(yes.v[i], no.v[i], wasm_f32x4_lt(a.v[i], b.v[i])));
}
UNSPOOL_INLINE F32x16 to_float(I32x16 a) { UNSPOOL_EACH(F32x16, wasm_f32x4_convert_i32x4(a.v[i])); }
UNSPOOL_INLINE I32x16 load_words_i8(const int8_t* p) {
    const v128_t low = wasm_i16x8_load8x8(p), high = wasm_i16x8_load8x8(p + 8);
    return {{wasm_i32x4_extend_low_i16x8(low), wasm_i32x4_extend_high_i16x8(low),
             wasm_i32x4_extend_low_i16x8(high), wasm_i32x4_extend_high_i16x8(high)}};
}
UNSPOOL_INLINE I32x16 load_words_u8(const uint8_t* p) {
    const v128_t low = wasm_u16x8_load8x8(p), high = wasm_u16x8_load8x8(p + 8);
    return {{wasm_u32x4_extend_low_u16x8(low), wasm_u32x4_extend_high_u16x8(low),
             wasm_u32x4_extend_low_u16x8(high), wasm_u32x4_extend_high_u16x8(high)}};
}
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) { return to_float(load_words_i8(p)); }
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) { return to_float(load_words_u8(p)); }
// Sixteen bytes, each shifted into the bits of a float.
template <int Bits>
UNSPOOL_INLINE F32x16 load_shifted(const uint8_t* p) {
    const I32x16 words = load_words_u8(p);
    UNSPOOL_EACH(F32x16, wasm_i32x4_shl(words.v[i], Bits));
}
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, wasm_i32x4_shl(wasm_u32x4_load16x4(p + 4 * i), 16));
}
// The exponent of a half counts from 15, that of a float from 127: multiplying by 2^112 corrects
// it, exactly. Infinity and NaN become numbers from 2^16 on: they get the highest exponent.
UNSPOOL_INLINE v128_t half_to_float(v128_t half) {
    const v128_t size = wasm_v128_and(half, wasm_i32x4_const_splat(0x7fff));
    const v128_t number =
        wasm_f32x4_mul(wasm_i32x4_shl(size, 13), wasm_f32x4_const_splat(0x1p112f));
    const v128_t special = wasm_v128_and(wasm_i32x4_gt(size, wasm_i32x4_const_splat(0x7bff)),
                                         wasm_i32x4_const_splat(0x7f800000));
    const v128_t sign = wasm_i32x4_shl(wasm_v128_xor(half, size), 16);
    return wasm_v128_or(wasm_v128_or(number, special), sign);
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, half_to_float(wasm_u32x4_load16x4(p + 4 * i)));
}
// p * 2^n, n an integer within the range of a float.
UNSPOOL_INLINE F32x16 scale_by_power(F32x16 p, F32x16 n) {
    const v128_t bias = wasm_i32x4_const_splat(127);
    UNSPOOL_EACH(
        F32x16,
        wasm_f32x4_mul(
            p.v[i], wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n.v[i]), bias), 23)));
}

UNSPOOL_INLINE void store(float* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) wasm_v128_store(p + 4 * i, a.v[i]);
}
UNSPOOL_INLINE void store_half(uint16_t* p, F32x16 a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(lanes[i]);
}
// Rounds sixteen floats within the range of int8 and stores them; returns their sum.
UNSPOOL_INLINE int32_t store_i8(int8_t* p, F32x16 a) {
    v128_t n[4];
    for (int i = 0; i < 4; ++i) n[i] = wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(a.v[i]));
    wasm_v128_store(p, wasm_i8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4(n[0], n[1]),
                                               wasm_i16x8_narrow_i32x4(n[2], n[3])));
    const v128_t four = wasm_i32x4_add(wasm_i32x4_add(n[0], n[1]), wasm_i32x4_add(n[2], n[3]));
    const v128_t two = wasm_i32x4_add(four, wasm_i64x2_shuffle(four, four, 1, 0));
    return wasm_i32x4_extract_lane(two, 0) + wasm_i32x4_extract_lane(two, 1);
}
UNSPOOL_INLINE float sum(F32x16 a) {
    const v128_t four =
        wasm_f32x4_add(wasm_f32x4_add(a.v[0], a.v[2]), wasm_f32x4_add(a.v[1], a.v[3]));
    return (wasm_f32x4_extract_lane(four, 0) + wasm_f32x4_extract_lane(four, 2)) +
           (wasm_f32x4_extract_lane(four, 1) + wasm_f32x4_extract_lane(four, 3));
}
UNSPOOL_INLINE float largest(F32x16 a) {
    const v128_t four =
        wasm_f32x4_pmax(wasm_f32x4_pmax(a.v[0], a.v[1]), wasm_f32x4_pmax(a.v[2], a.v[3]));
    const v128_t two = wasm_f32x4_pmax(four, wasm_i64x2_shuffle(four, four, 1, 0));
    const float first = wasm_f32x4_extract_lane(two, 0), second = wasm_f32x4_extract_lane(two, 1);
    return second > first ? second : first;
}

// -- integers -----------------------------------------------------------------------------------

// dot_bytes() uses stored bytes unchanged.
constexpr int kByteBias = 0;

UNSPOOL_INLINE I32x16 iset1(int32_t x) { UNSPOOL_EACH(I32x16, wasm_i32x4_splat(x)); }
// The `Count` bits of every byte from bit `From` on. There are no shifts of bytes on all
// processors: the mask removes what comes from the byte beside.
template <int From, int Count>
UNSPOOL_INLINE U8x64 take_bits(U8x64 a) {
    const v128_t mask = wasm_u8x16_const_splat((1 << Count) - 1);
    UNSPOOL_EACH(U8x64, wasm_v128_and(wasm_u16x8_shr(a.v[i], From), mask));
}
// Adds these bits to the bytes of `low`, from bit `To` on.
template <int From, int To, int Count>
UNSPOOL_INLINE U8x64 insert_bits(U8x64 low, U8x64 a) {
    const v128_t mask = wasm_u8x16_const_splat(((1 << Count) - 1) << To);
    const auto moved = [](v128_t x) UNSPOOL_LAMBDA {
        return From > To ? wasm_u16x8_shr(x, From - To) : wasm_i16x8_shl(x, To - From);
    };
    UNSPOOL_EACH(U8x64, wasm_v128_or(low.v[i], wasm_v128_and(moved(a.v[i]), mask)));
}
// Subtracts a number from every byte; signed results.
UNSPOOL_INLINE U8x64 subtract_from_bytes(U8x64 a, int number) {
    const v128_t numbers = wasm_i8x16_splat(static_cast<int8_t>(number));
    UNSPOOL_EACH(U8x64, wasm_i8x16_sub(a.v[i], numbers));
}
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) {
    UNSPOOL_EACH(U8x64, wasm_v128_load(p + 16 * i));
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, U8x64 a) {
    for (int i = 0; i < 4; ++i) wasm_v128_store(p + 16 * i, a.v[i]);
}
// Values of the codes 0 to 15.
struct Table {
    v128_t v;
};
UNSPOOL_INLINE Table load_table(const int8_t* p, int bias) {
    return {wasm_i8x16_add(wasm_v128_load(p), wasm_i8x16_splat(static_cast<int8_t>(bias)))};
}
UNSPOOL_INLINE U8x64 look_up(const Table& table, U8x64 codes) {
    UNSPOOL_EACH(U8x64, wasm_i8x16_swizzle(table.v, codes.v[i]));
}

// Four activations as two pairs of 16 bits, in all four words: first and third, second and fourth.
struct Pairs {
    v128_t even, odd;
};
UNSPOOL_INLINE Pairs pairs_of(const int8_t* a) {
    const v128_t four = wasm_v128_load32_splat(a);
    return {wasm_i16x8_shr(wasm_i16x8_shl(four, 8), 8), wasm_i16x8_shr(four, 8)};
}
// Weights times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, const int8_t* four) {
    const Pairs a = pairs_of(four);
    const v128_t mask = wasm_i16x8_const_splat(255);
    UNSPOOL_EACH(
        I32x16,
        wasm_i32x4_add(total.v[i],
                       wasm_i32x4_add(wasm_i32x4_dot_i16x8(wasm_v128_and(w.v[i], mask), a.even),
                                      wasm_i32x4_dot_i16x8(wasm_u16x8_shr(w.v[i], 8), a.odd))));
}
// The same for weights below 64.
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, const int8_t* four) {
#if defined(__wasm_relaxed_simd__)  // exact for weights below 128
    const v128_t a = wasm_v128_load32_splat(four);
    UNSPOOL_EACH(I32x16, wasm_i32x4_relaxed_dot_i8x16_i7x16_add(a, w.v[i], total.v[i]));
#else
    return dot_bytes(total, w, four);
#endif
}
// Signed weights times four activations, added to each row's sum.
constexpr bool kSignedDot = true;
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, const int8_t* four) {
    const Pairs a = pairs_of(four);
    const auto even = [](v128_t x)
                          UNSPOOL_LAMBDA { return wasm_i16x8_shr(wasm_i16x8_shl(x, 8), 8); };
    UNSPOOL_EACH(
        I32x16,
        wasm_i32x4_add(total.v[i],
                       wasm_i32x4_add(wasm_i32x4_dot_i16x8(even(w.v[i]), a.even),
                                      wasm_i32x4_dot_i16x8(wasm_i16x8_shr(w.v[i], 8), a.odd))));
}
#undef UNSPOOL_EACH
constexpr int kRowsPerPass = 2;  // rows of activations that share a block's weights
UNSPOOL_INLINE void prefetch(const void*) {}

}  // namespace ISA
}  // namespace unspool
