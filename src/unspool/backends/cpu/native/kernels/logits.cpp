// Operations of sampling on one row of logits, each a single pass. A result depends on that row
// alone: sums have a fixed order, in floats within a chunk and in doubles across chunks.
#include <cmath>
#include <limits>

#include "kernels.h"
#include "vec16.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = -1.0e4f;  // replaces -inf: exp of it is 0, and so is 0 times it
constexpr int64_t kChunk = 8 * kLanes;

// Calls visit(chunk) for each chunk of logits; the last one is padded with -inf.
template <typename Visit>
[[gnu::always_inline]] inline void for_each_chunk(const float* logits, int64_t count, Visit visit) {
    int64_t start = 0;
    for (; start + kChunk <= count; start += kChunk) visit(logits + start);
    if (start == count) return;
    float tail[kChunk];
    for (int64_t i = 0; i < kChunk; ++i)
        tail[i] = start + i < count ? logits[start + i] : -kInfinity;
    visit(tail);
}

double sum_in_order(const double* lanes) {
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
    return total;
}

inline void add_to(double* totals, F32x16 chunk) {
    float lanes[kLanes];
    store(lanes, chunk);
    for (int lane = 0; lane < kLanes; ++lane) totals[lane] += static_cast<double>(lanes[lane]);
}

}  // namespace

[[gnu::flatten]] float peak(const float* logits, int64_t count) {
    const F32x16 one = set1(1.0f), infinity = set1(kInfinity);
    F32x16 best = set1(-kInfinity), not_finite = zero();
    for_each_chunk(logits, count, [&](const float* chunk) {
        for (int64_t i = 0; i < kChunk; i += 2 * kLanes) {
            const F32x16 x = load(chunk + i), y = load(chunk + i + kLanes);
            best = vmax(best, vmax(x, y));
            // Not less than infinity: infinity or NaN.
            not_finite = vmax(not_finite,
                              where_less(x, infinity, where_less(y, infinity, zero(), one), one));
        }
    });
    if (largest(not_finite) == 0.0f) return largest(best);
    for (int64_t i = 0; i < count; ++i)
        if (std::isnan(logits[i])) return logits[i];
    return kInfinity;
}

// Flattened: calls of exp16 would cost a quarter of the time.
[[gnu::flatten]] void mass(const float* logits, int64_t count, float peak, double* total,
                           double* weighted) {
    const F32x16 top = set1(peak), lowest = set1(kLowest);
    double totals[kLanes] = {}, moments[kLanes] = {};
    for_each_chunk(logits, count, [&](const float* chunk) {
        F32x16 sum = zero(), moment = zero();
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            const F32x16 below = vmax(sub(load(chunk + i), top), lowest);
            const F32x16 weight = exp16(below);
            sum = add(sum, weight);
            moment = fma(weight, below, moment);
        }
        add_to(totals, sum);
        add_to(moments, moment);
    });
    *total = sum_in_order(totals);
    *weighted = sum_in_order(moments);
}

[[gnu::flatten]] int64_t count_above(const float* logits, int64_t count, float level) {
    const F32x16 bound = set1(level), one = set1(1.0f);
    F32x16 counts = zero();  // integers: exact up to 2^24 per lane
    for_each_chunk(logits, count, [&](const float* chunk) {
        F32x16 partial_counts = zero();
        for (int64_t i = 0; i < kChunk; i += kLanes)
            partial_counts = add(partial_counts, where_less(bound, load(chunk + i), one, zero()));
        counts = add(counts, partial_counts);
    });
    double totals[kLanes] = {};
    add_to(totals, counts);
    return static_cast<int64_t>(sum_in_order(totals));
}

int64_t above(const float* logits, int64_t count, float level, int64_t capacity, int32_t* indices) {
    constexpr int64_t kBlock = 4 * kLanes;
    int64_t number = 0;
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t end = start + kBlock < count ? start + kBlock : count;
        if (end == start + kBlock) {  // skip blocks without one, which are most
            const float* x = logits + start;
            const F32x16 low = vmax(load(x), load(x + kLanes));
            const F32x16 high = vmax(load(x + 2 * kLanes), load(x + 3 * kLanes));
            if (largest(vmax(low, high)) < level) continue;
        }
        for (int64_t i = start; i < end; ++i) {
            if (!(logits[i] >= level)) continue;  // written so that NaN does not count
            if (number < capacity) indices[number] = static_cast<int32_t>(i);
            ++number;
        }
    }
    return number;
}

int64_t maxima(const float* logits, int64_t count, int64_t depth, float* tops) {
    int64_t number = 0;
    const int64_t block = depth * kLanes;
    for (int64_t start = 0; start + block <= count; start += block, number += kLanes) {
        F32x16 best = load(logits + start);
        for (int64_t i = 1; i < depth; ++i) best = vmax(best, load(logits + start + i * kLanes));
        store(tops + number, best);
    }
    return number;
}

}  // namespace ISA
}  // namespace unspool
