// A mixture of experts: each token's router picks a few feed-forwards, whose answers are weighed.
#include <cmath>

#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kSmallestSum = 1e-6f;  // sigmoids may all be next to nothing

// Scores made positive; gives what they are divided by.
float weigh(float* scores, int64_t experts, bool sigmoid) {
    if (sigmoid) {
        for (int64_t e = 0; e < experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        return 1.0f;
    }
    float most = scores[0];
    for (int64_t e = 1; e < experts; ++e) most = scores[e] > most ? scores[e] : most;
    float whole = 0.0f;
    for (int64_t e = 0; e < experts; ++e) {
        scores[e] = std::exp(scores[e] - most);
        whole += scores[e];
    }
    return whole;
}

// Picks are sorted by expert, so that an expert's rows are neighbours and its weights read once.
void sort_picks(const Run& run, const Op& op) {
    const Picks& picks = run.picks;
    const int64_t tokens = run.batch.count, chosen = op.chosen, experts = op.experts;
    for (int64_t e = 0; e <= experts; ++e) picks.starts[e] = 0;
    for (int64_t token = 0; token < tokens; ++token) {
        float* scores = run.buffers[op.source].row(token);
        const float whole = weigh(scores, experts, op.flags & kSigmoidRouter);
        const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
        const auto wanted = [&](int64_t e) { return bias ? scores[e] + bias[e] : scores[e]; };
        float kept = op.flags & kSigmoidRouter ? kSmallestSum : 0.0f;
        for (int64_t i = 0; i < chosen; ++i) {
            int64_t best = 0;
            for (int64_t e = 1; e < experts; ++e)
                if (wanted(e) > wanted(best)) best = e;
            picks.weight[token * chosen + i] = scores[best] / whole;
            picks.place[token * chosen + i] = static_cast<int32_t>(best);  // the expert, for now
            kept += scores[best] / whole;
            scores[best] = -INFINITY;
            ++picks.starts[best + 1];
        }
        if (op.flags & kNormalizeExperts)
            for (int64_t i = 0; i < chosen; ++i) picks.weight[token * chosen + i] /= kept;
        if (op.scale != 1.0f)
            for (int64_t i = 0; i < chosen; ++i) picks.weight[token * chosen + i] *= op.scale;
        if (op.vector >= 0)
            for (int64_t i = token * chosen; i < (token + 1) * chosen; ++i)
                picks.weight[i] *= run.vectors[op.vector].data[picks.place[i]];
    }
    for (int64_t e = 0; e < experts; ++e) picks.starts[e + 1] += picks.starts[e];
    for (int64_t i = 0; i < tokens * chosen; ++i) {
        const int32_t expert = picks.place[i];
        const int32_t place = picks.starts[expert]++;
        picks.token[place] = static_cast<int32_t>(i / chosen);
        picks.place[i] = place;
    }
    for (int64_t e = experts; e > 0; --e) picks.starts[e] = picks.starts[e - 1];
    picks.starts[0] = 0;
}

}  // namespace

void route(const Run& run, const Op& op, Worker& worker) {
    worker.each(0, 1, [&](int64_t) { sort_picks(run, op); });
}

void combine(const Run& run, const Op& op, Worker& worker) {
    const Buffer& answers = run.buffers[op.source];
    const Buffer& x = run.buffers[op.target];
    const int64_t chosen = run.picks.chosen;
    each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* to = x.row(token);
        for (int64_t at = 0; at < x.width; at += kLanes) {
            F32x16 total = zero();
            for (int64_t i = 0; i < chosen; ++i) {
                const float* from = answers.row(run.picks.place[token * chosen + i]) + at;
                total = fma(load_first(from, x.width - at, 0.0f),
                            set1(run.picks.weight[token * chosen + i]), total);
            }
            if (op.flags & kAddToTarget)
                total = add(load_first(to + at, x.width - at, 0.0f), total);
            store_first(to + at, x.width - at, total);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
