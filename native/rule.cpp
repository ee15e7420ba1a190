// The rule by which a schedule is chosen: sizes and a machine's numbers in, a time for each out.
//
// Every candidate is a pipeline: chunks arrive, and a piece of the GEMM runs when its chunks are
// there. Its time follows from a handful of terms (docs/heuristic.md derives each of them):
//
//   local    the GEMM over the rank's own rows, which needs no communication
//   step     the pieces that one arrival lets run: launch, gap and body of each, and moving rows
//            into place where the schedule needs it; this is where decomposition loses
//   first    when the first chunks are there;  period: how long each further arrival takes
//   beside   pieces beside communication take longer, and so does communication beside them: less
//            bandwidth, fewer units, and what both do to each other (weft.simulate.contention)
//   decision what adaptive pays for each look at what has arrived
//
//   seconds = the longest of   local and all steps, one after the other
//                              waiting for the first arrival, then all steps
//                              waiting for the last arrival, then one step
//
// Where products are sent (reduce-scatter, all-reduce, all-to-all), the same pipeline runs backward:
// a step makes chunks, which leave, and are added where they arrive.
//
// Nothing is simulated. It is native only to be quick: 22 candidates in a few microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "rule_pieces.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;
using namespace weft::rule;

namespace {

// The terms of one operation on one machine, schedule by schedule.
class Terms : Pieces {
 public:
  Terms(const Machine& machine, int form, int64_t world, int64_t m, int64_t rows,
        const std::vector<int64_t>& columns, int64_t k, Cuts cuts)
      : Pieces(machine, form, world, m, rows, columns, k), cuts_(cuts) {}

  double seconds(const Candidate& c) {
    look_at(c);
    depth_ = std::max<int64_t>(1, cuts_.of(c));
    if (world_ == 1) return gemm(m_, k_).alone - n_.gap;
    if (form_ >= kSend) return c.engine == kDirect ? send_direct(c) : send(c);
    if (form_ == kContract) return contract(c);
    if (c.engine == kDirect) return direct(c);
    if (c.serial) return serial();
    if (c.one_peer) return shards();
    if (c.fusion == kAdaptive) return adaptive();
    return c.columns ? cut_columns(c) : cut_rows(c);
  }

 private:
  double serial() {
    const double alone = gemm(m_, k_).alone - n_.gap;
    return moving().first + flow(rows_, k_, true) + completion() + alone;
  }

  // One whole shard after the other, each from one peer.
  double shards() {
    const double bytes = double(rows_) * double(k_) * n_.element;
    const double flowing = bytes / moving().rate_alone;
    const double period = moving().first + flowing + completion();
    const Piece local = gemm(rows_, k_) + disturbed(world_ - 1);
    return pipeline(local, gemm(rows_, k_), world_ - 1, period, period, flowing);
  }

  double cut_rows(const Candidate& c) {
    const int64_t rows = ceil_div(rows_, depth_), steps = ceil_div(rows_, rows);
    const int64_t chunks = c.uniform ? world_ : world_ - 1;
    const double bytes_flow = flow(rows, k_, c.uniform);
    Piece step;
    if (c.fusion == kUnfused) {
      step = gemm(rows, k_) * double(chunks);
    } else {
      step = gemm(chunks * rows, k_);
      if (chunks > 1)  // the rows of a step are scattered to their places
        for (int64_t one : columns_)
          step = step + moving_rows(2.0 * double(chunks * rows) * double(one) * n_.result);
    }
    step = step + disturbed(chunks);
    const double first = moving().first + bytes_flow + completion();
    const Piece local = c.uniform ? Piece{} : gemm(rows_, k_);
    return pipeline(local, step, steps, first, bytes_flow + moving().following, bytes_flow);
  }

