// The Python face of the channel: jobs from pointers and sizes, submitted and waited for.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "channel.h"
#include "messages.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

constexpr double kLongestPatience = 4e9;  // seconds: more than a century, and no overflow in ns

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

// Sizes and pieces of a job in which all ranks have the same sizes.
void lay_alike(Job& job, int world, uint64_t in, uint64_t out, uint64_t bytes) {
  const bool gathers = job.kind == Kind::all_gather || job.kind == Kind::gather;
  const bool scatters = job.kind == Kind::reduce_scatter || job.kind == Kind::scatter ||
                        job.kind == Kind::all_to_all;
  if (job.kind == Kind::all_to_all || !(gathers || scatters)) {
    job.sizes.push_back(bytes);
  } else {
    job.sizes.assign(size_t(world), bytes);
  }
  if (in) lay(job.in, in, scatters ? world : 1, bytes);
  if (out) lay(job.out, out, gathers || job.kind == Kind::all_to_all ? world : 1, bytes);
}

// Whether one tensor has the shape of another, with so many times its rows.
bool has_rows_of(const TensorView& large, const TensorView& small, int64_t times) {
  if (small.dimensions == 0 || large.dimensions != small.dimensions) return false;
  if (large.shape[0] != times * small.shape[0]) return false;
  return std::equal(large.shape + 1, large.shape + large.dimensions, small.shape + 1);
}

bool same_shape(const TensorView& x, const TensorView& out) {
  return x.dimensions == out.dimensions &&
         std::equal(x.shape, x.shape + x.dimensions, out.shape);
}

bool apart(const TensorView& x, const TensorView& out) {
  return x.data + x.bytes <= out.data || out.data + out.bytes <= x.data;
}

// The bytes that every rank knows of, of a collective that is as plain as can be: input and result
// fit, and share no memory but where the result wants its input. 0 for any other.
uint64_t plain_bytes(const Channel& c, Kind kind, const TensorView& x, const TensorView& out) {
  if (x.dtype != out.dtype) return 0;
  const int64_t world = c.world();
  switch (kind) {
    case Kind::all_gather:
      return has_rows_of(out, x, world) &&
                     (apart(x, out) || x.data == out.data + uint64_t(c.rank()) * x.bytes)
                 ? x.bytes
                 : 0;
    case Kind::reduce_scatter:
      return has_rows_of(x, out, world) &&
                     (apart(x, out) || out.data == x.data + uint64_t(c.rank()) * out.bytes)
                 ? out.bytes
                 : 0;
    case Kind::all_to_all:
      return has_rows_of(out, x, 1) && x.shape[0] % world == 0 && apart(x, out)
                 ? x.bytes / uint64_t(world)
                 : 0;
    case Kind::all_reduce:
    case Kind::broadcast:
      return same_shape(x, out) && (apart(x, out) || x.data == out.data) ? x.bytes : 0;
    default:
      return 0;
  }
}

