// Reductions of every dtype against plain loops, at sizes around tiles and vectors.
#include "sums.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

constexpr Reduction kNumeric[] = {Reduction::sum, Reduction::product, Reduction::min,
                                  Reduction::max, Reduction::avg};
constexpr Reduction kBits[] = {Reduction::band, Reduction::bor, Reduction::bxor};
constexpr uint64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 1023, 1024, 1025, 2051};

double join(Reduction reduction, double a, double b) {
  switch (reduction) {
    case Reduction::product:
      return a * b;
    case Reduction::min:
      return std::min(a, b);
    case Reduction::max:
      return std::max(a, b);
    case Reduction::band:
      return double(int64_t(a) & int64_t(b));
    case Reduction::bor:
      return double(int64_t(a) | int64_t(b));
    case Reduction::bxor:
      return double(int64_t(a) ^ int64_t(b));
    default:
      return a + b;
  }
}

// Small whole numbers are exact in every dtype; halves and bfloat16 hold them by their upper bits.
template <class T>
T stored(Dtype, double value) {
  return T(value);
}

template <>
uint16_t stored<uint16_t>(Dtype dtype, double value) {
  if (dtype == Dtype::bf16) {
    const float wide = float(value);
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    return uint16_t(bits >> 16);
  }
#if defined(__FLT16_MAX__)
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#else
  return 0;
#endif
}

template <class T>
void check(Dtype dtype, Reduction reduction, int count, uint64_t size, bool in_place) {
  std::vector<std::vector<T>> sources(static_cast<size_t>(count));
  std::vector<double> expected(size);
  const bool positive = std::is_unsigned_v<T> && dtype != Dtype::bf16 && dtype != Dtype::f16;
  for (int s = 0; s < count; ++s)
    for (uint64_t i = 0; i < size; ++i) {
      double value = double(int((i * 5 + uint64_t(s) * 3) % 4) - (positive ? 0 : 1));
      if (dtype == Dtype::boolean) value = value > 0;
      sources[size_t(s)].push_back(stored<T>(dtype, value));
      expected[i] = s ? join(reduction, expected[i], value) : value;
      if (dtype == Dtype::boolean) expected[i] = expected[i] != 0;
    }
  if (reduction == Reduction::avg)
    for (double& value : expected) value = std::trunc(value / count * 4) / 4;
  std::vector<T> apart(size + 1);
  std::vector<const char*> pointers;
  for (auto& source : sources) pointers.push_back(reinterpret_cast<const char*>(source.data()));
  T* out = in_place ? sources.back().data() : apart.data();
  reduce(dtype, reduction, reinterpret_cast<char*>(out), pointers.data(), count, size * sizeof(T));
  for (uint64_t i = 0; i < size; ++i) CHECK_SAME(out[i], stored<T>(dtype, expected[i]));
  CHECK_SAME(apart[size], T(0));  // nothing beside the result is touched
}

template <class T>
void check_dtype(Dtype dtype) {
  const auto all = [&](Reduction reduction, int count) {
    if (!can_reduce(dtype, reduction)) return;
    for (const uint64_t size : kSizes)
      for (const bool in_place : {false, true}) check<T>(dtype, reduction, count, size, in_place);
  };
  for (const int count : {1, 2, 4}) {  // averages of four whole numbers are exact
    for (const Reduction reduction : kNumeric) all(reduction, count);
    for (const Reduction reduction : kBits) all(reduction, count);
  }
  all(Reduction::sum, 64);
}

TEST(reductions_of_floats) {
  check_dtype<double>(Dtype::f64);
  check_dtype<float>(Dtype::f32);
}

TEST(reductions_of_halves) {
  check_dtype<uint16_t>(Dtype::bf16);
#if defined(__FLT16_MAX__)
  check_dtype<uint16_t>(Dtype::f16);
#endif
}

TEST(reductions_of_whole_numbers) {
  check_dtype<int8_t>(Dtype::i8);
  check_dtype<uint8_t>(Dtype::u8);
  check_dtype<int16_t>(Dtype::i16);
  check_dtype<int32_t>(Dtype::i32);
  check_dtype<int64_t>(Dtype::i64);
  check_dtype<uint8_t>(Dtype::boolean);
}

TEST(what_can_be_reduced) {
  CHECK(can_reduce(Dtype::f32, Reduction::avg));
  CHECK(!can_reduce(Dtype::i32, Reduction::avg));
  CHECK(!can_reduce(Dtype::f16, Reduction::bxor));
  CHECK(can_reduce(Dtype::boolean, Reduction::band));
  CHECK(!can_reduce(Dtype::other, Reduction::sum));
}

TEST(whole_numbers_wrap_around_as_in_torch) {
  const int32_t large[] = {INT32_MAX}, one[] = {1};
  int32_t out[1];
  const char* sources[] = {reinterpret_cast<const char*>(large), reinterpret_cast<const char*>(one)};
  reduce(Dtype::i32, Reduction::sum, reinterpret_cast<char*>(out), sources, 2, 4);
  CHECK_SAME(out[0], INT32_MIN);
}

TEST(a_nan_wins_as_in_torch) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float a[] = {nan, 1, 5}, b[] = {2, nan, 3};
  float out[3];
  const char* sources[] = {reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b)};
  for (const Reduction reduction : {Reduction::min, Reduction::max}) {
    reduce(Dtype::f32, reduction, reinterpret_cast<char*>(out), sources, 2, 12);
    CHECK(std::isnan(out[0]));
    CHECK(std::isnan(out[1]));
    CHECK_SAME(out[2], reduction == Reduction::min ? 3.0f : 5.0f);
  }
}

}  // namespace
