// The pieces that the rule puts together: what a kernel, a chunk and a pipeline of both take.
//
// A piece knows its time alone and beside communication, and what communication loses beside it
// (weft.simulate.contention has the model). docs/heuristic.md derives the terms.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "gemm_time.h"

namespace weft::rule {

enum Engine { kDma, kCores, kDirect };
enum Fusion { kFused, kUnfused, kAdaptive };

// What an operation does: gathers rows and multiplies them; gathers them along the K of its product;
// or multiplies first, and then sends rows to who keeps them, adds them, or adds and passes them on.
enum Form { kGather, kContract, kSend, kSum, kSumEverywhere };

struct Candidate {
  int engine = kDma;
  int fusion = kFused;
  bool serial = false, one_peer = false, columns = false, uniform = false;
  int64_t depth = 0;  // chunks per shard; 0 is what the operation's lowering takes
};

// The chunks that a lowering makes where a name leaves it open: of fixed schedules, of those that
// leave rows in place, and of adaptive.
struct Cuts {
  int64_t fixed, in_place, adaptive;

  int64_t of(const Candidate& c) const {
    if (c.depth > 0) return c.depth;
    if (c.fusion == kAdaptive) return c.engine == kDirect ? 1 : adaptive;
    return c.engine == kDirect ? in_place : fixed;
  }
};

// How one engine brings chunks.
struct Moving {
  double first, following, completion;  // before bytes flow, between chunks, until a waiter knows
  double rate, rate_alone, rate_own;    // from each of all peers, from one alone, of own rows
  double row;                           // each further row of a strided chunk
  double bandwidth, drawn;              // of memory beside it, and what all peers' bytes draw of that
  double share;                         // what kernels and bytes lose beside each other, links full
  double slowdown;                      // how compute is slowed on a core that copies share
  double late;                          // how much later a waiter knows where compute runs beside it
  double each;                          // what compute loses to every chunk, on a core it shares
};

struct Machine {
  std::shared_ptr<Gemms> gemms;
  Moving moving[2];
  double rate, kernel, gap, latency, bandwidth, decision, decision_in_place;
  double host;                        // between two kernels that the host launches
  double reach, one_peer, from_same;  // reading a peer in place: start, rate, rate if all read it
  double in_place, full;              // contention where kernels read in place; bytes of full links
  double element, result, sum_bytes;
  int64_t left;  // compute units left while cores drive a gather
};

// Seconds of some pieces: alone, and beside communication. Both have `fixed` in them, the launches
// and gaps. `lost` is what communication is held up beside them.
struct Piece {
  double alone = 0.0, beside = 0.0, fixed = 0.0, lost = 0.0, launches = 0.0;
  Piece operator*(double count) const {
    return {alone * count, beside * count, fixed * count, lost * count, launches * count};
  }
  Piece operator+(const Piece& o) const {
    return {alone + o.alone, beside + o.beside, fixed + o.fixed, lost + o.lost,
            launches + o.launches};
  }
  // The same where bytes flow for only so much of the time.
  Piece eased(double flowing) const {
    return {alone, alone + flowing * (beside - alone), fixed, flowing * lost, launches};
  }
};

// When work ends that takes `work.beside` beside communication, which lasts `until`, and
// `work.alone` after it.
inline double end_of(double begin, double until, Piece work) {
  if (begin + work.beside <= until) return begin + work.beside;
  if (begin >= until) return begin + work.alone;
  return until + work.alone * (1.0 - (until - begin) / work.beside);
}

// Pieces of one operation on one machine. `rows` are those that one peer has, or is sent.
class Pieces {
 public:
  Pieces(const Machine& machine, int form, int64_t world, int64_t m, int64_t rows,
         const std::vector<int64_t>& columns, int64_t k)
      : n_(machine), form_(form), world_(world), m_(m), rows_(rows), k_(k), columns_(columns) {
    for (int64_t one : columns) load_ += 2.0 * double(m) * double(one) * double(k) / n_.rate;
    width_ = form >= kSend ? columns[0] : k;
  }

