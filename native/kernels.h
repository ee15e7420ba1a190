// Compute kernels of the fused operators: products of few rows, and pooled lookups. The same source
// (kernels.inc) is compiled for several instruction sets; the best one that runs here is taken.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

inline size_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

// A weight [K, N] as it lies in memory: `pitch` bytes from one row to the next, where a row is a row
// of the weight, or, if `transposed`, a column of it (then the K elements of a column lie together).
struct Weight {
  const char* data;
  Type type;
  bool transposed;
  size_t pitch;
  size_t k;
  const float* scale;  // one per column, or null
};

// What is made of the rows of a bag. An empty bag gives zeros.
enum class Pooling : int { sum = 0, mean = 1, max = 2 };

// One embedding table and what the bags ask of it. Bag b has the indices from offsets[b] to the next
// bag's offset, the last one to the end.
struct Table {
  const char* data;
  Type type;
  uint64_t rows, dim;
  uint64_t column;  // of its pooled rows, among those of all tables of the rank
  const void* indices;
  bool wide_indices;  // int64, else int32
  uint64_t num_indices;
  const void* offsets;
  bool wide_offsets;
  uint64_t num_bags;
  const void* weights;  // one per index in the table's type, or null; for sums only
  Pooling pooling;
  Type out;  // of the pooled rows
};

// One index of a table, by its number, and the bag that it is in.
struct Visit {
  uint64_t index, bag;
};

// Columns of a product that are made together, so that what several groups of rows read stays in the
// cache. Products that are cut at multiples of it have the same bits as a whole one.
constexpr size_t kColumnsTogether = 48;

struct Kernels {
  const char* name;
  // out[m, n] = sum over k of x[m, k] w[k, column + n], in float32; pitches in elements.
  void (*multiply)(const float* x, size_t x_pitch, size_t rows, const Weight& w, size_t column,
                   size_t columns, float* out, size_t out_pitch);
  // Stores the pooled rows of bags from `first` on, columns from `column` on; `pitch` in bytes.
  void (*pool)(const Table& table, uint64_t first, uint64_t bags, uint64_t column,
               uint64_t columns, char* target, size_t pitch);
  // Adds to each row that is visited the gradient of its bag (of type `table.out`), times its weight,
  // in the order of visits. `sums` has the rows of the table from `first` on; `pitch` in bytes.
  void (*spread)(const Table& table, const Visit* visits, uint64_t count, const char* bags,
                 size_t pitch, uint64_t first, float* sums);
  // Whether all indices are from 0 to below a limit.
  bool (*in_range)(const void* indices, bool wide, uint64_t count, uint64_t limit);
  // The sum of vectors in their order, stored to every target in its type.
  void (*add)(const float* const* sources, size_t num_sources, size_t size, char* const* targets,
              size_t num_targets, Type type);
  // A vector in float32.
  void (*widen)(const void* source, Type type, size_t size, float* target);
};

// The kernels for this processor, or those of a name (null where they cannot run here).
const Kernels& best_kernels();
const Kernels* find_kernels(const char* name);

}  // namespace weft
