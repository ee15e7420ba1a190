// The Python face of the native part. It takes pointers as integers and does not link to torch, so
// that one build serves every torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "moving.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

// Gives a block back when the last tensor on it is gone; keeps the heap mapped until then.
struct Block {
  std::shared_ptr<Heap> heap;
  uint64_t offset, size;
  ~Block() { heap->free(offset); }
};

// What a rank's header says of its sizes is checked before it is used, whatever wrote it.
[[noreturn]] void raise_corrupt(int rank) {
  const std::string text = "rank " + std::to_string(rank) +
                           " has a header that does not fit its memory; look for what overwrote it";
  const nb::object error = nb::module_::import_("weft.errors").attr("PeerLost")(text, rank);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

char* peer_buffer(Fabric& fabric, uint64_t call, int rank, int slot, uint64_t bytes) {
  if (rank < 0 || rank >= fabric.heap().world() || slot < 0 || slot >= kMaxSlots)
    throw nb::index_error("there is no such buffer");
  char* data = fabric.heap().buffer(call, rank, slot, bytes);
  if (!data) raise_corrupt(rank);
  return data;
}

}  // namespace

NB_MODULE(_native, m) {
  // A script may end while works and tensors are still referred to; that is no fault to report.
  nb::set_leak_warnings(false);
  m.doc() = "weft's native host fabric: heap, signals, engines, links.";
  m.attr("VERSION") = WEFT_VERSION;
  m.attr("MAX_WORLD") = kMaxWorld;
  m.attr("MAX_SLOTS") = kMaxSlots;
  m.attr("MAX_COUNTERS") = kMaxCounters;
  m.attr("MAX_BLOB") = kMaxBlob;
  m.def("now_ns", &now_ns);
  m.def("is_dying", &is_dying, "pid"_a);
  m.def("own_now_ns", [] { return own_time.now(); });
  m.def("slept", [](int64_t began, int64_t due) { own_time.slept(began, due); }, "began"_a, "due"_a);
  nb::list points;
  for (const char* name : kPointNames) points.append(name);
  m.attr("POINTS") = nb::tuple(points);
  m.def(
      "set_trap",  // for tests: see points.h
      [](int point, int times, int signal) {
        trap.left.store(times);
        trap.signal.store(signal);
        trap.point.store(point);
      },
      "point"_a, "times"_a, "signal"_a);
  m.def("create_heap", &Heap::create, "world"_a, "span"_a);

  nb::class_<Block>(m, "Block")
      .def_ro("offset", &Block::offset)
      .def_ro("size", &Block::size)
      .def_prop_ro("pointer",
                   [](Block& b) { return uint64_t(b.heap->base(b.heap->rank()) + b.offset); })
      .def("array", [](nb::object self) {
        Block& b = nb::cast<Block&>(self);
        char* data = b.heap->base(b.heap->rank()) + b.offset;
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(b.size)}, self);
      });

  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def(
          "add",
          [](Program& p, int lane, int task, bool holds_core,
             std::tuple<int, int, uint64_t, uint64_t> source,
             std::tuple<int, int, uint64_t, uint64_t> target, uint64_t rows, uint64_t row_bytes,
             const std::vector<std::pair<int, int>>& waits, int counter,
             const std::vector<int>& rings) {
            const auto end = [](const auto& t) {
              return End{std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
            };
            Command command{task, holds_core, end(source), end(target), rows,
                            row_bytes, {}, counter, rings};
            for (const auto& [rank, index] : waits) command.waits.push_back({rank, index});
            p.lanes[lane].push_back(std::move(command));
          },
          "lane"_a, "task"_a, "holds_core"_a, "source"_a, "target"_a, "rows"_a, "row_bytes"_a,
          "waits"_a, "counter"_a, "rings"_a);

  nb::class_<RunningCall>(m, "Call").def_prop_ro("spans", [](RunningCall& c) {
    std::lock_guard lock(c.call->mutex);
    std::vector<std::tuple<int, int64_t, int64_t>> spans;
    for (const Span& s : c.call->spans) spans.emplace_back(s.task, s.start, s.end);
    return spans;
  });

  nb::class_<Fabric>(m, "Fabric")
      .def(nb::init<int, int, int, uint64_t, int64_t, int64_t, int>(), "fd"_a, "rank"_a,
           "world"_a, "span"_a, "spin_ns"_a, "engine_spin_ns"_a, "cores"_a = 1)
      .def("leave", [](Fabric& f) { f.heap().leave(); })
      .def("watch",
           [](Fabric& f, int rank, int pidfd, int pid) { f.heap().watch(rank, pidfd, pid); })
      .def("set_link",
           [](Fabric& f, double bandwidth, int64_t latency_ns, int topology) {
             f.links().set(bandwidth, latency_ns, Topology(topology));
           })
      .def("allocate",
           [](Fabric& f, uint64_t size) {
             const uint64_t offset = f.heap().allocate(size);
             return new Block{f.heap_owner(), offset, size};
           })
      .def_prop_ro("allocated", [](Fabric& f) { return f.heap().allocated(); })
      .def("offset_of",  // of a pointer in this rank's part of the heap; -1 for any other
           [](Fabric& f, uint64_t pointer) -> int64_t {
             const char* p = reinterpret_cast<const char*>(pointer);
             return f.heap().contains(p) ? p - f.heap().base(f.heap().rank()) : -1;
           })
      .def(
          "stage",  // copies a private buffer into a block of this rank's part of the heap
          [](Fabric&, Block& block, uint64_t source, uint64_t size) {
            if (size > block.size) throw std::length_error("the block is too small");
            if (size == 0) return;  // an empty tensor may have no memory
            char* to = block.heap->base(block.heap->rank()) + block.offset;
            const char* from = reinterpret_cast<const char*>(source);
            by_threads(size < kTeamBytes ? 1 : team_threads(), size,
                       [&](uint64_t at, uint64_t bytes) { std::memcpy(to + at, from + at, bytes); });
          },
          Unlocked())
      .def("enter",
           [](Fabric& f, uint64_t call, uint64_t signature, const std::vector<uint64_t>& offsets,
              nb::bytes blob) {
             f.enter(call, signature, offsets, std::string(blob.c_str(), blob.size()));
           })
      .def(
          "agree",
          [](Fabric& f, uint64_t call, const std::vector<uint64_t>& signatures, int64_t deadline) {
            return result(f.agree(call, signatures, deadline));
          },
          Unlocked())
      .def("header",
           [](Fabric& f, uint64_t call, int rank) {
             const auto words = f.heap().words(call, rank);
             if (!words) raise_corrupt(rank);
             return nb::bytes(words->data(), words->size());
           })
      .def("entered",
           [](Fabric& f, int rank) { return f.heap().control(rank).entered.get(); })
      .def("peer_pointer",
           [](Fabric& f, uint64_t call, int rank, int slot) {
             return uint64_t(peer_buffer(f, call, rank, slot, 0));
           })
      .def("peer_array",
           [](nb::object self, uint64_t call, int rank, int slot, uint64_t size) {
             Fabric& f = nb::cast<Fabric&>(self);
             char* data = peer_buffer(f, call, rank, slot, size);
             return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(size)}, self);
           })
      .def("launch",
           [](Fabric& f, std::shared_ptr<Program> program, uint64_t number, int64_t deadline,
              const std::vector<uint64_t>& pointers, const std::vector<uint64_t>& signatures,
              bool record, bool small) {
             auto call = std::make_shared<Call>();
             call->program = std::move(program);
             call->number = number;
             call->deadline = deadline;
             for (uint64_t p : pointers) call->pointers.push_back(reinterpret_cast<char*>(p));
             call->signatures = signatures;
             call->record = record;
             f.launch(call, small);
             return RunningCall{call};
           },
           "program"_a, "number"_a, "deadline"_a, "pointers"_a, "signatures"_a, "record"_a,
           "small"_a = false)
      .def("is_small", &Fabric::is_small, "program"_a)
      .def("cancel", [](Fabric&, RunningCall& c) { c.call->cancel.store(true); })
      .def(
          "finish", [](Fabric& f, RunningCall& c) { return result(f.finish(*c.call)); }, Unlocked())
      .def("outcome",
           [](Fabric&, RunningCall& c) {
             std::lock_guard lock(c.call->mutex);
             return result(c.call->outcome);
           })
      .def(
          "wait",
          [](Fabric& f, RunningCall& c, int rank, int counter) {
            return result(f.wait(*c.call, rank, counter, nullptr));
          },
          Unlocked())
      .def(
          "wait_timed",
          [](Fabric& f, RunningCall& c, int rank, int counter) {
            int64_t woken_at = 0;
            f.wait(*c.call, rank, counter, &woken_at);
            return woken_at;
          },
          Unlocked())
      .def("doorbell",
           [](Fabric& f) { return f.heap().control(f.heap().rank()).doorbell.get(); })
      .def(
          "wait_doorbell",
          [](Fabric& f, RunningCall& c, uint64_t seen) { return result(f.wait_doorbell(*c.call, seen)); },
          Unlocked())
      .def("reached",  // which of these counters (rank, index) have reached the call
           [](Fabric& f, uint64_t call, const std::vector<std::pair<int, int>>& counters) {
             std::vector<bool> reached;
             reached.reserve(counters.size());
             for (const auto& [rank, index] : counters)
               reached.push_back(f.heap().control(rank).counters[index].get() >= call);
             return reached;
           })
      .def("counters",  // this rank's: value and sleepers of each, for kernels that wait by looking
           [](nb::object self) {
             Heap& heap = nb::cast<Fabric&>(self).heap();
             void* data = heap.control(heap.rank()).counters;
             return nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>(data, {kMaxCounters, 2}, self);
           })
      .def("signal",  // the end of a task of this rank's compute; gives the moment before
           [](Fabric& f, uint64_t call, int counter, const std::vector<int>& rings) {
             Heap& heap = f.heap();
             const int64_t moment = now_ns();
             come_to(Point::signal);
             heap.control(heap.rank()).counters[counter].set(call);
             for (int r : rings) heap.control(r).doorbell.add_one();
             return moment;
           })
      .def("reserve", &Fabric::reserve, "source"_a, "target"_a, "bytes"_a, "since"_a)
      .def(
          "hold",
          [](Fabric& f, uint64_t call, int64_t until, int64_t deadline) {
            return result(f.hold(call, until, deadline));
          },
          Unlocked())
      .def("done", [](Fabric& f, uint64_t call) { return result(f.done(call)); })
      .def("fail",
           [](Fabric& f, uint64_t call, int why) { f.heap().fail(call, Why(why)); })
      .def("failed", [](Fabric& f, int rank) { return f.heap().control(rank).failed.load(); })
      .def(
          "wait_released",
          [](Fabric& f, uint64_t call, int64_t deadline) {
            return result(f.wait_released(call, deadline));
          },
          Unlocked());
  bind_channel(m);
  bind_fused(m);
  bind_known(m);
  bind_lane(m);
  bind_serial(m);
}
