// What one instruction set offers: a function for each operation. Every instruction set compiles
// the same sources into its own namespace and fills one such table (table.cpp).
#pragma once
#include "../layout.h"
#include "../plan.h"

// Tile registers serve for products only: everything else is what AVX-512 does.
#if defined(ISA_amx)
#define UNSPOOL_SHARED avx512
#else
#define UNSPOOL_SHARED ISA
#endif

namespace unspool {

struct Kernels {
    const char* name;

    // -- operations of a plan (see plan.h); every worker calls them with its own number ---------
    void (*embed)(const RunContext&, const Op&, Worker&);
    void (*norm)(const RunContext&, const Op&, Worker&);
    void (*linear)(const RunContext&, const Op&, Worker&);
    void (*lora)(const RunContext&, const Op&, Worker&);  // what adapters add behind a kLinear
    void (*rope)(const RunContext&, const Op&, Worker&);
    void (*attention)(const RunContext&, const Op&, Worker&);
    void (*route)(const RunContext&, const Op&, Worker&);
    void (*combine)(const RunContext&, const Op&, Worker&);
    void (*gather)(const RunContext&, const Op&, Worker&);
    void (*softcap)(const RunContext&, const Op&, Worker&);
    void (*activate)(const RunContext&, const Op&, Worker&);
    void (*scale)(const RunContext&, const Op&, Worker&);
    void (*gate)(const RunContext&, const Op&, Worker&);
    void (*conv)(const RunContext&, const Op&, Worker&);
    void (*delta)(const RunContext&, const Op&, Worker&);
    void (*mamba)(const RunContext&, const Op&, Worker&);

    // -- sampling: one row of logits (sample.cpp) -----------------------------------------------
    // The largest logit; NaN if one is among them.
    float (*peak)(const float* logits, int64_t count);
    // Sum of exp(logit - peak), and of that times (logit - peak).
    void (*mass)(const float* logits, int64_t count, float peak, double* total, double* weighted);
    // How many logits lie above the level.
    int64_t (*count_above)(const float* logits, int64_t count, float level);
    // Numbers of the logits at or above the level, in order; gives how many there are (it writes
    // `room` of them at the most).
    int64_t (*above)(const float* logits, int64_t count, float level, int64_t capacity,
                     int32_t* indices);
    // The largest of each lane in blocks of `depth` times sixteen logits, what is left over passed
    // by; gives how many there are.
    int64_t (*maxima)(const float* logits, int64_t count, int64_t depth, float* tops);
};

}  // namespace unspool
