// GEMM: sixteen rows of quantized weights times many rows of activations (prefill, large batches).
//
// A block is unpacked to bytes and floats once and stays in the cache. With tile registers (AMX),
// sixteen rows of activations are multiplied together. Results are bit-identical to gemv.h.
#pragma once
#include "gemv.h"

#if defined(ISA_amx)
#include <immintrin.h>
#endif

namespace unspool {
namespace ISA {

// A block's weights, unpacked into a worker's scratch memory.
struct UnpackedBlock {
    uint8_t* bytes;             // [tiles][8 pieces][64], on NEON [4][tiles][8 pieces][16]; signed
                                // where the offset is already subtracted
    float* scales;              // [groups][16]
    float* minima;              // [groups][16]
    int32_t offset_correction;  // still to be subtracted from a dot product
    float* tile_scales;         // memory for a pack of activation rows, or for the corrections of
                                // rows that are multiplied together
};

#if defined(ISA_amx)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = kSignedDot;
#endif

UNSPOOL_INLINE uint8_t* align_to_cache_line(uint8_t* p) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t(63));
}

UNSPOOL_INLINE UnpackedBlock allocate_block(uint8_t* scratch, int64_t tiles) {
    UnpackedBlock block_out;
    block_out.bytes = align_to_cache_line(scratch);
    block_out.scales = reinterpret_cast<float*>(block_out.bytes + tiles * kTile * kLanes);
    block_out.minima = block_out.scales + tiles * 2 * kLanes;
    block_out.tile_scales = block_out.minima + tiles * 2 * kLanes;
    block_out.offset_correction = 0;
    return block_out;
}

UNSPOOL_INLINE void store_piece(uint8_t* bytes, int64_t tiles, int64_t tile, int piece,
                                const U8x64& columns) {
#if defined(ISA_neon)  // four rows after the other
    for (int quarter = 0; quarter < 4; ++quarter) {
        uint8_t* to = bytes + ((quarter * tiles + tile) * 8 + piece) * 16;
        vst1q_u8(to, columns.v[quarter]);
#if defined(ISA_i8mm)  // two rows of eight columns together
        if (piece % 2 == 0) continue;
        const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(to - 16));
        const uint32x4_t second = vreinterpretq_u32_u8(columns.v[quarter]);
        vst1q_u8(to - 16, vreinterpretq_u8_u32(vzip1q_u32(first, second)));
        vst1q_u8(to, vreinterpretq_u8_u32(vzip2q_u32(first, second)));
#endif
    }
#else
    static_cast<void>(tiles);
    store_bytes(bytes + (tile * 8 + piece) * 64, columns);
#endif
}

template <class S>
UNSPOOL_INLINE void unpack_block(const Matrix& m, const uint8_t* p, UnpackedBlock& block_out) {
    const int64_t tiles = tiles_of(m);
    const int offset = kSignedBytes ? m.offset : 0;
    block_out.offset_correction = m.offset - offset;
    [[maybe_unused]] Table table;
    if constexpr (S::format == kCodes) {
        block_out.offset_correction = kSignedBytes ? 0 : 128;
        table = load_table(m.table, block_out.offset_correction);
    }
    Factors<S> factors;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        p = factors.read_before(tile, p);
        prefetch_tile<S>(p);
        for_each_index<8>([&](auto piece_index) UNSPOOL_LAMBDA {
            constexpr int piece = decltype(piece_index)::value;
            U8x64 columns = load_piece<S::bits, piece>(p);
            if constexpr (S::format == kCodes)
                columns = look_up(table, columns);
            else
                columns = subtract_from_bytes(columns, offset);
            store_piece(block_out.bytes, tiles, tile, piece, columns);
        });
        TileScales<S> s;
        s.read(p + S::stored, factors, m.offset);
        for (int g = 0; g < kTile / S::group; ++g) {
            const int64_t group = tile * (kTile / S::group) + g;
            store(block_out.scales + group * kLanes, s.scale[g]);
            if constexpr (S::has_minima) store(block_out.minima + group * kLanes, s.minimum[g]);
        }
        p += S::tile;
    }
}

