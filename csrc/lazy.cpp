// Lazy conj and neg views. The dispatcher's own fallback would copy the whole table at every call (43 ms against
// 0.16 ms for one token of a long table), so the kernels read such tables through, with a sign flipped.
#include <ATen/ops/resolve_neg.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "call.h"

namespace rope {
namespace {

struct Negative {
  static Outputs run(const Call& call) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Negative);
    // In place: rotation is linear, so rotating what lies in memory rotates its lazy negative too.
    if (call.in_place) return dispatch(call);
    Outputs x;
    Call resolved = call;
    for (const int i : {0, 1}) {
      if (!call.x[i]) continue;
      x[i] = at::resolve_neg(*call.x[i]);
      resolved.x[i] = &x[i];
    }
    return dispatch(resolved);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, Negative, m) { register_all<Negative>(m); }

TORCH_LIBRARY_IMPL(rope, Conjugate, m) {
  for (const char* name : {"apply", "apply_cos_sin", "rotate", "rotate_cos_sin", "apply_", "apply_cos_sin_", "rotate_",
                           "rotate_cos_sin_"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace rope
