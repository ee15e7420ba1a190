// The kernels for avx512; see CMakeLists.txt for its flags.
#define KERNELS kernels_avx512
#define KERNELS_NAME "avx512"
#include "kernels.inc"
