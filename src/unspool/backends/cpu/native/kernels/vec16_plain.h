// Sixteen lanes in four vectors of the compiler's vector extension: the portable version, and the
// one to read first. GCC and Clang compile `a + b` of such vectors to SIMD instructions if there
// are any, without relying on auto-vectorization.
#pragma once
#include "../half.h"

namespace unspool {
namespace ISA {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef uint16_t UShorts __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));

struct F32x16 {
    Floats v[4];
};
struct I32x16 {
    Ints v[4];
};
struct U8x64 {
    Bytes v[4];
};  // four columns of sixteen rows

template <class To, class From>
UNSPOOL_INLINE To read_as(const From& from) {  // the same bits
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
template <class Vector, class Number>
UNSPOOL_INLINE Vector four_of(const Number* p) {
    return Vector{p[0], p[1], p[2], p[3]};
}

#define UNSPOOL_EACH(Result, expression)               \
    Result out;                                        \
    for (int i = 0; i < 4; ++i) out.v[i] = expression; \
    return out

UNSPOOL_INLINE F32x16 load(const float* p) {
    F32x16 out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
}
UNSPOOL_INLINE F32x16 set1(float x) { UNSPOOL_EACH(F32x16, (Floats{x, x, x, x})); }
UNSPOOL_INLINE F32x16 add(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, a.v[i] + b.v[i]); }
UNSPOOL_INLINE F32x16 sub(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, a.v[i] - b.v[i]); }
UNSPOOL_INLINE F32x16 mul(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, a.v[i] * b.v[i]); }
UNSPOOL_INLINE F32x16 div(F32x16 a, F32x16 b) { UNSPOOL_EACH(F32x16, a.v[i] / b.v[i]); }
// a * b + c, rounded once, as the instruction of other processors does.
#if defined(__ARM_FEATURE_FMA) || defined(__FMA__)
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    for (int i = 0; i < 16; ++i)
        c.v[i / 4][i % 4] = __builtin_fmaf(a.v[i / 4][i % 4], b.v[i / 4][i % 4], c.v[i / 4][i % 4]);
    return c;
}
#else
// In doubles the product is exact. The sum is rounded to odd (towards zero, and its last bit is set
// if it is inexact), so that the second rounding, to float, gives the float nearest to the exact
// sum.
UNSPOOL_INLINE Doubles fma_doubles(Doubles a, Doubles b, Doubles c) {
    const Doubles product = a * b, total = product + c, from_c = total - product;
    const Doubles error = (product - (total - from_c)) + (c - from_c);
    const Longs is_inexact = (error < 0.0) | (error > 0.0);  // not if NaN
    const Longs is_too_large = is_inexact & ((error < 0.0) ^ (total < 0.0));
    return read_as<Doubles>((read_as<Longs>(total) + is_too_large) | (is_inexact & 1));
}
UNSPOOL_INLINE Doubles to_doubles(Floats a) { return __builtin_convertvector(a, Doubles); }
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    UNSPOOL_EACH(F32x16, __builtin_convertvector(fma_doubles(to_doubles(a.v[i]), to_doubles(b.v[i]),
                                                             to_doubles(c.v[i])),
                                                 Floats));
}
#endif
UNSPOOL_INLINE F32x16 vmax(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
UNSPOOL_INLINE F32x16 vmin(F32x16 a, F32x16 b) {
    UNSPOOL_EACH(F32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
// To the nearest integer: adding 1.5 * 2^23 rounds the fraction away.
UNSPOOL_INLINE F32x16 round16(F32x16 a) {
    UNSPOOL_EACH(F32x16, (a.v[i] + 12582912.0f) - 12582912.0f);
}
UNSPOOL_INLINE F32x16 where_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    UNSPOOL_EACH(F32x16, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]);
}
UNSPOOL_INLINE F32x16 to_float(I32x16 a) {
    UNSPOOL_EACH(F32x16, __builtin_convertvector(a.v[i], Floats));
}
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) {
    UNSPOOL_EACH(F32x16, __builtin_convertvector(four_of<Ints>(p + 4 * i), Floats));
}
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) {
    UNSPOOL_EACH(F32x16, __builtin_convertvector(four_of<Ints>(p + 4 * i), Floats));
}
// Sixteen bytes, each shifted into the bits of a float.
template <int Bits>
UNSPOOL_INLINE F32x16 load_shifted(const uint8_t* p) {
    UNSPOOL_EACH(F32x16, read_as<Floats>(four_of<Words>(p + 4 * i) << Bits));
}
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, read_as<Floats>(four_of<Words>(p + 4 * i) << 16));
}
// half.h for four values at a time.
UNSPOOL_INLINE Floats half_to_float(Words half) {
    const Words shifted = (half & 0x7fffu) << 13, exponent = shifted & 0x0f800000u;
    const Words normal = shifted + ((127u - 15u) << 23);
    const Words special = normal + ((128u - 16u) << 23);
    const Words subnormal =
        read_as<Words>(read_as<Floats>(normal + (1u << 23)) - float_of(113u << 23));
    const Words small = exponent == 0u ? subnormal : normal;
    const Words size = exponent == 0x0f800000u ? special : small;
    return read_as<Floats>(((half & 0x8000u) << 16) | size);
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) {
    UNSPOOL_EACH(F32x16, half_to_float(four_of<Words>(p + 4 * i)));
}
UNSPOOL_INLINE Floats power_of_two(Floats n) {
    return read_as<Floats>((__builtin_convertvector(n, Ints) + 127) << 23);
}
// p * 2^n, n an integer within the range of a float.
UNSPOOL_INLINE F32x16 scale_by_power(F32x16 p, F32x16 n) {
    UNSPOOL_EACH(F32x16, p.v[i] * power_of_two(n.v[i]));
}

