// The C interface of repacking: checks the arguments, then processes block by block.
#include "repack.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace unspool {
namespace {

// Larger sizes are errors, and their products could overflow.
constexpr int64_t kMaxRows = int64_t{1} << 40;
constexpr int64_t kMaxColumns = int64_t{1} << 31;

struct BlockSize {
    int elements;  // 0: unknown type
    int bytes;
};

struct Size {
    int32_t type;
    BlockSize block;
};

constexpr Size kSizes[] = {
    {kTypeF32, {1, 4}},        {kTypeF16, {1, 2}},        {kTypeBF16, {1, 2}},
    {kTypeQ4_0, {32, 18}},     {kTypeQ4_1, {32, 20}},     {kTypeQ5_0, {32, 22}},
    {kTypeQ5_1, {32, 24}},     {kTypeQ8_0, {32, 34}},     {kTypeQ2_K, {256, 84}},
    {kTypeQ3_K, {256, 110}},   {kTypeQ4_K, {256, 144}},   {kTypeQ5_K, {256, 176}},
    {kTypeQ6_K, {256, 210}},   {kTypeIQ2_XXS, {256, 66}}, {kTypeIQ2_XS, {256, 74}},
    {kTypeIQ3_XXS, {256, 98}}, {kTypeIQ1_S, {256, 50}},   {kTypeIQ4_NL, {32, 18}},
    {kTypeIQ3_S, {256, 110}},  {kTypeIQ2_S, {256, 82}},   {kTypeIQ4_XS, {256, 136}},
    {kTypeIQ1_M, {256, 56}},   {kTypeTQ1_0, {256, 54}},   {kTypeTQ2_0, {256, 66}},
    {kTypeMXFP4, {32, 17}},    {kTypeNVFP4, {64, 36}},    {kTypeQ1_0, {128, 18}},
    {kTypeZero4, {32, 19}},    {kTypeZero8, {32, 35}},    {kTypeAffine8, {32, 36}},
};

BlockSize block_size(int32_t type) {
    for (const Size& size : kSizes)
        if (size.type == type) return size.block;
    return {0, 0};
}

int64_t row_bytes_of(const Matrix& m, int32_t type) {
    const BlockSize size = block_size(type);
    return m.columns / size.elements * size.bytes;
}

int rows_of_block(const Matrix& m, int64_t block) {
    const int64_t left = m.rows - block * kLanes;
    return static_cast<int>(left < kLanes ? left : kLanes);
}

bool is_valid_matrix(const Matrix& m) {
    return m.rows > 0 && m.rows <= kMaxRows && m.columns > 0 && m.columns <= kMaxColumns &&
           m.format >= kF32 && m.format <= kCodes &&
           (!is_quantized(m) || ((m.group == 16 || m.group == 32) && m.bits >= 1 && m.bits <= 8));
}

// Returns the pages that lie wholly within the part to the system: the file is not in memory twice.
void release_source(const PackPart& part) {
#if defined(__unix__) || defined(__APPLE__)
    const int64_t row_bytes = row_bytes_of(*part.matrix, part.type);
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t source = reinterpret_cast<uintptr_t>(part.source);
    const int64_t end =
        part.last * kLanes < part.matrix->rows ? part.last * kLanes : part.matrix->rows;
    const uintptr_t first = (source + part.first * kLanes * row_bytes + page - 1) / page * page;
    const uintptr_t last = (source + end * row_bytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)part;
#endif
}

}  // namespace

bool fits(const Matrix& m, int32_t type, int64_t source_bytes, int64_t first, int64_t last) {
    const BlockSize size = block_size(type);
    if (!is_valid_matrix(m) || size.elements == 0 || m.columns % size.elements != 0) return false;
    const int64_t row_bytes = row_bytes_of(m, type);
    if (source_bytes % row_bytes != 0 || source_bytes / row_bytes != m.rows) return false;
    return 0 <= first && first <= last && last <= blocks_of(m);
}

}  // namespace unspool

using namespace unspool;

int64_t unspool_packed_bytes(const Matrix* m) {
    return is_valid_matrix(*m) ? blocks_of(*m) * block_bytes(*m) : -1;
}

int32_t unspool_repack(const Matrix* m, int32_t type, const uint8_t* source, int64_t source_bytes,
                       int64_t first, int64_t last, uint8_t* target) {
    if (!fits(*m, type, source_bytes, first, last)) return -1;
    const RepackBlock repack = is_float_type(type)   ? float_repacker(*m, type)
                               : m->format == kCodes ? codes_repacker(*m, type)
                                                     : quantized_repacker(*m, type);
    if (repack == nullptr) return -1;
    const int64_t row_bytes = row_bytes_of(*m, type);
    bool finite = true;
    for (int64_t block = first; block < last; ++block) {
        finite &= repack(*m, source + block * kLanes * row_bytes, row_bytes,
                         rows_of_block(*m, block), target + block * block_bytes(*m));
    }
    return finite ? 0 : 1;
}

int32_t unspool_quantize(const Matrix* m, int32_t type, const uint8_t* source, int64_t source_bytes,
                         int64_t first, int64_t last, uint8_t* target, double* error) {
    if (!fits(*m, type, source_bytes, first, last) || !is_float_type(type)) return -1;
    const bool plain = m->group == kTile && m->scales == kHalves && m->factor == 1.0f;
    const bool q4 =
        m->format == kIntegers && m->bits == 4 && plain && m->minima == kMinima && m->offset == 0;
    const bool q8 = m->format == kIntegers && m->bits == 8 && plain && m->minima == kNoMinima &&
                    m->offset == 128;
    if (is_quantized(*m) && !q4 && !q8) return -1;
    const int64_t row_bytes = row_bytes_of(*m, type);
    bool finite = true;
    for (int64_t block = first; block < last; ++block) {
        finite &= quantize_block(*m, type, source + block * kLanes * row_bytes, row_bytes,
                                 rows_of_block(*m, block), target + block * block_bytes(*m), error);
    }
    return finite ? 0 : 1;
}

void unspool_pack_parts(PackPart* parts, int64_t count, int64_t* next) {
    while (true) {
        const int64_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (index >= count) return;
        PackPart& part = parts[index];
        uint8_t* target = const_cast<uint8_t*>(part.matrix->data);
        part.result = part.error
                          ? unspool_quantize(part.matrix, part.type, part.source, part.source_bytes,
                                             part.first, part.last, target, part.error)
                          : unspool_repack(part.matrix, part.type, part.source, part.source_bytes,
                                           part.first, part.last, target);
        if (part.release && part.result >= 0) release_source(part);
    }
}
