// A small frame for the native tests: a test is a function that throws where something is not as it
// should be. `native_tests` runs all of them, or those whose names contain one of its arguments.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw Failure(text.str());
}

template <class A, class B>
void same(const A& found, const B& expected, const char* text, const char* file, int line) {
  if (found == expected) return;
  std::ostringstream what;
  what << text << " is " << +found << ", not " << +expected;
  fail(file, line, what.str());
}

// What a function throws, in words; nothing if it throws nothing.
template <class Function>
std::string thrown(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Sanitizers make everything slower; stress tests do less then.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 1;
#else
constexpr int kRounds = 4;
#endif

}  // namespace weft::test

#define TEST(name)                                              \
  static void name();                                           \
  static const weft::test::Registered registered_##name{#name, name}; \
  static void name()

#define CHECK(condition) \
  if (!(condition)) weft::test::fail(__FILE__, __LINE__, #condition " does not hold")

#define CHECK_SAME(found, expected) \
  weft::test::same(found, expected, #found, __FILE__, __LINE__)
