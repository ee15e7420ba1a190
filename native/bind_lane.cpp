// The Python face of compute lanes that run without Python between their tasks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "lane.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

using AreaTuple = std::tuple<int, int, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<Area> areas(const std::vector<AreaTuple>& tuples) {
  std::vector<Area> made;
  for (const auto& [rank, buffer, row, rows, column, columns, pitch] : tuples)
    made.push_back({rank, buffer, row, rows, column, columns, pitch});
  return made;
}

std::vector<Matrix> matrices(const nb::list& tensors) {
  std::vector<Matrix> made;
  made.reserve(nb::len(tensors));
  for (nb::handle tensor : tensors) made.push_back(matrix_of(tensor));
  return made;
}

}  // namespace

void bind_lane(nb::module_& m) {
  m.def("has_torch_product", &has_torch_product);

  nb::class_<Lane>(m, "Lane")
      .def(
          "__init__",
          [](Lane* lane, int dtype, uint64_t item, bool one_launch) {
            new (lane) Lane{Dtype(dtype), item, one_launch, {}, {}};
          },
          "dtype"_a, "item"_a, "one_launch"_a)
      .def(
          "add",  // duty 0: products, 1: a sum, 2: moves, 3: only waits and signals
          [](Lane& lane, int id, int duty, const std::vector<AreaTuple>& a,
             const std::vector<AreaTuple>& b, const std::vector<AreaTuple>& c, bool accumulate,
             bool transposed, const std::vector<std::pair<int, int>>& waits, bool remote,
             int counter, std::vector<int> rings, int merge, std::vector<int> needs) {
            LaneTask task{id,      Duty(duty), areas(a),         areas(b), areas(c), accumulate,
                          transposed, {},      remote,           counter,  std::move(rings),
                          merge,   std::move(needs)};
            for (const auto& [rank, index] : waits) task.waits.push_back({rank, index});
            lane.tasks.push_back(std::move(task));
          },
          "id"_a, "duty"_a, "a"_a, "b"_a, "c"_a, "accumulate"_a, "transposed"_a, "waits"_a,
          "remote"_a, "counter"_a, "rings"_a, "merge"_a, "needs"_a)
      .def(
          "add_stretch",
          [](Lane& lane, int first, int count, bool loose) {
            lane.stretches.push_back({first, count, loose});
          },
          "first"_a, "count"_a, "loose"_a)
      .def("next_run", &Lane::next_run, "ready"_a);

  nb::class_<LaneRun>(m, "LaneRun")
      .def(
          "__init__",
          [](LaneRun* run, Fabric& fabric, std::shared_ptr<Lane> lane, RunningCall& copies,
             const nb::list& buffers) {
            new (run) LaneRun(fabric, std::move(lane), copies.call, matrices(buffers));
          },
          "fabric"_a, "lane"_a, "copies"_a, "buffers"_a, nb::keep_alive<1, 2>())
      .def(
          "go", [](LaneRun& run) { return result(run.go()); }, Unlocked())
      .def_prop_ro("at", &LaneRun::at)
      .def_prop_ro("spans", [](LaneRun& run) {
        std::vector<std::tuple<std::vector<int>, int64_t, int64_t>> spans;
        for (const LaneRun::Span& s : run.spans()) spans.emplace_back(s.tasks, s.start, s.end);
        return spans;
      });

  nb::class_<LaneCall>(m, "LaneCall")
      .def(
          "__init__",
          [](LaneCall* call, Fabric& fabric, std::shared_ptr<Lane> lane,
             std::shared_ptr<Program> copies, uint64_t signature, nb::bytes blob,
             std::vector<uint64_t> signatures) {
            new (call) LaneCall(fabric, std::move(lane), std::move(copies), signature,
                                std::string(blob.c_str(), blob.size()), std::move(signatures));
          },
          "fabric"_a, "lane"_a, "copies"_a, "signature"_a, "blob"_a, "signatures"_a,
          nb::keep_alive<1, 2>())
      .def(
          "start",
          [](LaneCall& call, uint64_t number, int64_t patience, const nb::list& buffers,
             const std::vector<uint64_t>& offsets) {
            std::vector<Matrix> made = matrices(buffers);
            nb::gil_scoped_release unlocked;
            return result(call.start(number, patience, std::move(made), offsets));
          },
          "number"_a, "patience"_a, "buffers"_a, "offsets"_a)
      .def(
          "go", [](LaneCall& call) { return result(call.go()); }, Unlocked())
      .def_prop_ro("at", &LaneCall::at)
      .def_prop_ro("copies", [](LaneCall& call) -> nb::object {
        return call.call() ? nb::cast(RunningCall{call.call()}) : nb::none();
      });
}
