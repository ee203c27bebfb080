// Choice of the kernels that this processor and operating system run.
#include <cstring>

#include "attention.h"
#include "packed.h"
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace chunkattn {
namespace {

bool always() { return true; }

#ifdef __x86_64__
// The compiler's own checks ask the operating system (XGETBV) too.
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool runs_avx512_bf16() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}
bool runs_avx512_vnni() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
bool runs_amx() {
  unsigned a, b, c, d;
  if (!runs_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!(d & kAmxBf16) || !(d & kAmxTile)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const struct {
  const Kernel &kernel;
  bool (*runs)();
} kKernels[] = {
#ifdef __x86_64__
    {kAmx, runs_amx},
    {kAvx512Bf16, runs_avx512_bf16},
    {kAvx2, runs_avx2},
#endif
    {kPortable, always},
};

#ifdef __aarch64__
bool runs_dot_products() {
#ifdef __linux__
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;
#endif
}
#endif

}  // namespace

const PackedKernel &best_packed_kernel() {
#ifdef __x86_64__
  return runs_avx512_vnni() ? kPackedAvx512 : runs_avx2() ? kPackedAvx2 : kPackedPortable;
#elif defined(__aarch64__)
  return runs_dot_products() ? kPackedNeon : kPackedPortable;
#else
  return kPackedPortable;
#endif
}

const PackedKernel &packed_kernel_of(const Kernel &named) {
  if (&named == &kPortable) return kPackedPortable;
#ifdef __x86_64__
  if (&named == &kAvx2) return kPackedAvx2;
#endif
  return best_packed_kernel();
}

const Kernel *best_kernel() {
  for (const auto &entry : kKernels)
    if (entry.runs()) return &entry.kernel;
  return &kPortable;
}

const Kernel *kernel_named(const char *name, const char **why) {
  for (const auto &entry : kKernels) {
    if (strcmp(entry.kernel.name, name)) continue;
    *why = entry.runs() ? nullptr : "this processor or operating system lacks its instructions";
    return *why ? nullptr : &entry.kernel;
  }
  *why = "no kernel has that name";
  return nullptr;
}

}  // namespace chunkattn
