// A tensor's memory, shape and dtype without torch's headers and without Python's attributes: through
// the table of C functions that torch (from 2.10 on) hangs on its tensor type, as DLPack describes it.
// Where there is none, nothing can be viewed, and callers ask in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

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

// Learns how to view tensors of a type, and that parameters can be viewed likewise; false if the type
// does not say how.
bool learn_tensors(nanobind::handle type, nanobind::handle parameter);

// Views a dense, contiguous tensor on the CPU, of that very type, with a dtype that can be added and
// at least one element; false for any other object. The view ends when Python runs again.
bool view(nanobind::handle object, TensorView& into);

// The same for a parameter, too, and for a tensor without elements.
bool view_any(nanobind::handle object, TensorView& into);

// A dense tensor of two dimensions on the CPU, with any strides. Throws for any other object. The memory
// is valid as long as the tensor.
Matrix matrix_of(nanobind::handle tensor);

// The values of arguments, and the layouts of the tensors among them (device, dtype, shape, strides), in
// bytes: equal for calls that can be made alike. Tensors, numbers, texts, None, and lists of them.
// graph: a tensor that requires a gradient is not among them. False for any other argument.
bool layouts_of(nanobind::handle arguments, bool graph, std::string& into);

}  // namespace weft
