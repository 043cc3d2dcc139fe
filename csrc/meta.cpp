// Shapes without values: what torch.compile, export and fake tensors see. Same checks and outputs as the real kernels.
#include <ATen/ops/empty_like.h>

#include "checks.h"

namespace rope {
namespace {

struct Meta {
  static Outputs run(const Call& call) {
    check<c10::SymInt>(call);
    if (call.in_place) return {};
    return {at::empty_like(*call.x[0]), call.pair() ? at::empty_like(*call.x[1]) : at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, Meta, m) { register_all<Meta>(m); }

}  // namespace rope
