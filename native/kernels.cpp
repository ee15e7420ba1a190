#include "kernels.h"

#include <cstring>
#include <initializer_list>

namespace weft {

extern const Kernels kernels_portable;
#if defined(WEFT_X86_KERNELS)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

const Kernels* find_kernels(const char* name) {
#if defined(WEFT_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && std::strcmp(name, "avx512") == 0)
    return &kernels_avx512;
  if (avx2 && std::strcmp(name, "avx2") == 0) return &kernels_avx2;
#endif
  return std::strcmp(name, "portable") == 0 ? &kernels_portable : nullptr;
}

const Kernels& best_kernels() {
  static const Kernels& best = [&]() -> const Kernels& {
    for (const char* name : {"avx512", "avx2"})
      if (const Kernels* found = find_kernels(name)) return *found;
    return kernels_portable;
  }();
  return best;
}

}  // namespace weft
