// A mixture of experts: each token's router picks a few feed-forwards, whose answers are weighed.
#include <cmath>

#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

// Picks are sorted by expert, so that an expert's rows are neighbours and its weights read once.
void sort_picks(const Run& run, const Op& op) {
    const Picks& picks = run.picks;
    const int64_t tokens = run.batch.count, chosen = op.chosen, experts = op.experts;
    for (int64_t e = 0; e <= experts; ++e) picks.starts[e] = 0;
    for (int64_t token = 0; token < tokens; ++token) {
        float* scores = run.buffers[op.source].row(token);
        float most = scores[0];
        for (int64_t e = 1; e < experts; ++e) most = scores[e] > most ? scores[e] : most;
        float whole = 0.0f;
        for (int64_t e = 0; e < experts; ++e) {
            scores[e] = std::exp(scores[e] - most);
            whole += scores[e];
        }
        float kept = 0.0f;
        for (int64_t i = 0; i < chosen; ++i) {
            int64_t best = 0;
            for (int64_t e = 1; e < experts; ++e)
                if (scores[e] > scores[best]) best = e;
            picks.weight[token * chosen + i] = scores[best] / whole;
            picks.place[token * chosen + i] = static_cast<int32_t>(best);  // the expert, for now
            kept += scores[best] / whole;
            scores[best] = -1.0f;
            ++picks.starts[best + 1];
        }
        if (op.flags & kNormalizeExperts)
            for (int64_t i = 0; i < chosen; ++i) picks.weight[token * chosen + i] /= kept;
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
