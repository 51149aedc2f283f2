// Sixteen lanes in one 512-bit register, with the dot product of AVX-512 VNNI.
#pragma once
#include <immintrin.h>

namespace unspool {
namespace ISA {

struct F32x16 {
    __m512 v;
};
struct I32x16 {
    __m512i v;
};
struct U8x64 {
    __m512i v;
};  // four columns of sixteen rows

UNSPOOL_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
UNSPOOL_INLINE F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
UNSPOOL_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
UNSPOOL_INLINE F32x16 vmax(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 vmin(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
UNSPOOL_INLINE F32x16 round16(F32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
UNSPOOL_INLINE F32x16 where_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
UNSPOOL_INLINE F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// p * 2^n, n an integer within the range of a float.
UNSPOOL_INLINE F32x16 scale_by_power(F32x16 p, F32x16 n) { return {_mm512_scalef_ps(p.v, n.v)}; }

UNSPOOL_INLINE void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
UNSPOOL_INLINE void store_half(uint16_t* p, F32x16 a) {
    const __m256i halves = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}
// Sixteen signed or unsigned bytes as floats.
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
// Sixteen bytes, each shifted into the bits of a float.
template <int Bits>
UNSPOOL_INLINE F32x16 load_shifted(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), Bits))};
}
// Rounds sixteen floats within the range of int8 and stores them; returns their sum.
UNSPOOL_INLINE int32_t store_i8(int8_t* p, F32x16 a) {
    const __m512i n = _mm512_cvtps_epi32(a.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(n));
    return _mm512_reduce_add_epi32(n);
}
UNSPOOL_INLINE float sum(F32x16 a) { return _mm512_reduce_add_ps(a.v); }
UNSPOOL_INLINE float largest(F32x16 a) { return _mm512_reduce_max_ps(a.v); }

// -- integers -----------------------------------------------------------------------------------

// dot_bytes() uses stored bytes unchanged.
constexpr int kByteBias = 0;

UNSPOOL_INLINE I32x16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// The `Count` bits of every byte from bit `From` on.
template <int From, int Count>
UNSPOOL_INLINE U8x64 take_bits(U8x64 a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, From), _mm512_set1_epi8((1 << Count) - 1))};
}
// Adds these bits to the bytes of `low`, from bit `To` on.
template <int From, int To, int Count>
UNSPOOL_INLINE U8x64 insert_bits(U8x64 low, U8x64 a) {
    const __m512i moved =
        From > To ? _mm512_srli_epi16(a.v, From - To) : _mm512_slli_epi16(a.v, To - From);
    const __m512i mask = _mm512_set1_epi8(((1 << Count) - 1) << To);
    return {_mm512_ternarylogic_epi32(low.v, moved, mask, 0xf8)};  // low | (moved & mask)
}
// Weights times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, const int8_t* four) {
    int32_t a;
    __builtin_memcpy(&a, four, 4);
    return {_mm512_dpbusd_epi32(total.v, w.v, _mm512_set1_epi32(a))};
}
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, const int8_t* four) {
    return dot_bytes(total, w, four);
}
// Values of the codes 0 to 15.
struct Table {
    __m512i v;
};
UNSPOOL_INLINE Table load_table(const int8_t* p, int bias) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_broadcast_i32x4(_mm_add_epi8(bytes, _mm_set1_epi8(static_cast<char>(bias))))};
}
UNSPOOL_INLINE U8x64 look_up(Table table, U8x64 codes) {
    return {_mm512_shuffle_epi8(table.v, codes.v)};
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, U8x64 a) { _mm512_storeu_si512(p, a.v); }
// Subtracts a number from every byte; signed results.
UNSPOOL_INLINE U8x64 subtract_from_bytes(U8x64 a, int number) {
    return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(static_cast<char>(number)))};
}
// There is no dot product of two signed operands: weights stay unsigned, and offsets are subtracted
// later.
constexpr bool kSignedDot = false;
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, const int8_t* four) {
    return dot_bytes(total, w, four);
}
constexpr int kRowsPerPass = 8;  // rows of activations that share a block's weights
UNSPOOL_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace ISA
}  // namespace unspool
