// A short convolution over the last tokens, each channel by itself, from state to state.
#include "prepare.h"
#include "table.h"

namespace unspool {
namespace ISA {

namespace {

constexpr int64_t kMostTaps = 8;  // of a convolution: plan_recurrent.py refuses more

// What a look sees of sixteen channels: squares of the gate, and of the state behind the token.
void show_block(float* seen, int64_t block, F32x16 gate, const F32x16* past, int64_t kernel) {
    F32x16 squares = zero();
    for (int64_t j = 1; j < kernel; ++j) squares = fma(past[j], past[j], squares);
    seen[2 * block] = sum(mul(gate, gate));
    seen[2 * block + 1] = sum(squares);
}

// All tokens of a row, in sixteen channels: the inputs that are still seen stay in registers.
void conv_block(const Run& run, const Op& op, int64_t row, int64_t block) {
    const Batch& batch = run.batch;
    const Buffer& source = run.buffers[op.source];
    const Buffer& target = run.buffers[op.target];
    const int64_t channels = op.width, kernel = op.window;
    const int64_t first = block * kLanes, left = channels - first;
    const bool gated = op.flags & kGated;  // rows are [b | c | x]: c * conv(b * x)
    F32x16 taps[kMostTaps], past[kMostTaps];
    const int64_t read = batch.states[2 * row];
    for (int64_t j = 0; j < kernel; ++j)
        taps[j] = load_first(run.vectors[op.vector].data + j * channels + first, left, 0.0f);
    for (int64_t j = 1; j < kernel; ++j)
        past[j] = read < 0 ? zero()
                           : load_first(batch.state(read) + op.state + (j - 1) * channels + first,
                                        left, 0.0f);
    for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
        const float* from = source.row(token) + first;
        F32x16 input = load_first(from, left, 0.0f), gate = zero();
        if (gated) {
            input = mul(input, load_first(from + 2 * channels, left, 0.0f));
            gate = load_first(from + channels, left, 0.0f);
        }
        for (int64_t j = 1; j < kernel; ++j) past[j - 1] = past[j];
        past[kernel - 1] = input;
        F32x16 total = zero();
        for (int64_t j = 0; j < kernel; ++j) total = fma(past[j], taps[j], total);
        store_first(target.row(token) + first, left,
                    gated ? mul(gate, total) : activate(op.activation, total));
        each_state_slot(batch, row, token, [&](float* state) {
            for (int64_t j = 1; j < kernel; ++j)
                store_first(state + op.state + (j - 1) * channels + first, left, past[j]);
        });
        float* seen = gated ? seen_of(run, op, token) : nullptr;
        if (seen != nullptr) show_block(seen, block, gate, past, kernel);
    }
}

}  // namespace

void conv(const Run& run, const Op& op, Worker& worker) {
    const int64_t blocks = (op.width + kLanes - 1) / kLanes;
    each_row(worker, 0, run.batch.rows * blocks,
             [&](int64_t task) { conv_block(run, op, task / blocks, task % blocks); });
}

}  // namespace ISA
}  // namespace unspool