UNSPOOL_INLINE void store(float* p, F32x16 a) { __builtin_memcpy(p, &a, sizeof a); }
UNSPOOL_INLINE void store_half(uint16_t* p, F32x16 a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i / 4][i % 4]);
}
// Rounds sixteen floats within the range of int8 and stores them; returns their sum.
UNSPOOL_INLINE int32_t store_i8(int8_t* p, F32x16 a) {
    const F32x16 rounded = round16(a);
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(rounded.v[i / 4][i % 4]);
        total += p[i];
    }
    return total;
}
UNSPOOL_INLINE float sum(F32x16 a) {
    const Floats four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
UNSPOOL_INLINE float largest(F32x16 a) {
    float best = a.v[0][0];
    for (int i = 1; i < 16; ++i) best = a.v[i / 4][i % 4] > best ? a.v[i / 4][i % 4] : best;
    return best;
}

// -- integers -----------------------------------------------------------------------------------

// dot_bytes() uses stored bytes unchanged.
constexpr int kByteBias = 0;

UNSPOOL_INLINE I32x16 iset1(int32_t x) { UNSPOOL_EACH(I32x16, (Ints{x, x, x, x})); }
// The `Count` bits of every byte from bit `From` on.
template <int From, int Count>
UNSPOOL_INLINE U8x64 take_bits(U8x64 a) {
    constexpr uint8_t mask = (1 << Count) - 1;
    UNSPOOL_EACH(U8x64, (a.v[i] >> From) & mask);
}
// Adds these bits to the bytes of `low`, from bit `To` on.
template <int From, int To, int Count>
UNSPOOL_INLINE U8x64 insert_bits(U8x64 low, U8x64 a) {
    constexpr uint8_t mask = (1 << Count) - 1;
    UNSPOOL_EACH(U8x64, low.v[i] | ((a.v[i] >> From) & mask) << To);
}
// Subtracts a number from every byte; signed results.
UNSPOOL_INLINE U8x64 subtract_from_bytes(U8x64 a, int number) {
    UNSPOOL_EACH(U8x64, a.v[i] - static_cast<uint8_t>(number));
}
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) {
    U8x64 out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
}
// Values of the codes 0 to 15.
struct Table {
    uint8_t v[16];
};
UNSPOOL_INLINE Table load_table(const int8_t* p, int bias) {
    Table table;
    for (int i = 0; i < 16; ++i) table.v[i] = static_cast<uint8_t>(p[i] + bias);
    return table;
}
UNSPOOL_INLINE U8x64 look_up(const Table& table, U8x64 codes) {
    uint8_t bytes[64];
    __builtin_memcpy(bytes, &codes, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table.v[byte];
    __builtin_memcpy(&codes, bytes, sizeof bytes);
    return codes;
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, U8x64 a) { __builtin_memcpy(p, &a, 64); }

// Four activations as two pairs: first and third, second and fourth.
struct Pairs {
    Shorts even, odd;
};
UNSPOOL_INLINE Shorts pair_of(int8_t first, int8_t second) {
    const uint32_t both = static_cast<uint16_t>(first) | static_cast<uint32_t>(second) << 16;
    return read_as<Shorts>(Words{both, both, both, both});
}
UNSPOOL_INLINE Pairs pairs_of(const int8_t* a) {
    return {pair_of(a[0], a[2]), pair_of(a[1], a[3])};
}
// Sums of adjacent pairs, in 32 bits.
UNSPOOL_INLINE Ints neighbours(Shorts a) {
    return (read_as<Ints>(read_as<Words>(a) << 16) >> 16) + (read_as<Ints>(a) >> 16);
}
// Weights times four activations, added to each row's sum. A byte times a signed byte fits into
// sixteen bits.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, const int8_t* four) {
    const Pairs a = pairs_of(four);
    for (int i = 0; i < 4; ++i) {
        const UShorts both = read_as<UShorts>(w.v[i]);
        total.v[i] += neighbours(read_as<Shorts>(both & 255) * a.even) +
                      neighbours(read_as<Shorts>(both >> 8) * a.odd);
    }
    return total;
}
// The same for weights below 64: the sum of two products fits too.
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, const int8_t* four) {
    const Pairs a = pairs_of(four);
    for (int i = 0; i < 4; ++i) {
        const UShorts both = read_as<UShorts>(w.v[i]);
        total.v[i] +=
            neighbours(read_as<Shorts>(both & 255) * a.even + read_as<Shorts>(both >> 8) * a.odd);
    }
    return total;
}
// Signed weights times four activations, added to each row's sum.
constexpr bool kSignedDot = true;
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, const int8_t* four) {
    const Pairs a = pairs_of(four);
    for (int i = 0; i < 4; ++i) {
        const Shorts even = read_as<Shorts>(read_as<UShorts>(w.v[i]) << 8) >> 8;
        const Shorts odd = read_as<Shorts>(w.v[i]) >> 8;
        total.v[i] += neighbours(even * a.even) + neighbours(odd * a.odd);
    }
    return total;
}
#undef UNSPOOL_EACH
constexpr int kRowsPerPass = 2;  // rows of activations that share a block's weights
UNSPOOL_INLINE void prefetch(const void*) {}

}  // namespace ISA
}  // namespace unspool