  double cut_columns(const Candidate& c) {
    const int64_t columns = ceil_div(k_, depth_), steps = ceil_div(k_, columns);
    const double bytes_flow = flow(rows_, columns, c.uniform);
    fill(rows_, columns);
    const auto sums = [&](double read) {
      if (c.fusion == kUnfused) return gemm(columns_, rows_, columns, read) * double(world_ - 1);
      if (c.uniform) return gemm(columns_, m_, columns, read);
      return around([&](int64_t rows) { return gemm(columns_, rows, columns, read); });
    };
    Piece step = sums(1.0);
    const Piece less = sums(0.0) + step * -1.0;  // the first step has no sums to read
    step = step + disturbed(c.uniform ? world_ : world_ - 1);
    const double first = moving().first + bytes_flow + completion();
    const Piece local = c.uniform ? Piece{} : gemm(rows_, k_);
    double seconds =
        pipeline(local, step, steps, first, bytes_flow + moving().following, bytes_flow, less);
    if (n_.sum_bytes != n_.result) {  // sums are rounded into the result, once
      const double rows = double(c.uniform ? m_ : m_ - rows_);
      for (int64_t one : columns_)
        seconds += moving_rows(rows * double(one) * (n_.sum_bytes + n_.result)).alone;
    }
    return seconds;
  }

  // Pieces read their rows where they are: over a link, one peer at a time.
  double direct(const Candidate& c) {
    const int64_t rows = ceil_div(rows_, depth_), pieces = ceil_div(rows_, rows) * (world_ - 1);
    // Adaptive takes the highest rows first, on all ranks, so all read the same peer.
    const bool same = c.fusion == kAdaptive;
    const double link = same ? n_.from_same : n_.one_peer;
    const double each = in_place(gemm(rows, k_), double(rows * k_) * n_.element, link);
    const double looking = same ? n_.decision_in_place : 0.0;
    return gemm(rows_, k_).alone - n_.gap + double(pieces) * (each + looking);
  }

  // Whatever has arrived, as few pieces as can be. A look finds the arrived rows of one peer side
  // by side, so pieces grow with the time that a round over all peers takes. What has not been
  // looked at when the last chunk arrives lies beside its neighbours, and is one piece.
  double adaptive() {
    const int64_t peers = world_ - 1, rows = ceil_div(rows_, depth_);
    const double bytes_flow = flow(rows, k_, false);
    const double share = bytes_flow / (bytes_flow + moving().following);
    const Piece own = gemm(rows_, k_).eased(share);
    const Piece decision{n_.decision, n_.decision, n_.decision, 0.0, 0.0};
    const Piece local = own + disturbed(peers * ceil_div(rows_, rows));
    // Beside communication there are pieces like those of the rank's own rows, one for each peer.
    const double steps = double(ceil_div(rows_, rows));
    const double alone = moving().first + bytes_flow + completion();
    const double all = alone + (steps - 1.0) * (bytes_flow + moving().following);
    const double first = held_up(alone, local, {}, 0.0);
    const double last = std::max(first, held_up(all, local, own, double(peers)));
    const double period = steps > 1.0 ? (last - first) / (steps - 1.0) : bytes_flow;
    const double begin = end_of(0.0, last, local) - n_.gap;
    if (begin >= last)
      return begin + around([&](int64_t n) { return gemm(n, k_) + decision; }).alone;
    const double overhead = n_.gap + n_.kernel + n_.decision;
    const double chunk =
        (own.beside - n_.gap - n_.kernel) / double(rows_) * double(rows);  // its compute
    const double start = std::max(begin, first);
    double now = start;
    int64_t pieces = 0;
    for (; now < last && pieces < peers; ++pieces)  // the first round, with what is there by then
      now += overhead + chunk * (1.0 + std::floor((now - first) / period));
    double round = now - start;
    while (now < last) {
      const double waiting = std::max(1.0, round / period), before = round;
      round = double(peers) * (overhead + chunk * waiting);
      if (round <= before * 1.01) {  // compute keeps up: what is left in the end is one round
        const int64_t left = std::max(rows, int64_t(double(rows) * waiting * 0.75));
        return last + double(peers) * (gemm(left, k_).alone + n_.decision);
      }
      now += round;
      pieces += peers;
    }
    const int64_t looked_at = std::min(pieces, peers);
    const int64_t total = pieces + looked_at + (peers > looked_at ? 1 : 0);
    // Pieces are of all sizes around their mean, so that tiles fit some and not others.
    const int64_t mean = ceil_div(peers * rows_, total);
    const Piece some = gemm(ceil_div(mean, 2), k_) + gemm(mean + mean / 2, k_);
    const Piece each = ((some + gemm(mean, k_) * 2.0) * 0.25).eased(share) + decision;
    const double tail = double(looked_at) * (gemm(rows, k_) + decision).alone;
    return std::max({end_of(start, last, each * double(total)), last + tail,
                     launched(double(total + 1), each.alone)});
  }

