// The Python face of the kernels that communicate by themselves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "fused.h"
#include "team.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

using EndTuple = std::tuple<int, int, uint64_t, uint64_t>;
using PieceTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, EndTuple>;
using Waits = std::vector<std::pair<int, int>>;

End end_of(const EndTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
}

const char* pointer(uint64_t address) { return reinterpret_cast<const char*>(address); }

const Kernels& kernels_of(const std::string& name) {
  if (name.empty()) return best_kernels();
  const Kernels* found = find_kernels(name.c_str());
  if (!found) throw std::invalid_argument("there are no kernels " + name + " for this processor");
  return *found;
}

Step step_of(Work work, const Waits& waits, int counter) {
  Step step;
  step.work = work;
  step.counter = counter;
  for (const auto& [rank, index] : waits) step.waits.push_back({rank, index});
  return step;
}

Step make_step(int work, const std::vector<PieceTuple>& pieces, const Waits& waits, int counter) {
  Step step = step_of(Work(work), waits, counter);
  for (const auto& [first, column, rows, columns, target] : pieces)
    step.pieces.push_back({first, column, rows, columns, end_of(target)});
  return step;
}

Weight weight_of(uint64_t data, int type, bool transposed, uint64_t pitch, uint64_t k,
                 uint64_t scale) {
  return {pointer(data), Type(type), transposed, pitch, k,
          reinterpret_cast<const float*>(pointer(scale))};
}

// The number of a dtype among those of the kernels; -1 where they have none.
int type_of(Dtype dtype) {
  if (dtype == Dtype::f32) return int(Type::f32);
  if (dtype == Dtype::bf16) return int(Type::bf16);
  return dtype == Dtype::f16 ? int(Type::f16) : -1;
}

bool is_vector(nb::handle tensor, TensorView& into) {
  return view_any(tensor, into) && into.dimensions == 1;
}

bool is_whole(const TensorView& v) { return v.dtype == Dtype::i32 || v.dtype == Dtype::i64; }

// Adds a table and its bags. False, and nothing is added, unless they are just as kernels take them.
bool add_viewed(Bags& bags, nb::handle table, nb::handle indices, nb::handle offsets,
                nb::handle weights, int pooling, int out, uint64_t& column) {
  TensorView t, i, o, w;
  if (!view_any(table, t) || t.dimensions != 2 || type_of(t.dtype) < 0) return false;
  const uint64_t rows = uint64_t(t.shape[0]), dim = uint64_t(t.shape[1]);
  if (!is_vector(indices, i) || !is_vector(offsets, o) || !is_whole(i) || !is_whole(o)) return false;
  const uint64_t num_indices = uint64_t(i.shape[0]);
  if (!weights.is_none()) {
    if (!is_vector(weights, w) || w.dtype != t.dtype) return false;
    if (uint64_t(w.shape[0]) != num_indices) return false;
  }
  bags.add({t.data, Type(type_of(t.dtype)), rows, dim, column, i.data, i.dtype == Dtype::i64,
            num_indices, o.data, o.dtype == Dtype::i64, uint64_t(o.shape[0]), w.data,
            Pooling(pooling), Type(out)});
  column += dim;
  return true;
}

