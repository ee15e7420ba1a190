// Known calls of operators from their arguments to their result, in one call from Python.
//
// With one or two rows, a product takes as long as a hundred steps of Python. So a serial call that a
// rank has made before is recognised here, by the layouts of its arguments, and carried out. Whatever is
// unusual (a mode of torch, a profiler, a recording, an outcome other than ok) is left to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings.h"
#include "serial_call.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

// What decides beside the arguments. The references stay for as long as the process.
struct Watched {
  PyObject* records = nullptr;       // a function: whether autograd records operators
  std::vector<PyObject*> modes;      // functions: whether a mode of torch must see every call
  struct State {
    PyObject *variables, *name, *usual;
  };
  std::vector<State> states;         // variables of modules, and the value that they usually have
  PyObject* groups = nullptr;        // has the default group
} watched;

PyObject* keep(nb::handle object) {
  Py_INCREF(object.ptr());
  return object.ptr();
}

// Whether nothing but the arguments decides about a call. graph: whether autograd records it.
bool is_usual(bool& graph) {
  const auto says = [](PyObject* function, bool& answer) {
    PyObject* found = PyObject_CallNoArgs(function);
    if (found == nullptr) PyErr_Clear();
    answer = found != Py_False;
    Py_XDECREF(found);
  };
  if (watched.records == nullptr || std::getenv("WEFT_SCHEDULE") != nullptr) return false;
  for (const Watched::State& one : watched.states)
    if (PyDict_GetItem(one.variables, one.name) != one.usual) return false;
  for (PyObject* mode : watched.modes) {
    bool active;
    says(mode, active);
    if (active) return false;
  }
  says(watched.records, graph);
  return true;
}

// A serial call with one weight, all of it but its operands.
struct Known {
  nb::object call;     // a SerialCall
  nb::object block;    // the private memory of `between`
  nb::object make;     // makes the result
  nb::object holds;    // whether the next such call is to be made like this
  nb::object ended;    // is told when a call started that has ended
  nb::object otherwise;  // goes on after any other outcome than ok
  nb::object break_off;  // ends a call after an exception
  Matrix between;
};

int64_t nanoseconds(double seconds) {
  constexpr double kForever = 4611686018427387904.0;  // as in fabric/deadlines.py
  return int64_t(std::min(seconds * 1e9, kForever));
}

double seconds_now() { return double(now_ns()) * 1e-9; }  // as time.perf_counter

// The known calls of one group.
class KnownCalls {
 public:
  KnownCalls(nb::object fabric, nb::object group)
      : fabric_(std::move(fabric)), group_(std::move(group)), process_(getpid()) {
    const nb::object lock = fabric_.attr("lock");
    acquire_ = lock.attr("acquire");
    release_ = lock.attr("release");
    memory_ = fabric_.attr("memory");
    all().push_back(this);
  }
  ~KnownCalls() { std::erase(all(), this); }
  KnownCalls(const KnownCalls&) = delete;
  KnownCalls& operator=(const KnownCalls&) = delete;

  void remember(nb::handle arguments, bool graph, Known known) {
    std::string key;
    if (!layouts_of(arguments, graph, key)) return;
    // All calls have one block. If it was replaced, the others are not known any more.
    const bool replaced = !calls_.empty() && !calls_.begin()->second->block.is(known.block);
    if (replaced || calls_.size() >= kMost) forget();
    calls_[std::move(key)] = std::make_shared<const Known>(std::move(known));
  }
  void forget() {
    const auto gone = std::move(calls_);  // their end may run Python, which may look here
    calls_.clear();
  }

  static KnownCalls* of(PyObject* group) {
    for (KnownCalls* one : all())
      if (PyWeakref_GetObject(one->group_.ptr()) == group && one->process_ == getpid()) return one;
    return nullptr;
  }