  // The gathered rows are the K of the product: every piece adds to all of it.
  double contract(const Candidate& c) {
    const int64_t rows = ceil_div(rows_, depth_), steps = ceil_div(rows_, rows);
    const Piece local = gemm(k_, rows_), piece = gemm(k_, rows, 1.0);
    if (c.engine == kDirect) {
      const double each = in_place(piece, double(rows * k_) * n_.element, n_.one_peer);
      return local.alone - n_.gap + double(steps * (world_ - 1)) * each;
    }
    if (c.serial)
      return moving().first + flow(rows_, k_, true) + completion() + gemm(k_, m_).alone - n_.gap;
    if (c.one_peer) {
      const double bytes = double(rows_) * double(k_) * n_.element;
      const double flowing = bytes / moving().rate_alone;
      const double period = moving().first + flowing + completion();
      return pipeline(local, piece, world_ - 1, period, period, flowing);
    }
    const double bytes_flow = flow(rows, k_, false);
    const double first = moving().first + bytes_flow + completion();
    return pipeline(local, piece * double(world_ - 1) + disturbed(world_ - 1), steps, first,
                    bytes_flow + moving().following, bytes_flow);
  }

  // What an owner does with so many of its rows once all of them are there: add, or nothing.
  Piece adding(int64_t rows, int64_t columns) const {
    if (form_ == kSend) return {};
    return moving_rows(double(rows) * double(columns) * n_.element * double(world_ + 1));
  }