// Adds the minima to rows [first, first + T): a separate sum, as in gemv.h.
template <int Group, int T>
UNSPOOL_INLINE void add_minima(const UnpackedBlock& block, int64_t tiles, const QuantizedRows& acts,
                               int64_t first, F32x16* total) {
    constexpr int groups = kTile / Group;
    F32x16 low[T];
    for (int t = 0; t < T; ++t) low[t] = zero();
    for (int64_t group = 0; group < tiles * groups; ++group) {
        const F32x16 minimum = load(block.minima + group * kLanes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const int64_t row = first + t;
            if constexpr (groups == 1) {
                low[t] = fma(minimum, set1(acts.scaled_sums[row * (acts.columns / kTile) + group]),
                             low[t]);
            } else {
                const int32_t sum = acts.sums[row * (acts.columns / kLanes) + group];
                const float a = acts.scales[row * (acts.columns / kTile) + group / 2];
                low[t] = fma(minimum, set1(a * static_cast<float>(sum)), low[t]);
            }
        }
    }
    for (int t = 0; t < T; ++t) total[t] = add(total[t], low[t]);
}

#if !defined(ISA_neon)  // see gemm_neon.h

// What unsigned weights add to the dot products of rows [first, first + T), negated: [T][groups].
// Dot products start with it, which costs no instruction.
template <int Group, int T>
inline const int32_t* offset_corrections(const UnpackedBlock& block, int64_t tiles,
                                         const QuantizedRows& acts, int64_t first) {
    int32_t* out = reinterpret_cast<int32_t*>(block.tile_scales);
    const int64_t groups = tiles * (kTile / Group);
    for (int t = 0; t < T; ++t) {
        const int32_t* sums = acts.sums + (first + t) * (acts.columns / kLanes);
        for (int64_t g = 0; g < groups; ++g)
            out[t * groups + g] = -block.offset_correction *
                                  (Group == kTile ? sums[2 * g] + sums[2 * g + 1] : sums[g]);
    }
    return out;
}

// An unpacked block times rows [first, first + T).
template <int Group, bool Minima, int T>
UNSPOOL_INLINE void multiply_unpacked(const UnpackedBlock& block, int64_t tiles,
                                      const QuantizedRows& acts, int64_t first, F32x16* out) {
    constexpr int groups = kTile / Group, pieces = 8 / groups;
    const int8_t* numbers = acts.quants + first * acts.columns;
    const float* scales = acts.scales + first * (acts.columns / kTile);
    [[maybe_unused]] const int32_t* corrections = nullptr;
    if constexpr (!kSignedBytes)
        corrections = offset_corrections<Group, T>(block, tiles, acts, first);
    F32x16 total[T];
    for (int t = 0; t < T; ++t) total[t] = zero();
    for (int64_t tile = 0; tile < tiles; ++tile) {
        for (int g = 0; g < groups; ++g) {
            const uint8_t* w = block.bytes + tile * kTile * kLanes + g * pieces * 64;
            const int8_t* a = numbers + tile * kTile + g * pieces * 4;
            I32x16 dots[T];
            for (int t = 0; t < T; ++t)
                dots[t] = iset1(kSignedBytes ? 0 : corrections[(t * tiles + tile) * groups + g]);
#pragma GCC unroll 8
            for (int j = 0; j < pieces; ++j) {
                const U8x64 bytes = load_bytes(w + 64 * j);
                for (int t = 0; t < T; ++t)
                    dots[t] = dot_signed(dots[t], bytes, a + t * acts.columns + 4 * j);
            }
            const F32x16 scale = load(block.scales + (tile * groups + g) * kLanes);
            for (int t = 0; t < T; ++t) {
                const F32x16 packed = mul(scale, set1(scales[t * (acts.columns / kTile) + tile]));
                total[t] = fma(to_float(dots[t]), packed, total[t]);
            }
        }
    }
    if constexpr (Minima) add_minima<Group, T>(block, tiles, acts, first, total);
    for (int t = 0; t < T; ++t) out[t] = total[t];
}

#endif

#if defined(ISA_amx)

// The compiler does not know that tile instructions read and write memory.
UNSPOOL_INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

// One group of sixteen activation rows (tile 4 or 6) times a block's weights (tile 5 or 7).
#define UNSPOOL_TILE_PRODUCT(sum)   \
    _tile_zero(sum);                \
    if constexpr (Group == kTile) { \
        _tile_loadd(4, a, stride);  \
        _tile_loadd(5, w, 64);      \
        _tile_dpbssd(sum, 4, 5);    \
    } else {                        \
        _tile_loadd(6, a, stride);  \
        _tile_loadd(7, w, 64);      \
        _tile_dpbssd(sum, 6, 7);    \
    }                               \
    break

// Sixteen activation rows and their strides.
struct TileRows {
    const int8_t* quants;
    int64_t stride;            // between rows
    int64_t tile_stride;       // between groups of 32 columns
    const float* tile_scales;  // scales and scaled sums, [tiles][2][16]
};