 protected:
  // The candidate that is looked at has this engine, and one peer or all of them at a time.
  void look_at(const Candidate& c) {
    engine_ = c.engine == kCores ? kCores : kDma;
    late_ = c.serial ? 0.0 : moving().late;
    const double peers = c.one_peer ? 1.0 : double(world_ - 1);
    filled_ = std::min(1.0, peers * moving().rate_alone / n_.full);
  }

  const Moving& moving() const { return n_.moving[engine_]; }
  double completion() const { return moving().completion + late_; }

  // A GEMM of so many rows over so much of K, one for every weight; `sums` is how often it reads
  // sums that it adds to, or -1 where it makes results.
  Piece gemm(int64_t rows, int64_t k, double sums = -1.0) { return gemm(columns_, rows, k, sums); }

  Piece gemm(const std::vector<int64_t>& columns, int64_t rows, int64_t k, double sums = -1.0) {
    Piece piece;
    for (int64_t one : columns) {
      auto [launch, working, fewer, traffic] = cost(rows, one, k);
      if (working == 0.0) continue;  // there is no product; a launch may cost nothing
      if (sums >= 0.0)
        traffic += double(rows) * double(one) * ((1.0 + sums) * n_.sum_bytes - n_.result);
      const double body = std::max(working, n_.latency + traffic / n_.bandwidth);
      double with_less = body;
      if (engine_ == kCores)
        with_less = std::max(fewer, n_.latency + traffic / moving().bandwidth);
      piece = piece + met(n_.gap + launch, body, with_less, traffic);
    }
    return piece;
  }

  // A kernel with its launch: `body` seconds alone and `with_less` on the units that are left
  // beside communication, which it meets in memory, fabric and caches.
  Piece met(double fixed, double body, double with_less, double traffic) const {
    const double slower = 1.0 + moving().share * filled_, memory = moving().bandwidth / slower;
    double longer = with_less * slower * moving().slowdown, bytes = 1.0 + moving().share;
    const double drawn = moving().drawn * filled_ / bytes, asked = traffic / longer;
    const double pressed = std::max(1.0, (asked + drawn) / memory);
    longer *= pressed;
    bytes *= pressed;
    return {fixed + body, fixed + longer, fixed, longer * (1.0 - 1.0 / bytes), 1.0};
  }

  // Candidates ask for the same GEMMs again and again: they are few, so a list is quick.
  const Cost& cost(int64_t m, int64_t n, int64_t k) {
    for (const auto& [key, known] : costs_)
      if (key[0] == m && key[1] == n && key[2] == k) return known;
    costs_.push_back({{m, n, k}, n_.gemms->cost(m, n, k, load_, n_.left)});
    return costs_.back().second;
  }

  // A kernel that brings rows into place and so reads and writes so many bytes.
  Piece moving_rows(double bytes) const {
    const double body = n_.latency + bytes / n_.bandwidth;
    return met(n_.gap + n_.kernel, body, body, bytes);
  }

  // What so many chunks cost the compute beside them.
  Piece disturbed(int64_t chunks) const {
    const double lost = moving().each * double(chunks);
    return {lost, lost, lost, 0.0, 0.0};
  }

  // Strided chunks leave links less full.
  void fill(int64_t rows, int64_t columns) {
    const double bytes = double(rows) * double(columns) * n_.element;
    const double strided = columns < width_ ? double(rows - 1) * moving().row : 0.0;
    const double rate = bytes / (bytes / moving().rate_alone + strided);
    filled_ = std::min(1.0, double(world_ - 1) * rate / n_.full);
  }

