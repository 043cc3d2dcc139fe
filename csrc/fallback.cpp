// Any device without a kernel of its own: the formula on ATen ops, one rounding per operation as in the kernels.
#include <ATen/ops/empty_like.h>

#include "checks.h"
#include "formula.h"

namespace rope {
namespace {

void warn_once_if_cuda(const Call& call) {
  if (!call.x[0]->is_cuda()) return;
  TORCH_WARN_ONCE(
      "rope_ext was built without CUDA kernels: CUDA tensors take a slower road over ATen ops. Rebuild where nvcc and "
      "a "
      "CUDA build of torch are present: ROPE_EXT_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps "
      ".");
}

struct Fallback {
  static Outputs run(const Call& call) {
    check<c10::SymInt>(call);
    warn_once_if_cuda(call);
    Outputs out;
    for (const int i : {0, 1}) {
      if (!call.x[i]) continue;
      const auto& x = *call.x[i];
      const auto result = call.in_place ? x : at::empty_like(x);
      rotate_formula(x, call, result);
      if (!call.in_place) out[i] = result;
    }
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, CompositeExplicitAutograd, m) { register_all<Fallback>(m); }

}  // namespace rope
