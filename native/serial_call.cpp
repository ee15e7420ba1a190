#include "serial_call.h"

#include <cstring>

namespace weft {
namespace {

// Stands for the address of an empty tensor, which has none. Nothing is read there.
char* some_address(char* data) { return data ? data : reinterpret_cast<char*>(64); }

}  // namespace

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
  deadline_ = later(now_ns(), patience);
  operands_ = std::move(operands);
  job_.reset();
  fabric_.enter(call, signature_, {}, blob_);
  if (!gathers_) multiply(operands_.x, operands_.weights[0], operands_.between);
  return go();
}

Outcome SerialCall::go() {
  const Outcome outcome = communicate();
  if (outcome.code != Code::ok) return outcome;
  job_.reset();
  if (gathers_)
    for (size_t i = 0; i < operands_.weights.size(); ++i)
      multiply(operands_.between, operands_.weights[i], operands_.results[i]);
  return fabric_.done(call_);
}

Outcome SerialCall::communicate() {
  if (!exchange_->moves) return fabric_.agree(call_, exchange_->expected, deadline_);
  if (job_) return channel_.wait(*job_, INT64_MAX);
  char* from = (gathers_ ? operands_.x : operands_.between).data;
  char* to = (gathers_ ? operands_.between : operands_.results[0]).data;
  return exchange_->start(channel_, call_, patience_, from, to, false, job_);
}

void SerialCall::multiply(const Matrix& a, const Matrix& b, const Matrix& c) const {
  if (c.rows == 0 || c.columns == 0) return;
  if (inner_ != 0) {
    torch_product(exchange_->dtype, a, b, c, false);
  } else {
    zero(c, exchange_->item);
  }
}

}  // namespace weft
