// A short convolution over the last tokens, each channel by itself, from state to state.
#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr int64_t kMostTaps = 8;  // of a convolution: plan_recurrent.py refuses more

constexpr int64_t kChannels = 16 * kLanes;  // of a task: neighbours, which memory gives together

// What a look sees of sixteen channels: squares of the gate, and of the state behind the token.
void show_block(float* seen, int64_t block, F32x16 gate, float* const* past, int64_t at,
                int64_t kernel) {
    F32x16 squares = zero();
    for (int64_t j = 1; j < kernel; ++j)
        squares = fma(load(past[j] + at), load(past[j] + at), squares);
    seen[2 * block] = sum(mul(gate, gate));
    seen[2 * block + 1] = sum(squares);
}

// All tokens of a row, in some of its channels. The inputs that are still seen stay close, each
// token's in a line of their own: past[0] is the oldest.
void conv_channels(const Run& run, const Op& op, int64_t row, int64_t first, int64_t end) {
    const Batch& batch = run.batch;
    const int64_t channels = op.width, kernel = op.window;
    const bool gated = op.flags & kGated;  // rows are [b | c | x]: c * conv(b * x)
    const float* taps = run.vectors[op.vector].data;
    const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
    const int64_t read = batch.states[2 * row];
    alignas(64) float room[kMostTaps][kChannels];
    float* past[kMostTaps];
    for (int64_t j = 0; j < kernel; ++j) {
        past[j] = room[j];
        for (int64_t at = first; at < end; at += kLanes) {
            F32x16 known = zero();
            if (read >= 0 && j > 0)
                known = load_first(batch.state(read) + op.state + (j - 1) * channels + at, end - at,
                                   0.0f);
            store(past[j] + at - first, known);
        }
    }
    for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
        const float* from = run.buffers[op.source].row(token);
        float* to = run.buffers[op.target].row(token);
        float* seen = gated ? seen_of(run, op, token) : nullptr;
        float* oldest = past[0];
        for (int64_t j = 1; j < kernel; ++j) past[j - 1] = past[j];
        past[kernel - 1] = oldest;
        for (int64_t at = first; at < end; at += kLanes) {
            const int64_t left = end - at, here = at - first;
            F32x16 input = load_first(from + at, left, 0.0f), gate = zero();
            if (gated) {
                input = mul(input, load_first(from + 2 * channels + at, left, 0.0f));
                gate = load_first(from + channels + at, left, 0.0f);
            }
            store(past[kernel - 1] + here, input);
            F32x16 total = bias == nullptr ? zero() : load_first(bias + at, left, 0.0f);
            for (int64_t j = 0; j < kernel; ++j)
                total = fma(load(past[j] + here), load_first(taps + j * channels + at, left, 0.0f),
                            total);
            store_first(to + at, left, gated ? mul(gate, total) : activate(op.activation, total));
            if (seen != nullptr) show_block(seen, at / kLanes, gate, past, here, kernel);
        }
        each_state_slot(batch, row, token, [&](float* state) {
            for (int64_t j = 1; j < kernel; ++j)
                for (int64_t at = first; at < end; at += kLanes)
                    store_first(state + op.state + (j - 1) * channels + at, end - at,
                                load(past[j] + at - first));
        });
    }
}

}  // namespace

void conv(const Run& run, const Op& op, Worker& worker) {
    const int64_t parts = (op.width + kChannels - 1) / kChannels;
    each_row(worker, 0, run.batch.rows * parts, [&](int64_t task) {
        const int64_t first = task % parts * kChannels, end = first + kChannels;
        conv_channels(run, op, task / parts, first, end < op.width ? end : op.width);
    });
}

}  // namespace ISA
}  // namespace unspool