// The bags of lists of tensors; None unless all of them are just as kernels take them.
std::shared_ptr<Bags> bags_of(const nb::list& tables, const nb::list& indices,
                              const nb::list& offsets, nb::handle weights,
                              const std::vector<int>& poolings, int out) {
  const size_t count = poolings.size();
  const bool weighted = !weights.is_none();
  if (tables.size() != count || indices.size() != count || offsets.size() != count) return nullptr;
  if (weighted && (!nb::isinstance<nb::list>(weights) || nb::len(weights) != count)) return nullptr;
  auto bags = std::make_shared<Bags>();
  uint64_t column = 0;
  for (size_t i = 0; i < count; ++i) {
    const nb::object weight = weighted ? nb::object(weights[i]) : nb::none();
    if (!add_viewed(*bags, tables[i], indices[i], offsets[i], weight, poolings[i], out, column))
      return nullptr;
  }
  return bags;
}

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("kernel_names", [] {
    std::vector<std::string> names;
    for (const char* name : {"avx512", "avx2", "portable"})
      if (find_kernels(name)) names.emplace_back(name);
    return names;
  });

  nb::class_<Bags>(m, "Bags")
      .def(
          "check", [](const Bags& bags) { return bags.check(best_kernels()); }, Unlocked())
      .def(
          "pool",
          [](const Bags& bags, uint64_t first, uint64_t count, uint64_t column, uint64_t columns,
             uint64_t target, uint64_t pitch, int threads, const std::string& kernels) {
            bags.pool(kernels_of(kernels), first, count, column, columns,
                      reinterpret_cast<char*>(target), pitch, threads);
          },
          "first"_a, "bags"_a, "column"_a, "columns"_a, "target"_a, "pitch"_a, "threads"_a = 1,
          "kernels"_a = "",
          Unlocked())
      .def(
          "spread",
          [](const Bags& bags, size_t table, uint64_t from, uint64_t pitch, uint64_t target,
             int threads) {
            bags.spread(best_kernels(), table, pointer(from), pitch,
                        reinterpret_cast<char*>(target), threads);
          },
          "table"_a, "bags"_a, "pitch"_a, "target"_a, "threads"_a = 1, Unlocked());

  m.def("bags_of", &bags_of, "tables"_a, "indices"_a, "offsets"_a, "weights"_a.none(), "poolings"_a,
        "out"_a);

  nb::class_<Kernel>(m, "Kernel")
      .def("__init__", [](Kernel* k, int type) { new (k) Kernel{Type(type), {}}; }, "type"_a)
      .def(
          "add_pieces",  // work 0: products, 1: bags; 3: only a wait; 4: products of the caller
          [](Kernel& kernel, int work, const std::vector<PieceTuple>& pieces, const Waits& waits,
             int counter) { kernel.steps.push_back(make_step(work, pieces, waits, counter)); },
          "work"_a, "pieces"_a, "waits"_a, "counter"_a)
      .def(
          "add_sum",
          [](Kernel& kernel, const std::vector<EndTuple>& sources,
             const std::vector<EndTuple>& targets, uint64_t rows, uint64_t columns,
             const Waits& waits, int counter) {
            Step step = step_of(Work::add, waits, counter);
            for (const auto& t : sources) step.sources.push_back(end_of(t));
            for (const auto& t : targets) step.targets.push_back(end_of(t));
            step.rows = rows;
            step.columns = columns;
            kernel.steps.push_back(std::move(step));
          },
          "sources"_a, "targets"_a, "rows"_a, "columns"_a, "waits"_a, "counter"_a);

  nb::class_<Operands>(m, "Operands")
      .def(nb::init<>())
      .def(
          "set_product",
          [](Operands& o, uint64_t x, uint64_t rows, uint64_t x_pitch, uint64_t w, int type,
             bool transposed, uint64_t pitch, uint64_t k, uint64_t scale) {
            o.x = pointer(x);
            o.x_rows = rows;
            o.x_pitch = x_pitch;
            o.weight = weight_of(w, type, transposed, pitch, k, scale);
          },
          "x"_a, "rows"_a, "x_pitch"_a, "w"_a, "type"_a, "transposed"_a, "pitch"_a, "k"_a,
          "scale"_a)
      .def_rw("threads", &Operands::threads)
      .def("set_bags", [](Operands& o, std::shared_ptr<Bags> bags) { o.bags = std::move(bags); });

  nb::class_<KernelRun>(m, "KernelRun")
      .def(
          "__init__",
          [](KernelRun* run, Fabric& fabric, std::shared_ptr<Kernel> kernel,
             const std::string& kernels, uint64_t call, int64_t deadline,
             const std::vector<uint64_t>& pointers, const std::vector<uint64_t>& signatures,
             const Operands& operands, bool record) {
            std::vector<char*> addresses;
            for (uint64_t p : pointers) addresses.push_back(reinterpret_cast<char*>(p));
            new (run) KernelRun(fabric, std::move(kernel), kernels_of(kernels), call, deadline,
                                std::move(addresses), signatures, operands, record);
          },
          "fabric"_a, "kernel"_a, "kernels"_a, "call"_a, "deadline"_a, "pointers"_a, "signatures"_a,
          "operands"_a, "record"_a, nb::keep_alive<1, 2>())
      .def(
          "go",
          [](KernelRun& run) { return result(run.go()); }, Unlocked())
      .def_prop_ro("at", &KernelRun::at)
      .def_prop_ro("spans", &KernelRun::spans);

  nb::class_<Repeat>(m, "Repeat")
      .def(
          "__init__",
          [](Repeat* repeat, std::shared_ptr<Kernel> kernel, const std::string& kernels,
             uint64_t signature, nb::bytes blob, const std::vector<uint64_t>& signatures,
             uint64_t partial) {
            new (repeat) Repeat(std::move(kernel), kernels_of(kernels), signature,
                                std::string(blob.c_str(), blob.size()), signatures,
                                reinterpret_cast<char*>(partial));
          },
          "kernel"_a, "kernels"_a, "signature"_a, "blob"_a, "signatures"_a, "partial"_a)
      .def(
          "start",
          [](Repeat& repeat, Fabric& fabric, uint64_t call, int64_t patience, uint64_t x,
             uint64_t rows, uint64_t x_pitch, uint64_t w, int type, bool transposed,
             uint64_t pitch, uint64_t k, uint64_t scale, uint64_t y, uint64_t inbox,
             uint64_t inbox_offset, uint64_t y_offset, int threads) {
            Operands operands;
            operands.threads = threads;
            operands.x = pointer(x);
            operands.x_rows = rows;
            operands.x_pitch = x_pitch;
            operands.weight = weight_of(w, type, transposed, pitch, k, scale);
            return result(repeat.start(fabric, call, patience, operands,
                                       reinterpret_cast<char*>(y), reinterpret_cast<char*>(inbox),
                                       inbox_offset, y_offset));
          },
          Unlocked())
      .def(
          "pool",  // the same for bags; pointers: the buffers of the kernel
          [](Repeat& repeat, Fabric& fabric, uint64_t call, int64_t patience,
             std::shared_ptr<Bags> bags, const std::vector<uint64_t>& pointers,
             const std::vector<uint64_t>& offsets, int threads) {
            Operands operands;
            operands.threads = threads;
            operands.bags = std::move(bags);
            std::vector<char*> addresses;
            for (uint64_t p : pointers) addresses.push_back(reinterpret_cast<char*>(p));
            return result(repeat.start(fabric, call, patience, operands, std::move(addresses), offsets));
          },
          Unlocked())
      .def(
          "go",
          [](Repeat& repeat) { return result(repeat.go()); }, Unlocked());

  m.def(
      "multiply",  // x [rows, k] in float32 by a weight, into float32; for tests and measurements
      [](uint64_t x, uint64_t rows, uint64_t w, int type, bool transposed, uint64_t pitch,
         uint64_t k, uint64_t scale, uint64_t columns, uint64_t out, int threads,
         const std::string& kernels) {
        multiply(kernels_of(kernels), threads, reinterpret_cast<const float*>(pointer(x)), k, rows,
                 weight_of(w, type, transposed, pitch, k, scale), 0, columns,
                 reinterpret_cast<float*>(out), columns);
      },
      "x"_a, "rows"_a, "w"_a, "type"_a, "transposed"_a, "pitch"_a, "k"_a, "scale"_a, "columns"_a,
      "out"_a, "threads"_a = 1, "kernels"_a = "", Unlocked());

  m.def("has_team", &has_team);  // whether kernels can use the threads of torch's operators

  m.def("num_process_cores", [] {
    const cpu_set_t cores = process_cores();
    return CPU_COUNT(&cores);
  });

  m.def(
      "is_set",  // whether the environment has a variable, without a word where it has not
      [](const char* name) { return std::getenv(name) != nullptr; }, "name"_a);

  m.def(
      "advise_huge",  // asks for large pages for memory that has not been touched yet
      [](uint64_t address, uint64_t size) {
        constexpr uint64_t kHuge = 2 << 20;
        const uint64_t first = (address + kHuge - 1) / kHuge * kHuge;
        const uint64_t end = (address + size) / kHuge * kHuge;
        if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
      },
      "address"_a, "size"_a);

  m.def(
      "same_samples",  // whether elements of w [k, n], spread over it, are those of its pack [n, k]
      [](uint64_t w, uint64_t row, uint64_t column, uint64_t packed, uint64_t k, uint64_t n,
         uint64_t item, uint64_t count) {
        const uint64_t total = k * n, step = std::max<uint64_t>(1, total / count) | 1;
        for (uint64_t i = 0; i < total; i += step) {
          const uint64_t at_k = i / n, at_n = i % n;
          const char* ours = pointer(w) + (at_k * row + at_n * column) * item;
          if (std::memcmp(ours, pointer(packed) + (at_n * k + at_k) * item, item) != 0)
            return false;
        }
        return true;
      },
      "w"_a, "row"_a, "column"_a, "packed"_a, "k"_a, "n"_a, "item"_a, "count"_a);
}
