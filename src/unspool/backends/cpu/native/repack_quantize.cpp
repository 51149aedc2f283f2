// Rows of floats into Q4 and Q8.
//
// Four rows go through every step together, one row a lane of a vector: nothing has to be added up
// across lanes.
//
// Q8 takes the largest number of a group for its scale. Q4 has sixteen levels, and where they lie
// matters: the span from the smallest to the largest number is only the first of several guesses.
// Each guess gives every number a level, and for these levels the scale and minimum with the least
// squared error follow from a straight line through (level, number). The best guess wins.
#include <cmath>
#include <cstring>

#include "half.h"
#include "repack.h"

namespace unspool {
namespace {

constexpr int kRows = 4;  // that go together

using Floats = float __attribute__((vector_size(4 * kRows)));
using Ints = int32_t __attribute__((vector_size(4 * kRows)));

constexpr float kLargest = 65504;  // of a half: minima and scales are kept as such
constexpr float kTop = 15;         // the highest level of Q4

// How much of the span is cut off at both ends. Found by trial: with these the error is 8% less
// than that of the whole span, be the numbers Gaussian, uniform or long-tailed; twice as many
// guesses gain another 0.3%.
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

Ints nearest(Floats value, float top) {  // whole numbers from 0 to `top`
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

// The line of least squares for the levels that `guess` gives, and the squared error it leaves
// beyond a constant of the group (which is all that a comparison needs). Numbers are taken from the
// lowest on: sums of large numbers that differ little would lose the difference.
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
    // All numbers on one level: no slope.
    const Floats scale = quotient(slope, n * qq_sum - q_sum * q_sum);
    error = -scale * slope;
    return {scale, lowest + (x_sum - scale * q_sum) / n};
}

void keep_best(Line& best, Floats& least, const Line& line, Floats error) {
    best.scale = error < least ? line.scale : best.scale;
    best.minimum = error < least ? line.minimum : best.minimum;
    least = error < least ? error : least;
}

// The squared error that is really left.
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
    Floats least = broadcast(1), remaining_error;  // a fit leaves 0 or less
    for (float cut : kCuts) {
        const Floats minimum = full.minimum + kTop * cut * full.scale;
        const Line line =
            fit(group, full.minimum, {full.scale * (1 - 2 * cut), minimum}, remaining_error);
        keep_best(best, least, line, remaining_error);
    }
    // Levels move once more for the line that was found, and the line with them.
    const Line line = fit(group, full.minimum, best, remaining_error);
    keep_best(best, least, line, remaining_error);
    // Rounding to halves can undo what little a fit gains; then it is the whole span.
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
    // Small halves are coarse: where rounding down would leave the largest number out of reach by
    // more than half a step, the next larger scale reaches it.
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

// Up to four rows from `source` on. False if a number is not finite, or too large for a half.
bool load_group(int32_t type, const uint8_t* source, int64_t row_bytes, int rows, int64_t column,
                Group& group) {
    bool finite = true;
    float numbers[kRows][kTile] = {};
    for (int l = 0; l < rows; ++l) {
        load_floats(type, source + l * row_bytes, column, group.columns, numbers[l]);
        int num_invalid = 0;
        for (float number : numbers[l]) num_invalid += !(std::fabs(number) <= kLargest);
        if (num_invalid != 0) {  // zeros instead: nothing after this can overflow
            finite = false;
            std::memset(numbers[l], 0, sizeof numbers[l]);
        }
    }
    for (int c = 0; c < kTile; ++c) {
        group.x[c] = Floats{numbers[0][c], numbers[1][c], numbers[2][c], numbers[3][c]};
    }
    return finite;
}

// Adds the error of what a float format made of a row, its numbers sixteen apart.
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
                m.format == kQ4 ? quantize_q4(group, row, target) : quantize_q8(group, row, target);
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
