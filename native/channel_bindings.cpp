// The Python face of the channel: jobs from pointers and sizes, submitted and waited for.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "channel.h"
#include "messages.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

using Result = std::pair<int, int>;
Result result(const Outcome& outcome) { return {int(outcome.code), outcome.rank}; }
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

char* pointer(uint64_t address) { return reinterpret_cast<char*>(address); }

// One piece per size, one after the other from an address on, or each at its own address.
std::vector<Piece> pieces(const std::vector<uint64_t>& at, const std::vector<uint64_t>& sizes) {
  std::vector<Piece> made;
  made.reserve(sizes.size());
  uint64_t offset = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    made.push_back({at.size() == 1 ? pointer(at[0]) + offset : pointer(at[i]), sizes[i]});
    offset += sizes[i];
  }
  return made;
}

// As many pieces of one size, one after the other.
void lay(std::vector<Piece>& into, uint64_t at, int count, uint64_t bytes) {
  for (int i = 0; i < count; ++i) into.push_back({pointer(at + uint64_t(i) * bytes), bytes});
}

std::shared_ptr<Job> describe(std::shared_ptr<Job> job, int kind, int dtype, int item,
                              int reduction, int root, bool holds_core, int64_t patience) {
  job->kind = Kind(kind);
  job->dtype = Dtype(dtype);
  job->item = uint64_t(item);
  job->reduction = Reduction(reduction);
  job->root = root;
  job->holds_core = holds_core;
  job->patience = patience;
  return job;
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Job>(m, "Job")
      .def_prop_ro("done", [](Job& j) { return j.done.load(); })
      .def_prop_ro("outcome", [](Job& j) { return result(j.outcome); })
      .def_prop_ro("number", [](Job& j) { return j.number; })
      .def_prop_ro("words", [](Job& j) { return j.words; });

  m.def("can_reduce",
        [](int dtype, int reduction) { return can_reduce(Dtype(dtype), Reduction(reduction)); });

  nb::class_<Channel>(m, "Channel")
      .def(nb::init<Fabric&, int64_t, bool>(), "fabric"_a, "spin_ns"_a, "crowded"_a,
           nb::keep_alive<1, 2>())
      .def(
          "alike",  // a collective in which all ranks have the same sizes, in one call where quick
          [](Channel& c, int world, int kind, int dtype, int item, int reduction, int root,
             bool holds_core, int64_t patience, uint64_t in, uint64_t out, uint64_t bytes,
             bool background) -> std::shared_ptr<Job> {
            auto job = describe(background ? std::make_shared<Job>() : c.spare(), kind, dtype, item,
                                reduction, root, holds_core, patience);
            const bool gathers = job->kind == Kind::all_gather || job->kind == Kind::gather;
            const bool scatters = job->kind == Kind::reduce_scatter ||
                                  job->kind == Kind::scatter || job->kind == Kind::all_to_all;
            const bool spreads = gathers || job->kind == Kind::all_to_all;
            if (job->kind == Kind::all_to_all || !(gathers || scatters)) {
              job->sizes.push_back(bytes);
            } else {
              job->sizes.assign(size_t(world), bytes);
            }
            if (in) lay(job->in, in, scatters ? world : 1, bytes);
            if (out) lay(job->out, out, spreads ? world : 1, bytes);
            nb::gil_scoped_release unlocked;
            c.submit(job, background);
            if (background) return job;
            const Outcome outcome = c.wait(*job, INT64_MAX);
            return outcome.code == Code::ok ? nullptr : job;
          })
      .def(
          "various",  // sizes by rank, and pieces wherever they lie
          [](Channel& c, int kind, int dtype, int item, int reduction, int root, bool holds_core,
             int64_t patience, bool uneven, const std::vector<uint64_t>& sizes,
             const std::vector<uint64_t>& in_at, const std::vector<uint64_t>& in_sizes,
             const std::vector<uint64_t>& out_at, const std::vector<uint64_t>& out_sizes,
             bool background) {
            auto job = describe(std::make_shared<Job>(), kind, dtype, item, reduction, root, holds_core, patience);
            job->uneven = uneven;
            job->sizes = sizes;
            job->in = pieces(in_at, in_sizes);
            job->out = pieces(out_at, out_sizes);
            nb::gil_scoped_release unlocked;
            c.submit(job, background);
            return job;
          })
      .def("refuse",
           [](Channel& c, const std::string& words, int64_t patience, bool background) {
             auto job = describe(std::make_shared<Job>(), int(Kind::refused), int(Dtype::other), 1, 0, 0, false, patience);
             job->words = words;
             c.submit(job, background);
             return job;
           })
      .def(
          "wait", [](Channel& c, Job& j, int64_t until) { return result(c.wait(j, until)); },
          Unlocked())
      .def(
          "withdraw", [](Channel& c, Job& j) { return c.withdraw(j); }, Unlocked())
      .def(
          "abort", [](Channel& c) { c.abort(); }, Unlocked())
      .def("late", [](Channel& c, Job& j) { return c.late(j); });

  nb::class_<Message>(m, "Message")
      .def_prop_ro("done", [](Message& message) { return message.done.load(); })
      .def_prop_ro("source", [](Message& message) { return message.source; })
      .def_prop_ro("total", [](Message& message) { return message.total; });

  nb::class_<Messages>(m, "Messages")
      .def(nb::init<Fabric&, int64_t, bool>(), "fabric"_a, "spin_ns"_a, "crowded"_a,
           nb::keep_alive<1, 2>())
      .def("start",
           [](Messages& all, bool sends, int peer, uint64_t tag, uint64_t data, uint64_t bytes,
              int64_t patience, bool background) {
             auto message = std::make_shared<Message>();
             message->peer = peer;
             message->tag = tag;
             message->data = pointer(data);
             message->bytes = bytes;
             message->deadline = now_ns() + patience;
             nb::gil_scoped_release unlocked;
             if (sends) {
               all.send(message, background);
             } else {
               all.receive(message, background);
             }
             return message;
           })
      .def(
          "wait",
          [](Messages& all, Message& message, int64_t until) {
            return result(all.wait(message, until));
          },
          Unlocked())
      .def(
          "abort", [](Messages& all) { all.abort(); }, Unlocked());
}
