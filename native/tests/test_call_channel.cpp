// The channel of serial calls: jobs have the numbers of calls, and headers decide whether they go on.
#include "channel.h"
#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

Outcome run(Channel& channel, const std::shared_ptr<Job>& job) {
  Outcome outcome = channel.at_once(job);
  while (outcome.code == Code::again) outcome = channel.wait(*job, INT64_MAX);
  return outcome;
}

std::shared_ptr<Job> sum_of(uint64_t call, const std::vector<uint64_t>& expected, float* in,
                            float* out, uint64_t count) {
  auto job = std::make_shared<Job>();
  job->kind = Kind::all_reduce;
  job->dtype = Dtype::f32;
  job->item = 4;
  job->patience = 20 * kSecond;
  job->sizes = {count * 4};
  job->in = {{reinterpret_cast<char*>(in), count * 4}};
  job->out = {{reinterpret_cast<char*>(out), count * 4}};
  job->call = call;
  job->expected = expected;
  return job;
}

// In some calls a rank expects other headers than there are. It learns so, and makes the call again
// with those that are there; the others wait for that, and take nothing of the first time.
void surprised(int world, uint64_t count, bool shared) {
  Ranks ranks(world);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 20'000, false, Traffic::calls);
    Heap& heap = fabric.heap();
    std::vector<float> own(count), out(count);
    float* in = own.data();
    if (shared) in = reinterpret_cast<float*>(heap.base(rank) + heap.allocate(count * 4));
    for (uint64_t call = 1; call <= 120; ++call) {
      if (call % 5 == 0) {  // a call without a collective
        fabric.enter(call, 1, {}, "");
        Outcome met{Code::again, -1};
        while (met.code == Code::again) met = fabric.agree(call, {}, now_ns() + 20 * kSecond);
        CHECK(met.code == Code::ok);
        CHECK(fabric.done(call).code == Code::ok);
        continue;
      }
      std::vector<uint64_t> headers;
      for (int r = 0; r < world; ++r) headers.push_back(100 + (call + uint64_t(r)) % 3);
      fabric.enter(call, headers[size_t(rank)], {}, "");
      if ((call + uint64_t(rank)) % 3 == 0) {
        std::vector<uint64_t> others = headers;
        others[size_t(rank + 1) % size_t(world)] = 7;
        std::fill(in, in + count, -1000.0f);
        CHECK(run(channel, sum_of(call, others, in, out.data(), count)).code == Code::disagree);
      }
      std::fill(in, in + count, float(rank + 1) + float(call % 9));
      CHECK(run(channel, sum_of(call, headers, in, out.data(), count)).code == Code::ok);
      const float wanted = float(world * (world + 1) / 2 + world * int(call % 9));
      CHECK(out[0] == wanted && out[count / 2] == wanted && out[count - 1] == wanted);
      CHECK(fabric.done(call).code == Code::ok);
    }
  });
}

}  // namespace

TEST(a_call_goes_on_when_all_headers_are_as_expected) {
  for (const int world : {2, 3}) {
    surprised(world, 11, false);
    surprised(world, 300'000, false);
    surprised(world, 300'000, true);
  }
}
