#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if HAS_amx
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace unspool {

#if HAS_plain
namespace plain {
extern const Kernels table;
}
#endif
#if HAS_wasm
namespace wasm {
extern const Kernels table;
}
#endif
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

#if defined(__x86_64__)
// One leaf of CPUID; all zero if the processor does not have it.
struct CpuidLeaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
    CpuidLeaf(unsigned leaf, unsigned subleaf) {
        if (!__get_cpuid_count(leaf, subleaf, &a, &b, &c, &d)) a = b = c = d = 0;
    }
};

bool has_bits(unsigned value, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(value >> bit & 1u)) return false;
    return true;
}

// Instruction sets of the processor whose registers the system also saves. __builtin_cpu_supports
// would do, but clang-cl has no library for it.
struct CpuFeatures {
    bool avx2 = false, avxvnni = false, avx512 = false, avx512bf16 = false, amx = false;

    CpuFeatures() {
        const CpuidLeaf basic(1, 0), extended(7, 0), extended1(7, 1);
        constexpr int kFma = 12, kOsXsave = 27, kAvx = 28, kF16c = 29;
        if (!has_bits(basic.c, {kOsXsave})) return;
        const unsigned saved = enabled_registers();
        constexpr unsigned kSavedAvx = 0x06, kSavedAvx512 = 0xe6;
        avx2 = has_bits(basic.c, {kFma, kAvx, kF16c}) && has_bits(extended.b, {5}) &&
               (saved & kSavedAvx) == kSavedAvx;
        avxvnni = avx2 && has_bits(extended1.a, {4});
        constexpr int kF = 16, kDq = 17, kBw = 30, kVl = 31, kVnni = 11;
        avx512 = avx2 && (saved & kSavedAvx512) == kSavedAvx512 &&
                 has_bits(extended.b, {kF, kDq, kBw, kVl}) && has_bits(extended.c, {kVnni});
        avx512bf16 = avx512 && has_bits(extended1.a, {5});
        constexpr int kAmxBf16 = 22, kAmxTile = 24, kAmxInt8 = 25;
        amx = avx512bf16 && has_bits(extended.d, {kAmxBf16, kAmxTile, kAmxInt8});
    }

    // Register XCR0: which registers the system saves.
    static unsigned enabled_registers() {
        unsigned low = 0, high = 0;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
    }
};
#endif

#if HAS_amx
// On Linux a process must request the tile registers.
bool amx_allowed() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool is_supported(const Kernels* set) {
#if defined(__x86_64__)
    static const CpuFeatures cpu;
#if HAS_avx2
    if (set == &avx2::table) return cpu.avx2;
#endif
#if HAS_avxvnni
    if (set == &avxvnni::table) return cpu.avxvnni;
#endif
#if HAS_avx512
    if (set == &avx512::table) return cpu.avx512;
#endif
#if HAS_amx
    if (set == &amx::table) return cpu.amx && amx_allowed();
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
#if HAS_plain
    return set == &plain::table;
#else
    return set == &wasm::table;
#endif
}

// All kernels of this library, the fastest first.
const Kernels* const kSets[] = {
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
#if HAS_plain
    &plain::table,
#endif
#if HAS_wasm
    &wasm::table,
#endif
};

const Kernels* choose_kernels() {
    const char* forced = std::getenv("UNSPOOL_ISA");
    for (const Kernels* set : kSets) {
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

const char* available_isa_names() {
    static const std::string names = [] {
        std::string joined;
        for (const Kernels* set : kSets)
            if (is_supported(set)) joined += (joined.empty() ? "" : " ") + std::string(set->name);
        return joined;
    }();
    return names.c_str();
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