  // Products first: a step makes a chunk for every peer, which leaves as soon as it is made; a rank's
  // own rows are made last, and sums follow arrivals.
  double send(const Candidate& c) {
    const int64_t peers = world_ - 1, n = columns_[0];
    if (c.serial) {
      const double sent = moving().first + flow(rows_, n, false) + completion();
      const double made = gemm(m_, k_).alone - n_.gap;
      if (form_ == kSend) {  // meanwhile its own rows are brought to their place
        const Piece kept = moving_rows(2.0 * double(rows_) * double(n) * n_.element);
        return made + std::max(sent, kept.alone);
      }
      const double summed = made + sent + adding(rows_, n).alone;
      if (form_ == kSum) return summed;
      return summed + std::max(sent, moving_rows(2.0 * own_bytes()).alone);
    }
    int64_t down = c.columns ? 1 : depth_, across = c.columns ? depth_ : 1;
    if (c.fusion == kAdaptive) std::tie(down, across) = blocks(rows_, n, depth_);
    const int64_t rows = ceil_div(rows_, down), columns = ceil_div(n, across);
    const int64_t steps = ceil_div(rows_, rows) * ceil_div(n, columns);
    const std::vector<int64_t> wide{columns};
    Piece step, local = c.uniform ? Piece{} : gemm(rows_, k_);
    const int64_t chunks = c.uniform ? world_ : peers;
    if (c.one_peer) {
      step = gemm(rows_, k_);
    } else if (c.fusion != kFused) {
      step = gemm(wide, rows, k_) * double(peers);
    } else if (c.columns) {
      step = c.uniform ? gemm(wide, m_, k_)
                       : around([&](int64_t some) { return gemm(wide, some, k_); });
    } else {
      step = gemm(chunks * rows, k_);
      if (chunks > 1)  // the rows of a step are gathered side by side
        step = step + moving_rows(2.0 * double(chunks * rows) * double(k_) * n_.element);
    }
    Piece sum = adding(rows, columns);
    if (c.fusion == kAdaptive) {
      const Piece decision{n_.decision, n_.decision, n_.decision, 0.0, 0.0};
      step = step + decision * double(peers);
      if (form_ == kSumEverywhere) local = (gemm(wide, rows, k_) + decision) * double(steps);
      if (form_ != kSend) sum = sum + decision;
    }
    const int64_t arrivals = c.one_peer ? peers : steps;
    step = step + disturbed(c.one_peer ? 1 : peers);
    const double alone = double(rows_) * double(n) * n_.element / moving().rate_alone;
    const double bytes_flow = c.one_peer ? alone : flow(rows, columns, false);
    const double start = moving().first, end = completion();
    const double period =
        bytes_flow + (c.one_peer ? moving().first + end : moving().following);
    const double share = std::min(1.0, bytes_flow / period);
    step = step.eased(share);
    local = local.eased(share);
    const Piece making = step * double(arrivals);
    // Chunks leave beside the steps after the first, and beside the rank's own rows.
    const double moved = start + bytes_flow + end + double(arrivals - 1) * period;
    const double links = step.alone - n_.gap +
                         std::min(held_up(moved, {}, step, 1e9),
                                  moved + double(arrivals - 1) * step.lost + local.lost);
    const double tail = end_of(-n_.gap, links, making) + start + bytes_flow + end;
    const double arrived = std::max(links, tail);
    const double computed =
        end_of(-n_.gap, arrived, making + local + sum * double(c.one_peer ? 1 : steps));
    const double kernels = making.launches + local.launches + sum.launches * double(steps);
    double seconds = std::max({computed, arrived + sum.alone, launched(kernels, 0.0)});
    if (form_ == kSumEverywhere) {  // sums go back over the links, each as soon as it is there
      const double passed =
          std::max(seconds + start + bytes_flow + end, links + double(arrivals) * period);
      seconds = std::max(passed, seconds + moving_rows(2.0 * own_bytes()).alone);
    }
    return seconds;
  }

  // How adaptive cuts what it makes (`weft.plan.blocks`): into what reads least.
  static std::pair<int64_t, int64_t> blocks(int64_t rows, int64_t columns, int64_t depth) {
    std::pair<int64_t, int64_t> found{depth, 1};
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t down = 1; down <= depth; ++down) {
      const int64_t across = depth / down, read = rows * across + columns * down;
      if (depth % down || down > rows || across > columns || read >= least) continue;
      least = read;
      found = {down, across};
    }
    return found;
  }

  double own_bytes() const { return double(rows_) * double(columns_[0]) * n_.element; }

  // Products are made in their owners' memory: over a link, one owner at a time.
  double send_direct(const Candidate& c) {
    const int64_t rows = ceil_div(rows_, depth_), steps = ceil_div(rows_, rows), n = columns_[0];
    const double bytes = double(rows) * double(n) * n_.element;
    const double each = in_place(gemm(rows, k_), bytes, n_.one_peer);
    const bool cut = c.fusion == kAdaptive && form_ == kSumEverywhere;
    const Piece local = cut ? gemm(rows, k_) * double(steps) : gemm(rows_, k_);
    double seconds = double(steps * (world_ - 1)) * each + local.alone - n_.gap;
    if (form_ == kSend)  // what peers put into the inbox is brought to its place
      seconds += moving_rows(2.0 * double(m_ - rows_) * double(n) * n_.element).alone;
    else
      seconds += double(steps) * adding(rows, n).alone;
    if (form_ == kSumEverywhere) {
      const double one = in_place(moving_rows(2.0 * bytes), bytes, n_.one_peer);
      seconds += double(steps * (world_ - 1)) * one + moving_rows(2.0 * own_bytes()).alone;
    }
    return seconds;
  }

