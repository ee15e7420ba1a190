// The compute kernels of every instruction set that runs here: products, lookups, sums and conversions
// against plain loops.
#include "kernels.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "fused.h"

using namespace weft;

namespace {

constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> found;
  for (const char* name : {"portable", "avx2", "avx512"})
    if (const Kernels* kernels = find_kernels(name)) found.push_back(kernels);
  return found;
}

float small(uint64_t i) { return float(int(i * 7 % 5) - 2); }  // exact in every type

// Writes a number of a type; small whole numbers have the same upper bits in all of them.
void put(char* at, Type type, float value) {
  if (type == Type::f32) {
    std::memcpy(at, &value, 4);
  } else if (type == Type::i8) {
    *reinterpret_cast<int8_t*>(at) = int8_t(value);
  } else if (type == Type::bf16) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t upper = uint16_t(bits >> 16);
    std::memcpy(at, &upper, 2);
  } else {  // -4 to 4 in halves
    constexpr uint16_t halves[] = {0xc400, 0xc200, 0xc000, 0xbc00, 0, 0x3c00, 0x4000, 0x4200, 0x4400};
    std::memcpy(at, &halves[int(value) + 4], 2);
  }
}

std::vector<char> numbers(Type type, uint64_t count, uint64_t seed) {
  std::vector<char> data(count * size_of(type));
  for (uint64_t i = 0; i < count; ++i) put(data.data() + i * size_of(type), type, small(i + seed));
  return data;
}

TEST(there_are_kernels_for_every_processor) {
  CHECK_SAME(std::string(find_kernels("portable")->name) == "portable", true);
  CHECK(find_kernels("none") == nullptr);
  CHECK(&best_kernels() == all_kernels().back());
}

TEST(products_of_few_rows) {
  for (const Kernels* kernels : all_kernels())
    for (const Type type : {Type::f32, Type::bf16, Type::f16, Type::i8})
      for (const bool transposed : {false, true})
        for (const bool scaled : {false, true})
          for (const auto& [rows, k, n] : {std::array<size_t, 3>{1, 1, 1}, {3, 17, 50}, {5, 64, 131},
                                           {9, 33, 7}, {2, 0, 3}, {0, 5, 5}}) {
            constexpr size_t kColumn = 2;
            const size_t width = n + kColumn + 1, item = size_of(type);
            const auto w = numbers(type, k * width, 3);
            std::vector<float> x(rows * k + 1), scale(width), out(rows * n + 1, 77);
            for (size_t i = 0; i < rows * k; ++i) x[i] = small(i + 1);
            for (size_t i = 0; i < width; ++i) scale[i] = float(1 << i % 3);
            const Weight weight{w.data(), type, transposed, (transposed ? k : width) * item, k,
                                scaled ? scale.data() : nullptr};
            kernels->multiply(x.data(), k, rows, weight, kColumn, n, out.data(), n);
            for (size_t r = 0; r < rows; ++r)
              for (size_t c = 0; c < n; ++c) {
                float sum = 0;
                for (size_t i = 0; i < k; ++i)
                  sum += x[r * k + i] *
                         small((transposed ? (kColumn + c) * k + i : i * width + kColumn + c) + 3);
                CHECK_SAME(out[r * n + c], scaled ? sum * scale[kColumn + c] : sum);
              }
            CHECK_SAME(out[rows * n], 77.0f);
          }
}

