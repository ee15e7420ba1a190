// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <utility>

#include "engine.h"
#include "torch_product.h"

namespace weft {

using Result = std::pair<int, int>;  // of an outcome, for Python
inline Result result(const Outcome& outcome) { return {int(outcome.code), outcome.rank}; }

using Unlocked = nanobind::call_guard<nanobind::gil_scoped_release>;

// The copies of a call that are under way.
struct RunningCall {
  std::shared_ptr<Call> call;
};

std::vector<Matrix> matrices(const nanobind::list& tensors);  // bind_lane.cpp

}  // namespace weft

void bind_channel(nanobind::module_& m);  // channel_bindings.cpp
void bind_fused(nanobind::module_& m);    // bind_fused.cpp
void bind_known(nanobind::module_& m);    // bind_known.cpp
void bind_lane(nanobind::module_& m);     // bind_lane.cpp
void bind_serial(nanobind::module_& m);   // bind_serial.cpp
