// Interventions and readings at the sites of a plan, row by row.
#include <cstring>

#include "kernels.h"
#include "prepare.h"

namespace unspool {
namespace ISA {

namespace {

// x += scale * vector
void add_scaled(float* x, const float* vector, int64_t width, float scale) {
    const F32x16 factor = set1(scale);
    for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = width - i;
        const F32x16 part = mul(load_first(vector + i, count, 0.0f), factor);
        store_first(x + i, count, add(load_first(x + i, count, 0.0f), part));
    }
}

void apply(const Change& change, int64_t offset, float* row) {
    float* x = row + change.offset;
    const int64_t width = change.width;
    const float* vector =
        change.vector != nullptr ? change.vector + offset * change.stride : nullptr;
    switch (change.kind) {
        case kAddVector:
            return add_scaled(x, vector, width, change.scale);
        case kProjectOut:
            return add_scaled(x, vector, width, -row_dot(x, vector, width));
        case kReplace:
            std::memcpy(x, vector, width * sizeof(float));
            return;
        case kClampFeature: {
            const float sum = row_dot(x, change.encoder, width) + change.bias;
            const float feature = sum > change.threshold ? sum : 0.0f;
            return add_scaled(x, vector, width, change.value - feature);
        }
        default:
            for (int64_t i = 0; i < width; ++i)
                x[i] = change.scale == 0.0f ? 0.0f : x[i] * change.scale;
    }
}

// Applies the interventions of a token to its row; they are in the order of the request.
void change_row(const Changes& changes, int64_t site, int64_t token, float* row) {
    const int32_t* first_changes = changes.first_changes + site * changes.interventions;
    for (int64_t i = changes.starts[token]; i < changes.starts[token + 1]; ++i) {
        const int32_t first = first_changes[changes.numbers[i]];
        if (first < 0) continue;
        const int32_t parts = changes.changes[first].parts;
        for (int32_t part = first; part < first + parts; ++part)
            apply(changes.changes[part], changes.offsets[i], row);
    }
}

// Whether an intervention changes the token at this site.
bool is_changed(const Changes* changes, int64_t site, int64_t token) {
    if (changes == nullptr || !changes->is_site_used[site]) return false;
    const int32_t* first_changes = changes->first_changes + site * changes->interventions;
    for (int64_t i = changes->starts[token]; i < changes->starts[token + 1]; ++i)
        if (first_changes[changes->numbers[i]] >= 0) return true;
    return false;
}

// Row of the values read that a row is copied to, or -1.
int64_t target_row(const RunContext& run, const Op& op, int64_t row) {
    if (run.taps == nullptr || run.taps->targets[op.layer] == nullptr) return -1;
    if (op.rows == kSelected) return row - (run.batch.selected_count - run.taps->selected_rows);
    return run.taps->token_rows[row];
}

}  // namespace

void stash(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& x = run.buffers[op.source];
    for_each_row(worker, 0, run.batch.count, [&](int64_t row) {
        if (is_changed(run.batch.changes, op.layer, row) || target_row(run, op, row) >= 0)
            std::memcpy(run.stash + row * op.width, x.row(row), op.width * sizeof(float));
    });
}

void site(const RunContext& run, const Op& op, Worker& worker) {
    const Buffer& values = run.buffers[op.source];
    const int64_t width = op.width;
    for_each_row(worker, 0, rows_of(run, op), [&](int64_t row) {
        const int64_t token = op.rows == kSelected ? run.batch.selected[row] : row;
        const int64_t target = target_row(run, op, row);
        const bool changed = is_changed(run.batch.changes, op.layer, token);
        if (!changed && target < 0) return;
        float* x = values.row(row);
        float* read =
            target < 0 ? nullptr : run.taps->targets[op.layer] + target * op.width;
        if (!(op.flags & kDifference)) {
            if (changed) change_row(*run.batch.changes, op.layer, token, x);
            if (read != nullptr) std::memcpy(read, x, width * sizeof(float));
            return;
        }
        // The stashed row turns into the difference; only a changed row is written back.
        float* before = run.stash + row * width;
        for (int64_t i = 0; i < width; ++i) {
            const float old = before[i];
            before[i] = x[i] - old;
            if (changed) x[i] = old;
        }
        if (changed) change_row(*run.batch.changes, op.layer, token, before);
        if (read != nullptr) std::memcpy(read, before, width * sizeof(float));
        if (changed)
            for (int64_t i = 0; i < width; ++i) x[i] += before[i];
    });
}

}  // namespace ISA
}  // namespace unspool
