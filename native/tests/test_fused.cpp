// Kernels that communicate by themselves: products of two ranks added where they are needed.
#include "fused.h"

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr uint64_t kN = 70, kK = 40;
enum Buffer { kX, kW, kY, kPartial, kInbox };
enum Slot { kInboxSlot, kYSlot };

float x_of(int rank, uint64_t i) { return float(int(i + uint64_t(rank)) % 5 - 2); }
float w_of(int rank, uint64_t i) { return float(int(i * 3 + uint64_t(rank)) % 7 - 3); }

// Rank r makes y = sum over ranks of x @ w: each rank stores its product into the inbox of every peer,
// and adds what has come to its own.
std::shared_ptr<Kernel> kernel_of(int rank) {
  const int peer = 1 - rank;
  auto kernel = std::make_shared<Kernel>();
  Step away{Work::multiply, {{0, 0, 1, kN, {peer, kInboxSlot, 0, kN * 4}}}, {}, {}, 0, 0, {}, 0};
  Step own{Work::multiply, {{0, 0, 1, kN, {rank, kPartial, 0, kN * 4}}}, {}, {}, 0, 0, {}, -1};
  Step sum{Work::add,
           {},
           {{rank, kPartial, 0, kN * 4}, {rank, kInbox, 0, kN * 4}},
           {{rank, kY, 0, kN * 4}},
           1,
           kN,
           {{peer, 0}},
           1};
  kernel->steps = {away, own, sum};
  return kernel;
}

struct Inputs {
  std::vector<float> x, w;
  Operands operands;
  explicit Inputs(int rank) : x(kK), w(kK * kN) {
    for (uint64_t i = 0; i < x.size(); ++i) x[i] = x_of(rank, i);
    for (uint64_t i = 0; i < w.size(); ++i) w[i] = w_of(rank, i);
    operands.x = reinterpret_cast<const char*>(x.data());
    operands.x_rows = 1;
    operands.x_pitch = kK * 4;
    operands.weight = {reinterpret_cast<const char*>(w.data()), Type::f32, false, kN * 4, kK, nullptr};
  }
  void multiply(float* target) const {
    for (uint64_t n = 0; n < kN; ++n) {
      target[n] = 0;
      for (uint64_t k = 0; k < kK; ++k) target[n] += x[k] * w[k * kN + n];
    }
  }
};

void check_sum(const float* y) {
  for (uint64_t n = 0; n < kN; ++n) {
    float sum = 0;
    for (int r = 0; r < 2; ++r)
      for (uint64_t k = 0; k < kK; ++k) sum += x_of(r, k) * w_of(r, k * kN + n);
    CHECK_SAME(y[n], sum);
  }
}

TEST(a_known_product_is_made_again_and_again) {
  for (const bool paced : {false, true}) {
    Ranks ranks(2);
    ranks.each([&](int rank, Fabric& fabric) {
      if (paced) fabric.links().set(1e9, 2000, Topology::mesh);
      Heap& heap = fabric.heap();
      const Inputs inputs(rank);
      const uint64_t inbox[2] = {heap.allocate(kN * 4), heap.allocate(kN * 4)};
      std::vector<char> partial(kN * 4);
      Repeat repeat(kernel_of(rank), best_kernels(), 1, "words", {1, 1}, partial.data());
      std::vector<float> y(kN);
      for (uint64_t call = 1; call <= uint64_t(50 * kRounds); ++call) {
        std::fill(y.begin(), y.end(), 0.0f);
        const uint64_t at = inbox[call % 2];
        Outcome outcome = repeat.start(fabric, call, 20 * kSecond, inputs.operands,
                                       reinterpret_cast<char*>(y.data()), heap.base(rank) + at, at, 0);
        while (outcome.code == Code::again) outcome = repeat.go();
        CHECK(outcome.code == Code::ok);
        check_sum(y.data());
      }
    });
  }
}

TEST(products_of_the_caller_are_stored_between_native_steps) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Heap& heap = fabric.heap();
    const Inputs inputs(rank);
    const uint64_t inbox[2] = {heap.allocate(kN * 4), heap.allocate(kN * 4)};
    std::vector<float> partial(kN), y(kN);
    const std::shared_ptr<Kernel> kernel = kernel_of(rank);
    for (Step& step : kernel->steps)
      if (step.work == Work::multiply) step.work = Work::outside;
    Repeat repeat(kernel, best_kernels(), 1, "words", {1, 1}, reinterpret_cast<char*>(partial.data()));
    for (uint64_t call = 1; call <= uint64_t(50 * kRounds); ++call) {
      std::fill(y.begin(), y.end(), 0.0f);
      const uint64_t at = inbox[call % 2];
      float* targets[2] = {reinterpret_cast<float*>(heap.base(1 - rank) + at), partial.data()};
      int made = 0;
      Outcome outcome = repeat.start(fabric, call, 20 * kSecond, inputs.operands,
                                     reinterpret_cast<char*>(y.data()), heap.base(rank) + at, at, 0);
      while (outcome.code == Code::again || outcome.code == Code::outside) {
        if (outcome.code == Code::outside && made < 2) inputs.multiply(targets[made++]);
        outcome = repeat.go();
      }
      CHECK(outcome.code == Code::ok);
      CHECK_SAME(made, 2);
      check_sum(y.data());
    }
  });
}

TEST(a_kernel_stores_nothing_outside_a_peers_memory) {
  constexpr uint64_t kSpan = 1 << 20;
  for (const uint64_t offset : {kSpan - kN * 4 + 1, kSpan + 1, UINT64_MAX}) {
    Ranks ranks(2, kSpan);
    ranks[1].enter(1, 1, {offset, 0}, "");
    Heap& heap = ranks[0].heap();
    const Inputs inputs(0);
    const uint64_t inbox = heap.allocate(kN * 4);
    std::vector<float> y(kN);
    std::vector<char> partial(kN * 4);
    Repeat repeat(kernel_of(0), best_kernels(), 1, "", {1, 1}, partial.data());
    const Outcome outcome =
        repeat.start(ranks[0], 1, 20 * kSecond, inputs.operands, reinterpret_cast<char*>(y.data()),
                     heap.base(0) + inbox, inbox, 0);
    CHECK(outcome.code == Code::corrupt);
    CHECK_SAME(outcome.rank, 1);
  }
}

}  // namespace
