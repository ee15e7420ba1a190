// torch's own GEMM without Python, through the C interface that compiled models of torch use
// (torch/csrc/inductor/aoti_torch). Its functions are looked up in the library that the process has
// loaded, so one build of this module works with every version of torch. Where they are missing, the
// products of a plan are made from Python.
#pragma once

#include "sums.h"

namespace weft {

// A matrix in memory; strides count elements.
struct Matrix {
  char* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 1;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

// Whether torch's functions were found.
bool has_torch_product();

// c = a @ b, or c += a @ b, with the bits, and on the threads, of torch.mm in this thread. All three
// have elements of one floating-point type. Throws if torch refuses.
void torch_product(Dtype dtype, const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate);

}  // namespace weft
