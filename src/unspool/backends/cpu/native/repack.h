// From a file's rows to the packed layout (layout.h) and back. The C interface:
//
//   unspool_packed_bytes   how much memory a packed matrix takes.
//   unspool_repack         a tensor as its file has it; no quantized number is changed.
//   unspool_quantize       rows of floats into Q4 or Q8 (or another float format).
//   unspool_unpack         some rows as float32.
//   unspool_set_grid       what a type's grid holds: groups of four or eight codes, by number.
//
// Work is cut by blocks of sixteen rows, so that threads can share one matrix. Sources need no
// alignment. A target's last block is written whole, the rows that fill it up as zeros.
#pragma once
#include "export.h"
#include "layout.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files and the packed layout are little-endian"
#endif

// `type` is GGUF's number of a type. Returns
//    0  all is well,
//    1  a number (of a quantized type: a scale, minimum or factor) is NaN, infinite or too large
//       for the target's format; the packing is complete all the same,
//   -1  nothing was touched: `source_bytes` is not what the matrix's rows and columns need, or the
//       columns do not divide into the type's blocks, or the matrix's format cannot take the type.
UNSPOOL_API int64_t unspool_packed_bytes(const unspool::Matrix* m);
UNSPOOL_API int32_t unspool_repack(const unspool::Matrix* m, int32_t type, const uint8_t* source,
                                   int64_t source_bytes, int64_t first, int64_t last,
                                   uint8_t* target);
// As above for a float type; adds the squared errors to error[0], the squared weights to error[1].
UNSPOOL_API int32_t unspool_quantize(const unspool::Matrix* m, int32_t type, const uint8_t* source,
                                     int64_t source_bytes, int64_t first, int64_t last,
                                     uint8_t* target, double* error);
// The codes of a grid's entries one after the other, a byte each; they must stay where they are.
// False: no type with such a grid. Types with a grid can be repacked once it is set.
UNSPOOL_API int32_t unspool_set_grid(int32_t type, const uint8_t* codes, int64_t count);
UNSPOOL_API void unspool_unpack(const unspool::Matrix* m, int64_t first, int64_t last, float* out);

namespace unspool {

// GGUF's numbers of the types; those from 1000 on are blocks that are made of other files' tensors.
enum Type : int32_t {
    kTypeF32 = 0,
    kTypeF16 = 1,
    kTypeQ4_0 = 2,
    kTypeQ4_1 = 3,
    kTypeQ5_0 = 6,
    kTypeQ5_1 = 7,
    kTypeQ8_0 = 8,
    kTypeQ2_K = 10,
    kTypeQ3_K = 11,
    kTypeQ4_K = 12,
    kTypeQ5_K = 13,
    kTypeQ6_K = 14,
    kTypeIQ2_XXS = 16,
    kTypeIQ2_XS = 17,
    kTypeIQ3_XXS = 18,
    kTypeIQ1_S = 19,
    kTypeIQ4_NL = 20,
    kTypeIQ3_S = 21,
    kTypeIQ2_S = 22,
    kTypeIQ4_XS = 23,
    kTypeIQ1_M = 29,
    kTypeBF16 = 30,
    kTypeTQ1_0 = 34,
    kTypeTQ2_0 = 35,
    kTypeMXFP4 = 39,
    kTypeNVFP4 = 40,
    kTypeQ1_0 = 41,
    kTypeZero4 = 1000,   // scale, zero point (a byte), 32 numbers of 4 bits as in Q4_0
    kTypeZero8 = 1001,   // the same of 8 bits
    kTypeAffine8 = 1002  // scale, minimum, 32 numbers of 8 bits
};

inline bool is_float_type(int32_t type) {
    return type == kTypeF32 || type == kTypeF16 || type == kTypeBF16;
}

// Whether the matrix is one that can be, its source has the right size, and the blocks are there.
bool fits(const Matrix& m, int32_t type, int64_t source_bytes, int64_t first, int64_t last);

// One block of rows. `rows` (1 to 16) of them are there, `row_bytes` apart. False if a number is
// not finite.
using RepackBlock = bool (*)(const Matrix& m, const uint8_t* source, int64_t row_bytes, int rows,
                             uint8_t* target);

// Null if the matrix's format cannot take the type.
RepackBlock quantized_repacker(const Matrix& m, int32_t type);  // repack_blocks.cpp
RepackBlock codes_repacker(const Matrix& m, int32_t type);      // repack_codes.cpp
RepackBlock float_repacker(const Matrix& m, int32_t type);      // repack_floats.cpp
bool quantize_block(const Matrix& m, int32_t type, const uint8_t* source, int64_t row_bytes,
                    int rows, uint8_t* target, double* error);  // repack_quantize.cpp

// Number `column` of a row of floats, `columns` of them from `column` on.
void load_floats(int32_t type, const uint8_t* row, int64_t column, int columns, float* out);

}  // namespace unspool
