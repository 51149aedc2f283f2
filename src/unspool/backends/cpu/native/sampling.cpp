#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "kernels/kernels.h"
#include "portable_math.h"

namespace unspool {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Integer key that sorts floats in descending order; 0 and -0 are equal. Unlike floats, keys have a
// total order even with NaN.
uint32_t sort_key(float x) {
    x += 0.0f;  // -0 becomes 0
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

float from_sort_key(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key : ~key & 0x7fffffffu;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// A threshold that at least `count` logits of the row reach, and few others: the count-th largest
// of the maxima of blocks. The lowest float if blocks would be too short to be worth it.
float threshold_for(const float* logits, int64_t width, int64_t count) {
    const int64_t num_maxima = std::max<int64_t>(512, 4 * count);
    const int64_t depth = width / num_maxima;
    if (depth < 2) return std::numeric_limits<float>::lowest();
    std::vector<float> tops(width / depth);
    const int64_t number = kernels().maxima(logits, width, depth, tops.data());
    std::vector<uint32_t> keys(number);
    std::transform(tops.begin(), tops.begin() + number, keys.begin(), sort_key);
    std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end());
    return std::max(from_sort_key(keys[count - 1]), std::numeric_limits<float>::lowest());
}

std::vector<int32_t> indices_above(const float* logits, int64_t width, float level,
                                   int64_t expected) {
    std::vector<int32_t> found(expected);
    const int64_t number = kernels().above(logits, width, level, expected, found.data());
    found.resize(number);
    if (number > expected) kernels().above(logits, width, level, number, found.data());
    return found;
}

// Stores a value, and its column `column_offset` elements after it.
void store_pair(double* place, int64_t column_offset, float value, int64_t column) {
    *place = static_cast<double>(value);
    std::memcpy(place + column_offset, &column, sizeof column);
}

}  // namespace

void top_k(const float* logits, int64_t width, int64_t count, double* values,
           int64_t column_offset) {
    const float level = threshold_for(logits, width, count);
    const std::vector<int32_t> columns =
        indices_above(logits, width, level, std::min(width, 2 * count + 64));
    // Logit and column in one key: sorted by both.
    std::vector<uint64_t> keys(columns.size());
    std::transform(columns.begin(), columns.end(), keys.begin(), [logits](int32_t column) {
        return static_cast<uint64_t>(sort_key(logits[column])) << 32 |
               static_cast<uint32_t>(column);
    });
    const int64_t sorted = std::min<int64_t>(count, keys.size());
    if (sorted < static_cast<int64_t>(keys.size()))
        std::nth_element(keys.begin(), keys.begin() + sorted, keys.end());
    std::sort(keys.begin(), keys.begin() + sorted);
    for (int64_t i = 0; i < sorted; ++i) {
        const int64_t column = static_cast<int64_t>(keys[i] & 0xffffffffu);
        store_pair(values + i, column_offset, logits[column], column);
    }
    // Fewer than `count` are above -inf: fill up with the first of the others.
    int64_t place = sorted;
    for (int64_t i = 0; i < width && place < count; ++i) {
        if (logits[i] >= level) continue;
        store_pair(values + place++, column_offset, logits[i], i);
    }
}

int64_t count_tokens(const int64_t* tokens, int64_t count, int64_t vocabulary, int64_t* unique) {
    // Index of each token in `unique`, plus one; all 0 between calls, so that the cost depends on
    // the number of tokens, not on the vocabulary.
    thread_local std::vector<int32_t> places;
    if (static_cast<int64_t>(places.size()) < vocabulary) places.resize(vocabulary);
    int64_t number = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = tokens[i];
        if (token < 0 || token >= vocabulary) continue;
        if (places[token] == 0) {
            unique[number] = token;
            unique[count + number] = 0;
            places[token] = static_cast<int32_t>(++number);
        }
        ++unique[count + places[token] - 1];
    }
    for (int64_t i = 0; i < number; ++i) places[unique[i]] = 0;
    return number;
}

}  // namespace unspool

using namespace unspool;

void unspool_exp(double* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) numbers[i] = portable_exp(numbers[i]);
}

void unspool_log(double* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) numbers[i] = portable_log(numbers[i]);
}

void unspool_peaks(const float* logits, int64_t rows, int64_t width, double* peaks) {
    for (int64_t row = 0; row < rows; ++row)
        peaks[row] = static_cast<double>(kernels().peak(logits + row * width, width));
}

void unspool_measure(const float* logits, int64_t rows, int64_t width, int32_t has_peaks,
                     double* peaks) {
    if (!has_peaks) unspool_peaks(logits, rows, width, peaks);
    double *totals = peaks + rows, *entropies = totals + rows;
    for (int64_t row = 0; row < rows; ++row) {
        totals[row] = entropies[row] = std::numeric_limits<double>::quiet_NaN();
        if (!std::isfinite(peaks[row])) continue;
        double weighted;
        kernels().mass(logits + row * width, width, static_cast<float>(peaks[row]), totals + row,
                       &weighted);
        entropies[row] = portable_log(totals[row]) - weighted / totals[row];
    }
}

void unspool_counts(const float* logits, int64_t rows, int64_t width, double* levels) {
    for (int64_t row = 0; row < rows; ++row) {
        const float below = std::nextafter(static_cast<float>(levels[row]), -kInfinity);
        const int64_t number = kernels().count_above(logits + row * width, width, below);
        std::memcpy(levels + rows + row, &number, sizeof number);
    }
}

void unspool_standing(const float* logits, int64_t rows, int64_t width, int64_t* columns) {
    for (int64_t row = 0; row < rows; ++row) {
        const float level = logits[row * width + columns[row]];
        const double wide = static_cast<double>(level);
        std::memcpy(columns + row, &wide, sizeof wide);
        columns[rows + row] = kernels().count_above(logits + row * width, width, level);
    }
}

void unspool_leading(const float* logits, int64_t rows, int64_t width, int64_t count,
                     double* values) {
    const int64_t column_offset = rows * count;
    for (int64_t row = 0; row < rows && count > 0; ++row)
        top_k(logits + row * width, width, count, values + row * count, column_offset);
}

void unspool_above(const float* logits, int64_t rows, int64_t width, const double* levels,
                   int64_t room, double* values) {
    std::vector<int32_t> found(room);
    for (int64_t row = 0; row < rows; ++row) {
        const float* row_logits = logits + row * width;
        const float level = static_cast<float>(levels[row]);
        const int64_t number =
            std::min(room, kernels().above(row_logits, width, level, room, found.data()));
        for (int64_t i = 0; i < room; ++i) {
            const bool in_use = i < number;
            store_pair(values + row * room + i, rows * room,
                       in_use ? row_logits[found[i]] : -kInfinity, in_use ? found[i] : 0);
        }
    }
}

int64_t unspool_tally(const int64_t* tokens, int64_t count, int64_t vocabulary, int64_t* unique) {
    return count_tokens(tokens, count, vocabulary, unique);
}
