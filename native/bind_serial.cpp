// The Python face of serial calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "serial_call.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

void bind_serial(nb::module_& m) {
  m.def(
      "serial_product",  // c = a @ b, as serial calls make it
      [](int dtype, nb::handle a, nb::handle b, nb::handle c) {
        const Matrix x = matrix_of(a), w = matrix_of(b), y = matrix_of(c);
        nb::gil_scoped_release unlocked;
        serial_product(Dtype(dtype), x, w, y);
      },
      "dtype"_a, "a"_a, "b"_a, "c"_a);

  nb::class_<Exchange>(m, "Exchange")
      .def(
          "__init__",
          [](Exchange* self, int kind, int dtype, int item, bool holds_core, bool uneven,
             bool moves, std::vector<uint64_t> sizes, std::vector<uint64_t> given,
             std::vector<uint64_t> taken, std::vector<uint64_t> expected) {
            new (self) Exchange{Kind(kind),       Dtype(dtype),     uint64_t(item),
                                holds_core,       uneven,           moves,
                                std::move(sizes), std::move(given), std::move(taken),
                                std::move(expected)};
          },
          "kind"_a, "dtype"_a, "item"_a, "holds_core"_a, "uneven"_a, "moves"_a, "sizes"_a,
          "given"_a, "taken"_a, "expected"_a)
      .def(
          "start",  // None if the collective of a call is over, else its job
          [](const Exchange& exchange, Channel& channel, uint64_t call, int64_t patience,
             uint64_t in, uint64_t out, bool record) {
            std::shared_ptr<Job> job;
            nb::gil_scoped_release unlocked;
            const Outcome outcome =
                exchange.start(channel, call, patience, reinterpret_cast<char*>(in),
                               reinterpret_cast<char*>(out), record, job);
            return outcome.code == Code::ok && !record ? nullptr : job;
          },
          "channel"_a, "call"_a, "patience"_a, "source"_a, "target"_a, "record"_a);

  nb::class_<SerialCall>(m, "SerialCall")
      .def(
          "__init__",
          [](SerialCall* call, Fabric& fabric, Channel& channel,
             std::shared_ptr<Exchange> exchange, bool gathers, uint64_t signature,
             nb::bytes blob) {
            new (call) SerialCall(fabric, channel, std::move(exchange), gathers, signature,
                                  std::string(blob.c_str(), blob.size()));
          },
          "fabric"_a, "channel"_a, "exchange"_a, "gathers"_a, "signature"_a, "blob"_a,
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "start",
          [](SerialCall& call, uint64_t number, int64_t patience, nb::handle x,
             nb::handle between, const nb::list& weights, const nb::list& results) {
            SerialOperands operands{matrix_of(x), matrix_of(between), matrices(weights),
                                    matrices(results)};
            nb::gil_scoped_release unlocked;
            return result(call.start(number, patience, std::move(operands)));
          },
          "number"_a, "patience"_a, "x"_a, "between"_a, "weights"_a, "results"_a)
      .def(
          "go", [](SerialCall& call) { return result(call.go()); }, Unlocked());
}
