// The C interface that Python calls. Every function gives an error as a number; nothing throws.
#pragma once
#include "export.h"
#include "plan.h"

namespace unspool {

// What Python hands over once; the arrays must outlive the model.
struct ModelSpec {
    const Op* ops;
    int64_t op_count;
    const Matrix* matrices;
    int64_t matrix_count;
    const Vector* vectors;
    int64_t vector_count;
    const int64_t* buffer_widths;
    const int32_t* buffer_rows;  // see Rows
    int64_t buffer_count;
    int64_t logits_buffer;  // this one is given with each run
    int32_t experts;
    int32_t experts_per_token;  // experts of a token
    int32_t threads;
};

enum Status : int32_t {
    kOk = 0,
    kOutOfMemory = 1,
    kNoThreads = 2,
    kBadBatch = 3,  // a number in it points outside of what there is
};

}  // namespace unspool

extern "C" {
UNSPOOL_API int32_t unspool_version();
UNSPOOL_API const char* unspool_isa();
UNSPOOL_API void* unspool_model_new(const unspool::ModelSpec* spec);  // null: out of memory
UNSPOOL_API void unspool_model_free(void* model);
UNSPOOL_API int32_t unspool_run(void* model, const unspool::KvCache* kv,
                                const unspool::RopeTable* rotary, const unspool::Batch* batch,
                                const unspool::Taps* taps, float* logits);
// Runs the operations from `first` on, on vectors given for its source: for the lens.
UNSPOOL_API int32_t unspool_run_head(void* model, const float* vectors, int64_t count,
                                     int64_t first, float* logits);
// Runs a plan some of whose buffers are the caller's memory (given[i], or null), to be read and
// written there; each with room for sixteen rows more. A plan without tokens works on the rows that
// are wanted.
UNSPOOL_API int32_t unspool_run_buffers(void* model, const unspool::KvCache* kv,
                                        const unspool::RopeTable* rotary,
                                        const unspool::Batch* batch, float* const* external);
UNSPOOL_API void unspool_copy_page(const unspool::KvCache* kv, int64_t source, int64_t target);
// Seconds spent in each operation since the last call, by worker 0; off until first called.
UNSPOOL_API void unspool_profile(void* model, double* seconds);
// Multiplies one matrix with rows, for tests and measurements.
UNSPOOL_API int32_t unspool_multiply(const unspool::Matrix* matrix, const float* rows,
                                     int64_t count, float* out, int32_t threads, int32_t repeat);
// Reads memory as fast as it can: gives a checksum, to measure bandwidth against.
UNSPOOL_API uint64_t unspool_read_memory(const uint8_t* data, int64_t bytes, int32_t threads,
                                         int32_t repeat);
}
