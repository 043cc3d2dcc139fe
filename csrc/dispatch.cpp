// From a Call back to the dispatcher: typed handles of the eight operators, looked up once.
#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace rope {
namespace {

struct Schemas {  // only the signatures: Kernels<Schemas> is never instantiated beyond decltype
  static Outputs run(const Call&);
};

template <class Signature>
c10::TypedOperatorHandle<Signature> handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

#define ROPE_HANDLE(variable, name) \
  static const auto variable = handle<decltype(Kernels<Schemas>::name)>("rope::" #name)

}  // namespace

Outputs dispatch(const Call& call) {
  const auto& x = *call.x[0];
  const auto& xk = call.x[1];
  const auto& table = *call.table[0];
  const auto& sin = call.table[1];
  const auto with = [&](const auto& op, const auto&... tensors) {
    return op.call(tensors..., call.positions, call.interleaved, call.rotary_dim, call.conj);
  };

  if (call.in_place) {
    ROPE_HANDLE(apply_, apply_);
    ROPE_HANDLE(apply_cos_sin_, apply_cos_sin_);
    ROPE_HANDLE(rotate_, rotate_);
    ROPE_HANDLE(rotate_cos_sin_, rotate_cos_sin_);
    if (xk && sin) {
      with(apply_cos_sin_, x, *xk, table, *sin);
    } else if (xk) {
      with(apply_, x, *xk, table);
    } else if (sin) {
      with(rotate_cos_sin_, x, table, *sin);
    } else {
      with(rotate_, x, table);
    }
    return {};
  }

  ROPE_HANDLE(apply, apply);
  ROPE_HANDLE(apply_cos_sin, apply_cos_sin);
  ROPE_HANDLE(rotate, rotate);
  ROPE_HANDLE(rotate_cos_sin, rotate_cos_sin);
  if (xk) {
    auto [q, k] = sin ? with(apply_cos_sin, x, *xk, table, *sin) : with(apply, x, *xk, table);
    return {std::move(q), std::move(k)};
  }
  return {sin ? with(rotate_cos_sin, x, table, *sin) : with(rotate, x, table), at::Tensor()};
}

}  // namespace rope
