// Samples one token from a row of logits with the common settings: penalties, top-k, top-p, min-p,
// temperature, in this order, and the counter-based draw.
//
// The same arithmetic in the same order as the chain of stages (`sampling/chain.py`), which is the
// specification: logits are floats, the few candidates after a truncation are doubles, sums start
// at the likeliest.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "kernels/kernels.h"
#include "pool.h"
#include "portable_math.h"
#include "sampling.h"

namespace unspool {
namespace {

constexpr double kSlack = 1e-6;           // see `SLACK` in candidates.py
constexpr double kMinTemperature = 1e-6;  // see temperature.py
constexpr int64_t kFirstTopK = 128, kTopKGrowth = 8;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Floats {
    double temperature, top_p, min_p, repetition, frequency, presence;
};

struct Ints {
    int64_t top_k;
    uint64_t seed;
    int64_t sample, position, history_start, history_end;
};

// Philox4x32-10 (Salmon et al. 2011): a number in [0,1) from seed, sample, position and stream
// alone. The stream is in the upper half of `position`.
double uniform(const Ints& row) {
    uint64_t c0 = static_cast<uint64_t>(row.position) & 0xffffffffu;
    uint64_t c1 = static_cast<uint64_t>(row.sample) & 0xffffffffu;
    uint64_t c2 = static_cast<uint64_t>(row.sample) >> 32;
    uint64_t c3 = static_cast<uint64_t>(row.position) >> 32;
    uint64_t k0 = row.seed & 0xffffffffu, k1 = row.seed >> 32;
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & 0xffffffffu;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & 0xffffffffu;
        k0 = (k0 + 0x9E3779B9u) & 0xffffffffu;
        k1 = (k1 + 0xBB67AE85u) & 0xffffffffu;
    }
    return static_cast<double>(((c0 << 32) | c1) >> 11) * 0x1p-53;
}

// Of a row of a canvas: what the order of unmasking needs.
struct CanvasDetails {
    double entropy, margin, target_logprob;
};

struct Candidate {
    double logit;
    int64_t token;
};

bool is_likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Working memory of one thread, reused for the next row.
struct RowSampler {
    std::vector<float> edited;
    std::vector<int64_t> counts;
    std::vector<double> top, cumulative;
    std::vector<Candidate> candidates;

    // Puts the `count` likeliest of a row into `candidates`, in order.
    void take_top(const float* x, int64_t width, int64_t count) {
        count = std::min(count, width);
        top.resize(2 * count);
        top_k(x, width, count, top.data(), count);
        candidates.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            candidates[i].logit = top[i];
            std::memcpy(&candidates[i].token, &top[count + i], sizeof(int64_t));
        }
    }

    // Cumulative sums of exp(logit - peak) over `candidates`; returns the total.
    double accumulate(double peak) {
        cumulative.resize(candidates.size());
        double total = 0;
        for (size_t i = 0; i < candidates.size(); ++i)
            cumulative[i] = total += portable_exp(candidates[i].logit - peak);
        return total;
    }

    const float* apply_penalties(const float* x, int64_t width, const Floats& settings,
                                 const int64_t* history, int64_t length) {
        const bool repetition = settings.repetition != 1.0, frequency = settings.frequency != 0.0;
        const bool presence = settings.presence != 0.0;
        if (length <= 0 || !(repetition || frequency || presence)) return x;
        counts.resize(2 * length);
        const int64_t number = count_tokens(history, length, width, counts.data());
        edited.assign(x, x + width);
        const float divisor = static_cast<float>(settings.repetition);
        for (int64_t i = 0; i < number; ++i) {
            float& level = edited[counts[i]];
            if (repetition) level = level > 0.0f ? level / divisor : level * divisor;
            if (frequency)
                level -= static_cast<float>(settings.frequency *
                                            static_cast<double>(counts[length + i]));
            if (presence) level -= static_cast<float>(settings.presence);
        }
        return edited.data();
    }

    // Keeps the fewest candidates whose probabilities sum to top_p.
    void apply_top_p(const float* x, int64_t width, bool full_vocabulary, double peak,
                     double top_p) {
        double total = 0;
        if (full_vocabulary) {
            double weighted;
            kernels().mass(x, width, static_cast<float>(peak), &total, &weighted);
        } else {
            total = accumulate(peak);
        }
        const double target_mass = top_p * (1 - kSlack) * total;
        for (int64_t top_count = kFirstTopK; full_vocabulary; top_count *= kTopKGrowth) {
            take_top(x, width, top_count);
            if (accumulate(peak) >= target_mass || top_count >= width) break;
        }
        size_t size = 0;
        while (size < candidates.size() && cumulative[size] < target_mass) ++size;
        candidates.resize(std::min(candidates.size(), size + 1));
    }

    // Keeps candidates with at least min_p times the top probability.
    void apply_min_p(const float* x, int64_t width, bool full_vocabulary, double peak,
                     double min_p) {
        const double bound = std::min(peak + portable_log(min_p) - kSlack, peak);
        if (!full_vocabulary) {
            size_t size = 1;
            while (size < candidates.size() && candidates[size].logit >= bound) ++size;
            candidates.resize(size);
            return;
        }
        const double lowest = static_cast<double>(std::numeric_limits<float>::lowest());
        const float level = static_cast<float>(std::max(bound, lowest));
        std::vector<int32_t> indices(256);
        const int64_t number =
            kernels().above(x, width, level, static_cast<int64_t>(indices.size()), indices.data());
        if (number > static_cast<int64_t>(indices.size())) {
            indices.resize(number);
            kernels().above(x, width, level, number, indices.data());
        }
        candidates.resize(number);
        for (int64_t i = 0; i < number; ++i)
            candidates[i] = {static_cast<double>(x[indices[i]]), indices[i]};
    }

