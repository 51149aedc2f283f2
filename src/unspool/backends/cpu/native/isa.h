// Selection of the instruction set.
#pragma once
#include "kernels/kernels.h"

namespace unspool {

// The best kernels for this processor, or those that UNSPOOL_ISA names.
const Kernels& kernels();

// Name of the active instruction set; null if the processor lacks the one in UNSPOOL_ISA.
const char* active_isa_name();

// AMX tile registers must be configured in each thread, for each run.
void begin_thread();
void end_thread();

}  // namespace unspool
