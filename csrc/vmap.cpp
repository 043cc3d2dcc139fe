// torch.func.vmap. Where the samples of the vmapped dimension share their rows, they are one larger batch; elsewhere
// (a table or positions per sample of the map) each is a call of its own.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "checks.h"

namespace rope {
namespace {

struct Batched {
  at::Tensor tensor;
  std::optional<int64_t> dim;

  at::Tensor at(int64_t i) const { return dim ? tensor.select(*dim, i) : tensor; }
};

// DynamicLayer.h knows the level, but needs a header that torch does not ship; the innermost wrapper knows it as well.
int64_t innermost_level(std::initializer_list<const at::Tensor*> tensors) {
  int64_t level = -1;
  for (const auto* t : tensors) {
    const auto* impl = t ? at::functorch::maybeGetBatchedImpl(*t) : nullptr;
    if (impl) level = std::max(level, impl->level());
  }
  return level;
}

Batched unwrap(const at::Tensor* t, int64_t level) {
  if (!t) return {};
  const auto* impl = at::functorch::maybeGetBatchedImpl(*t);
  if (!impl || impl->level() != level) return {*t, std::nullopt};
  return {impl->value(), impl->bdim()};
}

int64_t map_size(std::initializer_list<Batched> tensors) {
  for (const auto& t : tensors) {
    if (t.dim) return t.tensor.size(*t.dim);
  }
  return 0;  // not reached: one of them is mapped
}

struct Vmap {
  static Outputs run(const Call& call) {
    // Samples that share memory, and refusals after the first of them was written, cannot be told from here.
    TORCH_CHECK(!call.in_place, call.op, ": vmap cannot write in place; use the op without the underscore");
    check<c10::SymInt>(call);  // as one sample sees it

    const auto* maybe_positions = call.positions ? &*call.positions : nullptr;
    const int64_t level = innermost_level({call.x[0], call.x[1], call.table[0], call.table[1], maybe_positions});
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);

    const std::array<Batched, 2> x{unwrap(call.x[0], level), unwrap(call.x[1], level)};
    const std::array<Batched, 2> table{unwrap(call.table[0], level), unwrap(call.table[1], level)};
    const auto positions = unwrap(maybe_positions, level);
    const bool rows_mapped = table[0].dim || table[1].dim || positions.dim;
    const bool rows_shared =
        !rows_mapped && table[0].tensor.dim() == 2 && (!call.positions || positions.tensor.dim() == 1);

    Outputs out;
    for (const int i : {0, 1}) {
      if (!call.x[i]) continue;
      const auto rotate = [&](const at::Tensor& one, const at::Tensor& cos, const at::Tensor& sin,
                              const at::Tensor& rows) {
        const OptionalTensor maybe_rows = call.positions ? OptionalTensor(rows) : std::nullopt;
        return dispatch({call.op,
                         {&one, nullptr},
                         {&cos, call.complex_table() ? nullptr : &sin},
                         maybe_rows,
                         call.interleaved,
                         call.rotary_dim,
                         call.conj,
                         false})[0];
      };
      if (!x[i].dim && !rows_mapped) {
        out[i] = rotate(x[i].tensor, table[0].tensor, table[1].tensor, positions.tensor);
      } else if (rows_shared) {
        const auto moved = x[i].tensor.movedim(*x[i].dim, 0);
        const bool packed = moved.dim() == 4;  // (map, tokens, heads, head_dim) is a batch already
        const auto y = rotate(packed ? moved : moved.flatten(0, 1), table[0].tensor, table[1].tensor, positions.tensor);
        out[i] = at::functorch::makeBatched(packed ? y : y.unflatten_symint(0, {moved.sym_size(0), moved.sym_size(1)}),
                                            0, level);
      } else {
        const int64_t samples = map_size({x[i], table[0], table[1], positions});
        std::vector<at::Tensor> results;
        for (int64_t v = 0; v < samples; ++v) {
          results.push_back(rotate(x[i].at(v), table[0].at(v), call.complex_table() ? at::Tensor() : table[1].at(v),
                                   call.positions ? positions.at(v) : at::Tensor()));
        }
        auto shape = call.x[i]->sym_sizes().vec();
        shape.insert(shape.begin(), 0);
        out[i] =
            at::functorch::makeBatched(samples ? at::stack(results) : x[i].tensor.new_empty_symint(shape), 0, level);
      }
    }
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, FuncTorchBatched, m) { register_all<Vmap>(m); }

}  // namespace rope
