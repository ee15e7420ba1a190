// Sums and the other reductions of several sources, always in the order of the sources.
#pragma once

#include <cstdint>

namespace weft {

// The numbers are those of `weft.dtype` (channel).
enum class Dtype : int { f64, f32, f16, bf16, i8, u8, i16, i32, i64, boolean, other };
// In the order of `weft.collectives.kinds.REDUCTIONS`.
enum class Reduction : int { sum, product, min, max, band, bor, bxor, avg };

// Whether a dtype can be reduced so.
bool can_reduce(Dtype dtype, Reduction reduction);

// out[i] = sources[0][i] + sources[1][i] + ... over `bytes` of each. Halves grow in float32 and are
// rounded once; `avg` divides by the number of sources before that. `out` may be one of the sources.
void reduce(Dtype dtype, Reduction reduction, char* out, const char* const* sources, int count,
            uint64_t bytes);

// The same on several threads, with the same bits: each element is made by one of them, alike.
void reduce_by(int threads, Dtype dtype, Reduction reduction, char* out, const char* const* sources,
               int count, uint64_t bytes);

}  // namespace weft
