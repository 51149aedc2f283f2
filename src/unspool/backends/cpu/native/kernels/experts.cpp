// Mixture of experts: routing of tokens, and the weighted sum of the experts' outputs.
#include <cmath>

#include "../portable_math.h"
#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

namespace {

constexpr float kMinWeightSum = 1e-6f;  // all sigmoids may be close to 0

// Turns scores into unnormalized weights; returns their divisor.
float activate_scores(float* scores, int64_t experts, bool sigmoid) {
    if (sigmoid) {
        for (int64_t e = 0; e < experts; ++e) scores[e] = 1.0f / (1.0f + portable_exp(-scores[e]));
        return 1.0f;
    }
    float max_score = scores[0];
    for (int64_t e = 1; e < experts; ++e) max_score = scores[e] > max_score ? scores[e] : max_score;
    float denominator = 0.0f;
    for (int64_t e = 0; e < experts; ++e) {
        scores[e] = portable_exp(scores[e] - max_score);
        denominator += scores[e];
    }
    return denominator;
}

// Selects experts and sorts the pairs by expert, so that an expert's rows are contiguous and its
// weights are read once.
void assign_experts(const RunContext& run, const Op& op) {
    const Routing& routing = run.routing;
    const int64_t tokens = run.batch.count, per_token = op.experts_per_token, experts = op.experts;
    for (int64_t e = 0; e <= experts; ++e) routing.starts[e] = 0;
    for (int64_t token = 0; token < tokens; ++token) {
        float* scores = run.buffers[op.source].row(token);
        const float denominator = activate_scores(scores, experts, op.flags & kSigmoidRouter);
        const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
        const auto selection_score = [&](int64_t e) {
            return bias ? scores[e] + bias[e] : scores[e];
        };
        float weight_sum = op.flags & kSigmoidRouter ? kMinWeightSum : 0.0f;
        for (int64_t i = 0; i < per_token; ++i) {
            int64_t best = 0;
            for (int64_t e = 1; e < experts; ++e)
                if (selection_score(e) > selection_score(best)) best = e;
            routing.weight[token * per_token + i] = scores[best] / denominator;
            routing.slot[token * per_token + i] =
                static_cast<int32_t>(best);  // the expert, until pairs are sorted
            weight_sum += scores[best] / denominator;
            scores[best] = -INFINITY;
            ++routing.starts[best + 1];
        }
        if (op.flags & kNormalizeExperts)
            for (int64_t i = 0; i < per_token; ++i)
                routing.weight[token * per_token + i] /= weight_sum;
        if (op.scale != 1.0f)
            for (int64_t i = 0; i < per_token; ++i)
                routing.weight[token * per_token + i] *= op.scale;
        if (op.vector >= 0)
            for (int64_t i = token * per_token; i < (token + 1) * per_token; ++i)
                routing.weight[i] *= run.vectors[op.vector].data[routing.slot[i]];
    }
    for (int64_t e = 0; e < experts; ++e) routing.starts[e + 1] += routing.starts[e];
    for (int64_t i = 0; i < tokens * per_token; ++i) {
        const int32_t expert = routing.slot[i];
        const int32_t slot = routing.starts[expert]++;
        routing.token[slot] = static_cast<int32_t>(i / per_token);
        routing.slot[i] = slot;
    }
    for (int64_t e = experts; e > 0; --e) routing.starts[e] = routing.starts[e - 1];
    routing.starts[0] = 0;
}

}  // namespace

void route(const RunContext& run, const Op& op, Worker& worker) {
    worker.for_each(0, 1, [&](int64_t) { assign_experts(run, op); });
}

void combine(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& expert_out = run.buffers[op.source];
    const Buffer& x = run.buffers[op.target];
    const int64_t per_token = run.routing.experts_per_token;
    for_each_row(worker, 0, run.batch.count, [&](int64_t token) {
        float* to = x.row(token);
        for (int64_t column = 0; column < x.width; column += kLanes) {
            F32x16 total = zero();
            for (int64_t i = 0; i < per_token; ++i) {
                const float* from =
                    expert_out.row(run.routing.slot[token * per_token + i]) + column;
                total = fma(load_first(from, x.width - column, 0.0f),
                            set1(run.routing.weight[token * per_token + i]), total);
            }
            if (op.flags & kAddToTarget)
                total = add(load_first(to + column, x.width - column, 0.0f), total);
            store_first(to + column, x.width - column, total);
        }
    });
}

}  // namespace ISA
}  // namespace unspool
