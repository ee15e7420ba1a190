// Runs the native tests and says which failed, and how long each took.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
  using Clock = std::chrono::steady_clock;
  int ran = 0, failed = 0;
  for (const auto& test : weft::test::cases()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted |= std::strstr(test.name, arguments[i]) != nullptr;
    if (!wanted) continue;
    ++ran;
    const auto start = Clock::now();
    std::string error;
    try {
      test.run();
    } catch (const std::exception& thrown) {
      error = thrown.what();
      ++failed;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%-6s %6.2f s  %s\n", error.empty() ? "passed" : "FAILED", seconds, test.name);
    if (!error.empty()) std::printf("       %s\n", error.c_str());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", ran, failed);
  return failed || !ran ? 1 : 0;
}
