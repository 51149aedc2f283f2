#include "api.h"

#include <cstring>

#include "isa.h"
#include "model.h"

using namespace unspool;

extern "C" {

int32_t unspool_version() { return 8; }

const char* unspool_isa() { return chosen_name(); }

void* unspool_model_new(const ModelSpec* spec) {
    try {
        return new Model(*spec);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void unspool_model_free(void* model) { delete static_cast<Model*>(model); }

int32_t unspool_run(void* model, const KeyValues* kv, const RotaryTable* rotary, const Batch* batch,
                    const TapList* taps, float* logits) {
    return static_cast<Model*>(model)->run(*kv, rotary, *batch, taps, logits, 0, nullptr);
}

int32_t unspool_run_head(void* model, const float* vectors, int64_t count, int64_t first,
                         float* logits) {
    Batch batch{};
    batch.wanted_count = count;
    KeyValues none{};
    return static_cast<Model*>(model)->run(none, nullptr, batch, nullptr, logits, first, vectors);
}

int32_t unspool_run_given(void* model, const KeyValues* kv, const RotaryTable* rotary,
                          const Batch* batch, float* const* given) {
    return static_cast<Model*>(model)->run(*kv, rotary, *batch, nullptr, nullptr, 0, nullptr,
                                           given);
}

void unspool_copy_page(const KeyValues* kv, int64_t source, int64_t target) {
    const int64_t bytes = kv->page_bytes;
    std::memcpy(kv->data + target * bytes, kv->data + source * bytes, bytes);
}

void unspool_profile(void* model, double* seconds) {
    Model& it = *static_cast<Model*>(model);
    const size_t count = it.spec.op_count;
    if (!it.seconds.empty()) std::memcpy(seconds, it.seconds.data(), count * sizeof(double));
    it.seconds.assign(count, 0.0);
}

int32_t unspool_multiply(const Matrix* matrix, const float* rows, int64_t count, float* out,
                         int32_t threads, int32_t repeat) {
    Op op{};
    op.kind = kLinear;
    op.rows = kWanted;
    op.source = 0;
    op.target = 1;
    op.width = static_cast<int32_t>(matrix->columns);
    op.matrix_count = 1;
    const int64_t widths[2] = {matrix->columns, matrix->rows};
    const int32_t kinds[2] = {kWanted, kWanted};
    ModelSpec spec{};
    spec.ops = &op;
    spec.op_count = 1;
    spec.matrices = matrix;
    spec.matrix_count = 1;
    spec.buffer_widths = widths;
    spec.buffer_rows = kinds;
    spec.buffer_count = 2;
    spec.logits_buffer = 1;
    spec.threads = threads;
    try {
        Model model(spec);
        int32_t status = kOk;
        for (int32_t i = 0; i < repeat && status == kOk; ++i)
            status = unspool_run_head(&model, rows, count, 0, out);
        return status;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}

namespace {
struct Reading {
    const uint8_t* data;
    int64_t bytes;
    int32_t repeat;
    std::atomic<uint64_t> total{0};

    static void work(void* what, int index, int count) {
        Reading& self = *static_cast<Reading*>(what);
        const int64_t words = self.bytes / 64 * 8;
        const int64_t first = words / 8 * index / count * 8,
                      last = words / 8 * (index + 1) / count * 8;
        const uint64_t* from = reinterpret_cast<const uint64_t*>(self.data);
        uint64_t sums[8] = {};
        for (int32_t i = 0; i < self.repeat; ++i)
            for (int64_t at = first; at < last; at += 8)
                for (int lane = 0; lane < 8; ++lane) sums[lane] += from[at + lane];
        uint64_t total = 0;
        for (uint64_t sum : sums) total += sum;
        self.total.fetch_add(total);
    }
};
}  // namespace

uint64_t unspool_read_memory(const uint8_t* data, int64_t bytes, int32_t threads, int32_t repeat) {
    Reading reading{data, bytes, repeat};
    run_on_pool(threads, &Reading::work, &reading);
    return reading.total.load();
}

}  // extern "C"
