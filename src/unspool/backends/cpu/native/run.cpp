// A run of a plan: every worker walks the operations in parallel.
#include <chrono>
#include <cstring>

#include "isa.h"
#include "model.h"

namespace unspool {

namespace {

int64_t rows_for(int32_t kind, const Batch& batch, int64_t experts_per_token) {
    if (kind == kSelected) return batch.selected_count;
    if (kind == kRouted) return batch.count * experts_per_token;
    return batch.count;
}

bool all_within(const int64_t* numbers, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] < 0 || numbers[i] >= limit) return false;
    return true;
}

// Whether all echoes go to existing pages.
bool are_valid_echoes(const Batch& batch, const KvCache& kv) {
    if (batch.echo_starts == nullptr) return true;
    if (batch.echo_starts[0] != 0) return false;
    for (int64_t token = 0; token < batch.count; ++token) {
        const int64_t first = batch.echo_starts[token], last = batch.echo_starts[token + 1];
        if (last < first || !all_within(batch.echo_slots + first, last - first, batch.table_rows))
            return false;
        for (int64_t i = first; i < last; ++i) {
            const int64_t* pages = batch.table + batch.echo_slots[i] * batch.table_columns;
            if (!all_within(pages + batch.positions[token] / kPage, 1, kv.pages)) return false;
        }
    }
    return true;
}

// Whether all state slots of rows and captures exist.
bool are_valid_states(const Batch& batch) {
    if (batch.state_data == nullptr || batch.states == nullptr) return false;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t read = batch.states[2 * row];
        if (read != -1 && !all_within(&read, 1, batch.state_slots)) return false;
        if (!all_within(batch.states + 2 * row + 1, 1, batch.state_slots)) return false;
    }
    if (batch.capture_starts == nullptr) return true;
    if (batch.capture_starts[0] != 0) return false;
    for (int64_t token = 0; token < batch.count; ++token)
        if (batch.capture_starts[token + 1] < batch.capture_starts[token]) return false;
    return all_within(batch.capture_slots, batch.capture_starts[batch.count], batch.state_slots);
}

// Whether all indices of a batch are in range: input is not trusted.
bool is_valid_batch(const Batch& batch, const ModelSpec& spec, const KvCache& kv,
                    const RopeTable* rotary) {
    if (batch.rows < 0 || batch.starts[0] != 0 || batch.starts[batch.rows] != batch.count)
        return false;
    const Op& embed = spec.ops[0];  // first operation of every plan with tokens
    if (!all_within(batch.tokens, batch.count, spec.matrices[embed.matrix].rows)) return false;
    if (!all_within(batch.selected, batch.selected_count, batch.count)) return false;
    if (!all_within(batch.slots, batch.rows, batch.table_rows)) return false;
    if (batch.adapters != nullptr)
        for (int64_t row = 0; row < batch.rows; ++row)
            if (batch.adapters->row_adapters[row] < -1 ||
                batch.adapters->row_adapters[row] >= batch.adapters->count)
                return false;
    int64_t positions = INT64_MAX;
    bool writes = false;  // keys and values
    for (int64_t i = 0; i < spec.op_count; ++i) {
        if (spec.ops[i].kind != kConv) continue;
        if (!are_valid_states(batch)) return false;
        break;
    }
    if (embed.vector >= 0) {
        const int64_t limit = spec.vectors[embed.vector].count / spec.buffer_widths[embed.target];
        positions = limit < positions ? limit : positions;
    }
    for (int64_t i = 0; i < spec.op_count; ++i) {
        if (spec.ops[i].kind != kRope) continue;
        writes = writes || !(spec.ops[i].flags & kQueriesOnly);
        if (spec.ops[i].rotary < 0) continue;
        const int64_t limit = rotary[spec.ops[i].rotary].positions;
        positions = limit < positions ? limit : positions;
    }
    const int64_t capacity = batch.table_columns * kPage;
    if (writes && capacity < positions) positions = capacity;
    if (!all_within(batch.positions, batch.count, positions)) return false;
    if (!are_valid_echoes(batch, kv)) return false;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t first = batch.starts[row], last = batch.starts[row + 1];
        if (last < first || last > batch.count) return false;
        for (int64_t at = first + 1; at < last; ++at)  // positions are consecutive
            if (batch.positions[at] != batch.positions[at - 1] + 1) return false;
        int64_t max_visible = 0;
        for (int64_t at = first; at < last; ++at) {
            const int64_t end = batch.visible_end[at];
            if (end <= (writes ? batch.positions[at] : 0)) return false;  // it attends to itself
            if (end > batch.table_columns * kPage) return false;
            max_visible = end > max_visible ? end : max_visible;
        }
        if (!all_within(batch.pages(row), (max_visible + kPage - 1) / kPage, kv.pages))
            return false;
    }
    return true;
}