  // The result of a call, or nothing if it is not known.
  nb::object again(nb::handle arguments, bool graph) {
    thread_local std::string key;
    key.clear();
    if (!layouts_of(arguments, graph, key)) return nb::none();
    const auto found = calls_.find(key);
    if (found == calls_.end()) return nb::none();
    const std::shared_ptr<const Known> known = found->second;  // Python may forget it meanwhile
    if (known->holds.is_valid() && !known->holds.is_none() && !nb::cast<bool>(known->holds()))
      return nb::none();
    const double started = seconds_now();
    nb::object y;
    try {
      y = known->make();
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;  // an interrupt
      return nb::none();  // no memory: the usual path fails too, and informs all ranks
    }
    acquire_();
    struct Release {
      nb::object& release;
      ~Release() {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        Py_XDECREF(PyObject_CallNoArgs(release.ptr()));
        PyErr_Restore(kind, value, trace);
      }
    } releases{release_};
    static PyObject *const number_name = name_of("number"), *const broken = name_of("broken"),
                           *const deadline = name_of("deadline"), *const kept = name_of("kept");
    if (!nb::getattr(fabric_, broken).is_none()) return nb::none();
    if (!nb::getattr(memory_, kept).is(known->block)) return nb::none();
    const uint64_t number = nb::cast<uint64_t>(nb::getattr(fabric_, number_name)) + 1;
    nb::setattr(fabric_, number_name, nb::int_(number));
    const int64_t patience = nanoseconds(nb::cast<double>(nb::getattr(fabric_, deadline)));
    nb::object outcome;
    try {
      PyObject* w = PyTuple_GET_ITEM(arguments.ptr(), kWeight);
      if (PyList_CheckExact(w)) w = PyList_GET_ITEM(w, 0);
      SerialOperands operands{matrix_of(PyTuple_GET_ITEM(arguments.ptr(), kX)), known->between,
                              {matrix_of(w)}, {matrix_of(y)}};
      SerialCall& call = *nb::inst_ptr<SerialCall>(known->call);
      Outcome made;
      {
        nb::gil_scoped_release unlocked;
        made = call.start(number, patience, std::move(operands));
      }
      if (made.code == Code::ok) {
        known->ended(started);
        return y;
      }
      outcome = nb::cast(result(made));
    } catch (const nb::python_error&) {
      throw;
    } catch (const std::exception& error) {
      outcome = nb::str(error.what());
    }
    // Its peers may expect another call from now on. Python knows, and remembers the next one anew.
    const auto now = calls_.find(key);
    if (now != calls_.end() && now->second == known) calls_.erase(now);
    try {
      return known->otherwise(arguments, y, started, number, outcome);
    } catch (nb::python_error& error) {
      // An interrupt may be raised before `otherwise` has begun. The channel must let go of the operands.
      known->break_off(number, error.value());
      throw;
    }
  }

 private:
  static constexpr int kX = 2, kWeight = 3;  // among the arguments, after the operator and the schedule
  static constexpr size_t kMost = 1024;

  static std::vector<KnownCalls*>& all() {
    static std::vector<KnownCalls*> open;
    return open;
  }

  nb::object fabric_, group_, acquire_, release_, memory_;
  pid_t process_;
  std::unordered_map<std::string, std::shared_ptr<const Known>> calls_;
};

nb::object again(nb::handle group, nb::handle arguments) {
  bool graph;
  if (!is_usual(graph)) return nb::none();
  static PyObject* const default_group = name_of("default_pg");
  nb::object asked = group.is_none() ? nb::object(nb::getattr(watched.groups, default_group))
                                     : nb::borrow(group);
  if (asked.is_none()) return nb::none();  // as are references to groups that are gone
  KnownCalls* calls = KnownCalls::of(asked.ptr());
  return calls == nullptr ? nb::none() : calls->again(arguments, graph);
}

}  // namespace

void bind_known(nb::module_& m) {
  m.def(
      "watch",
      [](nb::handle records, const std::vector<nb::object>& modes,
         const std::vector<nb::tuple>& states, nb::handle groups) {
        watched = {keep(records), {}, {}, keep(groups)};
        for (const nb::object& mode : modes) watched.modes.push_back(keep(mode));
        for (const nb::tuple& one : states)
          watched.states.push_back({keep(one[0]), keep(one[1]), keep(one[2])});
      },
      "records"_a, "modes"_a, "states"_a, "groups"_a);

  m.def(
      "layouts_of",
      [](nb::handle arguments, bool graph) -> nb::object {
        std::string made;
        if (!layouts_of(arguments, graph, made)) return nb::none();
        return nb::bytes(made.data(), made.size());
      },
      "arguments"_a, "graph"_a);

  m.def("again", &again, "group"_a.none(), "arguments"_a);

  nb::class_<KnownCalls>(m, "KnownCalls")
      .def(nb::init<nb::object, nb::object>(), "fabric"_a, "group"_a)
      .def(
          "remember",
          [](KnownCalls& calls, nb::handle arguments, bool graph, nb::object call, nb::object block,
             nb::handle between, nb::object make, nb::object holds, nb::object ended,
             nb::object otherwise, nb::object break_off) {
            calls.remember(
                arguments, graph,
                {std::move(call), std::move(block), std::move(make), std::move(holds), std::move(ended),
                 std::move(otherwise), std::move(break_off), matrix_of(between)});
          },
          "arguments"_a, "graph"_a, "call"_a, "block"_a, "between"_a, "make"_a, "holds"_a.none(),
          "ended"_a, "otherwise"_a, "break_off"_a)
      .def("forget", &KnownCalls::forget);
}
