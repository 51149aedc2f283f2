// From a file's rows to the packed layout (layout.h) and back. The C interface:
//
//   unspool_packed_bytes   how much memory a packed matrix takes.
//   unspool_repack         a tensor as its file has it; no quantized number is changed.
//   unspool_quantize       rows of floats into Q4 or Q8 (or another float format).
//   unspool_unpack         some rows as float32.
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
UNSPOOL_API void unspool_unpack(const unspool::Matrix* m, int64_t first, int64_t last, float* out);

namespace unspool {

// GGUF's numbers of the types.
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
    kTypeBF16 = 30
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

RepackBlock quantized_repacker(const Matrix& m, int32_t type);  // repack_blocks.cpp
RepackBlock float_repacker(const Matrix& m, int32_t type);      // repack_floats.cpp; both null
                                                                // if the format cannot take it
bool quantize_block(const Matrix& m, int32_t type, const uint8_t* source, int64_t row_bytes,
                    int rows, uint8_t* target, double* error);  // repack_quantize.cpp

// Number `column` of a row of floats, `columns` of them from `column` on.
void load_floats(int32_t type, const uint8_t* row, int64_t column, int columns, float* out);

}  // namespace unspool
