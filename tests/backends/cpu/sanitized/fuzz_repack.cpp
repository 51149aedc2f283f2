// Random matrices of every type through the repacker, in buffers of exactly the size they need, so
// that the address sanitizer sees a byte too much. `fuzz_repack SEED SECONDS`; exits with 1 and a
// line that names the seed if something is wrong.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fuzzing.h"
#include "repack.h"

using namespace unspool;

namespace {

struct Case {
    int32_t type;
    int elements, bytes;
    int32_t format, bits, group, offset, minima, scales;
};

const Case kCases[] = {
    {kTypeF32, 1, 4, kF32, 0, 32, 0, 0, 0},
    {kTypeF16, 1, 2, kF16, 0, 32, 0, 0, 0},
    {kTypeBF16, 1, 2, kBF16, 0, 32, 0, 0, 0},
    {kTypeQ4_0, 32, 18, kIntegers, 4, 32, 8, 0, 0},
    {kTypeQ4_1, 32, 20, kIntegers, 4, 32, 0, 1, 0},
    {kTypeQ5_0, 32, 22, kIntegers, 5, 32, 16, 0, 0},
    {kTypeQ5_1, 32, 24, kIntegers, 5, 32, 0, 1, 0},
    {kTypeQ8_0, 32, 34, kIntegers, 8, 32, 128, 0, 0},
    {kTypeQ2_K, 256, 84, kIntegers, 2, 16, 0, 1, 1},
    {kTypeQ3_K, 256, 110, kIntegers, 3, 16, 4, 0, 1},
    {kTypeQ4_K, 256, 144, kIntegers, 4, 32, 0, 1, 1},
    {kTypeQ5_K, 256, 176, kIntegers, 5, 32, 0, 1, 1},
    {kTypeQ6_K, 256, 210, kIntegers, 6, 16, 32, 0, 1},
    {kTypeIQ4_NL, 32, 18, kCodes, 4, 32, 0, 0, kHalves},
    {kTypeIQ4_XS, 256, 136, kCodes, 4, 32, 0, 0, kSuper},
    {kTypeMXFP4, 32, 17, kCodes, 4, 32, 0, 0, kPowers},
    {kTypeNVFP4, 64, 36, kCodes, 4, 16, 0, 0, kFloat8},
    {kTypeIQ2_XXS, 256, 66, kCodes, 3, 32, 0, 0, kSuper},
    {kTypeIQ2_XS, 256, 74, kCodes, 3, 16, 0, 0, kSuper},
    {kTypeIQ2_S, 256, 82, kCodes, 3, 16, 0, 0, kSuper},
    {kTypeIQ3_XXS, 256, 98, kCodes, 4, 32, 0, 0, kSuper},
    {kTypeIQ3_S, 256, 110, kCodes, 4, 32, 0, 0, kSuper},
    {kTypeIQ1_S, 256, 50, kCodes, 3, 32, 0, 0, kSuper},
    {kTypeIQ1_M, 256, 56, kCodes, 3, 16, 0, 0, kSuper},
    {kTypeTQ1_0, 256, 54, kCodes, 2, 32, 0, 0, kSuper},
    {kTypeTQ2_0, 256, 66, kCodes, 2, 32, 0, 0, kSuper},
    {kTypeQ1_0, 128, 18, kCodes, 1, 32, 0, 0, kHalves},
    {kTypeZero4, 32, 19, kIntegers, 4, 32, 0, kZeroPoints, kHalves},
    {kTypeZero8, 32, 35, kIntegers, 8, 32, 128, kZeroPoints, kHalves},
    {kTypeAffine8, 32, 36, kIntegers, 8, 32, 128, kMinima, kHalves},
};
constexpr int kFloats = 3;  // the first of them
constexpr int kAll = sizeof kCases / sizeof kCases[0];

// Exactly `size` bytes, at an odd address every other time: sources have no alignment.
struct Buffer {
    explicit Buffer(int64_t size)
        : size(size), shift(random(0, 1)), bytes(new uint8_t[static_cast<size_t>(size + shift)]) {}
    uint8_t* data() { return bytes.get() + shift; }
    int64_t size, shift;
    std::unique_ptr<uint8_t[]> bytes;
};

void fill_randomly(Buffer& buffer) {
    const bool tame = random(0, 1) != 0;  // small floats instead of any pattern of bits
    for (int64_t i = 0; i < buffer.size; ++i) {
        buffer.data()[i] = static_cast<uint8_t>(random_bits());
        if (tame && i % 2 == 1) buffer.data()[i] = static_cast<uint8_t>(0x30 + random(0, 8));
    }
}

[[noreturn]] void fail(const char* what, const Matrix& m, int32_t type) {
    std::printf("%s: type %d, format %d, %lld x %lld\n", what, type, m.format,
                static_cast<long long>(m.rows), static_cast<long long>(m.columns));
    std::exit(1);
}

// Packs in two parts into memory that was full of `canary`.
int32_t pack(const Matrix& m, int32_t type, bool quantize, Buffer& source, int64_t size,
             int64_t middle, uint8_t canary, Buffer& target, double* error) {
    std::memset(target.data(), canary, static_cast<size_t>(target.size));
    const int64_t ends[] = {0, middle, blocks_of(m)};
    int32_t worst = 0;
    for (int part = 0; part < 2; ++part) {
        const int32_t result = quantize
                                   ? unspool_quantize(&m, type, source.data(), size, ends[part],
                                                      ends[part + 1], target.data(), error)
                                   : unspool_repack(&m, type, source.data(), size, ends[part],
                                                    ends[part + 1], target.data());
        if (result < 0) return result;
        worst = result > worst ? result : worst;
    }
    return worst;
}

void one() {
    const int index = static_cast<int>(random(0, kAll - 1));
    const Case& from = kCases[index];
    const bool quantize = index < kFloats && random(0, 1) != 0;
    // Mostly a format that supports the type; sometimes any.
    int to = index;
    if (index < kFloats) to = static_cast<int>(random(0, kFloats - 1));
    if (quantize && random(0, 2) != 0) to = random(0, 1) != 0 ? 4 : 7;
    const bool any = random(0, 9) == 0;
    if (any) to = static_cast<int>(random(0, kAll - 1));

    const int64_t blocks = random(1, from.elements == 1 ? 140 : (from.elements == 32 ? 20 : 4));
    Matrix m = {};
    m.rows = random(1, 50);
    m.columns = blocks * from.elements;
    m.format = kCases[to].format;
    m.bits = kCases[to].bits;
    m.group = kCases[to].group;
    m.offset = kCases[to].offset;
    m.minima = kCases[to].minima;
    m.scales = kCases[to].scales;
    m.bias = -1;
    m.factor = 1.0f;
    for (int8_t& number : m.table) number = static_cast<int8_t>(random(-127, 127));

    Buffer source(m.rows * blocks * from.bytes);
    fill_randomly(source);
    Buffer target(unspool_packed_bytes(&m)), again(target.size);
    const int64_t size = source.size - (random(0, 19) == 0 ? random(-5, 5) : 0);
    const int64_t middle = random(0, blocks_of(m));
    double error[2] = {0, 0};
    const int32_t result = pack(m, from.type, quantize, source, size, middle, 0xaa, target, error);
    if (result < 0) {
        if (!any && size == source.size) fail("refused", m, from.type);
        for (int64_t i = 0; i < target.size; ++i) {
            if (target.data()[i] != 0xaa) fail("touched though refused", m, from.type);
        }
        return;
    }
    if (size != source.size) fail("taken though of the wrong size", m, from.type);
    pack(m, from.type, quantize, source, size, 0, 0x55, again, error);
    if (std::memcmp(target.data(), again.data(), static_cast<size_t>(target.size)) != 0) {
        fail("bytes left out, or not the same twice", m, from.type);
    }
    if (!(error[0] >= 0 && error[1] >= 0)) fail("an error that is no number", m, from.type);

    m.data = target.data();
    const int64_t first = random(0, m.rows), last = random(first, m.rows);
    std::unique_ptr<float[]> out(new float[static_cast<size_t>((last - first) * m.columns)]);
    unspool_unpack(&m, first, last, out.get());
    for (int64_t i = 0; result == 0 && i < (last - first) * m.columns; ++i) {
        if (!(out[i] - out[i] == 0)) fail("not finite, and nothing said", m, from.type);
    }
}

}  // namespace

int main(int, char** arguments) {
    random_bits.seed(static_cast<uint64_t>(std::atoll(arguments[1])));
    set_grids();
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<int>(1000 * std::atof(arguments[2])));
    int count = 0;
    while (std::chrono::steady_clock::now() < end) one(), ++count;
    std::printf("%d matrices\n", count);
    return count < 100;  // too slow to prove anything
}
