// A serial call of an operator, as plain code has it: products by torch, and one collective of a channel
// before or after them, without Python in between.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "channel.h"
#include "torch_product.h"

namespace weft {

// c = a @ b. Up to eight rows in float32 are made by the kernels for few rows, which read b only once and
// take 0.3 to 0.9 times as long as torch's GEMM there; all others by torch. The sizes and
// layouts alone decide, so a call has the same bits whenever it is made.
void serial_product(Dtype dtype, const Matrix& a, const Matrix& b, const Matrix& c);

// The collective of a serial call, without its memory: made once, and carried out in every call.
struct Exchange {
  Kind kind;
  Dtype dtype;
  uint64_t item;
  bool holds_core, uneven;
  bool moves;  // whether any rank has anything to send
  std::vector<uint64_t> sizes, given, taken;
  std::vector<uint64_t> expected;  // the signatures that the headers must have

  // Begins the collective of a call, and carries it out unless the outcome is another than ok.
  Outcome start(Channel& channel, uint64_t call, int64_t patience, char* in, char* out, bool record,
                std::shared_ptr<Job>& job) const;
};

// The matrices of a serial call. between: what the collective makes for the products, or gets from them.
struct SerialOperands {
  Matrix x, between;
  std::vector<Matrix> weights, results;
};

// A call that a rank has made before, all of it but its operands. To make it once more takes one call
// from Python.
class SerialCall {
 public:
  // gathers: the collective comes before the products.
  SerialCall(Fabric& fabric, Channel& channel, std::shared_ptr<const Exchange> exchange,
             bool gathers, uint64_t signature, std::string blob)
      : fabric_(fabric),
        channel_(channel),
        exchange_(std::move(exchange)),
        gathers_(gathers),
        signature_(signature),
        blob_(std::move(blob)) {}

  // Enters a call and carries it out, to its end unless the outcome is another than ok.
  Outcome start(uint64_t call, int64_t patience, SerialOperands operands);
  // Goes on where the outcome was `again`.
  Outcome go();

 private:
  Outcome communicate();

  Fabric& fabric_;
  Channel& channel_;
  std::shared_ptr<const Exchange> exchange_;
  bool gathers_;
  uint64_t signature_;
  std::string blob_;
  uint64_t call_ = 0;
  int64_t patience_ = 0, deadline_ = 0;
  SerialOperands operands_;
  std::shared_ptr<Job> job_;  // of the collective that is under way
};

}  // namespace weft
