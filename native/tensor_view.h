// A tensor's memory, shape and dtype without torch's headers and without Python's attributes: through
// the table of C functions that torch (from 2.10 on) hangs on its tensor type, as DLPack describes it.
// Where there is none, nothing can be viewed, and callers ask in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "sums.h"
#include "torch_product.h"

namespace weft {

struct TensorView {
  char* data = nullptr;
  int dimensions = 0;
  const int64_t* shape = nullptr;
  Dtype dtype = Dtype::other;
  uint64_t item = 0, bytes = 0;
};

// Learns how to view tensors of a type; false if it does not say.
bool learn_tensors(nanobind::handle type);

// Views a dense, contiguous tensor on the CPU, of that very type, with a dtype that can be added and
// at least one element; false for any other object. The view ends when Python runs again.
bool view(nanobind::handle object, TensorView& into);

// A dense tensor of two dimensions on the CPU, with any strides. Throws for any other object. The memory
// is valid as long as the tensor.
Matrix matrix_of(nanobind::handle tensor);

}  // namespace weft
