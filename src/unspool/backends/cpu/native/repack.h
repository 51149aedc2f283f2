// Repacking: from a file's rows to the packed layout (layout.h) and back. The C interface:
//
//   unspool_packed_bytes   bytes of a packed matrix.
//   unspool_repack         packs a tensor of a file; quantized values are unchanged.
//   unspool_quantize       packs rows of floats as Q4 or Q8 (or another float format).
//   unspool_pack_parts     does both for parts of many tensors, together with other threads.
//   unspool_unpack         returns rows as float32.
//   unspool_set_grid       sets the codebook grid of a type: entries of four or eight codes.
//
// Work is divided by blocks of sixteen rows, so that threads can share one matrix. Sources need no
// alignment. The last block of a target is zero-padded.
#pragma once
#include "export.h"
#include "layout.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files and the packed layout are little-endian"
#endif

namespace unspool {

// Blocks `first` to `last` of a tensor. Python fills the same structure (see `packing.py`).
struct PackPart {
    const Matrix* matrix;  // its `data` is the target
    const uint8_t* source;
    int64_t source_bytes;
    int64_t first;
    int64_t last;
    double* error;  // of unspool_quantize; null: unspool_repack
    int32_t type;
    int32_t release;  // the source is a mapped file, whose pages are returned to the system
    int32_t result;   // see unspool_repack
};

}  // namespace unspool

// `type` is the GGUF type number. Returns
//    0  success,
//    1  a value (of a quantized type: a scale, minimum or factor) is NaN, infinite or too large for
//    the target's format; the packing is complete nevertheless,
//   -1  nothing was written: `source_bytes` does not match the matrix's shape, the columns are not
//   a multiple of the type's block, or the matrix's format does not support the type.
UNSPOOL_API int64_t unspool_packed_bytes(const unspool::Matrix* m);
UNSPOOL_API int32_t unspool_repack(const unspool::Matrix* m, int32_t type, const uint8_t* source,
                                   int64_t source_bytes, int64_t first, int64_t last,
                                   uint8_t* target);
// As above for a float type; adds the squared errors to error[0], the squared weights to error[1].
UNSPOOL_API int32_t unspool_quantize(const unspool::Matrix* m, int32_t type, const uint8_t* source,
                                     int64_t source_bytes, int64_t first, int64_t last,
                                     uint8_t* target, double* error);
// Packs parts until none is left. `next` is the first part that no thread has taken yet.
UNSPOOL_API void unspool_pack_parts(unspool::PackPart* parts, int64_t count, int64_t* next);
// The codes of a grid's entries, a byte each; the memory must stay valid. Returns 0 if no type has
// such a grid. Types with a grid can be repacked once it is set.
UNSPOOL_API int32_t unspool_set_grid(int32_t type, const uint8_t* codes, int64_t count);
UNSPOOL_API void unspool_unpack(const unspool::Matrix* m, int64_t first, int64_t last, float* out);

namespace unspool {

// GGUF type numbers; those from 1000 on are blocks made from tensors of other file formats.
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
    kTypeZero4 = 1000,   // scale, zero point (a byte), 32 values of 4 bits as in Q4_0
    kTypeZero8 = 1001,   // the same with 8 bits
    kTypeAffine8 = 1002  // scale, minimum, 32 values of 8 bits
};

inline bool is_float_type(int32_t type) {
    return type == kTypeF32 || type == kTypeF16 || type == kTypeBF16;
}

// Whether the matrix is valid, its source has the right size, and the blocks exist.
bool fits(const Matrix& m, int32_t type, int64_t source_bytes, int64_t first, int64_t last);

// Packs one block of `rows` (1 to 16) rows, `row_bytes` apart. Returns false if a value is not
// finite.
using RepackBlock = bool (*)(const Matrix& m, const uint8_t* source, int64_t row_bytes, int rows,
                             uint8_t* target);

// Null if the matrix's format does not support the type.
RepackBlock quantized_repacker(const Matrix& m, int32_t type);  // repack_blocks.cpp
RepackBlock codes_repacker(const Matrix& m, int32_t type);      // repack_codes.cpp
RepackBlock float_repacker(const Matrix& m, int32_t type);      // repack_floats.cpp
bool quantize_block(const Matrix& m, int32_t type, const uint8_t* source, int64_t row_bytes,
                    int rows, uint8_t* target, double* error);  // repack_quantize.cpp

// Loads `columns` values of a row of floats, from `column` on.
void load_floats(int32_t type, const uint8_t* row, int64_t column, int columns, float* out);

}  // namespace unspool
