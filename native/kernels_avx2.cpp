// The kernels for avx2; see CMakeLists.txt for its flags.
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#include "kernels.inc"