UNSPOOL_INLINE TileRows tile_rows(const QuantizedRows& acts, int64_t tiles, int64_t first,
                                  float* buffer) {
    const int64_t stride = acts.columns / kTile;
    if (first % kLanes == 0)
        return {acts.tiled + first * acts.columns, kTile, kTile * kLanes,
                acts.tile_scales + first * stride * 2};
    for (int64_t tile = 0; tile < tiles; ++tile) {  // rows of an expert are not aligned
        for (int t = 0; t < kLanes; ++t) {
            buffer[tile * 2 * kLanes + t] = acts.scales[(first + t) * stride + tile];
            buffer[tile * 2 * kLanes + kLanes + t] = acts.scaled_sums[(first + t) * stride + tile];
        }
    }
    return {acts.quants + first * acts.columns, acts.columns, kTile, buffer};
}

// An unpacked block times rows [first, first + 16). Tile instructions have long latencies, so a
// group of columns is multiplied two iterations before its sums are stored, and stored four
// iterations before they are scaled and added: 1.2 times as fast as one after the other.
template <int Group, bool Minima>
UNSPOOL_INLINE void multiply_tiles(const UnpackedBlock& block, int64_t tiles,
                                   const QuantizedRows& acts, int64_t first, F32x16* out) {
    constexpr int groups_of_tile = kTile / Group, store_ahead = 4, multiply_ahead = 6;
    alignas(64) int32_t dots[2 * store_ahead][kLanes][kLanes];
    const TileRows rows = tile_rows(acts, tiles, first, block.tile_scales);
    const float* tile_scales = rows.tile_scales;
    const int64_t stride = rows.stride, groups = tiles * groups_of_tile;
    const auto multiply = [&](int64_t group) UNSPOOL_LAMBDA {
        const uint8_t* w = block.bytes + group * Group * kLanes;
        const int8_t* a = rows.quants + group / groups_of_tile * rows.tile_stride +
                          group % groups_of_tile * Group;
        switch (group % 4) {  // the number of a tile register is part of the instruction
            case 0:
                UNSPOOL_TILE_PRODUCT(0);
            case 1:
                UNSPOOL_TILE_PRODUCT(1);
            case 2:
                UNSPOOL_TILE_PRODUCT(2);
            default:
                UNSPOOL_TILE_PRODUCT(3);
        }
    };
    const auto store_dots = [&](int64_t group) UNSPOOL_LAMBDA {
        auto& group_dots = dots[group % (2 * store_ahead)];
        switch (group % 4) {
            case 0:
                _tile_stored(0, group_dots, 64);
                break;
            case 1:
                _tile_stored(1, group_dots, 64);
                break;
            case 2:
                _tile_stored(2, group_dots, 64);
                break;
            default:
                _tile_stored(3, group_dots, 64);
        }
    };
    F32x16 total[kLanes];
    for (auto& sum : total) sum = zero();
    memory_barrier();
    for (int64_t group = 0; group < multiply_ahead; ++group) {
        if (group < groups) multiply(group);
        const int64_t stored = group - (multiply_ahead - store_ahead);
        if (stored >= 0 && stored < groups) store_dots(stored);
    }
    for (int64_t group = 0; group < groups; ++group) {
        if (group + multiply_ahead < groups) multiply(group + multiply_ahead);
        if (group + store_ahead < groups) store_dots(group + store_ahead);
        memory_barrier();
        const F32x16 scale = load(block.scales + group * kLanes);
        const float* row_factors = tile_scales + group / groups_of_tile * 2 * kLanes;
        const auto& group_dots = dots[group % (2 * store_ahead)];
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t) {
            const F32x16 product = {_mm512_cvtepi32_ps(_mm512_load_si512(group_dots[t]))};
            total[t] = fma(product, mul(scale, set1(row_factors[t])), total[t]);
        }
    }
    if constexpr (Minima && groups_of_tile == 1) {
        F32x16 low[kLanes];
        for (auto& sum : low) sum = zero();
        for (int64_t group = 0; group < groups; ++group) {
            const F32x16 minimum = load(block.minima + group * kLanes);
            const float* row_factors = tile_scales + group * 2 * kLanes + kLanes;
#pragma GCC unroll 16
            for (int t = 0; t < kLanes; ++t) low[t] = fma(minimum, set1(row_factors[t]), low[t]);
        }
        for (int t = 0; t < kLanes; ++t) total[t] = add(total[t], low[t]);
    } else if constexpr (Minima) {
        add_minima<Group, kLanes>(block, tiles, acts, first, total);
    }
    for (int t = 0; t < kLanes; ++t) out[t] = total[t];
}
#undef UNSPOOL_TILE_PRODUCT

#endif  // ISA_amx

}  // namespace ISA
}  // namespace unspool
