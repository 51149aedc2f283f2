// Marks a function of the C interface; everything else stays hidden inside the library.
#pragma once

#if defined(_WIN32)
#define UNSPOOL_API extern "C" __declspec(dllexport)
#else
#define UNSPOOL_API extern "C" __attribute__((visibility("default")))
#endif