TEST(lookups_into_tables) {
  const std::vector<int64_t> wide{0, 5, 2, 2, 9, 1, 8}, offsets{0, 2, 2, 6};
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  for (const Kernels* kernels : all_kernels())
    for (const Type type : kTypes)
      for (const uint64_t dim : {1, 5, 16, 37, 130})
        for (const Pooling pooling : {Pooling::sum, Pooling::mean, Pooling::max})
          for (const bool weighted : {false, true}) {
            if (weighted && pooling == Pooling::max) continue;
            const auto table = numbers(type, 10 * dim, 0), weights = numbers(type, wide.size(), 1);
            std::vector<char> out(4 * dim * size_of(type) + 1, 7), expected = out;
            std::vector<float> sums(dim);
            for (const bool is_wide : {false, true}) {
              const void* indices = is_wide ? static_cast<const void*>(wide.data()) : narrow.data();
              Bags bags;
              bags.add({table.data(), type, 10, dim, 0, indices, is_wide, wide.size(), offsets.data(),
                        true, 4, weighted ? weights.data() : nullptr, pooling, type});
              CHECK_SAME(std::get<0>(bags.check(*kernels)), 0);
              // The mean of four is exact; of others only without a division.
              bags.pool(*kernels, 0, 4, 0, dim, out.data(), dim * size_of(type), 1);
              for (uint64_t bag = 0; bag < 4; ++bag) {
                const uint64_t end = bag < 3 ? uint64_t(offsets[bag + 1]) : wide.size();
                const uint64_t count = end - uint64_t(offsets[bag]);
                for (uint64_t c = 0; c < dim; ++c) {
                  float sum = 0;
                  for (uint64_t i = uint64_t(offsets[bag]); i < end; ++i) {
                    const float value = small(uint64_t(wide[i]) * dim + c);
                    if (pooling == Pooling::max)
                      sum = i == uint64_t(offsets[bag]) || value > sum ? value : sum;
                    else
                      sum += value * (weighted ? small(i + 1) : 1);
                  }
                  if (pooling == Pooling::mean && count) sum /= float(count);
                  float found;
                  kernels->widen(out.data() + (bag * dim + c) * size_of(type), type, 1, &found);
                  CHECK(std::abs(found - sum) <= (type == Type::f32 ? 0 : 0.01f * std::abs(sum)));
                }
              }
              CHECK_SAME(out.back(), char(7));
            }
          }
}

TEST(gradients_of_tables) {
  // Rows in several blocks (of 256 KiB), bags in several slabs, empty bags, rows that repeat.
  constexpr uint64_t kRows = 3000, kBags = 400, kIndices = 1200;
  std::vector<int64_t> indices(kIndices), offsets(kBags);
  for (uint64_t i = 0; i < kIndices; ++i) indices[i] = int64_t(i * i * 7 % 31 * 96 + i % 3);
  for (uint64_t bag = 0; bag < kBags; ++bag) offsets[bag] = int64_t(bag / 2 * 2 * 3);
  for (const Kernels* kernels : all_kernels())
    for (const Type type : kTypes)
      for (const uint64_t dim : {1, 37, 96})
        for (const bool weighted : {false, true}) {
          const auto dy = numbers(type, kBags * dim, 0), weights = numbers(type, kIndices, 1);
          std::vector<float> expected(kRows * dim), found(kRows * dim);
          for (uint64_t bag = 0; bag < kBags; ++bag) {
            const uint64_t end = bag + 1 < kBags ? uint64_t(offsets[bag + 1]) : kIndices;
            for (uint64_t i = uint64_t(offsets[bag]); i < end; ++i)
              for (uint64_t c = 0; c < dim; ++c)
                expected[uint64_t(indices[i]) * dim + c] +=
                    small(bag * dim + c) * (weighted ? small(i + 1) : 1);
          }
          Bags bags;
          bags.add({nullptr, type, kRows, dim, 0, indices.data(), true, kIndices, offsets.data(),
                    true, kBags, weighted ? weights.data() : nullptr, Pooling::sum, type});
          for (const int threads : {1, 3}) {
            std::vector<char> out(kRows * dim * size_of(type) + 1, 7);
            bags.spread(*kernels, 0, dy.data(), dim * size_of(type), out.data(), threads);
            kernels->widen(out.data(), type, kRows * dim, found.data());
            for (uint64_t i = 0; i < kRows * dim; ++i)
              CHECK(std::abs(found[i] - expected[i]) <=
                    (type == Type::f32 ? 0 : 0.01f * std::abs(expected[i])));
            CHECK_SAME(out.back(), char(7));
          }
        }
}

