// A model as the library keeps it: the plan, and memory that is used again with every run.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#include "api.h"

namespace unspool {

// Memory on a cache line's border that grows when it must and is never shrunk.
template <typename T>
class Room {
public:
    Room() = default;
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    Room(Room&& other) noexcept : data_(other.data_), size_(other.size_) {
        other.data_ = nullptr;
        other.size_ = 0;
    }
    ~Room() { std::free(data_); }

    T* need(int64_t count) {
        if (count > size_) {
            std::free(data_);
            data_ = nullptr;
            size_ = 0;
            const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
            void* got = nullptr;
            if (posix_memalign(&got, 64, bytes) != 0) throw std::bad_alloc();
            data_ = static_cast<T*>(got);
            size_ = count;
        }
        return data_;
    }

private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

struct Model {
    explicit Model(const ModelSpec& given);

    ModelSpec spec;
    int64_t widest;  // input of any matrix, filled up to 32
    std::vector<Buffer> buffers;
    std::vector<Room<float>> buffer_rooms;
    std::vector<Room<uint8_t>> scratch;  // one a worker
    Room<int8_t> numbers, tiled;
    Room<float> scales, lows, turned, values, low, partial, pick_weights;
    Room<int32_t> sums, row_of, pick_tokens, pick_places, pick_starts;
    Room<Progress> progress;      // kParts for each operation
    std::vector<double> seconds;  // empty: not measured

    int32_t run(const KeyValues& kv, const RotaryTable* rotary, const Batch& batch,
                const TapList* taps, float* logits, int64_t first_op, const float* vectors,
                float* const* given = nullptr);

private:
    void make_room(Run& run, int64_t rows, float* logits, float* const* given);
    friend struct Running;
};

int64_t scratch_needed(const Model& model);

}  // namespace unspool
