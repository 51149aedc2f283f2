// One run: every worker goes through the plan's operations, side by side.
#include <chrono>
#include <cstring>

#include "isa.h"
#include "model.h"

namespace unspool {

namespace {

int64_t rows_for(int32_t kind, const Batch& batch, int64_t chosen) {
    if (kind == kWanted) return batch.wanted_count;
    if (kind == kPicks) return batch.count * chosen;
    return batch.count;
}

bool all_within(const int64_t* numbers, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] < 0 || numbers[i] >= limit) return false;
    return true;
}

// Whether what is written more than once goes to pages that there are.
bool echoes_make_sense(const Batch& batch, const KeyValues& kv) {
    if (batch.echo_starts == nullptr) return true;
    if (batch.echo_starts[0] != 0) return false;
    for (int64_t token = 0; token < batch.count; ++token) {
        const int64_t first = batch.echo_starts[token], last = batch.echo_starts[token + 1];
        if (last < first || !all_within(batch.echo_lines + first, last - first, batch.table_rows))
            return false;
        for (int64_t i = first; i < last; ++i) {
            const int64_t* pages = batch.table + batch.echo_lines[i] * batch.table_columns;
            if (!all_within(pages + batch.positions[token] / kPage, 1, kv.pages)) return false;
        }
    }
    return true;
}

// Whether every row has slots for its states, and what is kept on the way goes to some.
bool states_make_sense(const Batch& batch) {
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

// Whether a batch stays within the vocabulary, the pages, the tables: what comes from outside is
// not believed.
bool makes_sense(const Batch& batch, const ModelSpec& spec, const KeyValues& kv,
                 const RotaryTable* rotary) {
    if (batch.rows < 0 || batch.starts[0] != 0 || batch.starts[batch.rows] != batch.count)
        return false;
    const Op& embed = spec.ops[0];  // every plan that has tokens begins so
    if (!all_within(batch.tokens, batch.count, spec.matrices[embed.matrix].rows)) return false;
    if (!all_within(batch.wanted, batch.wanted_count, batch.count)) return false;
    if (!all_within(batch.slots, batch.rows, batch.table_rows)) return false;
    if (batch.adapters != nullptr)
        for (int64_t row = 0; row < batch.rows; ++row)
            if (batch.adapters->of_row[row] < -1 ||
                batch.adapters->of_row[row] >= batch.adapters->count)
                return false;
    int64_t positions = INT64_MAX;
    bool writes = false;  // keys and values
    for (int64_t i = 0; i < spec.op_count; ++i) {
        if (spec.ops[i].kind != kConv) continue;
        if (!states_make_sense(batch)) return false;
        break;
    }
    if (embed.vector >= 0) {
        const int64_t known = spec.vectors[embed.vector].count / spec.buffer_widths[embed.target];
        positions = known < positions ? known : positions;
    }
    for (int64_t i = 0; i < spec.op_count; ++i) {
        if (spec.ops[i].kind != kPlace) continue;
        writes = writes || !(spec.ops[i].flags & kQueriesOnly);
        if (spec.ops[i].rotary < 0) continue;
        const int64_t known = rotary[spec.ops[i].rotary].positions;
        positions = known < positions ? known : positions;
    }
    const int64_t room = batch.table_columns * kPage;
    if (writes && room < positions) positions = room;
    if (!all_within(batch.positions, batch.count, positions)) return false;
    if (!echoes_make_sense(batch, kv)) return false;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t first = batch.starts[row], last = batch.starts[row + 1];
        if (last < first || last > batch.count) return false;
        for (int64_t at = first + 1; at < last; ++at)  // a row's tokens stand one behind the other
            if (batch.positions[at] != batch.positions[at - 1] + 1) return false;
        int64_t seen = 0;
        for (int64_t at = first; at < last; ++at) {
            const int64_t end = batch.visible_end[at];
            if (end <= (writes ? batch.positions[at] : 0)) return false;  // sees what it wrote
            if (end > batch.table_columns * kPage) return false;
            seen = end > seen ? end : seen;
        }
        if (!all_within(batch.pages(row), (seen + kPage - 1) / kPage, kv.pages)) return false;
    }
    return true;
}

