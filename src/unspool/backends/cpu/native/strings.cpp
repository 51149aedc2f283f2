// Reads arrays of strings in GGUF files: a vocabulary has 50,000 strings and more.
#include <cstring>

#include "api.h"

int64_t unspool_join_strings(const uint8_t* data, int64_t size, int64_t start, int64_t count,
                             uint8_t* joined, int64_t capacity) {
    for (int64_t i = 0; i < count; ++i) {
        uint64_t length = 0;
        if (size - start < static_cast<int64_t>(sizeof length)) return -1;
        std::memcpy(&length, data + start, sizeof length);
        start += sizeof length;
        if (length > static_cast<uint64_t>(size - start)) return -1;
        if (joined) {
            if (length >= static_cast<uint64_t>(capacity)) return -1;
            capacity -= static_cast<int64_t>(length) + 1;
            std::memcpy(joined, data + start, length);
            joined[length] = 0;
            joined += length + 1;
        }
        start += static_cast<int64_t>(length);
    }
    return start;
}
