// The compute lane of a plan, run without Python between its tasks: waits, products (by torch, see
// torch_product.h), sums and signals.
//
// A Lane is made once from a plan. A LaneRun is one call of it. The policy is that of
// `weft.plan.adaptive`: tasks run in the order of the plan, except loose ones, which run as soon as
// what they need has arrived, products in as few GEMMs as possible.
#pragma once

#include <optional>
#include <string>

#include "engine.h"
#include "torch_product.h"

namespace weft {

// A rectangle of a buffer: of this rank (index into the call's buffers), or of a peer (slot of the
// peer's header), whose rows are contiguous and `pitch` elements apart.
struct Area {
  int rank, buffer;
  int64_t row, rows, column, columns, pitch;
};

// products: c[i] = a[i] @ b[i]. sum: every c = the sum of all a, in their order. moves: c[i] = a[i].
enum class Duty : int { products = 0, sum = 1, moves = 2, nothing = 3 };

struct LaneTask {
  int id = 0;
  Duty duty = Duty::nothing;
  std::vector<Area> a{}, b{}, c{};
  bool accumulate = false, transposed = false;  // of products: c += a @ b; c = a.T @ b
  std::vector<Wait> waits{};
  bool remote = false;     // it touches the memory of peers
  int counter = -1;        // set to the number of the call when the task has ended
  std::vector<int> rings{};  // ranks whose compute may wait for it
  int merge = -1;          // loose products with the same number may become one GEMM
  std::vector<int> needs{};  // loose tasks, by their places in the lane, that must end first
};

// Consecutive tasks. If they are loose, each runs as soon as it is ready.
struct Stretch {
  int first, count;
  bool loose;
};

struct Lane {
  Dtype dtype = Dtype::f32;
  uint64_t item = 4;
  // One kernel, whose stores are in transfer on a paced link while it computes on. The tasks of other
  // lanes hold the compute thread until the link would have transferred what they read or stored.
  bool one_launch = false;
  std::vector<LaneTask> tasks;
  std::vector<Stretch> stretches;

  // Which of these tasks, by their places, run next and together: one sum, or products as one GEMM.
  // The tasks are loose and ready.
  std::vector<int> next_run(const std::vector<int>& ready) const;
};

class LaneRun {
 public:
  struct Span {
    std::vector<int> tasks;  // by id, those that ran as one
    int64_t start, end;
  };

  // copies: the call of the engines, also where they have nothing to do. buffers: this rank's.
  LaneRun(Fabric& fabric, std::shared_ptr<const Lane> lane, std::shared_ptr<Call> copies,
          std::vector<Matrix> buffers);

  // Goes on to the end of the call; `again` now and then while it waits, so that Python can handle its
  // signals.
  Outcome go();
  // A task that it waits for or has come to; -1 at the end.
  int at() const;
  const std::vector<Span>& spans() const { return spans_; }

 private:
  Outcome agree();
  Outcome in_order(const Stretch& stretch);
  Outcome loose(const Stretch& stretch);
  Outcome await(const LaneTask& task);
  bool may_run(const LaneTask& task);
  Outcome run(const std::vector<int>& run);
  Outcome execute(const LaneTask& task, int64_t rows);
  Outcome multiply(const LaneTask& task, int64_t rows);
  Outcome add(const LaneTask& task);
  Outcome hold();
  Outcome after(const LaneTask& task);
  Outcome deliver();
  // Of an area with other rows than its own, unless that is 0. False if a peer's header places it
  // outside of the peer's memory.
  bool matrix(const Area& area, int64_t rows, Matrix& made);

  Fabric& fabric_;
  std::shared_ptr<const Lane> lane_;
  std::shared_ptr<Call> copies_;
  std::vector<Matrix> buffers_;
  bool agreed_;
  size_t stretch_ = 0;
  int next_ = 0;  // of a stretch in order: how many tasks of it have ended
  // Of a loose stretch:
  bool begun_ = false;
  std::vector<int> waiting_, ready_;
  std::vector<bool> ended_;
  // Tasks that have been computed, and wait for a paced link:
  std::vector<int> computed_;
  int64_t started_ = 0, until_ = 0;
  std::vector<const LaneTask*> pending_;  // whose signals wait until the ranks agree
  std::deque<std::pair<int64_t, const LaneTask*>> late_;  // whose stores are still in transfer, until when
  std::vector<Span> spans_;
};

// A call that a rank has made before, all of it but its operands: what its header says, and what those
// of its peers are expected to say. To make it once more takes one call from Python.
class LaneCall {
 public:
  LaneCall(Fabric& fabric, std::shared_ptr<const Lane> lane, std::shared_ptr<const Program> copies,
           uint64_t signature, std::string blob, std::vector<uint64_t> signatures)
      : fabric_(fabric),
        lane_(std::move(lane)),
        copies_(std::move(copies)),
        signature_(signature),
        blob_(std::move(blob)),
        signatures_(std::move(signatures)) {}

  // Enters a call and carries it out, to its end unless the outcome is another than ok.
  Outcome start(uint64_t call, int64_t patience, std::vector<Matrix> buffers,
                const std::vector<uint64_t>& offsets);
  // Goes on where the outcome was `again`.
  Outcome go();
  // The call of the engines.
  const std::shared_ptr<Call>& call() const { return call_; }
  int at() const { return run_ ? run_->at() : -1; }

 private:
  Fabric& fabric_;
  std::shared_ptr<const Lane> lane_;
  std::shared_ptr<const Program> copies_;
  uint64_t signature_;
  std::string blob_;
  std::vector<uint64_t> signatures_;
  std::shared_ptr<Call> call_;
  std::optional<LaneRun> run_;
};

}  // namespace weft