constexpr int64_t kRowSlack = 16;  // kernels may compute a full tile of rows and use some of it

}  // namespace

Model::Model(const ModelSpec& given) : spec(given), widest(kTile) {
    for (int64_t i = 0; i < spec.matrix_count; ++i) {
        const int64_t columns = tiles_of(spec.matrices[i]) * kTile;
        if (columns > widest) widest = columns;
    }
    widest +=
        2 * kTile;  // an odd number of cache lines apart, so that rows do not push each other out
    buffers.resize(spec.buffer_count);
    buffer_rooms.resize(spec.buffer_count);
    scratch.resize(spec.threads);
}

// A worker's own memory: a block of weights as bytes with its scales and minima (linear.cpp), a
// few prepared rows, or the scores of a tile of queries (attend.cpp).
int64_t scratch_needed(const Model& model) {
    const int64_t block = model.widest * kLanes + model.widest / 16 * kLanes * 4 * 3 + 1024;
    const int64_t rows =
        4 * (model.widest * 5 + model.widest / 32 * 8 + model.widest / 16 * 4 + 64);
    const int64_t scores = 64 * (kSegment + 64) * 4 + 64 * 2048 * 4;
    return block + rows + scores;
}

void Model::make_room(Run& run, int64_t rows, float* logits, float* const* given) {
    const int64_t chosen = spec.chosen > 0 ? spec.chosen : 1;
    for (int64_t i = 0; i < spec.buffer_count; ++i) {
        const int64_t width = spec.buffer_widths[i];
        const int64_t count = rows_for(spec.buffer_rows[i], run.batch, chosen);
        float* theirs = given != nullptr ? given[i] : nullptr;
        if (i == spec.logits_buffer && logits != nullptr) theirs = logits;
        buffers[i].data =
            theirs != nullptr ? theirs : buffer_rooms[i].need((count + kRowSlack) * width);
        buffers[i].width = width;
    }
    const int64_t prepared = rows * chosen + kRowSlack;
    run.prepared.columns = widest;
    run.prepared.numbers = numbers.need(prepared * widest);
    run.prepared.scales = scales.need(prepared * (widest / kTile));
    run.prepared.lows = lows.need(prepared * (widest / kTile));
    run.prepared.sums = sums.need(prepared * (widest / kLanes));
    run.prepared.values = values.need(prepared * widest);
    run.prepared.tiled = tiled.need((prepared + kLanes) * widest);
    run.prepared.turned = turned.need((prepared + kLanes) * (widest / kTile) * 2);
    run.matrix_count = spec.matrix_count;
    if (run.batch.adapters != nullptr) run.low = low.need(rows * run.batch.adapters->most);
    run.partial_room = static_cast<int64_t>(1) << 20;
    run.partial = partial.need(run.partial_room);
    for (auto& room : scratch) room.need(scratch_needed(*this));
    progress.need(spec.op_count * kParts);
    run.picks.chosen = chosen;
    if (spec.experts > 0) {
        run.picks.token = pick_tokens.need(rows * chosen);
        run.picks.place = pick_places.need(rows * chosen);
        run.picks.weight = pick_weights.need(rows * chosen);
        run.picks.starts = pick_starts.need(spec.experts + 1);
    }
}

struct Running {
    Model* model;
    Run run;
    int64_t first_op;

    static void snapshot(const Run& run, const Op& op, Worker& worker) {
        if (run.taps == nullptr) return;
        const Buffer& x = run.buffers[op.source];
        const int64_t place = run.taps->places ? run.taps->places[op.layer] : op.layer;
        if (place < 0) return;
        float* to = run.taps->snapshots + place * run.taps->row_count * x.width;
        worker.each(0, run.taps->row_count, [&](int64_t i) {
            std::memcpy(to + i * x.width, x.row(run.taps->rows[i]), x.width * sizeof(float));
        });
    }

