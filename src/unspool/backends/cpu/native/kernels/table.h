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
    void (*embed)(const Run&, const Op&, Worker&);
    void (*norm)(const Run&, const Op&, Worker&);
    void (*linear)(const Run&, const Op&, Worker&);
    void (*adapt)(const Run&, const Op&, Worker&);  // what adapters add behind a kLinear
    void (*place)(const Run&, const Op&, Worker&);
    void (*attend)(const Run&, const Op&, Worker&);
    void (*route)(const Run&, const Op&, Worker&);
    void (*combine)(const Run&, const Op&, Worker&);
    void (*gather)(const Run&, const Op&, Worker&);
    void (*softcap)(const Run&, const Op&, Worker&);
    void (*activate)(const Run&, const Op&, Worker&);
    void (*scale)(const Run&, const Op&, Worker&);
    void (*gate)(const Run&, const Op&, Worker&);
    void (*conv)(const Run&, const Op&, Worker&);
    void (*delta)(const Run&, const Op&, Worker&);
    void (*mamba)(const Run&, const Op&, Worker&);

    // -- sampling: one row of logits (sample.cpp) -----------------------------------------------
    // The largest logit; NaN if one is among them.
    float (*peak)(const float* logits, int64_t count);
    // Sum of exp(logit - peak), and of that times (logit - peak).
    void (*mass)(const float* logits, int64_t count, float peak, double* total, double* weighted);
    // How many logits lie above the level.
    int64_t (*count_above)(const float* logits, int64_t count, float level);
    // Numbers of the logits at or above the level, in order; gives how many there are (it writes
    // `room` of them at the most).
    int64_t (*above)(const float* logits, int64_t count, float level, int64_t room, int32_t* found);
    // The largest of each lane in blocks of `depth` times sixteen logits, what is left over passed
    // by; gives how many there are.
    int64_t (*maxima)(const float* logits, int64_t count, int64_t depth, float* tops);
};

}  // namespace unspool
