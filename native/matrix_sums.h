// Sums of matrices with any strides, always in the order of the sources.
#pragma once

#include <vector>

#include "torch_product.h"

namespace weft {

// Every target = the sum of all sources, on the threads of the caller. All have the same shape, and
// elements of so many bytes. Of one source, it is a copy.
void add_matrices(Dtype dtype, uint64_t item, std::vector<Matrix> sources,
                  std::vector<Matrix> targets);

}  // namespace weft
