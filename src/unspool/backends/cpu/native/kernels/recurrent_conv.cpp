// Short causal convolution, each channel by itself; the state holds the last inputs.
#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

namespace {

constexpr int64_t kMaxConvKernel = 8;  // the plan builder rejects longer kernels

constexpr int64_t kChannels = 16 * kLanes;  // channels per task, contiguous in memory

// Observed values of sixteen channels: sums of squares of the gate and of the new state.
void store_block_stats(float* stats, int64_t block, F32x16 gate, float* const* history,
                       int64_t column, int64_t kernel) {
    F32x16 squares = zero();
    for (int64_t j = 1; j < kernel; ++j)
        squares = fma(load(history[j] + column), load(history[j] + column), squares);
    stats[2 * block] = sum(mul(gate, gate));
    stats[2 * block + 1] = sum(squares);
}

// All tokens of a row, in some of its channels. The last inputs stay in local memory; history[0] is
// the oldest.
void conv_channels(const RunContext& run, const Op& op, int64_t row, int64_t first, int64_t end) {
    const Batch& batch = run.batch;
    const int64_t channels = op.width, kernel = op.window;
    const bool gated = op.flags & kGated;  // rows are [b | c | x]: c * conv(b * x)
    const float* taps = run.vectors[op.vector].data;
    const float* bias = op.second_vector >= 0 ? run.vectors[op.second_vector].data : nullptr;
    const int64_t read_slot = batch.states[2 * row];
    alignas(64) float history_memory[kMaxConvKernel][kChannels];
    float* history[kMaxConvKernel];
    for (int64_t j = 0; j < kernel; ++j) {
        history[j] = history_memory[j];
        for (int64_t column = first; column < end; column += kLanes) {
            F32x16 initial = zero();
            if (read_slot >= 0 && j > 0)
                initial = load_first(
                    batch.state(read_slot) + op.state_offset + (j - 1) * channels + column,
                    end - column, 0.0f);
            store(history[j] + column - first, initial);
        }
    }
    for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
        const float* from = run.buffers[op.source].row(token);
        float* to = run.buffers[op.target].row(token);
        float* stats = gated ? stats_of(run, op, token) : nullptr;
        float* oldest = history[0];
        for (int64_t j = 1; j < kernel; ++j) history[j - 1] = history[j];
        history[kernel - 1] = oldest;
        for (int64_t column = first; column < end; column += kLanes) {
            const int64_t count = end - column, local = column - first;
            F32x16 input = load_first(from + column, count, 0.0f), gate = zero();
            if (gated) {
                input = mul(input, load_first(from + 2 * channels + column, count, 0.0f));
                gate = load_first(from + channels + column, count, 0.0f);
            }
            store(history[kernel - 1] + local, input);
            F32x16 total = bias == nullptr ? zero() : load_first(bias + column, count, 0.0f);
            for (int64_t j = 0; j < kernel; ++j)
                total = fma(load(history[j] + local),
                            load_first(taps + j * channels + column, count, 0.0f), total);
            store_first(to + column, count,
                        gated ? mul(gate, total) : activate(op.activation, total));
            if (stats != nullptr)
                store_block_stats(stats, column / kLanes, gate, history, local, kernel);
        }
        for_each_state_slot(batch, row, token, [&](float* state) {
            for (int64_t j = 1; j < kernel; ++j)
                for (int64_t column = first; column < end; column += kLanes)
                    store_first(state + op.state_offset + (j - 1) * channels + column, end - column,
                                load(history[j] + column - first));
        });
    }
}

}  // namespace

void conv(const RunContext& run, const Op& op, Worker& worker) {
    const int64_t parts = (op.width + kChannels - 1) / kChannels;
    for_each_row(worker, 0, run.batch.rows * parts, [&](int64_t task) {
        const int64_t first = task % parts * kChannels, end = first + kChannels;
        conv_channels(run, op, task / parts, first, end < op.width ? end : op.width);
    });
}

}  // namespace ISA
}  // namespace unspool
