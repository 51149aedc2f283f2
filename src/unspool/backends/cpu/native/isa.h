// Selection of the instruction set.
#pragma once
#include "kernels/kernels.h"

namespace unspool {

// The best kernels for this processor, or those that UNSPOOL_ISA names.
const Kernels& kernels();

// Name of the active instruction set; null if the processor lacks the one in UNSPOOL_ISA.
const char* active_isa_name();

// Names of the instruction sets that this processor has and the library has kernels for, the
// fastest first, with spaces between them.
const char* available_isa_names();

// AMX tile registers must be configured in each thread, for each run.
void begin_thread();
void end_thread();

}  // namespace unspool
