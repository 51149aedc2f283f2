// Kernels of one instruction set: a function per operation. Every instruction set compiles the same
// sources into its namespace and fills one such table (kernels.cpp).
#pragma once
#include "../layout.h"
#include "../plan.h"

// Some instruction sets differ from another one in products of many rows only (AMX and AVX-512,
// i8mm and NEON), or in all quantized products (AVX-VNNI and AVX2): they share the other's kernels.
#if defined(ISA_amx)
#define UNSPOOL_SHARED avx512
#define UNSPOOL_GEMV avx512
#elif defined(ISA_avxvnni)
#define UNSPOOL_SHARED avx2
#define UNSPOOL_GEMV avxvnni
#elif defined(ISA_i8mm)
#define UNSPOOL_SHARED neon
#define UNSPOOL_GEMV neon
#else
#define UNSPOOL_SHARED ISA
#define UNSPOOL_GEMV ISA
#endif

namespace unspool {

struct Kernels {
    const char* name;
    const char* compiler;  // its name and version

    // -- operations of a plan (see plan.h); called by every worker ---------
    void (*embed)(const RunContext&, const Op&, Worker&);
    void (*norm)(const RunContext&, const Op&, Worker&);
    void (*linear)(const RunContext&, const Op&, Worker&);
    void (*lora)(const RunContext&, const Op&, Worker&);  // LoRA after a kLinear
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
    void (*stash)(const RunContext&, const Op&, Worker&);
    void (*site)(const RunContext&, const Op&, Worker&);

    // -- sampling: one row of logits (logits.cpp) -----------------------------------------------
    // The largest logit; NaN if there is one.
    float (*peak)(const float* logits, int64_t count);
    // Sum of exp(logit - peak), and sum of exp(logit - peak) * (logit - peak).
    void (*mass)(const float* logits, int64_t count, float peak, double* total, double* weighted);
    // Number of logits above the level.
    int64_t (*count_above)(const float* logits, int64_t count, float level);
    // Indices of the logits >= level, in order, at most `capacity`; returns how many there are.
    int64_t (*above)(const float* logits, int64_t count, float level, int64_t capacity,
                     int32_t* indices);
    // Maximum of each lane in blocks of `depth` * 16 logits, without the remainder; returns their
    // number.
    int64_t (*maxima)(const float* logits, int64_t count, int64_t depth, float* tops);
};

}  // namespace unspool
