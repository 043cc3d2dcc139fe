// Which of the compiled kernels runs. Chosen once, in the order of torch's own ATEN_CPU_CAPABILITY levels.
#pragma once

#include <string>
#include <vector>

#include "../rope_params.h"

namespace rope::cpu {

// Rotates rows [begin, end) of a call, where row = (batch * seqlen + token) * (heads of xq + heads of xk) + head.
// Both tensors of the call must have one dtype and agree on whether their features are contiguous.
// `stream` writes around the caches, for outputs that would not be found there again.
using RotateRows = void (*)(const Params&, int64_t begin, int64_t end, bool stream);

struct Isa {
  const char* name;  // "default", "avx2", "avx512"
  RotateRows rotate_rows;
};

// The level in use.
const Isa& isa();

// The levels in this binary, least first.
std::vector<std::string> isa_built();

namespace isa_default {
void rotate_rows(const Params&, int64_t begin, int64_t end, bool stream);
}
#if defined(__x86_64__)
namespace isa_avx2 {
void rotate_rows(const Params&, int64_t begin, int64_t end, bool stream);
}
namespace isa_avx512 {
void rotate_rows(const Params&, int64_t begin, int64_t end, bool stream);
}
#endif

}  // namespace rope::cpu
