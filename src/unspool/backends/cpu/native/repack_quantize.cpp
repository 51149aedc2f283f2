// Quantization of float rows to Q4 and Q8.
//
// Four rows are processed together, one per lane of a vector: no horizontal sums.
//
// Q8 derives its scale from the largest value of a group. Q4 has sixteen levels, whose position
// matters: the span from the smallest to the largest value is only the first of several candidates.
// Each candidate assigns a level to every value, and a least-squares line through (level, value)
// gives the best scale and minimum for these levels. The candidate with the smallest error wins.
#include <cmath>
#include <cstring>

#include "half.h"
#include "repack.h"

namespace unspool {
namespace {

constexpr int kRows = 4;  // processed together

using Floats = float __attribute__((vector_size(4 * kRows)));
using Ints = int32_t __attribute__((vector_size(4 * kRows)));

constexpr float kLargest = 65504;  // of a half: minima and scales are stored as halves
constexpr float kTop = 15;         // the highest level of Q4

// Fraction of the span cut off at both ends. Tuned by experiment: the error is 8% less than that of
// the full span for Gaussian, uniform and long-tailed values; twice as many candidates gain another
// 0.3%.
constexpr float kCuts[] = {0.0f, 0.02f, 0.04f, 0.06f, 0.085f, 0.115f};

// One group of columns of four rows; zero where there is no row or no column.
struct Group {
    Floats x[kTile];
    int columns;
};

struct Line {
    Floats scale;
    Floats minimum;
};

Floats broadcast(float value) { return Floats{} + value; }

Floats to_floats(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

Floats quotient(Floats dividend, Floats divisor) {  // 0 where the divisor is not positive
    const Floats exact = dividend / (divisor > 0.0f ? divisor : broadcast(1));
    return divisor > 0.0f ? exact : broadcast(0);
}

Ints nearest(Floats value, float top) {  // integers from 0 to `top`
    const Floats above = value > 0.0f ? value : broadcast(0);
    return __builtin_convertvector((above < top ? above : broadcast(top)) + 0.5f, Ints);
}

Ints levels(const Group& group, int column, Floats minimum, Floats steps) {
    return nearest((group.x[column] - minimum) * steps, kTop);
}

Floats round_to_half(Floats values) {
    for (int l = 0; l < kRows; ++l) values[l] = half_to_float(float_to_half(values[l]));
    return values;
}

// Least-squares line for the levels of `guess`, and its squared error up to a constant of the group
// (enough for comparisons). Values are relative to the lowest: sums of large values that differ
// little would lose precision.
Line fit(const Group& group, Floats lowest, const Line& guess, Floats& error) {
    const float n = static_cast<float>(group.columns);
    const Floats steps = quotient(broadcast(1), guess.scale);
    Floats q_sum = {}, qq_sum = {}, x_sum = {}, qx_sum = {};
    for (int c = 0; c < group.columns; ++c) {
        const Floats q = to_floats(levels(group, c, guess.minimum, steps));
        const Floats x = group.x[c] - lowest;
        q_sum += q;
        qq_sum += q * q;
        x_sum += x;
        qx_sum += q * x;
    }
    const Floats slope = n * qx_sum - q_sum * x_sum;
    // All values on one level: no slope.
    const Floats scale = quotient(slope, n * qq_sum - q_sum * q_sum);
    error = -scale * slope;
    return {scale, lowest + (x_sum - scale * q_sum) / n};
}

void keep_best(Line& best, Floats& least, const Line& line, Floats error) {
    best.scale = error < least ? line.scale : best.scale;
    best.minimum = error < least ? line.minimum : best.minimum;
    least = error < least ? error : least;
}

// The actual squared error.
Floats error_of(const Group& group, const Line& line) {
    const Floats steps = quotient(broadcast(1), line.scale);
    Floats sum = {};
    for (int c = 0; c < group.columns; ++c) {
        const Floats q = to_floats(levels(group, c, line.minimum, steps));
        const Floats residual = group.x[c] - (line.scale * q + line.minimum);
        sum += residual * residual;
    }
    return sum;
}

Line full_span(const Group& group) {
    Floats low = group.x[0], high = group.x[0];
    for (int c = 1; c < group.columns; ++c) {
        low = group.x[c] < low ? group.x[c] : low;
        high = group.x[c] > high ? group.x[c] : high;
    }
    return {(high - low) / kTop, low};
}

Line best_line(const Group& group, Floats& error) {
    const Line full = full_span(group);
    Line best = full;
    Floats least = broadcast(1), remaining_error;  // `fit` returns 0 or less
    for (float cut : kCuts) {
        const Floats minimum = full.minimum + kTop * cut * full.scale;
        const Line line =
            fit(group, full.minimum, {full.scale * (1 - 2 * cut), minimum}, remaining_error);
        keep_best(best, least, line, remaining_error);
    }
    // Reassign levels for the best line once more, and fit again.
    const Line line = fit(group, full.minimum, best, remaining_error);
    keep_best(best, least, line, remaining_error);
    // Rounding to halves can undo the gain of a fit; then use the full span.
    best = {round_to_half(best.scale), round_to_half(best.minimum)};
    error = error_of(group, best);
    const Line rounded = {round_to_half(full.scale), round_to_half(full.minimum)};
    keep_best(best, error, rounded, error_of(group, rounded));
    return best;
}

void put_half(uint8_t* halves, int number, float value) {
    const uint16_t bits = float_to_half(value);
    std::memcpy(halves + 2 * number, &bits, sizeof bits);
}

// Both write the tile's part of four rows, the first of them `row`, and return the squared error.
Floats quantize_q4(const Group& group, int row, uint8_t* tile) {
    Floats error;
    const Line line = best_line(group, error);
    const Floats steps = quotient(broadcast(1), line.scale);
    Ints stored[kTile] = {};
    for (int c = 0; c < group.columns; ++c) {
        stored[c] = levels(group, c, line.minimum, steps);
    }
    for (int c = 0; c < kTile / 2; ++c) {
        const Ints both = stored[c] | stored[c + kTile / 2] << 4;
        uint8_t* bytes = tile + 4 * (kLanes * (c / 4) + row) + c % 4;
        for (int l = 0; l < kRows; ++l) bytes[4 * l] = static_cast<uint8_t>(both[l]);
    }
    uint8_t* scales = tile + kLanes * kTile / 2;
    for (int l = 0; l < kRows; ++l) {
        put_half(scales, row + l, line.scale[l]);
        put_half(scales + 2 * kLanes, row + l, line.minimum[l]);
    }
    return error;
}

Floats quantize_q8(const Group& group, int row, uint8_t* tile) {
    Floats largest = {};
    for (int c = 0; c < group.columns; ++c) {
        const Floats size = group.x[c] < 0.0f ? -group.x[c] : group.x[c];
        largest = size > largest ? size : largest;
    }
    Floats scale = round_to_half(largest / 127.0f);
    // Small halves are coarse: if rounding down puts the largest value out of range by more than
    // half a step, use the next larger scale.
    for (int l = 0; l < kRows; ++l) {
        if (scale[l] * 127.5f < largest[l]) scale[l] = half_to_float(float_to_half(scale[l]) + 1);
    }
    const Floats steps = quotient(broadcast(1), scale);
    Floats error = {};
    for (int c = 0; c < kTile; ++c) {
        Ints stored = {};
        if (c < group.columns) {
            stored = nearest(group.x[c] * steps + 128.0f, 255);
            const Floats residual = group.x[c] - scale * to_floats(stored - 128);
            error += residual * residual;
        }
        uint8_t* bytes = tile + 4 * (kLanes * (c / 4) + row) + c % 4;
        for (int l = 0; l < kRows; ++l) bytes[4 * l] = static_cast<uint8_t>(stored[l]);
    }
    for (int l = 0; l < kRows; ++l) put_half(tile + kLanes * kTile, row + l, scale[l]);
    return error;
}

// Loads up to four rows. Returns false if a value is not finite, or too large for a half.
bool load_group(int32_t type, const uint8_t* source, int64_t row_bytes, int rows, int64_t column,
                Group& group) {
    bool finite = true;
    float numbers[kRows][kTile] = {};
    for (int l = 0; l < rows; ++l) {
        load_floats(type, source + l * row_bytes, column, group.columns, numbers[l]);
        int num_invalid = 0;
        for (float number : numbers[l]) num_invalid += !(std::fabs(number) <= kLargest);
        if (num_invalid != 0) {  // use zeros instead: nothing can overflow later
            finite = false;
            std::memset(numbers[l], 0, sizeof numbers[l]);
        }
    }
    for (int c = 0; c < kTile; ++c) {
        group.x[c] = Floats{numbers[0][c], numbers[1][c], numbers[2][c], numbers[3][c]};
    }
    return finite;
}

// Adds the rounding error of a row in a float format; its packed values are sixteen apart.
void compare(const Matrix& m, int32_t type, const uint8_t* row, const uint8_t* packed,
             double* error) {
    constexpr int32_t kTypes[] = {kTypeF32, kTypeF16, kTypeBF16};
    const int64_t size = m.format == kF32 ? 4 : 2;
    for (int64_t column = 0; column < m.columns; ++column) {
        float weight, stored;
        load_floats(type, row, column, 1, &weight);
        load_floats(kTypes[m.format], packed + column * kLanes * size, 0, 1, &stored);
        const double exact = static_cast<double>(weight);
        const double residual = exact - static_cast<double>(stored);
        error[0] += residual * residual;
        error[1] += exact * exact;
    }
}

}  // namespace

bool quantize_block(const Matrix& m, int32_t type, const uint8_t* source, int64_t row_bytes,
                    int rows, uint8_t* target, double* error) {
    bool finite = true;
    if (!is_quantized(m)) {
        finite = float_repacker(m, type)(m, source, row_bytes, rows, target);
        for (int row = 0; finite && row < rows; ++row) {
            const int64_t size = m.format == kF32 ? 4 : 2;
            compare(m, type, source + row * row_bytes, target + row * size, error);
        }
        return finite;
    }
    for (int64_t column = 0; column < m.columns; column += kTile, target += tile_bytes(m)) {
        const int64_t remaining_error = m.columns - column;
        Group group;
        group.columns = static_cast<int>(remaining_error < kTile ? remaining_error : kTile);
        for (int row = 0; row < kLanes; row += kRows) {
            const int row_count = rows - row < 0 ? 0 : (rows - row < kRows ? rows - row : kRows);
            const uint8_t* row_source = row_count > 0 ? source + row * row_bytes : source;
            finite &= load_group(type, row_source, row_bytes, row_count, column, group);
            const Floats errors =
                m.bits == 4 ? quantize_q4(group, row, target) : quantize_q8(group, row, target);
            Floats weights = {};
            for (int c = 0; c < group.columns; ++c) weights += group.x[c] * group.x[c];
            for (int l = 0; l < row_count; ++l) {
                error[0] += static_cast<double>(errors[l]);
                error[1] += static_cast<double>(weights[l]);
            }
        }
    }
    return finite;
}

}  // namespace unspool
