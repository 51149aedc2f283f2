// The C interface for Python. Functions return errors as status codes; none throws.
#pragma once
#include "export.h"
#include "plan.h"

namespace unspool {

// Description of a model, passed once; the arrays must outlive the model.
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
    int64_t logits_buffer;  // passed with each run
    int32_t experts;
    int32_t experts_per_token;  // experts of a token
    int32_t threads;
};

enum Status : int32_t {
    kOk = 0,
    kOutOfMemory = 1,
    kNoThreads = 2,
    kBadBatch = 3,  // an index is out of range
};

}  // namespace unspool

extern "C" {
UNSPOOL_API int32_t unspool_version();
UNSPOOL_API const char* unspool_isa();
UNSPOOL_API const char* unspool_available_isas();  // the fastest first, with spaces between them
UNSPOOL_API const char* unspool_compiler();        // that compiled the kernels, and its version
UNSPOOL_API void* unspool_model_new(const unspool::ModelSpec* spec);  // null: out of memory
UNSPOOL_API void unspool_model_free(void* model);
UNSPOOL_API int32_t unspool_run(void* model, const unspool::KvCache* kv,
                                const unspool::RopeTable* rotary, const unspool::Batch* batch,
                                const unspool::Taps* taps, float* logits);
// Runs the operations from `first` on with `vectors` as its source: the head, for the lenses.
UNSPOOL_API int32_t unspool_run_head(void* model, const float* vectors, int64_t count,
                                     int64_t first, float* logits);
UNSPOOL_API void unspool_copy_page(const unspool::KvCache* kv, int64_t source, int64_t target);
// Seconds spent in each operation since the last call, by worker 0; off until first called.
UNSPOOL_API void unspool_profile(void* model, double* seconds);
// Multiplies one matrix with rows, for tests and benchmarks.
UNSPOOL_API int32_t unspool_multiply(const unspool::Matrix* matrix, const float* rows,
                                     int64_t count, float* out, int32_t threads, int32_t repeat);
// Reads memory at full speed and returns a checksum: measures memory bandwidth.
UNSPOOL_API uint64_t unspool_read_memory(const uint8_t* data, int64_t bytes, int32_t threads,
                                         int32_t repeat);
// Copies `count` strings of a GGUF file to the `capacity` bytes of `joined`, each with a zero byte
// after it; null copies nothing. In the file a string is its length (8 bytes, little-endian) and
// its bytes; the first begins at `start`. Returns the position after the last one; -1: they reach
// past the file's end, or past `joined` (another process changed the file).
UNSPOOL_API int64_t unspool_join_strings(const uint8_t* data, int64_t size, int64_t start,
                                         int64_t count, uint8_t* joined, int64_t capacity);
}
