#include "job.h"

#include <algorithm>

namespace weft {
namespace {

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"all_gather", "all_to_all", "reduce_scatter", "all_reduce",
                                   "broadcast",  "gather",     "scatter",        "reduce",
                                   "barrier",    "refused"};
  return names[int(kind)];
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"float64", "float32", "float16", "bfloat16", "int8", "uint8",
                                   "int16",   "int32",   "int64",   "bool",     "bytes"};
  return names[int(dtype)];
}

const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {"sum", "product", "min", "max", "and", "or", "xor", "average"};
  return names[int(reduction)];
}

std::string elements(const Job& job) {
  const uint64_t item = std::max<uint64_t>(1, job.item);
  const auto count = [&](uint64_t bytes) { return std::to_string(bytes / item); };
  if (job.sizes.empty()) return "";
  const bool alike = std::all_of(job.sizes.begin(), job.sizes.end(),
                                 [&](uint64_t size) { return size == job.sizes[0]; });
  if (alike) return count(job.sizes[0]);
  std::string text = "[";
  for (size_t i = 0; i < job.sizes.size(); ++i) text += (i ? ", " : "") + count(job.sizes[i]);
  return text + "]";
}

}  // namespace

std::string describe(const Job& job) {
  std::string text = name_of(job.kind);
  if (job.kind == Kind::barrier) return text;
  text += " (";
  if (reduces(job.kind)) text += std::string(name_of(job.reduction)) + " of ";
  text += job.uneven ? "uneven splits of " : elements(job) + " ";
  text += job.dtype == Dtype::other ? std::to_string(job.item) + "-byte elements" : name_of(job.dtype);
  if (job.kind == Kind::broadcast || job.kind == Kind::gather || job.kind == Kind::scatter ||
      job.kind == Kind::reduce)
    text += ", root " + std::to_string(job.root);
  if (job.bounded) text += ", chunks of " + std::to_string(job.chunk) + " bytes";
  return text + ")";
}

}  // namespace weft
