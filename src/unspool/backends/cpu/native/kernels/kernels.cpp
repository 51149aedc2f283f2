// The table of this instruction set's kernels.
#include "kernels.h"

#include <cstring>

#if defined(ISA_amx)
#include <immintrin.h>
#endif

namespace unspool {

namespace UNSPOOL_SHARED {
void embed(const RunContext&, const Op&, Worker&);
void norm(const RunContext&, const Op&, Worker&);
void lora(const RunContext&, const Op&, Worker&);
void rope(const RunContext&, const Op&, Worker&);
void attention(const RunContext&, const Op&, Worker&);
void route(const RunContext&, const Op&, Worker&);
void combine(const RunContext&, const Op&, Worker&);
void gather(const RunContext&, const Op&, Worker&);
void softcap(const RunContext&, const Op&, Worker&);
void activate(const RunContext&, const Op&, Worker&);
void scale(const RunContext&, const Op&, Worker&);
void gate(const RunContext&, const Op&, Worker&);
void conv(const RunContext&, const Op&, Worker&);
void delta(const RunContext&, const Op&, Worker&);
void mamba(const RunContext&, const Op&, Worker&);
void stash(const RunContext&, const Op&, Worker&);
void site(const RunContext&, const Op&, Worker&);
float peak(const float*, int64_t);
void mass(const float*, int64_t, float, double*, double*);
int64_t count_above(const float*, int64_t, float);
int64_t above(const float*, int64_t, float, int64_t, int32_t*);
int64_t maxima(const float*, int64_t, int64_t, float*);
}  // namespace UNSPOOL_SHARED

namespace ISA {

void linear(const RunContext&, const Op&, Worker&);

#define UNSPOOL_TEXT(x) #x
#define UNSPOOL_NAME(x) UNSPOOL_TEXT(x)

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;  // begins with "Clang" or "Apple LLVM"
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

#if defined(ISA_wasm)  // less code to download: the browser's engine refuses models that need these
#define UNSPOOL_RARE(name) nullptr
#else
#define UNSPOOL_RARE(name) UNSPOOL_SHARED::name
#endif

extern const Kernels table;
const Kernels table = {UNSPOOL_NAME(ISA),
                       kCompiler,
                       UNSPOOL_SHARED::embed,
                       UNSPOOL_SHARED::norm,
                       linear,
                       UNSPOOL_RARE(lora),
                       UNSPOOL_SHARED::rope,
                       UNSPOOL_SHARED::attention,
                       UNSPOOL_RARE(route),
                       UNSPOOL_RARE(combine),
                       UNSPOOL_SHARED::gather,
                       UNSPOOL_SHARED::softcap,
                       UNSPOOL_SHARED::activate,
                       UNSPOOL_SHARED::scale,
                       UNSPOOL_SHARED::gate,
                       UNSPOOL_RARE(conv),
                       UNSPOOL_RARE(delta),
                       UNSPOOL_RARE(mamba),
                       UNSPOOL_SHARED::stash,
                       UNSPOOL_SHARED::site,
                       UNSPOOL_SHARED::peak,
                       UNSPOOL_SHARED::mass,
                       UNSPOOL_SHARED::count_above,
                       UNSPOOL_SHARED::above,
                       UNSPOOL_SHARED::maxima};

#if defined(ISA_amx)

// Shapes of the eight tile registers: sums in 0 to 3; sixteen rows of 32 activations and 32 columns
// of weights in 4 and 5; the same with 16 columns in 6 and 7.
void begin_thread() {
    struct alignas(64) Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_of_row[16];
        uint8_t rows[16];
    } shapes;
    std::memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    const uint8_t rows[8] = {16, 16, 16, 16, 16, 8, 16, 4};
    const uint16_t bytes[8] = {64, 64, 64, 64, 32, 64, 16, 64};
    for (int i = 0; i < 8; ++i) {
        shapes.rows[i] = rows[i];
        shapes.bytes_of_row[i] = bytes[i];
    }
    asm volatile("" ::: "memory");  // the compiler does not know that the next call reads memory
    _tile_loadconfig(&shapes);
}

void end_thread() { _tile_release(); }

#endif

}  // namespace ISA
}  // namespace unspool
