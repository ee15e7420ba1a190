// Kernels that communicate by themselves: the compute lane of a plan, carried out in one go.
//
// A Kernel is made once from a plan. A KernelRun is one call of it: it computes piece by piece, stores
// each where it is needed, in whichever rank's memory, and sets a counter when all of a piece is
// there. On paced links a piece counts as being there when the link would have brought it; the thread
// computes on meanwhile, and waits for links only when there is nothing else to do.
#pragma once

#include <optional>
#include <string>

#include "engine.h"
#include "kernels.h"

namespace weft {

// What bags ask of the tables of one rank, in the memory of the caller.
class Bags {
 public:
  void add(const Table& table) { tables_.push_back(table); }
  // What is wrong with the offsets and indices: (0: nothing, 1: offsets do not start at 0, 2: they
  // decrease, 3: they go beyond the indices, 4: an index is out of range; the table; where in it).
  std::tuple<int, uint64_t, uint64_t> check(const Kernels& kernels) const;
  // Pools bags from `first` on into a target; columns count over all tables.
  void pool(const Kernels& kernels, uint64_t first, uint64_t bags, uint64_t column,
            uint64_t columns, char* target, uint64_t pitch, int threads) const;
  // The gradient of a table, in its type, from the gradients of its bags: each row is the sum of its
  // visits in their order, in float32. What `check` checks must hold.
  void spread(const Kernels& kernels, size_t table, const char* bags, uint64_t pitch, char* target,
              int threads) const;

 private:
  uint64_t bytes_of_bag() const;  // that are read, in the mean

  std::vector<Table> tables_;
};

// A rectangle to make: of the product from `column` of the weight on, or of bags from `first` on.
struct Rectangle {
  uint64_t first, column, rows, columns;
  End target;
};

// outside: the caller makes the pieces, which are products that its own GEMM makes faster.
enum class Work : int { multiply = 0, pool = 1, add = 2, wait = 3, outside = 4 };

struct Step {
  Work work;
  std::vector<Rectangle> pieces;
  std::vector<End> sources, targets;  // of a sum
  uint64_t rows = 0, columns = 0;     // of a sum
  std::vector<Wait> waits;
  int counter = -1;  // set to the call when all that the step stored is there
};

struct Kernel {
  Type type = Type::f32;  // of x, the tables and the results
  std::vector<Step> steps;
};

// What a call brings along besides its buffers.
struct Operands {
  const char* x = nullptr;
  uint64_t x_rows = 0, x_pitch = 0;  // bytes from row to row
  Weight weight{};
  std::shared_ptr<const Bags> bags;
  int threads = 1;  // that may compute
};

// kernels.multiply on several threads, with the same bits.
void multiply(const Kernels& kernels, int threads, const float* x, size_t x_pitch, size_t rows,
              const Weight& w, size_t column, size_t columns, float* out, size_t out_pitch);

class KernelRun {
 public:
  KernelRun(Fabric& fabric, std::shared_ptr<const Kernel> kernel, const Kernels& kernels,
            uint64_t call, int64_t deadline, std::vector<char*> pointers,
            std::vector<uint64_t> signatures, const Operands& operands, bool record);

  // Goes on; `again` now and then while it waits, so that Python can handle its signals. `outside`:
  // the caller makes the pieces of the step that it is at, and goes on then.
  Outcome go();
  // The step that it is at, and when each of them started and ended (where recorded).
  size_t at() const { return at_; }
  const std::vector<std::pair<int64_t, int64_t>>& spans() const { return spans_; }

 private:
  struct Pending {
    int64_t until;
    int counter;
  };

  Outcome agree();
  Outcome prepare(const Step& step);
  Outcome execute(const Step& step);
  Outcome multiply(const Step& step);
  Outcome pool(const Step& step);
  Outcome add(const Step& step);
  void signal(const Step& step, int64_t since);
  Outcome release(bool all);
  char* address(const End& end, uint64_t rows, uint64_t row_bytes);

  Fabric& fabric_;
  std::shared_ptr<const Kernel> kernel_;
  const Kernels& kernels_;
  uint64_t call_;
  int64_t deadline_;
  std::vector<char*> pointers_;
  std::vector<uint64_t> signatures_;
  Operands operands_;
  bool record_;
  bool agreed_;
  size_t at_ = 0;
  int64_t outside_ = 0;  // when the caller began to make the step that it is at
  const float* x_ = nullptr;
  size_t x_pitch_ = 0;
  std::vector<float> widened_;
  std::vector<Pending> pending_;
  std::vector<std::pair<int64_t, int64_t>> spans_;
};

// A call that a rank has made before, all of it but its operands: what its header says, and what
// those of its peers are expected to say. To make it once more takes one call from Python, for where
// few rows are multiplied again and again, all that is between two products counts.
class Repeat {
 public:
  // partial: workspace of products, null if there is none.
  Repeat(std::shared_ptr<const Kernel> kernel, const Kernels& kernels, uint64_t signature,
         std::string blob, std::vector<uint64_t> signatures, char* partial)
      : kernel_(std::move(kernel)),
        kernels_(kernels),
        signature_(signature),
        blob_(std::move(blob)),
        signatures_(std::move(signatures)),
        partial_(partial) {}

  // Enters a call and carries it out, to its end unless the outcome is another than ok. pointers: the
  // buffers of the kernel. offsets: those that the header places.
  Outcome start(Fabric& fabric, uint64_t call, int64_t patience, const Operands& operands,
                std::vector<char*> pointers, const std::vector<uint64_t>& offsets);
  // The same for a product. The buffers are x, w, y, partial and inbox; headers place inbox and y.
  Outcome start(Fabric& fabric, uint64_t call, int64_t patience, const Operands& operands, char* y,
                char* inbox, uint64_t inbox_offset, uint64_t y_offset) {
    return start(fabric, call, patience, operands, {nullptr, nullptr, y, partial_, inbox},
                 {inbox_offset, y_offset});
  }
  // Goes on where the outcome was `again` or `outside`.
  Outcome go();

 private:
  std::shared_ptr<const Kernel> kernel_;
  const Kernels& kernels_;
  uint64_t signature_;
  std::string blob_;
  std::vector<uint64_t> signatures_;
  char* partial_;  // the caller's, as long as this exists
  Fabric* fabric_ = nullptr;
  uint64_t call_ = 0;
  std::optional<KernelRun> run_;
};

}  // namespace weft
