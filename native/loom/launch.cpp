// Kernels that the process brings itself: a function that the stream calls in its turn, and that
// tells the log what it touches while it runs, as no list made beforehand could.
#include "queue.h"
#include "vendor.h"

namespace loom {

namespace {
thread_local const Op* op_here = nullptr;  // the kernel that this thread runs
thread_local std::string problem_here;

Op line_of(const char* pointer, uint64_t width, uint64_t rows, uint64_t pitch, bool write) {
  if (!op_here) throw Error("loom: no kernel runs on this thread");
  Op op;
  op.name = op_here->name;
  op.label = op_here->label;
  op.origin = op_here->origin;
  op.stream = op_here->stream;
  op.host = op_here->host;
  op.rects = {rect_of(pointer, width, rows, pitch, write)};
  return op;
}
}  // namespace

Running::Running(const Op& op) { op_here = &op; }
Running::~Running() { op_here = nullptr; }

void launch(Stream* stream, const char* name, Function function, uint64_t number) {
  Op op;
  op.name = intern(name);
  op.run = [=] {
    problem_here.clear();
    function(number);
    if (!problem_here.empty()) throw Error(problem_here);
  };
  issue(stream, std::move(op));
}

void kernel_failed(const char* why) { problem_here = why; }

void kernel_touched(const char* pointer, uint64_t width, uint64_t rows, uint64_t pitch,
                    bool write) {
  if (!logging()) return;
  const int64_t now = now_ns();
  log_op(line_of(pointer, width, rows, pitch, write), now, now);
}

void kernel_saw(const char* word, uint64_t value) {
  if (!logging()) return;
  const Op op = line_of(word, 4, 1, 0, false);
  log_hold(op, op.rects.front(), Compare::equal, value);
}

}  // namespace loom

using namespace loom;

LOOM_EXPORT void loom_kernel_failed(const char* why) { kernel_failed(why); }
LOOM_EXPORT void loom_kernel_touched(const char* pointer, uint64_t width, uint64_t rows,
                                     uint64_t pitch, int write) {
  kernel_touched(pointer, width, rows, pitch, write != 0);
}
LOOM_EXPORT void loom_kernel_saw(const char* word, uint64_t value) { kernel_saw(word, value); }
LOOM_EXPORT char* loom_readable(const void* pointer) { return readable(pointer); }