  Cuts cuts_;
  int64_t depth_ = 1;
};

}  // namespace

NB_MODULE(_rule, m) {
  m.doc() = "The rule by which a schedule is chosen, and the GEMM times that it stands on.";
  nb::class_<Gemms>(m, "Gemms")
      .def("cost", &Gemms::cost, "m"_a, "n"_a, "k"_a, "load"_a, "left"_a);
  nb::class_<Tiled, Gemms>(m, "Tiled")
      .def(nb::init<const std::vector<std::tuple<int64_t, int64_t, int64_t, double, double>>&,
                    std::tuple<int64_t, int64_t, int64_t>, const std::vector<double>&>(),
           "tiles"_a, "counts"_a, "numbers"_a);
  nb::class_<Rated, Gemms>(m, "Rated")
      .def(nb::init<double, std::tuple<double, double, double>, std::tuple<double, double, double>,
                    std::pair<double, int64_t>, const std::array<std::vector<double>, 3>&,
                    const std::vector<Rated::Point>&>(),
           "peak"_a, "half"_a, "bytes"_a, "kernel_and_units"_a, "axes"_a, "points"_a);
  nb::class_<Moving>(m, "Moving")
      .def(nb::init<double, double, double, double, double, double, double, double, double,
                    double, double, double, double>(),
           "first"_a, "following"_a, "completion"_a, "rate"_a, "rate_alone"_a, "rate_own"_a,
           "row"_a, "bandwidth"_a, "drawn"_a, "share"_a, "slowdown"_a = 1.0, "late"_a = 0.0,
           "each"_a = 0.0);
  nb::class_<Candidate>(m, "Candidate")
      .def(nb::init<int, int, bool, bool, bool, bool, int64_t>(), "engine"_a, "fusion"_a,
           "serial"_a, "one_peer"_a, "columns"_a, "uniform"_a, "depth"_a);
  nb::class_<Machine>(m, "Machine")
      .def(
          "__init__",
          [](Machine* self, std::shared_ptr<Gemms> gemms, const Moving& dma, const Moving& cores,
             double rate, double kernel, double gap, double latency, double bandwidth,
             double decision, double decision_in_place, double host, double reach, double one_peer,
             double from_same, double in_place, double full, double element, double result,
             double sum_bytes, int64_t left) {
            new (self) Machine{std::move(gemms), {dma, cores}, rate, kernel, gap, latency,
                               bandwidth, decision, decision_in_place, host, reach, one_peer,
                               from_same, in_place, full, element, result, sum_bytes, left};
          },
          nb::kw_only(), "gemms"_a, "dma"_a, "cores"_a, "rate"_a, "kernel"_a, "gap"_a,
          "latency"_a, "bandwidth"_a, "decision"_a, "decision_in_place"_a, "host"_a, "reach"_a,
          "one_peer"_a, "from_same"_a, "in_place"_a, "full"_a, "element"_a, "result"_a,
          "sum_bytes"_a, "left"_a)
      .def(
          "seconds",
          [](const Machine& machine, const std::vector<const Candidate*>& candidates, int form,
             int64_t world, int64_t m, int64_t rows, const std::vector<int64_t>& columns,
             int64_t k, std::tuple<int64_t, int64_t, int64_t> cuts) {
            const auto [fixed, in_place, adaptive] = cuts;
            Terms terms(machine, form, world, m, rows, columns, k, {fixed, in_place, adaptive});
            std::vector<double> seconds;
            for (const Candidate* one : candidates) seconds.push_back(terms.seconds(*one));
            return seconds;
          },
          "candidates"_a, "form"_a, "world"_a, "m"_a, "rows"_a, "columns"_a, "k"_a,
          "cuts"_a);
}