    // The candidate at `target` of the cumulative sums; `candidates` are sorted.
    int64_t select_token(double target, double peak) const {
        size_t column =
            std::upper_bound(cumulative.begin(), cumulative.end(), target) - cumulative.begin();
        size_t last = candidates.size();
        while (last > 1 && portable_exp(candidates[last - 1].logit - peak) == 0.0) --last;
        return candidates[std::min(column, last - 1)].token;
    }

    int64_t draw_from_candidates(double temperature, double u, bool is_sorted) {
        if (temperature != 1.0)
            for (Candidate& candidate : candidates)
                candidate.logit /= std::max(temperature, kMinTemperature);
        double peak = -kInfinity;
        for (const Candidate& candidate : candidates) peak = std::max(peak, candidate.logit);
        const double total = accumulate(peak);  // before sorting, as the chain does
        if (!is_sorted) {
            std::sort(candidates.begin(), candidates.end(), is_likelier);
            accumulate(peak);
        }
        return select_token(u * total, peak);
    }

    int64_t draw_from_all(const float* x, int64_t width, double temperature, double u) {
        if (temperature != 1.0) {
            const float bounded = std::max(static_cast<float>(temperature), 1e-6f);
            if (x != edited.data()) edited.assign(x, x + width);
            for (float& level : edited) level /= bounded;
            x = edited.data();
        }
        const float peak = kernels().peak(x, width);
        double total, weighted;
        kernels().mass(x, width, peak, &total, &weighted);
        for (int64_t top_count = 64;; top_count *= 16) {
            take_top(x, width, top_count);
            if (accumulate(peak) > u * total || top_count >= width) break;
        }
        return select_token(u * total, peak);
    }

    int64_t pick(const float* logits, int64_t width, const Floats& settings, const Ints& row,
                 const int64_t* history, double* logprob, int64_t target, CanvasDetails* details) {
        const float model_peak = kernels().peak(logits, width);
        if (!std::isfinite(model_peak)) return -1;
        double model_total, weighted;
        kernels().mass(logits, width, model_peak, &model_total, &weighted);
        const float* x = apply_penalties(logits, width, settings, history + row.history_start,
                                         row.history_end - row.history_start);
        const float peak = x == logits ? model_peak : kernels().peak(x, width);
        if (!std::isfinite(peak)) return -1;
        int64_t token;
        if (settings.temperature == 0.0) {
            token = std::find(x, x + width, peak) - x;
        } else {
            bool full_vocabulary = true, is_sorted = true;
            if (row.top_k > 0) {
                take_top(x, width, row.top_k);
                full_vocabulary = false;
            }
            if (settings.top_p < 1.0) {
                apply_top_p(x, width, full_vocabulary, peak, settings.top_p);
                full_vocabulary = false;
            }
            if (settings.min_p > 0.0) {
                is_sorted = !full_vocabulary;
                apply_min_p(x, width, full_vocabulary, peak, settings.min_p);
                full_vocabulary = false;
            }
            token = full_vocabulary
                        ? draw_from_all(x, width, settings.temperature, uniform(row))
                        : draw_from_candidates(settings.temperature, uniform(row), is_sorted);
        }
        const double log_total = portable_log(model_total);
        const auto logprob_of = [&](double logit) {
            return logit - static_cast<double>(model_peak) - log_total;
        };
        *logprob = logprob_of(static_cast<double>(logits[token]));
        if (details) {
            take_top(logits, width, 2);
            details->entropy = std::max(0.0, log_total - weighted / model_total);
            details->margin = portable_exp(logprob_of(candidates[0].logit)) -
                              portable_exp(logprob_of(candidates[1].logit));
            details->target_logprob =
                target < 0 ? 0.0 : logprob_of(static_cast<double>(logits[target]));
        }
        return token;
    }
};

struct PickJob {
    const float* logits;
    int64_t rows, width;
    const Floats* floats;
    const Ints* ints;
    const int64_t* history;
    int64_t* tokens;
    double* logprobs;
    const int64_t* targets;  // null: not a canvas
    CanvasDetails* details;
    std::atomic<int64_t> next{0};

    static void work(void* argument, int, int) {
        PickJob& self = *static_cast<PickJob*>(argument);
        thread_local RowSampler sampler;
        for (int64_t row; (row = self.next.fetch_add(1)) < self.rows;)
            self.tokens[row] = sampler.pick(
                self.logits + row * self.width, self.width, self.floats[row], self.ints[row],
                self.history, self.logprobs + row, self.targets ? self.targets[row] : -1,
                self.targets ? self.details + row : nullptr);
    }
};

}  // namespace
}  // namespace unspool

using namespace unspool;

void unspool_pick(const float* logits, int64_t rows, int64_t width, const double* floats,
                  const int64_t* ints, const int64_t* history, int32_t threads, int64_t* tokens,
                  double* logprobs, const int64_t* targets, double* details) {
    PickJob job{logits,
                rows,
                width,
                reinterpret_cast<const Floats*>(floats),
                reinterpret_cast<const Ints*>(ints),
                history,
                tokens,
                logprobs,
                targets,
                reinterpret_cast<CanvasDetails*>(details)};
    if (rows == 1 || threads == 1 || !run_on_pool(threads, &PickJob::work, &job))
        PickJob::work(&job, 0, 1);
}