TEST(what_is_wrong_with_bags_is_found) {
  const auto table = numbers(Type::f32, 40, 0);
  const auto check = [&](std::vector<int64_t> indices, std::vector<int64_t> offsets) {
    int code = -1;
    for (const Kernels* kernels : all_kernels()) {
      Bags bags;
      bags.add({table.data(), Type::f32, 10, 4, 0, indices.data(), true, indices.size(),
                offsets.data(), true, offsets.size(), nullptr, Pooling::sum, Type::f32});
      code = std::get<0>(bags.check(*kernels));
    }
    return code;
  };
  CHECK_SAME(check({0, 9}, {0, 1}), 0);
  CHECK_SAME(check({0, 9}, {1, 1}), 1);
  CHECK_SAME(check({0, 9}, {0, 2, 1}), 2);
  CHECK_SAME(check({0, 9}, {0, 3}), 3);
  CHECK_SAME(check({0, 10}, {0, 1}), 4);
  CHECK_SAME(check({-1, 0}, {0, 1}), 4);
  CHECK_SAME(check({0}, {0, -1}), 2);
}

TEST(sums_are_stored_to_every_target) {
  for (const Kernels* kernels : all_kernels())
    for (const Type type : kTypes)
      for (const size_t size : {1, 15, 16, 33}) {
        std::vector<float> a(size), b(size), c(size);
        for (size_t i = 0; i < size; ++i) a[i] = b[i] = small(i), c[i] = -small(i);
        const float* sources[] = {a.data(), b.data(), c.data()};
        std::vector<char> one(size * 4 + 1, 7), two(size * 4 + 1, 7);
        char* targets[] = {one.data(), two.data()};
        kernels->add(sources, 3, size, targets, 2, type);
        std::vector<float> found(size);
        for (const auto* target : {&one, &two}) {
          kernels->widen(target->data(), type, size, found.data());
          for (size_t i = 0; i < size; ++i) CHECK_SAME(found[i], small(i));
          CHECK_SAME((*target)[size * size_of(type)], char(7));
        }
      }
}

// Every half there is, and back again; kernels of all instruction sets agree with the portable ones.
TEST(conversions_of_halves) {
  const Kernels* portable = find_kernels("portable");
  for (const Type type : {Type::f16, Type::bf16}) {
    std::vector<uint16_t> halves(65536), back(65536);
    for (uint32_t i = 0; i < 65536; ++i) halves[i] = uint16_t(i);
    std::vector<float> wide(65536), other(65536);
    portable->widen(halves.data(), type, 65536, wide.data());
    for (const Kernels* kernels : all_kernels()) {
      kernels->widen(halves.data(), type, 65536, other.data());
      const float* sources[] = {other.data()};
      char* targets[] = {reinterpret_cast<char*>(back.data())};
      kernels->add(sources, 1, 65536, targets, 1, type);
      for (uint32_t i = 0; i < 65536; ++i) {
        if (std::isnan(wide[i])) {
          CHECK(std::isnan(other[i]));
          CHECK((back[i] & 0x7fff) > (type == Type::f16 ? 0x7c00 : 0x7f80));
        } else {
          CHECK_SAME(other[i], wide[i]);
          CHECK_SAME(back[i], halves[i]);
        }
      }
    }
  }
  // Known values: one, the smallest and the largest, infinity; ties go to the even neighbour.
  const float values[] = {1.0f, 0x1p-24f, 65504.0f, 65520.0f, 1 + 0x1p-11f, 1 + 0x3p-11f, -0.0f};
  const uint16_t expected[] = {0x3c00, 1, 0x7bff, 0x7c00, 0x3c00, 0x3c02, 0x8000};
  for (const Kernels* kernels : all_kernels()) {
    uint16_t found[7];
    const float* sources[] = {values};
    char* targets[] = {reinterpret_cast<char*>(found)};
    kernels->add(sources, 1, 7, targets, 1, Type::f16);
    for (int i = 0; i < 7; ++i) CHECK_SAME(found[i], expected[i]);
  }
}

}  // namespace
