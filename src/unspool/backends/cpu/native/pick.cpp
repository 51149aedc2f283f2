// One token from a row of logits, with the settings that most texts have: penalties, top-k, top-p,
// min-p, temperature, in this order, and the counter-based draw.
//
// The same numbers in the same order as the chain of stages (`sampling/chain.py`), which is the
// specification: the model's own logits are floats, the few candidates that remain after a
// truncation are doubles, sums run from the likeliest on.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "kernels/table.h"
#include "pool.h"
#include "sampling.h"

namespace unspool {
namespace {

constexpr double kSlack = 1e-6;    // see `SLACK` in candidates.py
constexpr double kColdest = 1e-6;  // see temperature.py
constexpr int64_t kFirstLook = 128, kWider = 8;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Floats {
    double temperature, top_p, min_p, repetition, frequency, presence;
};

struct Ints {
    int64_t top_k;
    uint64_t seed;
    int64_t sample, position, history_start, history_end;
};

// Philox4x32-10 (Salmon et al. 2011): a number in [0,1) from seed, sample and position alone.
double uniform(const Ints& row) {
    uint64_t c0 = static_cast<uint64_t>(row.position) & 0xffffffffu;
    uint64_t c1 = static_cast<uint64_t>(row.sample) & 0xffffffffu;
    uint64_t c2 = static_cast<uint64_t>(row.sample) >> 32, c3 = 0;
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

struct Candidate {
    double logit;
    int64_t token;
};

bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Everything one thread needs for a row; used again for the next.
struct Picker {
    std::vector<float> edited;
    std::vector<int64_t> counts;
    std::vector<double> lead, running;
    std::vector<Candidate> few;

    // The `count` likeliest of a row, in order, into `few`.
    void take_lead(const float* x, int64_t width, int64_t count) {
        count = std::min(count, width);
        lead.resize(2 * count);
        leading(x, width, count, lead.data(), count);
        few.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            few[i].logit = lead[i];
            std::memcpy(&few[i].token, &lead[count + i], sizeof(int64_t));
        }
    }

    // Sums of exp(logit - peak) over `few`, from the first on; gives the whole sum.
    double sum_up(double peak) {
        running.resize(few.size());
        double total = 0;
        for (size_t i = 0; i < few.size(); ++i) running[i] = total += std::exp(few[i].logit - peak);
        return total;
    }

    const float* penalized(const float* x, int64_t width, const Floats& by, const int64_t* history,
                           int64_t length) {
        const bool repetition = by.repetition != 1.0, frequency = by.frequency != 0.0;
        const bool presence = by.presence != 0.0;
        if (length <= 0 || !(repetition || frequency || presence)) return x;
        counts.resize(2 * length);
        const int64_t number = tally(history, length, width, counts.data());
        edited.assign(x, x + width);
        const float divisor = static_cast<float>(by.repetition);
        for (int64_t i = 0; i < number; ++i) {
            float& level = edited[counts[i]];
            if (repetition) level = level > 0.0f ? level / divisor : level * divisor;
            if (frequency)
                level -= static_cast<float>(by.frequency * static_cast<double>(counts[length + i]));
            if (presence) level -= static_cast<float>(by.presence);
        }
        return edited.data();
    }

    // Keeps the fewest candidates whose mass reaches top_p of the whole.
    void nucleus(const float* x, int64_t width, bool whole, double peak, double top_p) {
        double total = 0;
        if (whole) {
            double unused;
            kernels().mass(x, width, static_cast<float>(peak), &total, &unused);
        } else {
            total = sum_up(peak);
        }
        const double goal = top_p * (1 - kSlack) * total;
        for (int64_t look = kFirstLook; whole; look *= kWider) {
            take_lead(x, width, look);
            if (sum_up(peak) >= goal || look >= width) break;
        }
        size_t kept = 0;
        while (kept < few.size() && running[kept] < goal) ++kept;
        few.resize(std::min(few.size(), kept + 1));
    }

    // Keeps candidates at least min_p times as probable as the likeliest.
    void floor(const float* x, int64_t width, bool whole, double peak, double min_p) {
        const double bound = std::min(peak + std::log(min_p) - kSlack, peak);
        if (!whole) {
            size_t kept = 1;
            while (kept < few.size() && few[kept].logit >= bound) ++kept;
            few.resize(kept);
            return;
        }
        const double lowest = static_cast<double>(std::numeric_limits<float>::lowest());
        const float level = static_cast<float>(std::max(bound, lowest));
        std::vector<int32_t> found(256);
        const int64_t number =
            kernels().above(x, width, level, static_cast<int64_t>(found.size()), found.data());
        if (number > static_cast<int64_t>(found.size())) {
            found.resize(number);
            kernels().above(x, width, level, number, found.data());
        }
        few.resize(number);
        for (int64_t i = 0; i < number; ++i) few[i] = {static_cast<double>(x[found[i]]), found[i]};
    }

    // Where the number falls on the candidates in `few`, which are in order and summed up.
    int64_t landing(double target, double peak) const {
        size_t column = std::upper_bound(running.begin(), running.end(), target) - running.begin();
        size_t last = few.size();
        while (last > 1 && std::exp(few[last - 1].logit - peak) == 0.0) --last;
        return few[std::min(column, last - 1)].token;
    }

    int64_t draw_from_few(double temperature, double u, bool ordered) {
        if (temperature != 1.0)
            for (Candidate& one : few) one.logit /= std::max(temperature, kColdest);
        double peak = -kInfinity;
        for (const Candidate& one : few) peak = std::max(peak, one.logit);
        const double total = sum_up(peak);  // before they are put in order, as the chain does
        if (!ordered) {
            std::sort(few.begin(), few.end(), likelier);
            sum_up(peak);
        }
        return landing(u * total, peak);
    }

    int64_t draw_from_all(const float* x, int64_t width, double temperature, double u) {
        if (temperature != 1.0) {
            const float warm = std::max(static_cast<float>(temperature), 1e-6f);
            if (x != edited.data()) edited.assign(x, x + width);
            for (float& level : edited) level /= warm;
            x = edited.data();
        }
        const float peak = kernels().peak(x, width);
        double total, unused;
        kernels().mass(x, width, peak, &total, &unused);
        for (int64_t look = 64;; look *= 16) {
            take_lead(x, width, look);
            if (sum_up(peak) > u * total || look >= width) break;
        }
        return landing(u * total, peak);
    }

    int64_t pick(const float* logits, int64_t width, const Floats& by, const Ints& row,
                 const int64_t* history, double* logprob) {
        const float own_peak = kernels().peak(logits, width);
        if (!std::isfinite(own_peak)) return -1;
        double own_total, unused;
        kernels().mass(logits, width, own_peak, &own_total, &unused);
        const float* x = penalized(logits, width, by, history + row.history_start,
                                   row.history_end - row.history_start);
        const float peak = x == logits ? own_peak : kernels().peak(x, width);
        if (!std::isfinite(peak)) return -1;
        int64_t token;
        if (by.temperature == 0.0) {
            token = std::find(x, x + width, peak) - x;
        } else {
            bool whole = true, ordered = true;
            if (row.top_k > 0) {
                take_lead(x, width, row.top_k);
                whole = false;
            }
            if (by.top_p < 1.0) {
                nucleus(x, width, whole, peak, by.top_p);
                whole = false;
            }
            if (by.min_p > 0.0) {
                ordered = !whole;
                floor(x, width, whole, peak, by.min_p);
                whole = false;
            }
            token = whole ? draw_from_all(x, width, by.temperature, uniform(row))
                          : draw_from_few(by.temperature, uniform(row), ordered);
        }
        *logprob = static_cast<double>(logits[token]) - static_cast<double>(own_peak) -
                   std::log(own_total);
        return token;
    }
};

struct Picking {
    const float* logits;
    int64_t rows, width;
    const Floats* floats;
    const Ints* ints;
    const int64_t* history;
    int64_t* tokens;
    double* logprobs;
    std::atomic<int64_t> next{0};

    static void work(void* what, int, int) {
        Picking& self = *static_cast<Picking*>(what);
        thread_local Picker picker;
        for (int64_t row; (row = self.next.fetch_add(1)) < self.rows;)
            self.tokens[row] =
                picker.pick(self.logits + row * self.width, self.width, self.floats[row],
                            self.ints[row], self.history, self.logprobs + row);
    }
};

}  // namespace
}  // namespace unspool

using namespace unspool;

void unspool_pick(const float* logits, int64_t rows, int64_t width, const double* floats,
                  const int64_t* ints, const int64_t* history, int32_t threads, int64_t* tokens,
                  double* logprobs) {
    Picking picking{logits,
                    rows,
                    width,
                    reinterpret_cast<const Floats*>(floats),
                    reinterpret_cast<const Ints*>(ints),
                    history,
                    tokens,
                    logprobs};
    if (rows == 1 || threads == 1 || !run_on_pool(threads, &Picking::work, &picking))
        Picking::work(&picking, 0, 1);
}
