// Ranks for tests: threads of one process, each with a fabric of its own on one mapping. A thread
// sanitizer sees what ranks do to each other's memory here; between processes it sees nothing.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine.h"

namespace weft::test {

constexpr int64_t kSecond = 1'000'000'000;

class Ranks {
 public:
  explicit Ranks(int world, uint64_t span = 4 << 20, int64_t spin_ns = 20'000) {
    auto first = std::make_shared<Heap>(Heap::create(world, span), 0, world, span);
    for (int rank = 0; rank < world; ++rank) {
      auto heap = rank == 0 ? first : std::make_shared<Heap>(first->mapping(), rank, world, span);
      fabrics_.push_back(std::make_unique<Fabric>(heap, spin_ns, spin_ns));
    }
  }

  Fabric& operator[](int rank) { return *fabrics_[size_t(rank)]; }
  int world() const { return int(fabrics_.size()); }

  // Runs a function on a thread per rank, and passes on what the first of them threw.
  void each(const std::function<void(int, Fabric&)>& function) {
    std::vector<std::exception_ptr> errors(fabrics_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          function(rank, (*this)[rank]);
        } catch (...) {
          errors[size_t(rank)] = std::current_exception();
          (*this)[rank].heap().leave();  // so that the others do not wait for it
        }
      });
    for (auto& thread : threads) thread.join();
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  std::vector<std::unique_ptr<Fabric>> fabrics_;
};

}  // namespace weft::test
