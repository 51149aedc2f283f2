#include "api.h"

#include <cstring>

#include "isa.h"
#include "model.h"

using namespace unspool;

extern "C" {

int32_t unspool_version() { return 13; }

const char* unspool_isa() { return active_isa_name(); }
const char* unspool_available_isas() { return available_isa_names(); }
const char* unspool_compiler() { return kernels().compiler; }

void* unspool_model_new(const ModelSpec* spec) {
    UNSPOOL_TRY { return new Model(*spec); }
    UNSPOOL_ON_BAD_ALLOC { return nullptr; }
}

void unspool_model_free(void* model) { delete static_cast<Model*>(model); }

int32_t unspool_run(void* model, const KvCache* kv, const RopeTable* rotary, const Batch* batch,
                    const Taps* taps, float* logits) {
    return static_cast<Model*>(model)->run(*kv, rotary, *batch, taps, logits, 0, nullptr);
}

int32_t unspool_run_head(void* model, const float* vectors, int64_t count, int64_t first,
                         float* logits) {
    Batch batch{};
    batch.selected_count = count;
    KvCache none{};
    return static_cast<Model*>(model)->run(none, nullptr, batch, nullptr, logits, first, vectors);
}

void unspool_copy_page(const KvCache* kv, int64_t source, int64_t target) {
    const int64_t bytes = kv->page_bytes;
    std::memcpy(kv->data + target * bytes, kv->data + source * bytes, bytes);
}

void unspool_profile(void* model, double* seconds) {
    Model& profiled = *static_cast<Model*>(model);
    const size_t count = profiled.spec.op_count;
    if (!profiled.seconds.empty())
        std::memcpy(seconds, profiled.seconds.data(), count * sizeof(double));
    profiled.seconds.assign(count, 0.0);
}

int32_t unspool_multiply(const Matrix* matrix, const float* rows, int64_t count, float* out,
                         int32_t threads, int32_t repeat) {
    Op op{};
    op.kind = kLinear;
    op.rows = kSelected;
    op.source = 0;
    op.target = 1;
    op.width = static_cast<int32_t>(matrix->columns);
    op.matrix_count = 1;
    const int64_t widths[2] = {matrix->columns, matrix->rows};
    const int32_t kinds[2] = {kSelected, kSelected};
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
    UNSPOOL_TRY {
        Model model(spec);
        int32_t status = kOk;
        for (int32_t i = 0; i < repeat && status == kOk; ++i)
            status = unspool_run_head(&model, rows, count, 0, out);
        return status;
    }
    UNSPOOL_ON_BAD_ALLOC { return kOutOfMemory; }
}

namespace {
struct ReadJob {
    const uint8_t* data;
    int64_t bytes;
    int32_t repeat;
    std::atomic<uint64_t> total{0};

    static void work(void* argument, int index, int count) {
        ReadJob& self = *static_cast<ReadJob*>(argument);
        const int64_t words = self.bytes / 64 * 8;
        const int64_t first = words / 8 * index / count * 8,
                      last = words / 8 * (index + 1) / count * 8;
        const uint64_t* words_in = reinterpret_cast<const uint64_t*>(self.data);
        uint64_t sums[8] = {};
        for (int32_t i = 0; i < self.repeat; ++i)
            for (int64_t at = first; at < last; at += 8)
                for (int lane = 0; lane < 8; ++lane) sums[lane] += words_in[at + lane];
        uint64_t total = 0;
        for (uint64_t sum : sums) total += sum;
        self.total.fetch_add(total);
    }
};
}  // namespace

uint64_t unspool_read_memory(const uint8_t* data, int64_t bytes, int32_t threads, int32_t repeat) {
    ReadJob job{data, bytes, repeat};
    run_on_pool(threads, &ReadJob::work, &job);
    return job.total.load();
}

}  // extern "C"
