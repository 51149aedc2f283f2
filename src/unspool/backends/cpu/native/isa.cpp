#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace unspool {

namespace plain {
extern const Kernels table;
}
#if HAS_avx2
namespace avx2 {
extern const Kernels table;
}
#endif
#if HAS_avxvnni
namespace avxvnni {
extern const Kernels table;
}
#endif
#if HAS_avx512
namespace avx512 {
extern const Kernels table;
}
#endif
#if HAS_amx
namespace amx {
extern const Kernels table;
void begin_thread();
void end_thread();
}  // namespace amx
#endif
#if HAS_neon
namespace neon {
extern const Kernels table;
}
#endif
#if HAS_i8mm
namespace i8mm {
extern const Kernels table;
}
#endif

namespace {

#if HAS_amx
// On Linux a process must request the tile registers.
bool amx_allowed() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tile = d & (1u << 24), int8 = d & (1u << 25), bf16 = d & (1u << 22);
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return tile && int8 && bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool is_supported(const Kernels* set) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni");
#if HAS_avx2
    if (set == &avx2::table) return has_avx2;
#endif
#if HAS_avxvnni
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (set == &avxvnni::table)
        return has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
#endif
#if HAS_avx512
    if (set == &avx512::table) return has_avx512;
#endif
#if HAS_amx
    if (set == &amx::table)
        return has_avx512 && __builtin_cpu_supports("avx512bf16") && amx_allowed();
#endif
#endif
#if HAS_neon
#if defined(__linux__)
    if (set == &neon::table) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    if (set == &neon::table) return true;  // every Apple chip has the dot product
#endif
#endif
#if HAS_i8mm
#if defined(__linux__)
    constexpr unsigned long kI8mm = 1u << 13;  // HWCAP2_I8MM, which old headers lack
    if (set == &i8mm::table) return (getauxval(AT_HWCAP2) & kI8mm) != 0;
#else
    int has_i8mm = 0;
    size_t size = sizeof has_i8mm;
    if (set == &i8mm::table)
        return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has_i8mm, &size, nullptr, 0) == 0 &&
               has_i8mm != 0;
#endif
#endif
    return set == &plain::table;
}

const Kernels* choose_kernels() {
    const Kernels* sets[] = {
#if HAS_amx
        &amx::table,
#endif
#if HAS_avx512
        &avx512::table,
#endif
#if HAS_avxvnni
        &avxvnni::table,
#endif
#if HAS_avx2
        &avx2::table,
#endif
#if HAS_i8mm
        &i8mm::table,
#endif
#if HAS_neon
        &neon::table,
#endif
        &plain::table,
    };
    const char* forced = std::getenv("UNSPOOL_ISA");
    for (const Kernels* set : sets) {
        if (forced != nullptr && *forced != 0 && std::strcmp(forced, set->name) != 0) continue;
        if (is_supported(set)) return set;
    }
    return nullptr;
}

const Kernels* active_kernels() {
    static const Kernels* const best = choose_kernels();
    return best;
}

}  // namespace

const Kernels& kernels() { return *active_kernels(); }
const char* active_isa_name() {
    return active_kernels() != nullptr ? active_kernels()->name : nullptr;
}

void begin_thread() {
#if HAS_amx
    if (active_kernels() == &amx::table) amx::begin_thread();
#endif
}

void end_thread() {
#if HAS_amx
    if (active_kernels() == &amx::table) amx::end_thread();
#endif
}

}  // namespace unspool
