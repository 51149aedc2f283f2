// Random matrices of every format through the products, and random logits through the functions of
// sampling, in buffers of exactly the size they need. `fuzz_kernels SEED SECONDS`.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "fuzzing.h"
#include "repack.h"
#include "sampling.h"

using namespace unspool;

namespace {

struct Kind {
    int32_t type;
    int elements, bytes;
    int32_t format, bits, group, offset, minima, scales;
    int halves[2];  // offsets of scale, minimum or factors
};

const Kind kKinds[] = {
    {kTypeF32, 1, 4, kF32, 0, 32, 0, 0, 0, {-1, -1}},
    {kTypeF32, 1, 4, kF16, 0, 32, 0, 0, 0, {-1, -1}},
    {kTypeF32, 1, 4, kBF16, 0, 32, 0, 0, 0, {-1, -1}},
    {kTypeF32, 1, 4, kIntegers, 4, 32, 0, 1, 0, {-1, -1}},
    {kTypeF32, 1, 4, kIntegers, 8, 32, 128, 0, 0, {-1, -1}},
    {kTypeQ4_0, 32, 18, kIntegers, 4, 32, 8, 0, 0, {0, -1}},
    {kTypeQ5_0, 32, 22, kIntegers, 5, 32, 16, 0, 0, {0, -1}},
    {kTypeQ5_1, 32, 24, kIntegers, 5, 32, 0, 1, 0, {0, 2}},
    {kTypeQ2_K, 256, 84, kIntegers, 2, 16, 0, 1, 1, {80, 82}},
    {kTypeQ3_K, 256, 110, kIntegers, 3, 16, 4, 0, 1, {108, -1}},
    {kTypeQ4_K, 256, 144, kIntegers, 4, 32, 0, 1, 1, {0, 2}},
    {kTypeQ5_K, 256, 176, kIntegers, 5, 32, 0, 1, 1, {0, 2}},
    {kTypeQ6_K, 256, 210, kIntegers, 6, 16, 32, 0, 1, {208, -1}},
    {kTypeIQ4_NL, 32, 18, kCodes, 4, 32, 0, 0, kHalves, {0, -1}},
    {kTypeIQ4_XS, 256, 136, kCodes, 4, 32, 0, 0, kSuper, {0, -1}},
    {kTypeNVFP4, 64, 36, kCodes, 4, 16, 0, 0, kFloat8, {-1, -1}},
    {kTypeIQ2_XXS, 256, 66, kCodes, 3, 32, 0, 0, kSuper, {0, -1}},
    {kTypeIQ2_XS, 256, 74, kCodes, 3, 16, 0, 0, kSuper, {0, -1}},
    {kTypeIQ2_S, 256, 82, kCodes, 3, 16, 0, 0, kSuper, {0, -1}},
    {kTypeIQ3_XXS, 256, 98, kCodes, 4, 32, 0, 0, kSuper, {0, -1}},
    {kTypeIQ3_S, 256, 110, kCodes, 4, 32, 0, 0, kSuper, {0, -1}},
    {kTypeIQ1_S, 256, 50, kCodes, 3, 32, 0, 0, kSuper, {0, -1}},
    {kTypeTQ1_0, 256, 54, kCodes, 2, 32, 0, 0, kSuper, {52, -1}},
    {kTypeTQ2_0, 256, 66, kCodes, 2, 32, 0, 0, kSuper, {64, -1}},
    {kTypeQ1_0, 128, 18, kCodes, 1, 32, 0, 0, kHalves, {0, -1}},
    {kTypeZero4, 32, 19, kIntegers, 4, 32, 0, kZeroPoints, kHalves, {0, -1}},
    {kTypeZero8, 32, 35, kIntegers, 8, 32, 128, kZeroPoints, kHalves, {0, -1}},
    {kTypeAffine8, 32, 36, kIntegers, 8, 32, 128, kMinima, kHalves, {0, 2}},
};

float random_float() { return static_cast<float>(random(-1000, 1000)) / 1000; }

// Exactly `count` elements; packed matrices start on a cache line.
template <class T>
struct Exactly {
    explicit Exactly(int64_t count)
        : data(static_cast<T*>(aligned_alloc_exact(static_cast<size_t>(count) * sizeof(T)))) {}
    ~Exactly() { std::free(data); }
    static void* aligned_alloc_exact(size_t bytes) {
        void* got = nullptr;
        if (posix_memalign(&got, 64, bytes == 0 ? 1 : bytes) != 0) std::abort();
        return got;
    }
    T* data;
};

[[noreturn]] void fail(const char* what, int64_t a, int64_t b, int64_t c) {
    std::printf("%s: %lld, %lld x %lld\n", what, static_cast<long long>(a),
                static_cast<long long>(b), static_cast<long long>(c));
    std::exit(1);
}

void one_product() {
    const Kind& kind = kKinds[random(0, sizeof kKinds / sizeof kKinds[0] - 1)];
    const int64_t blocks = random(1, kind.elements == 1 ? 100 : (kind.elements == 32 ? 12 : 3));
    Matrix m = {};
    m.rows = random(1, 70);
    m.columns = blocks * kind.elements;
    m.format = kind.format;
    m.bits = kind.bits;
    m.group = kind.group;
    m.offset = kind.offset;
    m.minima = kind.minima;
    m.scales = kind.scales;
    m.bias = -1;
    m.factor = 1.0f;
    for (int8_t& number : m.table) number = static_cast<int8_t>(random(-127, 127));
    Exactly<uint8_t> source(m.rows * blocks * kind.bytes);
    for (int64_t i = 0; i < m.rows * blocks * kind.bytes; ++i) {
        source.data[i] = static_cast<uint8_t>(random_bits());
    }
    for (int64_t i = 0; i < m.rows * blocks; ++i) {
        uint8_t* block = source.data + i * kind.bytes;
        const uint16_t small = static_cast<uint16_t>(0x2000 + random(0, 0x7ff));
        const float number = random_float();
        if (kind.elements == 1) std::memcpy(block, &number, 4);
        for (int at : kind.halves) {
            if (at >= 0) std::memcpy(block + at, &small, 2);
        }
    }
    Exactly<uint8_t> target(unspool_packed_bytes(&m));
    double error[2] = {0, 0};
    const int64_t size = m.rows * blocks * kind.bytes;
    const int32_t packed =
        kind.elements == 1
            ? unspool_quantize(&m, kind.type, source.data, size, 0, blocks_of(m), target.data,
                               error)
            : unspool_repack(&m, kind.type, source.data, size, 0, blocks_of(m), target.data);
    if (packed != 0) fail("packing failed", kind.type, m.rows, m.columns);
    m.data = target.data;

    const int64_t count = random(1, random(0, 3) == 0 ? 40 : 3);
    Exactly<float> rows(count * m.columns), out(count * m.rows), weights(m.rows * m.columns);
    for (int64_t i = 0; i < count * m.columns; ++i) rows.data[i] = random_float();
    for (int64_t i = 0; i < count * m.rows; ++i) out.data[i] = NAN;
    const int32_t threads = static_cast<int32_t>(random(1, 3));
    if (unspool_multiply(&m, rows.data, count, out.data, threads, 1) != 0) {
        fail("multiplying failed", kind.type, m.rows, m.columns);
    }
    unspool_unpack(&m, 0, m.rows, weights.data);
    for (int64_t i = 0; i < count * m.rows; ++i) {
        const float* x = rows.data + i / m.rows * m.columns;
        const float* w = weights.data + i % m.rows * m.columns;
        double exact = 0, largest_x = 0, largest_w = 0;
        for (int64_t c = 0; c < m.columns; ++c) {
            exact += static_cast<double>(x[c]) * static_cast<double>(w[c]);
            largest_x = std::fmax(largest_x, std::fabs(static_cast<double>(x[c])));
            largest_w = std::fmax(largest_w, std::fabs(static_cast<double>(w[c])));
        }
        // Rows are rounded to bytes on the way, and multiplied before the minimum is added.
        const double most = 0.01 * largest_x * 2 * largest_w * static_cast<double>(m.columns);
        if (!(std::fabs(static_cast<double>(out.data[i]) - exact) <= most + 1e-6)) {
            fail("a wrong product", kind.type * 100 + m.format, m.rows, m.columns);
        }
    }
}

void one_sampling() {
    const int64_t rows = random(1, 3), width = random(1, random(0, 1) != 0 ? 40 : 2000);
    Exactly<float> logits(rows * width);
    for (int64_t i = 0; i < rows * width; ++i) {
        logits.data[i] = random(0, 9) == 0 ? -INFINITY : 10 * random_float();
    }
    for (int64_t row = 0; row < rows; ++row) logits.data[row * width] = 1;
    Exactly<double> peaks(3 * rows), counts(2 * rows), levels(rows);
    unspool_peaks(logits.data, rows, width, peaks.data);
    for (int64_t row = 0; row < rows; ++row) {
        if (!(peaks.data[row] >= 1)) fail("a wrong peak", row, rows, width);
        counts.data[row] = levels.data[row] = static_cast<double>(10 * random_float());
    }
    unspool_measure(logits.data, rows, width, 1, peaks.data);
    unspool_counts(logits.data, rows, width, counts.data);
    const int64_t count = random(1, width), room = random(1, width);
    Exactly<double> leading(2 * rows * count), above(2 * rows * room);
    unspool_leading(logits.data, rows, width, count, leading.data);
    unspool_above(logits.data, rows, width, levels.data, room, above.data);
    for (int64_t row = 0; row < rows; ++row) {
        if (leading.data[row * count] != peaks.data[row]) fail("a wrong first", row, rows, width);
    }
}

}  // namespace

int main(int, char** arguments) {
    random_bits.seed(static_cast<uint64_t>(std::atoll(arguments[1])));
    set_grids();
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<int>(1000 * std::atof(arguments[2])));
    int count = 0;
    for (; std::chrono::steady_clock::now() < end; ++count) {
        one_product();
        one_sampling();
    }
    std::printf("%d rounds\n", count);
    std::fflush(stdout);
    std::_Exit(count < 20);  // the pool's threads never end
}
