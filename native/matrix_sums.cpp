#include "matrix_sums.h"

#include <algorithm>
#include <cstring>

#include "moving.h"
#include "team.h"

namespace weft {
namespace {

// Elements of one row, from or to contiguous memory.
void gather(char* to, const Matrix& m, int64_t row, uint64_t item) {
  const char* from = m.data + row * m.row_stride * int64_t(item);
  for (int64_t i = 0; i < m.columns; ++i)
    std::memcpy(to + uint64_t(i) * item, from + i * m.column_stride * int64_t(item), item);
}

void scatter(const Matrix& m, int64_t row, const char* from, uint64_t item) {
  char* to = m.data + row * m.row_stride * int64_t(item);
  for (int64_t i = 0; i < m.columns; ++i)
    std::memcpy(to + i * m.column_stride * int64_t(item), from + uint64_t(i) * item, item);
}

bool has_dense_rows(const Matrix& m) { return m.column_stride == 1 || m.columns == 1; }

// Rows [first, first + count) of every target = the sum of those of the sources.
void add_rows(Dtype dtype, uint64_t item, const std::vector<Matrix>& sources,
              const std::vector<Matrix>& targets, int64_t first, int64_t count) {
  const int64_t columns = targets[0].columns;
  const uint64_t bytes = uint64_t(columns) * item;
  std::vector<char> scratch;
  std::vector<const char*> from(sources.size());
  const auto buffer = [&](size_t i) { return scratch.data() + i * bytes; };
  const bool dense = std::all_of(sources.begin(), sources.end(), has_dense_rows) &&
                     has_dense_rows(targets[0]);
  if (!dense) scratch.resize((sources.size() + 1) * bytes);
  for (int64_t row = first; row < first + count; ++row) {
    for (size_t i = 0; i < sources.size(); ++i) {
      const Matrix& source = sources[i];
      from[i] = source.data + row * source.row_stride * int64_t(item);
      if (has_dense_rows(source)) continue;
      gather(buffer(i), source, row, item);
      from[i] = buffer(i);
    }
    const bool here = has_dense_rows(targets[0]);
    char* out = here ? targets[0].data + row * targets[0].row_stride * int64_t(item)
                     : buffer(sources.size());
    reduce(dtype, Reduction::sum, out, from.data(), int(from.size()), bytes);
    for (size_t i = here ? 1 : 0; i < targets.size(); ++i) {
      if (has_dense_rows(targets[i])) {
        std::memcpy(targets[i].data + row * targets[i].row_stride * int64_t(item), out, bytes);
      } else {
        scatter(targets[i], row, out, item);
      }
    }
  }
}

// Whether the rows of a matrix follow each other without a gap.
bool is_dense(const Matrix& m) {
  return has_dense_rows(m) && (m.rows == 1 || m.row_stride == m.columns);
}

// Makes of every matrix one long row, if all of them are dense.
bool flatten(std::vector<Matrix>& sources, std::vector<Matrix>& targets) {
  for (const auto* matrices : {&sources, &targets})
    if (!std::all_of(matrices->begin(), matrices->end(), is_dense)) return false;
  for (auto* matrices : {&sources, &targets})
    for (Matrix& m : *matrices) m = {m.data, 1, m.rows * m.columns, m.rows * m.columns, 1};
  return true;
}

// The same for matrices of one row each, on several threads.
void add_flat(int threads, Dtype dtype, uint64_t item, const std::vector<Matrix>& sources,
              const std::vector<Matrix>& targets) {
  const uint64_t bytes = uint64_t(targets[0].columns) * item;
  std::vector<const char*> from;
  for (const Matrix& source : sources) from.push_back(source.data);
  reduce_by(threads, dtype, Reduction::sum, targets[0].data, from.data(), int(from.size()), bytes);
  for (size_t i = 1; i < targets.size(); ++i)
    move_by(threads, targets[i].data, targets[0].data, bytes, false);
}

}  // namespace

void add_matrices(Dtype dtype, uint64_t item, std::vector<Matrix> sources,
                  std::vector<Matrix> targets) {
  const Matrix& first = targets[0];
  if (first.rows == 0 || first.columns == 0) return;
  const int threads = team_threads();
  if (flatten(sources, targets)) return add_flat(threads, dtype, item, sources, targets);
  const uint64_t row_bytes = uint64_t(first.columns) * item * (sources.size() + 1);
  in_blocks(threads, uint64_t(first.rows), row_bytes, [&](uint64_t row, uint64_t count) {
    add_rows(dtype, item, sources, targets, int64_t(row), int64_t(count));
  });
}

}  // namespace weft
