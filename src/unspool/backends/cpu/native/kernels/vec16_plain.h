// Sixteen lanes in an ordinary array: for processors we have no registers' words for, and the
// version to read first. Compilers turn these loops into whatever vectors there are.
#pragma once
#include <cmath>

#include "../half.h"

namespace unspool {
namespace ISA {

struct F32x16 {
    float v[16];
};
struct I32x16 {
    int32_t v[16];
};
struct U8x64 {
    uint8_t v[64];
};  // four columns of sixteen rows

#define UNSPOOL_EACH(expression)                        \
    F32x16 out;                                         \
    for (int i = 0; i < 16; ++i) out.v[i] = expression; \
    return out

UNSPOOL_INLINE F32x16 load(const float* p) { UNSPOOL_EACH(p[i]); }
UNSPOOL_INLINE F32x16 set1(float x) { UNSPOOL_EACH(x); }
UNSPOOL_INLINE F32x16 add(const F32x16& a, const F32x16& b) { UNSPOOL_EACH(a.v[i] + b.v[i]); }
UNSPOOL_INLINE F32x16 sub(const F32x16& a, const F32x16& b) { UNSPOOL_EACH(a.v[i] - b.v[i]); }
UNSPOOL_INLINE F32x16 mul(const F32x16& a, const F32x16& b) { UNSPOOL_EACH(a.v[i] * b.v[i]); }
UNSPOOL_INLINE F32x16 div(const F32x16& a, const F32x16& b) { UNSPOOL_EACH(a.v[i] / b.v[i]); }
UNSPOOL_INLINE F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
    UNSPOOL_EACH(a.v[i] * b.v[i] + c.v[i]);
}
UNSPOOL_INLINE F32x16 vmax(const F32x16& a, const F32x16& b) {
    UNSPOOL_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
UNSPOOL_INLINE F32x16 vmin(const F32x16& a, const F32x16& b) {
    UNSPOOL_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
// To the nearest whole number: adding 1.5 * 2^23 leaves no room for a fraction.
UNSPOOL_INLINE F32x16 round16(const F32x16& a) {
    UNSPOOL_EACH((a.v[i] + 12582912.0f) - 12582912.0f);
}
UNSPOOL_INLINE F32x16 where_less(const F32x16& a, const F32x16& b, const F32x16& yes,
                                 const F32x16& no) {
    UNSPOOL_EACH(a.v[i] < b.v[i] ? yes.v[i] : no.v[i]);
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) { UNSPOOL_EACH(half_to_float(p[i])); }
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) { UNSPOOL_EACH(bf16_to_float(p[i])); }
UNSPOOL_INLINE F32x16 to_float(const I32x16& a) { UNSPOOL_EACH(static_cast<float>(a.v[i])); }
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) { UNSPOOL_EACH(static_cast<float>(p[i])); }
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) { UNSPOOL_EACH(static_cast<float>(p[i])); }
UNSPOOL_INLINE float power_of_two(int32_t n) {
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
// p times two to the n, n whole and small enough for a float.
UNSPOOL_INLINE F32x16 scale_by_power(const F32x16& p, const F32x16& n) {
    UNSPOOL_EACH(p.v[i] * power_of_two(static_cast<int32_t>(n.v[i])));
}
#undef UNSPOOL_EACH

UNSPOOL_INLINE void store(float* p, const F32x16& a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
UNSPOOL_INLINE void store_half(uint16_t* p, const F32x16& a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
// Sixteen floats, already within a signed byte, rounded and stored; gives their sum.
UNSPOOL_INLINE int32_t store_i8(int8_t* p, const F32x16& a) {
    const F32x16 whole = round16(a);
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(whole.v[i]);
        total += p[i];
    }
    return total;
}
UNSPOOL_INLINE float sum(const F32x16& a) {
    float total[8];
    for (int i = 0; i < 8; ++i) total[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) total[i] += total[i + 4];
    return (total[0] + total[2]) + (total[1] + total[3]);
}
UNSPOOL_INLINE float largest(const F32x16& a) {
    float best = a.v[0];
    for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}

// -- whole numbers ------------------------------------------------------------------------------

// dot_bytes() takes stored bytes as they are: nothing is taken from them.
constexpr int kByteBias = 0;

UNSPOOL_INLINE I32x16 iset1(int32_t x) {
    I32x16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = x;
    return out;
}
UNSPOOL_INLINE I32x16 iadd(const I32x16& a, const I32x16& b) {
    I32x16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = a.v[i] + b.v[i];
    return out;
}
UNSPOOL_INLINE I32x16 isub(const I32x16& a, const I32x16& b) {
    I32x16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = a.v[i] - b.v[i];
    return out;
}
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) {
    U8x64 out;
    __builtin_memcpy(out.v, p, 64);
    return out;
}
UNSPOOL_INLINE U8x64 low_halves(U8x64 a) {
    for (int i = 0; i < 64; ++i) a.v[i] &= 15;
    return a;
}
UNSPOOL_INLINE U8x64 high_halves(U8x64 a) {
    for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
    return a;
}
// Weights times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, const U8x64& w, const int8_t* four) {
    for (int i = 0; i < 16; ++i)
        for (int t = 0; t < 4; ++t) total.v[i] += w.v[4 * i + t] * four[t];
    return total;
}
UNSPOOL_INLINE I32x16 dot_small(const I32x16& total, const U8x64& w, const int8_t* four) {
    return dot_bytes(total, w, four);
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, const U8x64& a) { __builtin_memcpy(p, a.v, 64); }
// Every byte less a number, as a signed byte.
UNSPOOL_INLINE U8x64 take_from(U8x64 a, int number) {
    for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] - number);
    return a;
}
// Signed weights times four activations, added to each row's sum.
constexpr bool kSignedDot = true;
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, const U8x64& w, const int8_t* four) {
    for (int i = 0; i < 16; ++i)
        for (int t = 0; t < 4; ++t) total.v[i] += static_cast<int8_t>(w.v[4 * i + t]) * four[t];
    return total;
}
constexpr int kRowsAtOnce = 4;  // rows of activations that share a block's weights
UNSPOOL_INLINE void prefetch(const void*) {}

}  // namespace ISA
}  // namespace unspool
