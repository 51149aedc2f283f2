// Sixteen lanes in two 256-bit registers, for processors with AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

namespace unspool {
namespace ISA {

struct F32x16 {
    __m256 v[2];
};
struct I32x16 {
    __m256i v[2];
};
struct U8x64 {
    __m256i v[2];
};  // four columns of sixteen rows

UNSPOOL_INLINE F32x16 load(const float* p) {
    return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}};
}
UNSPOOL_INLINE F32x16 set1(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }

#define UNSPOOL_BOTH(expression)                       \
    F32x16 out;                                        \
    for (int i = 0; i < 2; ++i) out.v[i] = expression; \
    return out

UNSPOOL_INLINE F32x16 add(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_add_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 sub(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_sub_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 mul(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_mul_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 div(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_div_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    UNSPOOL_BOTH(_mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]));
}
UNSPOOL_INLINE F32x16 vmax(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_max_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 vmin(F32x16 a, F32x16 b) { UNSPOOL_BOTH(_mm256_min_ps(a.v[i], b.v[i])); }
UNSPOOL_INLINE F32x16 round16(F32x16 a) {
    UNSPOOL_BOTH(_mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
UNSPOOL_INLINE F32x16 where_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    UNSPOOL_BOTH(_mm256_blendv_ps(no.v[i], yes.v[i], _mm256_cmp_ps(a.v[i], b.v[i], _CMP_LT_OQ)));
}
UNSPOOL_INLINE F32x16 load_half(const uint16_t* p) {
    UNSPOOL_BOTH(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))));
}
UNSPOOL_INLINE F32x16 load_bf16(const uint16_t* p) {
    UNSPOOL_BOTH(_mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))), 16)));
}
UNSPOOL_INLINE F32x16 to_float(I32x16 a) { UNSPOOL_BOTH(_mm256_cvtepi32_ps(a.v[i])); }
// p * 2^n, n an integer within the range of a float.
UNSPOOL_INLINE F32x16 scale_by_power(F32x16 p, F32x16 n) {
    UNSPOOL_BOTH(_mm256_mul_ps(
        p.v[i], _mm256_castsi256_ps(_mm256_slli_epi32(
                    _mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127)), 23))));
}
// Sixteen signed or unsigned bytes as floats.
UNSPOOL_INLINE F32x16 load_i8(const int8_t* p) {
    UNSPOOL_BOTH(_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)))));
}
UNSPOOL_INLINE F32x16 load_u8(const uint8_t* p) {
    UNSPOOL_BOTH(_mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)))));
}
// Sixteen bytes, each shifted into the bits of a float.
template <int Bits>
UNSPOOL_INLINE F32x16 load_shifted(const uint8_t* p) {
    UNSPOOL_BOTH(_mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))), Bits)));
}
#undef UNSPOOL_BOTH

UNSPOOL_INLINE void store(float* p, F32x16 a) {
    _mm256_storeu_ps(p, a.v[0]);
    _mm256_storeu_ps(p + 8, a.v[1]);
}
UNSPOOL_INLINE void store_half(uint16_t* p, F32x16 a) {
    for (int i = 0; i < 2; ++i) {
        const __m128i halves = _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i), halves);
    }
}
UNSPOOL_INLINE int32_t add_lanes(__m256i a) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// Rounds sixteen floats within the range of int8 and stores them; returns their sum.
UNSPOOL_INLINE int32_t store_i8(int8_t* p, F32x16 a) {
    const __m256i low = _mm256_cvtps_epi32(a.v[0]), high = _mm256_cvtps_epi32(a.v[1]);
    const __m128i words_low =
        _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    const __m128i words_high =
        _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words_low, words_high));
    return add_lanes(_mm256_add_epi32(low, high));
}
UNSPOOL_INLINE float sum(F32x16 a) {
    const __m256 eight = _mm256_add_ps(a.v[0], a.v[1]);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
UNSPOOL_INLINE float largest(F32x16 a) {
    const __m256 eight = _mm256_max_ps(a.v[0], a.v[1]);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// -- integers -----------------------------------------------------------------------------------

UNSPOOL_INLINE I32x16 iset1(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
UNSPOOL_INLINE U8x64 load_bytes(const uint8_t* p) {
    return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))}};
}
// The `Count` bits of every byte from bit `From` on.
template <int From, int Count>
UNSPOOL_INLINE U8x64 take_bits(U8x64 a) {
    const __m256i mask = _mm256_set1_epi8((1 << Count) - 1);
    for (auto& v : a.v) v = _mm256_and_si256(_mm256_srli_epi16(v, From), mask);
    return a;
}
// Adds these bits to the bytes of `low`, from bit `To` on.
template <int From, int To, int Count>
UNSPOOL_INLINE U8x64 insert_bits(U8x64 low, U8x64 a) {
    const __m256i mask = _mm256_set1_epi8(((1 << Count) - 1) << To);
    for (int i = 0; i < 2; ++i) {
        const __m256i moved =
            From > To ? _mm256_srli_epi16(a.v[i], From - To) : _mm256_slli_epi16(a.v[i], To - From);
        low.v[i] = _mm256_or_si256(low.v[i], _mm256_and_si256(moved, mask));
    }
    return low;
}
UNSPOOL_INLINE __m256i broadcast_four(const int8_t* four) {
    int32_t a;
    __builtin_memcpy(&a, four, 4);
    return _mm256_set1_epi32(a);
}
#if defined(ISA_avxvnni)

