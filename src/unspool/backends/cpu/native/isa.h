// Which instruction set runs here.
#pragma once
#include "kernels/kernels.h"

namespace unspool {

// The best kernels that this processor has, or those that UNSPOOL_ISA names.
const Kernels& kernels();

// Its name; null if UNSPOOL_ISA asks for what the processor cannot do.
const char* active_isa_name();

// AMX keeps its registers switched off until they are set up, thread by thread, run by run.
void begin_thread();
void end_thread();

}  // namespace unspool