    void step(const Op& op, Worker& worker) const {
        const Kernels& does = kernels();
        switch (op.kind) {
            case kEmbed:
                return does.embed(run, op, worker);
            case kNorm:
                return does.norm(run, op, worker);
            case kLinear:
                does.linear(run, op, worker);
                if (run.batch.adapters != nullptr) does.adapt(run, op, worker);
                return;
            case kPlace:
                return does.place(run, op, worker);
            case kAttend:
                return does.attend(run, op, worker);
            case kRoute:
                return does.route(run, op, worker);
            case kExperts:
                return does.linear(run, op, worker);
            case kCombine:
                return does.combine(run, op, worker);
            case kGather:
                return does.gather(run, op, worker);
            case kSoftcap:
                return does.softcap(run, op, worker);
            case kActivate:
                return does.activate(run, op, worker);
            case kScale:
                return does.scale(run, op, worker);
            case kGate:
                return does.gate(run, op, worker);
            case kConv:
                return does.conv(run, op, worker);
            case kDelta:
                return does.delta(run, op, worker);
            case kMamba:
                return does.mamba(run, op, worker);
            case kSnapshot:
                return snapshot(run, op, worker);
            default:
                return;
        }
    }

    static void work(void* what, int index, int count) {
        Running& self = *static_cast<Running*>(what);
        Model& model = *self.model;
        begin_thread();
        Worker worker{count, nullptr, model.scratch[index].need(0)};
        const bool timed = !model.seconds.empty() && index == 0;
        for (int64_t i = self.first_op; i < model.spec.op_count; ++i) {
            const Op& op = model.spec.ops[i];
            if (op.kind == kSnapshot && self.run.taps == nullptr) continue;
            const auto before =
                timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
            worker.progress = model.progress.need(0) + i * kParts;
            self.step(op, worker);
            if (timed) {
                const auto after = std::chrono::steady_clock::now();
                model.seconds[i] += std::chrono::duration<double>(after - before).count();
            }
        }
        end_thread();
    }
};

int32_t Model::run(const KeyValues& kv, const RotaryTable* rotary, const Batch& batch,
                   const TapList* taps, float* logits, int64_t first_op, const float* vectors,
                   float* const* given) {
    const bool bare = given != nullptr && batch.count == 0 && batch.rows == 0;
    if (vectors == nullptr && !bare && !makes_sense(batch, spec, kv, rotary)) return kBadBatch;
    Running running{};
    running.model = this;
    running.first_op = first_op;
    Run& run = running.run;
    run.matrices = spec.matrices;
    run.vectors = spec.vectors;
    run.rotary = rotary;
    run.kv = kv;
    run.batch = batch;
    run.taps = taps;
    try {
        make_room(run, batch.count > batch.wanted_count ? batch.count : batch.wanted_count, logits,
                  given);
        int32_t* rows = row_of.need(batch.count + 1);
        for (int64_t row = 0; row < batch.rows; ++row)
            for (int64_t at = batch.starts[row]; at < batch.starts[row + 1]; ++at)
                rows[at] = static_cast<int32_t>(row);
        run.row_of = rows;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    run.buffers = buffers.data();
    if (vectors != nullptr) {
        const Buffer& into = buffers[spec.ops[first_op].source];
        std::memcpy(into.data, vectors, batch.wanted_count * into.width * sizeof(float));
    }
    Progress* every = progress.need(0);
    for (int64_t i = 0; i < spec.op_count * kParts; ++i) new (every + i) Progress;
    return run_on_pool(spec.threads, &Running::work, &running) ? kOk : kNoThreads;
}

}  // namespace unspool
