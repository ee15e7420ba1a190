#include "sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "moving.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WEFT_F16C 1
#endif

namespace weft {
namespace {

constexpr int kMaxSources = 64;

// -- elements: how each dtype is read and written -------------------------------------------------

template <class T>
struct Plain {
  using Stored = T;
  using Grown = T;
  static Grown read(T value) { return value; }
  static T write(Grown value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Grown = float;
  static float read(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static uint16_t write(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Grown = float;
  // By shifting exponents, without branches, so that loops over it vectorise.
  static float read(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
    uint32_t wide = rest;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    value *= 0x1p112f;  // exact, subnormals too
    std::memcpy(&wide, &value, sizeof wide);
    wide = rest >= 0x0f800000 ? (rest | 0x7f800000) : wide;  // infinity and NaN
    wide |= sign;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static uint16_t write(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits & 0x80000000;
    bits ^= sign;
    uint32_t half;
    if (bits >= 0x47800000) {  // too large, infinity or NaN
      half = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (bits < 0x38800000) {  // subnormal: let the adder round
      float small;
      std::memcpy(&small, &bits, sizeof small);
      small += 0.5f;
      std::memcpy(&half, &small, sizeof half);
      half -= 0x3f000000;
    } else {
      half = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    }
    return uint16_t(half | sign >> 16);
  }
};

struct Boolean {
  using Stored = uint8_t;
  using Grown = uint8_t;
  static uint8_t read(uint8_t value) { return value != 0; }
  static uint8_t write(uint8_t value) { return value != 0; }
};

// -- reductions -----------------------------------------------------------------------------------

struct Sum {
  template <class T>
  static T join(T a, T b) {
    return T(a + b);
  }
};
struct Product {
  template <class T>
  static T join(T a, T b) {
    return T(a * b);
  }
};
struct Min {
  template <class T>
  static T join(T a, T b) {
    return a < b || a != a ? a : b;  // a NaN wins, as in torch
  }
};
struct Max {
  template <class T>
  static T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct And {
  template <class T>
  static T join(T a, T b) {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  static T join(T a, T b) {
    return T(a | b);
  }
};
struct Xor {
  template <class T>
  static T join(T a, T b) {
    return T(a ^ b);
  }
};

constexpr uint64_t kTile = 1024;  // elements that grow together, in the innermost cache

template <class Element, class Join>
void reduce_elements(char* out_bytes, const char* const* sources, int count, uint64_t bytes,
                     bool mean) {
  using Stored = typename Element::Stored;
  using Grown = typename Element::Grown;
  const uint64_t total = bytes / sizeof(Stored);
  Grown grown[kTile];
  for (uint64_t at = 0; at < total; at += kTile) {
    const uint64_t size = std::min(kTile, total - at);
    const Stored* first = reinterpret_cast<const Stored*>(sources[0]) + at;
    for (uint64_t i = 0; i < size; ++i) grown[i] = Element::read(first[i]);
    for (int s = 1; s < count; ++s) {
      const Stored* next = reinterpret_cast<const Stored*>(sources[s]) + at;
      for (uint64_t i = 0; i < size; ++i) grown[i] = Join::join(grown[i], Element::read(next[i]));
    }
    if constexpr (std::is_floating_point_v<Grown>)
      if (mean)
        for (uint64_t i = 0; i < size; ++i) grown[i] /= Grown(count);
    Stored* out = reinterpret_cast<Stored*>(out_bytes) + at;
    for (uint64_t i = 0; i < size; ++i) out[i] = Element::write(grown[i]);
  }
}

// The commonest of all, in one pass: two sources of one dtype that does not grow.
template <class T>
void add_two(char* out_bytes, const char* a_bytes, const char* b_bytes, uint64_t bytes) {
  const T *a = reinterpret_cast<const T*>(a_bytes), *b = reinterpret_cast<const T*>(b_bytes);
  T* out = reinterpret_cast<T*>(out_bytes);
  constexpr uint64_t kLine = 64 / sizeof(T), kAhead = 1024 / sizeof(T);
  const uint64_t total = bytes / sizeof(T);
  uint64_t at = 0;
  for (; at + kLine <= total; at += kLine) {
    __builtin_prefetch(a + at + kAhead);
    __builtin_prefetch(b + at + kAhead);
#pragma GCC ivdep
    for (uint64_t i = at; i < at + kLine; ++i) out[i] = a[i] + b[i];
  }
  for (; at < total; ++at) out[at] = a[at] + b[at];
}

#ifdef WEFT_F16C
// Where the processor converts halves itself: the same values, several at once.
__attribute__((target("avx2,f16c"))) void sum_halves_f16c(char* out_bytes,
                                                          const char* const* sources, int count,
                                                          uint64_t bytes, bool mean) {
  const uint64_t total = bytes / 2, whole = total / 8 * 8;
  uint16_t* out = reinterpret_cast<uint16_t*>(out_bytes);
  const __m256 number = _mm256_set1_ps(float(count));
  for (uint64_t i = 0; i < whole; i += 8) {
    const auto half = [&](int s) {
      const auto* p = reinterpret_cast<const uint16_t*>(sources[s]) + i;
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    __m256 grown = _mm256_cvtph_ps(half(0));
    for (int s = 1; s < count; ++s) grown = _mm256_add_ps(grown, _mm256_cvtph_ps(half(s)));
    if (mean) grown = _mm256_div_ps(grown, number);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(grown, _MM_FROUND_TO_NEAREST_INT));
  }
  const char* rest[kMaxSources];
  for (int s = 0; s < count; ++s) rest[s] = sources[s] + whole * 2;
  reduce_elements<Float16, Sum>(out_bytes + whole * 2, rest, count, (total - whole) * 2, mean);
}

bool converts_halves() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return can;
}
#endif

template <class Element>
void reduce_numbers(Reduction reduction, char* out, const char* const* sources, int count,
                    uint64_t bytes) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::avg:
      return reduce_elements<Element, Sum>(out, sources, count, bytes, reduction == Reduction::avg);
    case Reduction::product:
      return reduce_elements<Element, Product>(out, sources, count, bytes, false);
    case Reduction::min:
      return reduce_elements<Element, Min>(out, sources, count, bytes, false);
    case Reduction::max:
      return reduce_elements<Element, Max>(out, sources, count, bytes, false);
    default:
      break;
  }
  if constexpr (std::is_integral_v<typename Element::Grown>) {
    if (reduction == Reduction::band) reduce_elements<Element, And>(out, sources, count, bytes, false);
    if (reduction == Reduction::bor) reduce_elements<Element, Or>(out, sources, count, bytes, false);
    if (reduction == Reduction::bxor) reduce_elements<Element, Xor>(out, sources, count, bytes, false);
  }
}

}  // namespace

bool can_reduce(Dtype dtype, Reduction reduction) {
  if (dtype == Dtype::other) return false;
  const bool floats = dtype <= Dtype::bf16;
  if (reduction == Reduction::avg) return floats;
  return !floats || reduction <= Reduction::max;
}

void reduce(Dtype dtype, Reduction reduction, char* out, const char* const* sources, int count,
            uint64_t bytes) {
  const bool two = count == 2 && reduction == Reduction::sum;
  switch (dtype) {
    case Dtype::f64:
      if (two) return add_two<double>(out, sources[0], sources[1], bytes);
      return reduce_numbers<Plain<double>>(reduction, out, sources, count, bytes);
    case Dtype::f32:
      if (two) return add_two<float>(out, sources[0], sources[1], bytes);
      return reduce_numbers<Plain<float>>(reduction, out, sources, count, bytes);
    case Dtype::f16:
#ifdef WEFT_F16C
      if ((reduction == Reduction::sum || reduction == Reduction::avg) && converts_halves())
        return sum_halves_f16c(out, sources, count, bytes, reduction == Reduction::avg);
#endif
      return reduce_numbers<Float16>(reduction, out, sources, count, bytes);
    case Dtype::bf16:
      return reduce_numbers<Bfloat16>(reduction, out, sources, count, bytes);
    case Dtype::i8:
      return reduce_numbers<Plain<int8_t>>(reduction, out, sources, count, bytes);
    case Dtype::u8:
      return reduce_numbers<Plain<uint8_t>>(reduction, out, sources, count, bytes);
    case Dtype::i16:
      return reduce_numbers<Plain<int16_t>>(reduction, out, sources, count, bytes);
    case Dtype::i32:
      return reduce_numbers<Plain<int32_t>>(reduction, out, sources, count, bytes);
    case Dtype::i64:
      return reduce_numbers<Plain<int64_t>>(reduction, out, sources, count, bytes);
    case Dtype::boolean:
      return reduce_numbers<Boolean>(reduction, out, sources, count, bytes);
    case Dtype::other:
      return;
  }
}

void reduce_by(int threads, Dtype dtype, Reduction reduction, char* out, const char* const* sources,
               int count, uint64_t bytes) {
  by_threads(threads, bytes, [&](uint64_t at, uint64_t size) {
    const char* here[kMaxSources];
    for (int s = 0; s < count; ++s) here[s] = sources[s] + at;
    reduce(dtype, reduction, out + at, here, count, size);
  });
}

}  // namespace weft
