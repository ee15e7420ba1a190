// The kernels for every processor that the compiler is told of by default.
#define KERNELS kernels_portable
#define KERNELS_NAME "portable"
#include "kernels.inc"
