// Memory layout of packed matrices, which every kernel reads.
//
// A kernel multiplies sixteen rows at a time, one row per lane, so rows come in blocks of sixteen
// (the last block is zero-padded), in the order in which the lanes read them. A block is read
// sequentially, once per token.
//
//   F32, F16, BF16    for each column: the values of the sixteen rows.
//
//   Integers          of 2, 3, 4, 5, 6 or 8 bits, with a scale for each group of 16 or 32 columns
//                     of a row:
//                         value = scale * (stored - offset)            without minima
//                         value = scale * stored + minimum             with minima
//                     Columns go in tiles of 32 (the last is zero-padded). A tile is eight pieces
//                     of 64 bytes: byte 4 * row + t of piece s is column 4 * s + t. Eight bits are
//                     stored like that. Fewer bits are stored in planes, 64 bytes for each bit: a
//                     byte of a plane has the bits of several pieces at the same row and column.
//                     part_of tells which.
//                     Each tile is followed by its scales, then its minima:
//                       plain:  16 halves (one per row) of scales; 16 halves of minima if any, or
//                       16
//                               bytes of zero points: minimum = -(scale * byte).
//                               The group is always 32.
//                       super:  for each group of the tile (two of 16, or one of 32) 16 signed
//                               bytes of scales; then as many unsigned bytes of minima if any.
//                               Eight tiles (256 columns) are preceded by 16 halves, the rows'
//                               common factor of scales, and if there are minima by 16 more, the
//                               factor of minima: scale = factor * byte, and
//                               minimum = -(factor * byte).
//                       power:  16 bytes, scale = 2 to the (byte - 127). The group is 32.
//                       float8: two times 16 bytes, each a float without a sign: 5 bits of exponent
//                       (bias 15), 3 of mantissa. The group is 16.
//
//   Codes             integers of 1 to 4 bits that are indices into a table of sixteen signed
//                     bytes, one table per matrix. There are no minima.
//
// Finally every value is multiplied by the matrix's factor.
//
// GGUF types map to these without changing a value:
//   Integers: Q4_0 offset 8, Q4_1 minima, Q4_K super 32 minima
//             Q5_0 offset 16, Q5_1 minima, Q5_K super 32 minima
//             Q8_0 offset 128 (the stored byte is the signed number + 128)
//             Q2_K super 16 minima, Q3_K super 16 offset 4, Q6_K super 16 offset 32
//   Codes:    four bits: IQ4_NL, IQ4_XS super 32, MXFP4 power, NVFP4 float8, IQ3_* super 32
//             three: IQ1_S, IQ2_XXS super 32; IQ1_M, IQ2_XS, IQ2_S super 16
//             two: TQ1_0, TQ2_0 super 32; one: Q1_0
#pragma once
#include <cstddef>
#include <cstdint>

// For code in inner loops: a call would spill registers.
#define UNSPOOL_INLINE inline __attribute__((always_inline))
#define UNSPOOL_LAMBDA __attribute__((always_inline))
// For long code with several callers: compiled once.
#define UNSPOOL_NOINLINE __attribute__((noinline))

namespace unspool {

constexpr int kLanes = 16;      // rows of a block
constexpr int kTile = 32;       // columns of a tile
constexpr int kSuperTiles = 8;  // tiles that share the factors of a super group

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kIntegers = 3, kCodes = 4 };
enum Scales : int32_t { kHalves = 0, kSuper = 1, kPowers = 2, kFloat8 = 3 };
enum MinimaKind : int32_t { kNoMinima = 0, kMinima = 1, kZeroPoints = 2 };

// Some bits of a stored value: bits [from, from + count) of a plane.
struct Part {
    int plane, from, count;
};

// Where the bits of a piece are: its parts with number 0, 1, ..., the lowest bits first. A part
// without bits is none. As many pieces as possible have all bits in one plane, which is quick to
// read; the others get what is left.
constexpr Part part_of(int bits, int piece, int number) {
    constexpr int kMost = 3;
    constexpr Part kThree[2][kMost] = {{{0, 6, 2}, {1, 6, 1}, {}}, {{2, 6, 2}, {1, 7, 1}, {}}};
    constexpr Part kFive[3][kMost] = {
        {{0, 5, 3}, {3, 6, 2}, {}}, {{1, 5, 3}, {4, 6, 2}, {}}, {{2, 5, 3}, {3, 5, 1}, {4, 5, 1}}};
    if (number >= kMost) return {};
    if (bits == 3 && piece >= 6) return kThree[piece - 6][number];
    if (bits == 5 && piece >= 5) return kFive[piece - 5][number];
    if (bits == 6 && piece % 4 == 3) return {piece / 4 * 3 + number, 6, 2};
    if (number > 0) return {};
    if (bits == 3) return {piece / 2, piece % 2 * 3, 3};
    if (bits == 5) return {piece, 0, 5};
    if (bits == 6) return {piece / 4 * 3 + piece % 4, 0, 6};
    return {piece % bits, piece / bits * bits, bits};  // 1, 2, 4 and 8
}

// A packed matrix; Python fills the same structure (see `packing.py`).
struct Matrix {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;
    int32_t format;
    int32_t bits;   // of a stored value (quantized formats)
    int32_t group;  // columns that share a scale: 16 or 32 (quantized formats)
    // Subtracted from a stored value. With minima it is 0, or only shifts bytes into the signed
    // range without changing values.
    int32_t offset;
    int32_t minima;    // see MinimaKind
    int32_t scales;    // see Scales
    int32_t bias;      // index of the bias vector, or -1
    float factor;      // factor of every value
    int8_t table[16];  // kCodes: value of each code
};

inline int64_t blocks_of(const Matrix& m) { return (m.rows + kLanes - 1) / kLanes; }
inline int64_t tiles_of(const Matrix& m) { return (m.columns + kTile - 1) / kTile; }
inline bool is_quantized(const Matrix& m) { return m.format >= kIntegers; }

// Bytes of a tile's stored values, of its scales, and of its minima.
constexpr int stored_bytes(int bits) { return kLanes * kTile / 8 * bits; }
constexpr int scale_bytes(int32_t scales, int group) {
    if (scales == kHalves) return kLanes * 2;
    return scales == kPowers ? kLanes : kLanes * (kTile / group);
}
constexpr int minima_bytes(int32_t minima, int32_t scales, int group) {
    if (minima == kNoMinima) return 0;
    return minima == kZeroPoints ? kLanes : scale_bytes(scales, group);
}

// Bytes of one tile with its scales and minima, without the factors of a super group.
inline int64_t tile_bytes(const Matrix& m) {
    return stored_bytes(m.bits) + scale_bytes(m.scales, m.group) +
           minima_bytes(m.minima, m.scales, m.group);
}

// Bytes of the factors before every eight tiles of a super format.
inline int64_t factor_bytes(const Matrix& m) {
    return m.scales == kSuper ? kLanes * 2 * (m.minima ? 2 : 1) : 0;
}

inline int64_t block_bytes(const Matrix& m) {
    if (m.format == kF32) return m.columns * kLanes * 4;
    if (m.format == kF16 || m.format == kBF16) return m.columns * kLanes * 2;
    const int64_t tiles = tiles_of(m);
    const int64_t supers = (tiles + kSuperTiles - 1) / kSuperTiles;
    return tiles * tile_bytes(m) + supers * factor_bytes(m);
}

}  // namespace unspool
