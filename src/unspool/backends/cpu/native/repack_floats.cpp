// Packs rows of floats in the float formats: transposed, and converted between formats.
#include "half.h"
#include "repack.h"

namespace unspool {
namespace {

struct F32 {
    using Bits = uint32_t;
    static constexpr Bits kExponent = 0x7f800000u;
    static float to_float(Bits bits) { return float_of(bits); }
    static Bits from_float(float value) { return bits_of(value); }
};

struct F16 {
    using Bits = uint16_t;
    static constexpr Bits kExponent = 0x7c00u;
    static float to_float(Bits bits) { return half_to_float(bits); }
    static Bits from_float(float value) { return float_to_half(value); }
};

struct BF16 {
    using Bits = uint16_t;
    static constexpr Bits kExponent = 0x7f80u;
    static float to_float(Bits bits) { return bf16_to_float(bits); }
    static Bits from_float(float value) { return float_to_bf16(value); }
};

template <class From, class To>
struct Convert {
    static typename To::Bits one(typename From::Bits bits) {
        return To::from_float(From::to_float(bits));
    }
};

template <class Same>
struct Convert<Same, Same> {
    static typename Same::Bits one(typename Same::Bits bits) { return bits; }
};

// Read whole cache lines of a row at a time: sixteen rows with a power-of-two stride would
// otherwise evict each other from the cache.
constexpr int kStrip = 32;

template <class From, class To>
bool repack_floats(const Matrix& m, const uint8_t* source, int64_t row_bytes, int rows,
                   uint8_t* target) {
    using Bits = typename To::Bits;
    Bits strip[kLanes][kStrip] = {};
    Bits infinite = 0;
    for (int64_t column = 0; column < m.columns; column += kStrip) {
        const int64_t left = m.columns - column;
        const int width = static_cast<int>(left < kStrip ? left : kStrip);
        for (int row = 0; row < rows; ++row) {
            typename From::Bits numbers[kStrip] = {};
            const size_t size = sizeof(typename From::Bits);
            std::memcpy(numbers, source + row * row_bytes + column * size, width * size);
            for (int i = 0; i < kStrip; ++i) {
                const Bits bits = Convert<From, To>::one(numbers[i]);
                infinite |= (bits & To::kExponent) == To::kExponent;
                strip[row][i] = bits;
            }
        }
        for (int i = 0; i < width; ++i) {
            Bits lanes[kLanes];
            for (int row = 0; row < kLanes; ++row) lanes[row] = strip[row][i];
            std::memcpy(target + (column + i) * sizeof lanes, lanes, sizeof lanes);
        }
    }
    return infinite == 0;
}

template <class From>
RepackBlock repacker_from(const Matrix& m) {
    switch (m.format) {
        case kF32:
            return repack_floats<From, F32>;
        case kF16:
            return repack_floats<From, F16>;
        case kBF16:
            return repack_floats<From, BF16>;
        default:
            return nullptr;
    }
}

template <class From>
void load(const uint8_t* row, int64_t column, int columns, float* out) {
    typename From::Bits bits;
    for (int i = 0; i < columns; ++i) {
        std::memcpy(&bits, row + (column + i) * sizeof bits, sizeof bits);
        out[i] = From::to_float(bits);
    }
}

}  // namespace

RepackBlock float_repacker(const Matrix& m, int32_t type) {
    switch (type) {
        case kTypeF32:
            return repacker_from<F32>(m);
        case kTypeF16:
            return repacker_from<F16>(m);
        default:
            return repacker_from<BF16>(m);
    }
}

void load_floats(int32_t type, const uint8_t* row, int64_t column, int columns, float* out) {
    switch (type) {
        case kTypeF32:
            return load<F32>(row, column, columns, out);
        case kTypeF16:
            return load<F16>(row, column, columns, out);
        default:
            return load<BF16>(row, column, columns, out);
    }
}

}  // namespace unspool