// A collective of two tensors whose arguments need no words: True if it is over, False if it was not
// begun (Python then checks every argument, and says what is wrong), else its job.
nb::object quick(Channel& c, int kind, nb::handle x, nb::handle out, int reduction, int root,
                 double patience) {
  TensorView from, to;
  if (!view(x, from) || !view(out, to)) return nb::bool_(false);
  const uint64_t bytes = plain_bytes(c, Kind(kind), from, to);
  if (bytes == 0) return nb::bool_(false);
  if (reduces(Kind(kind)) && !can_reduce(from.dtype, Reduction(reduction))) return nb::bool_(false);
  auto job = describe(c.spare(), kind, int(from.dtype), int(from.item), reduction, root, false,
                      int64_t(std::min(patience, kLongestPatience) * 1e9));
  lay_alike(*job, c.world(), uint64_t(from.data), uint64_t(to.data), bytes);
  Outcome outcome;
  {
    nb::gil_scoped_release unlocked;
    outcome = c.at_once(job);
  }
  if (outcome.code == Code::ok) return nb::bool_(true);
  return nb::cast(job);
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Job>(m, "Job")
      .def_prop_ro("done", [](Job& j) { return j.done.load(); })
      .def_prop_ro("outcome", [](Job& j) { return result(j.outcome); })
      .def_prop_ro("number", [](Job& j) { return j.number.load(); })
      .def_prop_ro("words", [](Job& j) { return j.words; })
      .def_prop_ro("marks", [](Job& j) {  // once it is over: (act, peer, bytes, start, end)
        std::vector<std::tuple<int, int, uint64_t, int64_t, int64_t>> marks;
        for (const Mark& m : j.marks) marks.emplace_back(int(m.act), m.peer, m.bytes, m.start, m.end);
        return marks;
      });

  nb::class_<Facts>(m, "Facts")
      .def_prop_ro("kind", [](Facts& f) { return int(f.kind); })
      .def_prop_ro("dtype", [](Facts& f) { return int(f.dtype); })
      .def_prop_ro("reduction", [](Facts& f) { return int(f.reduction); })
      .def_ro("holds_core", &Facts::holds_core)
      .def_ro("number", &Facts::number)
      .def_ro("item", &Facts::item)
      .def_ro("bytes_in", &Facts::in)
      .def_ro("bytes_out", &Facts::out)
      .def_prop_ro("came", [](Facts& f) { return std::vector<uint64_t>(f.came, f.came + kWays); })
      .def_ro("chunks", &Facts::chunks)
      .def_ro("chunk_bytes", &Facts::chunk_bytes)
      .def_ro("started", &Facts::started)
      .def_ro("ended", &Facts::ended);

  m.def("learn_tensors", &learn_tensors, "type"_a, "parameter"_a);
  m.attr("SMALL_BYTES") = kSmallBytes;
  m.attr("LEAST_CHUNK_BYTES") = Tuning{}.least_chunk;
  m.attr("MOST_CHUNK_BYTES") = Tuning{}.most_chunk;
  m.attr("STREAM_BYTES") = Tuning{}.stream;
  m.attr("STORE_TRIALS") = 2 * StoreTrials::kTries;

  m.def("can_reduce",
        [](int dtype, int reduction) { return can_reduce(Dtype(dtype), Reduction(reduction)); });

  nb::class_<Channel>(m, "Channel")
      .def(
          "__init__",
          [](Channel* self, Fabric& fabric, int64_t spin_ns, bool crowded, bool for_calls) {
            const Traffic traffic = for_calls ? Traffic::calls : Traffic::collectives;
            new (self) Channel(fabric, spin_ns, crowded, traffic);
          },
          "fabric"_a, "spin_ns"_a, "crowded"_a, "for_calls"_a = false, nb::keep_alive<1, 2>())
      .def("quick", &quick, "kind"_a, "x"_a.none(), "out"_a.none(), "reduction"_a, "root"_a,
           "patience"_a)
      .def("last", &Channel::last)
      .def("tune",
           [](Channel& c, uint64_t small, uint64_t least, uint64_t most, uint64_t stream, int past) {
             const bool lines = least > 0 && least % 64 == 0 && most % 64 == 0 && small % 64 == 0;
             if (!lines || least > most || most > kChunkBytes || small > kSmallBytes)
               throw nb::value_error("small and chunks must be whole lines, and fit");
             c.tune({small, least, most, stream, Past(past)});
           })
      .def(
          "alike",  // a collective in which all ranks have the same sizes, in one call where quick
          [](Channel& c, int kind, int dtype, int item, int reduction, int root, bool holds_core,
             int64_t patience, uint64_t in, uint64_t out, uint64_t bytes, bool background,
             bool record) -> std::shared_ptr<Job> {
            const bool seen = background || record;  // by Python, once it is over
            auto job = describe(seen ? std::make_shared<Job>() : c.spare(), kind, dtype, item,
                                reduction, root, holds_core, patience);
            job->record = record;
            lay_alike(*job, c.world(), in, out, bytes);
            nb::gil_scoped_release unlocked;
            if (background) {
              c.submit(job, true);
              return job;
            }
            const Outcome outcome = c.at_once(job);
            return outcome.code == Code::ok && !record ? nullptr : job;
          })
      .def(
          "various",  // sizes by rank, and pieces wherever they lie
          [](Channel& c, int kind, int dtype, int item, int reduction, int root, bool holds_core,
             int64_t patience, bool uneven, const std::vector<uint64_t>& sizes,
             const std::vector<uint64_t>& in_at, const std::vector<uint64_t>& in_sizes,
             const std::vector<uint64_t>& out_at, const std::vector<uint64_t>& out_sizes,
             bool background, bool record) {
            auto job = describe(std::make_shared<Job>(), kind, dtype, item, reduction, root,
                                holds_core, patience);
            job->record = record;
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
             auto job = describe(std::make_shared<Job>(), int(Kind::refused), int(Dtype::other), 1,
                                 0, 0, false, patience);
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
      .def("late", [](Channel& c, Job& j) { return c.late(j); })
      .def("why_failed", [](Channel& c, int rank) { return c.why_failed(rank); });

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
             message->deadline = later(own_time.now(), patience);
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