constexpr int64_t kRowSlack = 16;  // kernels may compute a full tile of rows and discard some

}  // namespace

Model::Model(const ModelSpec& external) : spec(external), max_columns(kTile) {
    for (int64_t i = 0; i < spec.matrix_count; ++i) {
        const int64_t columns = tiles_of(spec.matrices[i]) * kTile;
        if (columns > max_columns) max_columns = columns;
    }
    max_columns +=
        2 * kTile;  // an odd number of cache lines apart: no conflict misses between rows
    buffers.resize(spec.buffer_count);
    buffer_memory.resize(spec.buffer_count);
    scratch.resize(spec.threads);
}

// Scratch memory of a worker: an unpacked block of weights (linear.cpp), a few prepared rows, or
// the scores of a query tile (attention.cpp).
int64_t scratch_bytes(const Model& model) {
    // Bytes, scales and minima of sixteen rows; a pack of eight rows of activations (gemm_neon.h).
    const int64_t block = model.max_columns * (kLanes + 4 + 4 + 12) + 1024;
    const int64_t rows =
        4 * (model.max_columns * 5 + model.max_columns / 32 * 8 + model.max_columns / 16 * 4 + 64);
    const int64_t scores = 64 * (kSegment + 64) * 4 + 64 * 2048 * 4;
    return block + rows + scores;
}

void Model::allocate(RunContext& run, int64_t rows, float* logits) {
    const int64_t experts_per_token = spec.experts_per_token > 0 ? spec.experts_per_token : 1;
    for (int64_t i = 0; i < spec.buffer_count; ++i) {
        const int64_t width = spec.buffer_widths[i];
        const int64_t count = rows_for(spec.buffer_rows[i], run.batch, experts_per_token);
        buffers[i].data = i == spec.logits_buffer && logits != nullptr
                              ? logits
                              : buffer_memory[i].reserve((count + kRowSlack) * width);
        buffers[i].width = width;
    }
    const int64_t prepared = rows * experts_per_token + kRowSlack;
    run.prepared.columns = max_columns;
    run.prepared.quants = quants.reserve(prepared * max_columns);
    run.prepared.scales = scales.reserve(prepared * (max_columns / kTile));
    run.prepared.scaled_sums = scaled_sums.reserve(prepared * (max_columns / kTile));
    run.prepared.sums = sums.reserve(prepared * (max_columns / kLanes));
    run.prepared.values = values.reserve(prepared * max_columns);
    run.prepared.tiled = tiled.reserve((prepared + kLanes) * max_columns);
    run.prepared.tile_scales = tile_scales.reserve((prepared + kLanes) * (max_columns / kTile) * 2);
    run.matrix_count = spec.matrix_count;
    if (run.taps != nullptr || run.batch.changes != nullptr)
        run.stash = stash.reserve(rows * max_columns);
    if (run.batch.adapters != nullptr) run.low = low.reserve(rows * run.batch.adapters->max_rank);
    run.partial_size = static_cast<int64_t>(1) << 20;
    run.partial = partial.reserve(run.partial_size);
    for (auto& memory : scratch) memory.reserve(scratch_bytes(*this));
    progress.reserve(spec.op_count * kPhases);
    run.routing.experts_per_token = experts_per_token;
    if (spec.experts > 0) {
        run.routing.token = routing_tokens.reserve(rows * experts_per_token);
        run.routing.slot = routing_slots.reserve(rows * experts_per_token);
        run.routing.weight = routing_weights.reserve(rows * experts_per_token);
        run.routing.starts = routing_starts.reserve(spec.experts + 1);
    }
}

