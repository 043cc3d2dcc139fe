// Lazy conj and neg views. The dispatcher's own fallback would copy the whole table at every call (43 ms against
// 0.16 ms for one token of a long table), so the kernels read such tables through, with a sign flipped.
#include <ATen/core/Tensor.h>
#include <ATen/ops/resolve_neg.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "checks.h"

namespace rope {
namespace {

struct Negative {
  static Outputs run(const Call& call) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Negative);
    const auto is_neg = [](const at::Tensor* t) { return t && t->is_neg(); };
    if (!is_neg(call.x[0]) && !is_neg(call.x[1])) return dispatch(call);

    // A lazily negated x is rare: rotate what it stands for.
    if (call.in_place) check<c10::SymInt>(call);
    Call resolved = call;
    resolved.in_place = false;
    Outputs x;
    for (const int i : {0, 1}) {
      if (!call.x[i]) continue;
      x[i] = at::resolve_neg(*call.x[i]);
      resolved.x[i] = &x[i];
    }
    Outputs out = dispatch(resolved);
    if (!call.in_place) return out;
    for (const int i : {0, 1}) {
      if (call.x[i]) call.x[i]->copy_(out[i]);
    }
    return {};
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
