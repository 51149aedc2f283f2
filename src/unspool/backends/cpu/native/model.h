// A model inside the library: the plan, and memory that is reused by every run.
#pragma once
#include <new>
#include <vector>

#include "api.h"

// WebAssembly is compiled without exceptions: there a failed allocation ends the program.
#if defined(__cpp_exceptions)
#define UNSPOOL_TRY try
#define UNSPOOL_ON_BAD_ALLOC catch (const std::bad_alloc&)
#else
#define UNSPOOL_TRY
#define UNSPOOL_ON_BAD_ALLOC if (false)
#endif

namespace unspool {

// Cache-line-aligned memory that grows on demand and never shrinks.
template <typename T>
class GrowingBuffer {
public:
    GrowingBuffer() = default;
    GrowingBuffer(const GrowingBuffer&) = delete;
    GrowingBuffer& operator=(const GrowingBuffer&) = delete;
    GrowingBuffer(GrowingBuffer&& other) noexcept : data_(other.data_), size_(other.size_) {
        other.data_ = nullptr;
        other.size_ = 0;
    }
    ~GrowingBuffer() { release(); }

    T* reserve(int64_t count) {
        if (count > size_) {
            release();
            const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
            data_ = static_cast<T*>(::operator new(bytes, kAlignment));
            size_ = count;
        }
        return data_;
    }

private:
    static constexpr std::align_val_t kAlignment{64};

    void release() {
        ::operator delete(data_, kAlignment);
        data_ = nullptr;
        size_ = 0;
    }

    T* data_ = nullptr;
    int64_t size_ = 0;
};

struct Model {
    explicit Model(const ModelSpec& external);

    ModelSpec spec;
    int64_t max_columns;  // widest matrix input, padded to 32
    std::vector<Buffer> buffers;
    std::vector<GrowingBuffer<float>> buffer_memory;
    std::vector<GrowingBuffer<uint8_t>> scratch;  // one per worker
    GrowingBuffer<int8_t> quants, tiled;
    GrowingBuffer<float> scales, scaled_sums, tile_scales, values, low, stash, partial,
        routing_weights;
    GrowingBuffer<int32_t> sums, row_of, routing_tokens, routing_slots, routing_starts;
    GrowingBuffer<Progress> progress;  // kPhases per operation
    std::vector<double> seconds;       // empty: not measured

    int32_t run(const KvCache& kv, const RopeTable* rotary, const Batch& batch, const Taps* taps,
                float* logits, int64_t first_op, const float* vectors);

private:
    void allocate(RunContext& run, int64_t rows, float* logits);
    friend struct RunJob;
};

int64_t scratch_bytes(const Model& model);

}  // namespace unspool