struct RunJob {
    Model* model;
    RunContext run;
    int64_t first_op;

    static bool is_skipped(const RunContext& run, const Op& op) {
        return (op.kind == kSite || op.kind == kStash) && !is_site_used(run, op);
    }

    void step(const Op& op, Worker& worker) const {
        const Kernels& kernel = kernels();
        switch (op.kind) {
            case kEmbed:
                return kernel.embed(run, op, worker);
            case kNorm:
                return kernel.norm(run, op, worker);
            case kLinear:
                kernel.linear(run, op, worker);
                if (run.batch.adapters != nullptr) kernel.lora(run, op, worker);
                return;
            case kRope:
                return kernel.rope(run, op, worker);
            case kAttention:
                return kernel.attention(run, op, worker);
            case kRoute:
                return kernel.route(run, op, worker);
            case kExperts:
                return kernel.linear(run, op, worker);
            case kCombine:
                return kernel.combine(run, op, worker);
            case kGather:
                return kernel.gather(run, op, worker);
            case kSoftcap:
                return kernel.softcap(run, op, worker);
            case kActivate:
                return kernel.activate(run, op, worker);
            case kScale:
                return kernel.scale(run, op, worker);
            case kGate:
                return kernel.gate(run, op, worker);
            case kConv:
                return kernel.conv(run, op, worker);
            case kDelta:
                return kernel.delta(run, op, worker);
            case kMamba:
                return kernel.mamba(run, op, worker);
            case kSite:
                return kernel.site(run, op, worker);
            case kStash:
                return kernel.stash(run, op, worker);
            default:
                return;
        }
    }

    static void work(void* argument, int index, int count) {
        RunJob& self = *static_cast<RunJob*>(argument);
        Model& model = *self.model;
        begin_thread();
        Worker worker{count, nullptr, model.scratch[index].reserve(0)};
        const bool timed = !model.seconds.empty() && index == 0;
        for (int64_t i = self.first_op; i < model.spec.op_count; ++i) {
            const Op& op = model.spec.ops[i];
            if (is_skipped(self.run, op)) continue;
            const auto before =
                timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
            worker.progress = model.progress.reserve(0) + i * kPhases;
            self.step(op, worker);
            if (timed) {
                const auto after = std::chrono::steady_clock::now();
                model.seconds[i] += std::chrono::duration<double>(after - before).count();
            }
        }
        end_thread();
    }
};

int32_t Model::run(const KvCache& kv, const RopeTable* rotary, const Batch& batch, const Taps* taps,
                   float* logits, int64_t first_op, const float* vectors) {
    if (vectors == nullptr && !is_valid_batch(batch, spec, kv, rotary)) return kBadBatch;
    RunJob job{};
    job.model = this;
    job.first_op = first_op;
    RunContext& run = job.run;
    run.matrices = spec.matrices;
    run.vectors = spec.vectors;
    run.rotary = rotary;
    run.kv = kv;
    run.batch = batch;
    run.taps = taps;
    UNSPOOL_TRY {
        allocate(run, batch.count > batch.selected_count ? batch.count : batch.selected_count,
                 logits);
        int32_t* rows = row_of.reserve(batch.count + 1);
        for (int64_t row = 0; row < batch.rows; ++row)
            for (int64_t at = batch.starts[row]; at < batch.starts[row + 1]; ++at)
                rows[at] = static_cast<int32_t>(row);
        run.row_of = rows;
    }
    UNSPOOL_ON_BAD_ALLOC { return kOutOfMemory; }
    run.buffers = buffers.data();
    if (vectors != nullptr) {
        const Buffer& input = buffers[spec.ops[first_op].source];
        std::memcpy(input.data, vectors, batch.selected_count * input.width * sizeof(float));
    }
    Progress* all = progress.reserve(0);
    for (int64_t i = 0; i < spec.op_count; ++i)
        if (!RunJob::is_skipped(run, spec.ops[i]))
            for (int64_t phase = 0; phase < kPhases; ++phase)
                new (all + i * kPhases + phase) Progress;
    return run_on_pool(spec.threads, &RunJob::work, &job) ? kOk : kNoThreads;
}

}  // namespace unspool
