#include "serial_call.h"

#include <cstring>

#include "fused.h"
#include "team.h"

namespace weft {
namespace {

// Stands for the address of an empty tensor, which has none. Nothing is read there.
char* some_address(char* data) { return data ? data : reinterpret_cast<char*>(64); }

// Whether the kernels for few rows make a product faster than torch. Weights with contiguous columns, as
// `linear.weight.t()`, suit them best.
bool suits_kernels(Dtype dtype, const Matrix& a, const Matrix& b, const Matrix& c) {
  constexpr int64_t kMostRows = 8, kManyTerms = 256;
  static const bool vectors = std::strcmp(best_kernels().name, "portable") != 0;
  if (!vectors || dtype != Dtype::f32 || c.rows > kMostRows) return false;
  if (a.column_stride != 1 || c.column_stride != 1 || b.rows < 2) return false;
  if (b.row_stride == 1) return b.rows >= kManyTerms || c.rows <= 2;
  return b.column_stride == 1;
}

}  // namespace

void serial_product(Dtype dtype, const Matrix& a, const Matrix& b, const Matrix& c) {
  if (c.rows == 0 || c.columns == 0) return;
  if (b.rows == 0) return zero(c, dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2);
  if (!suits_kernels(dtype, a, b, c)) return torch_product(dtype, a, b, c, false);
  const bool columns = b.row_stride == 1;
  const size_t pitch = size_t(columns ? b.column_stride : b.row_stride) * sizeof(float);
  const Weight weight{b.data, Type::f32, columns, pitch, size_t(b.rows), nullptr};
  multiply(best_kernels(), team_threads(), reinterpret_cast<const float*>(a.data),
           size_t(a.row_stride), size_t(a.rows), weight, 0, size_t(c.columns),
           reinterpret_cast<float*>(c.data), size_t(c.row_stride));
}

Outcome Exchange::start(Channel& channel, uint64_t call, int64_t patience, char* in, char* out,
                        bool record, std::shared_ptr<Job>& job) const {
  job = record ? std::make_shared<Job>() : channel.spare();
  job->kind = kind;
  job->dtype = dtype;
  job->item = item;
  job->reduction = Reduction::sum;
  job->root = 0;
  job->holds_core = holds_core;
  job->patience = patience;
  job->record = record;
  job->uneven = uneven;
  job->sizes = sizes;
  job->call = call;
  job->expected = expected;
  const auto lay = [](std::vector<Piece>& pieces, char* at, const std::vector<uint64_t>& sizes) {
    at = some_address(at);
    for (const uint64_t bytes : sizes) {
      pieces.push_back({at, bytes});
      at += bytes;
    }
  };
  lay(job->in, in, given);
  lay(job->out, out, taken);
  return channel.at_once(job);
}

Outcome SerialCall::start(uint64_t call, int64_t patience, SerialOperands operands) {
  call_ = call;
  patience_ = patience;
  deadline_ = later(own_time.now(), patience);
  operands_ = std::move(operands);
  job_.reset();
  fabric_.enter(call, signature_, {}, blob_);
  if (!gathers_) serial_product(exchange_->dtype, operands_.x, operands_.weights[0], operands_.between);
  return go();
}

Outcome SerialCall::go() {
  const Outcome outcome = communicate();
  if (outcome.code != Code::ok) return outcome;
  job_.reset();
  if (gathers_)
    for (size_t i = 0; i < operands_.weights.size(); ++i)
      serial_product(exchange_->dtype, operands_.between, operands_.weights[i],
                     operands_.results[i]);
  return fabric_.done(call_);
}

Outcome SerialCall::communicate() {
  if (!exchange_->moves) return fabric_.agree(call_, exchange_->expected, deadline_);
  if (job_) return channel_.wait(*job_, INT64_MAX);
  char* from = (gathers_ ? operands_.x : operands_.between).data;
  char* to = (gathers_ ? operands_.between : operands_.results[0]).data;
  return exchange_->start(channel_, call_, patience_, from, to, false, job_);
}

}  // namespace weft