// As in vec16_avx512.h: weights are bytes without a sign, and offsets are subtracted later.
constexpr int kByteBias = 0;
constexpr bool kSignedDot = false;
constexpr int kRowsPerPass = 4;  // rows of activations that share a block's weights

// Weights times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, const int8_t* four) {
    const __m256i a = broadcast_four(four);
    for (int i = 0; i < 2; ++i) total.v[i] = _mm256_dpbusd_avx_epi32(total.v[i], w.v[i], a);
    return total;
}
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, const int8_t* four) {
    return dot_bytes(total, w, four);
}
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, const int8_t* four) {
    return dot_bytes(total, w, four);
}

#else

// dot_bytes() uses signed weights: subtracted from a stored byte first. The sum of two products of
// int8 fits the 16 bits in which AVX2 adds pairs.
constexpr int kByteBias = 128;
constexpr bool kSignedDot = true;
constexpr int kRowsPerPass = 2;  // rows of activations that share a block's weights

// Sums of products with weights of 0 to 15, two per row. Those of a whole tile fit 16 bits (16 * 15
// * 128 = 30,720), so they are widened once per tile, not per product.
struct SmallSums {
    __m256i v[2];
    int32_t start;  // added at the end
};
// Weights of 0 to 15 times four activations, added to each row's sums.
UNSPOOL_INLINE SmallSums dot_small(SmallSums total, U8x64 w, const int8_t* four) {
    const __m256i a = broadcast_four(four);
    for (int i = 0; i < 2; ++i)
        total.v[i] = _mm256_add_epi16(total.v[i], _mm256_maddubs_epi16(w.v[i], a));
    return total;
}
// The same for weights below 64, whose sums need 32 bits.
UNSPOOL_INLINE I32x16 dot_small(I32x16 total, U8x64 w, const int8_t* four) {
    const __m256i a = broadcast_four(four), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; ++i)
        total.v[i] =
            _mm256_add_epi32(total.v[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w.v[i], a), ones));
    return total;
}
UNSPOOL_INLINE F32x16 sums_to_float(const SmallSums& a) {
    const __m256i ones = _mm256_set1_epi16(1), start = _mm256_set1_epi32(a.start);
    return to_float({{_mm256_add_epi32(_mm256_madd_epi16(a.v[0], ones), start),
                      _mm256_add_epi32(_mm256_madd_epi16(a.v[1], ones), start)}});
}
// Stored bytes of 0 to 255, minus kByteBias, times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_bytes(I32x16 total, U8x64 w, const int8_t* four) {
    const __m256i a = broadcast_four(four);
    for (int i = 0; i < 2; ++i) {
        const __m256i row = _mm256_xor_si256(w.v[i], _mm256_set1_epi8(-128));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(row), _mm256_sign_epi8(a, row));
        total.v[i] = _mm256_add_epi32(total.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return total;
}
// Signed weights times four activations, added to each row's sum.
UNSPOOL_INLINE I32x16 dot_signed(I32x16 total, U8x64 w, const int8_t* four) {
    const __m256i a = broadcast_four(four);
    for (int i = 0; i < 2; ++i) {
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(w.v[i]), _mm256_sign_epi8(a, w.v[i]));
        total.v[i] = _mm256_add_epi32(total.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return total;
}

#endif

// Values of the codes 0 to 15.
struct Table {
    __m256i v;
};
UNSPOOL_INLINE Table load_table(const int8_t* p, int bias) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {
        _mm256_broadcastsi128_si256(_mm_add_epi8(bytes, _mm_set1_epi8(static_cast<char>(bias))))};
}
UNSPOOL_INLINE U8x64 look_up(Table table, U8x64 codes) {
    for (auto& v : codes.v) v = _mm256_shuffle_epi8(table.v, v);
    return codes;
}
UNSPOOL_INLINE void store_bytes(uint8_t* p, U8x64 a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * i), a.v[i]);
}
// Subtracts a number from every byte; signed results.
UNSPOOL_INLINE U8x64 subtract_from_bytes(U8x64 a, int number) {
    for (auto& v : a.v) v = _mm256_sub_epi8(v, _mm256_set1_epi8(static_cast<char>(number)));
    return a;
}
UNSPOOL_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace ISA
}  // namespace unspool