  // Seconds for which the bytes of a chunk flow, from every peer at once.
  double flow(int64_t rows, int64_t columns, bool own) const {
    const double bytes = double(rows) * double(columns) * n_.element;
    const double strided = columns < width_ ? double(rows - 1) * moving().row : 0.0;
    double seconds = std::max(bytes / moving().rate, bytes / moving().rate_alone + strided);
    if (!own) return seconds;
    // Beside them, the rank's own rows are copied, which memory may have to slow with the others.
    const double local = bytes / moving().rate_own, all = moving().rate * double(world_ - 1);
    const double mine = moving().drawn * moving().rate_own / all;
    const double pressed = std::max(1.0, (moving().drawn + mine) / moving().bandwidth);
    seconds += std::min(seconds, local) * (pressed - 1.0);
    return std::max(seconds, local * pressed + strided);
  }

  // When communication that takes `amount` alone is through, beside `local` and then steps. A step
  // that waits for what it needs holds nothing up meanwhile, so they hold up no more than is lost
  // beside all of them.
  static double held_up(double amount, const Piece& local, const Piece& step, double steps) {
    const double done = local.beside - local.lost;  // beside local
    if (amount <= done || step.beside <= 0.0)
      return local.beside > 0.0 ? std::min(amount / (1.0 - local.lost / local.beside),
                                           amount + local.lost)
                                : amount;
    const double rest = amount - done, rate = 1.0 - step.lost / step.beside;
    return local.beside + std::min(rest / rate, rest + steps * step.lost);
  }

  // When the host has launched so many kernels, the last of which takes that long.
  double launched(double kernels, double last) const {
    return (kernels - 1.0) * n_.host + last;
  }

  // Arrivals at `first`, then every `period`, in which bytes flow for `flowing`; each lets a step
  // run, after `local`. `less` is what the first step differs by.
  double pipeline(Piece local, Piece step, int64_t steps, double first, double period,
                  double flowing, const Piece& less = {}) const {
    const double share = std::min(1.0, flowing / period), count = double(steps);
    local = local.eased(share);
    step = step.eased(share);
    const double last = held_up(first + (count - 1.0) * period, local, step, count - 1.0);
    first = held_up(first, local, {}, 0.0);
    const bool waits = local.alone == 0.0;  // then the first piece has no other before it
    double begin = first - n_.gap;
    if (!waits) begin = std::max(first, end_of(0.0, last, local) - n_.gap);
    const double end = end_of(begin, last, step * count + less.eased(share));
    const double each = step.launches > 0.0 ? step.alone / step.launches : 0.0;
    return std::max({end, last + step.alone - (waits && steps == 1 ? n_.gap : 0.0),
                     launched(local.launches + count * step.launches, each - n_.gap)});
  }

  // A kernel of which so many bytes go over a link while it runs; what it does to them, they do to
  // it.
  double in_place(const Piece& piece, double bytes, double link) const {
    const double body = piece.alone - piece.fixed, over = bytes / link;
    const double filled = std::min(1.0, bytes / std::max({body, over, 1e-12}) / n_.full);
    const double slowed = std::max(body * (1.0 + n_.in_place * filled), over * (1.0 + n_.in_place));
    return std::max(piece.fixed + slowed + n_.reach, n_.host);
  }

  // A piece over the rows above the rank's own, and one over those below; of the slowest rank.
  template <typename Make>
  Piece around(Make make) {
    Piece slowest = make((world_ - 1) * rows_);
    for (int64_t above = 1; above <= (world_ - 1) / 2; ++above) {
      const Piece both = make(above * rows_) + make((world_ - 1 - above) * rows_);
      if (both.alone > slowest.alone) slowest = both;
    }
    return slowest;
  }

  const Machine& n_;
  int form_;
  int64_t world_, m_, rows_, k_;
  const std::vector<int64_t>& columns_;
  int64_t width_ = 0;  // columns of what travels
  double load_ = 0.0, late_ = 0.0;
  double filled_ = 1.0;  // how full links are while bytes flow
  int engine_ = kDma;
  std::vector<std::pair<std::array<int64_t, 3>, Cost>> costs_;
};

}  // namespace weft::rule
