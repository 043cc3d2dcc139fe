// Gradients, forward-mode derivatives, and the bookkeeping of in-place writes.
//
// y = R(table) x is linear in x, so the gradient of x is the same operator with the conjugate table (the adjoint, also
// where factors are not of length 1), and the tangent of x is rotated like x. Nothing of x is saved unless the table
// needs a gradient.
//
// A hand-made Node as torch's own operators have, not torch::autograd::Function: functorch refuses that one, and it has
// no forward mode. One Node per tensor, so that q and k may need gradients, or be views of one buffer, independently.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "checks.h"
#include "formula.h"
#include "torch_versions.h"

namespace rope {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// One backward pass as a function of values alone: compiled autograd traces it with tensors of its own.
struct Backward {
  at::Tensor x, cos, sin, positions;  // undefined where the call has none, x also where the table needs no gradient
  bool interleaved, conj, x_wanted, table_wanted;
  OptionalInt rotary_dim;

  variable_list operator()(const at::Tensor& grad) const {
    const bool complex_table = !sin.defined();
    variable_list result(complex_table ? 2 : 3);
    if (!grad.defined()) return result;

    const OptionalTensor rows = positions.defined() ? OptionalTensor(positions) : std::nullopt;
    const auto call = [&](bool conjugate) {
      return Call{"rope::rotate",
                  {&grad, nullptr},
                  {&cos, complex_table ? nullptr : &sin},
                  rows,
                  interleaved,
                  rotary_dim,
                  conjugate,
                  false};
    };
    if (x_wanted) result[0] = dispatch(call(!conj))[0];
    if (table_wanted) {
      auto [g_cos, g_sin] = table_gradients(x, grad, call(conj));
      result[1] = std::move(g_cos);
      if (!complex_table) result[2] = std::move(g_sin);
    }
    return result;
  }

  // To Python and back, where compiled autograd keeps its graph.
  std::vector<c10::IValue> pack() const {
    return {x, cos, sin, positions, interleaved, conj, x_wanted, table_wanted, rotary_dim};
  }
  static std::vector<at::TypePtr> packed_types() {
    const at::TypePtr tensor = at::TensorType::get(), flag = at::BoolType::get();
    return {tensor, tensor, tensor, tensor, flag, flag, flag, flag, at::OptionalType::create(at::IntType::get())};
  }
  static variable_list of_packed(const variable_list& grads, const std::vector<c10::IValue>& v) {
    return Backward{v[0].toTensor(), v[1].toTensor(), v[2].toTensor(), v[3].toTensor(),           v[4].toBool(),
                    v[5].toBool(),   v[6].toBool(),   v[7].toBool(),   v[8].toOptional<int64_t>()}(grads[0]);
  }
};

struct RotateBackward final : Node {
  SavedVariable x;  // only when the table needs a gradient
  std::array<SavedVariable, 2> table;
  SavedVariable positions;
  bool complex_table, table_grad, interleaved, conj;
  OptionalInt rotary_dim;

  RotateBackward(const Call& call, const at::Tensor& x_in, bool needs_table_grad)
      : complex_table(call.complex_table()),
        table_grad(needs_table_grad),
        interleaved(call.interleaved),
        conj(call.conj),
        rotary_dim(call.rotary_dim) {
    if (table_grad) x = SavedVariable(x_in, false);
    for (const int i : {0, 1}) {
      if (call.table[i]) table[i] = SavedVariable(*call.table[i], false);
    }
    if (call.positions) positions = SavedVariable(*call.positions, false);
  }

  std::string name() const override { return "RotateBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    for (auto& t : table) t.reset_data();
    positions.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return unpack()(grads[0]);
  }

#if ROPE_TORCH_SINCE(13)  // before, these interfaces changed with every release
  // The two halves of compiled autograd: what a traced graph depends on, and the trace.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const auto* saved : {&x, &table[0], &table[1], &positions}) args.collect(*saved, /*is_output=*/false);
    for (const bool flag : {complex_table, table_grad, interleaved, conj}) args.collect(flag);
    args.collect(rotary_dim);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    const auto& compiler = compiled::getPyCompilerInterface();
    static const std::string bound =
        compiler->bind_function(swap.get_py_compiler(), name(), Backward::of_packed, Backward::packed_types());
    const std::array<SavedVariable*, 4> all_saved{&x, &table[0], &table[1], &positions};
    for (auto* saved : all_saved) swap.before(*saved);
    const auto results = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", bound, grads, unpack().pack(),
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges())));
    for (auto* saved : all_saved) swap.after(*saved);
    return results;
  }
#endif

 private:
  Backward unpack() {
    const bool table_wanted =
        table_grad && (task_should_compute_output(1) || (!complex_table && task_should_compute_output(2)));
    return {table_wanted ? x.unpack() : at::Tensor(),
            table[0].unpack(),
            table[1].unpack(),
            positions.unpack(),
            interleaved,
            conj,
            task_should_compute_output(0),
            table_wanted,
            rotary_dim};
  }
};

bool has_tangent(const at::Tensor* t) { return t && t->_fw_grad(/*level=*/0).defined(); }
bool requires_grad(const at::Tensor* t) { return t && t->requires_grad(); }

// The same call for one tensor and another table.
Call single(const Call& call, const at::Tensor& x, std::array<const at::Tensor*, 2> table) {
  return {"rope::rotate", {&x, nullptr}, table, call.positions, call.interleaved, call.rotary_dim, call.conj, false};
}

// R(table) dx + R(dtable) x; in dtable the features that pass through have no part.
at::Tensor tangent(const Call& call, const at::Tensor& x) {
  const bool table_tangent = has_tangent(call.table[0]) || has_tangent(call.table[1]);
  if (!has_tangent(&x) && !table_tangent) return {};

  std::array<at::Tensor, 2> primals, tangents;
  std::array<const at::Tensor*, 2> table{}, d_table{};
  for (const int i : {0, 1}) {
    if (!call.table[i]) continue;
    primals[i] = call.table[i]->_fw_primal(/*level=*/0);
    table[i] = &primals[i];
    if (!table_tangent) continue;
    tangents[i] = has_tangent(call.table[i]) ? call.table[i]->_fw_grad(0) : at::zeros_like(primals[i]);
    d_table[i] = &tangents[i];
  }
  at::Tensor result;
  if (has_tangent(&x)) result = dispatch(single(call, x._fw_grad(0), table))[0];
  if (table_tangent) {
    auto by_table = dispatch(single(call, x._fw_primal(0), d_table))[0];
    if (call.rotary_dim) {
      by_table = at::constant_pad_nd(by_table.slice(-1, 0, *call.rotary_dim), {0, x.size(-1) - *call.rotary_dim});
    }
    result = result.defined() ? result + by_table : by_table;
  }
  return result;
}

using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

NodePtr make_node(const Call& call, const at::Tensor& x, bool table_grad) {
#if ROPE_TORCH_SINCE(13)
  auto node = c10::make_intrusive<RotateBackward>(call, x, table_grad);
#else
  NodePtr node(new RotateBackward(call, x, table_grad), torch::autograd::deleteNode);
#endif
  node->set_next_edges(call.complex_table() ? torch::autograd::collect_next_edges(x, *call.table[0])
                                            : torch::autograd::collect_next_edges(x, *call.table[0], *call.table[1]));
  return node;
}

struct Autograd {
  static Outputs run(const Call& call) {
    const bool grad_mode = at::GradMode::is_enabled();
    const bool table_grad = grad_mode && (requires_grad(call.table[0]) || requires_grad(call.table[1]));
    const bool table_tangent = has_tangent(call.table[0]) || has_tangent(call.table[1]);
    const bool plain = !table_grad && !table_tangent && !has_tangent(call.x[0]) && !has_tangent(call.x[1]) &&
                       !(grad_mode && (requires_grad(call.x[0]) || requires_grad(call.x[1])));
    return call.in_place ? in_place(call, plain, table_grad || table_tangent) : functional(call, plain, table_grad);
  }

 private:
  static bool needs_node(const Call& call, int i, bool table_grad) {
    return call.x[i] && at::GradMode::is_enabled() && (table_grad || call.x[i]->requires_grad());
  }

  static Outputs functional(const Call& call, bool plain, bool table_grad) {
    const auto below = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch(call);
    };
    if (plain) return below();

    std::array<NodePtr, 2> nodes;
    for (const int i : {0, 1}) {
      if (needs_node(call, i, table_grad)) nodes[i] = make_node(call, *call.x[i], table_grad);
    }
    Outputs out = below();
    for (const int i : {0, 1}) {
      if (nodes[i]) torch::autograd::set_history(out[i], nodes[i]);
      if (!call.x[i]) continue;
      if (auto t = tangent(call, *call.x[i]); t.defined()) out[i]._set_fw_grad(t, 0, /*is_inplace_op=*/false);
    }
    return out;
  }

  static Outputs in_place(const Call& call, bool plain, bool table_differentiable) {
    const auto below = [&] {
      at::AutoDispatchBelowAutograd guard;
      return dispatch(call);
    };
    if (plain) return below();

    check<c10::SymInt>(call);  // before the rules of autograd, and under the name that was called
    TORCH_CHECK(
        !table_differentiable, call.op, ": the gradient of ", call.table_name(0),
        " needs the x that an in-place call overwrites; use the op without the underscore, or detach the table");
    std::array<NodePtr, 2> nodes;
    std::array<at::Tensor, 2> tangents;
    for (const int i : {0, 1}) {
      if (!call.x[i]) continue;
      const auto& x = *call.x[i];
      TORCH_CHECK(
          !at::GradMode::is_enabled() || !x.requires_grad() || !x.is_leaf(), call.op, ": ", call.x_name(i),
          " is a leaf that requires grad, whose value an in-place operation must not change; use the op without "
          "the underscore, or torch.no_grad()");
      torch::autograd::check_inplace(x, x.requires_grad());
      if (needs_node(call, i, false)) nodes[i] = make_node(call, x, false);
      tangents[i] = tangent(call, x);
    }
    below();
    for (const int i : {0, 1}) {
      if (nodes[i]) torch::autograd::rebase_history(*call.x[i], nodes[i]);
      if (!tangents[i].defined()) continue;
      const auto held = call.x[i]->_fw_grad(0);  // in place, the tangent is written in place too
      held.copy_(tangents[i]);
      call.x[i]->_set_fw_grad(held, 0, /*is_inplace_op=*/true);
    }
    return {};
  }
};

// Version counters have a key of their own, which inference_mode keeps for normal tensors.
struct VersionCounter {
  static Outputs run(const Call& call) {
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      dispatch(call);
    }
    for (const auto* x : call.x) {
      if (x) torch::autograd::increment_version(*x);
    }
    return {};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, Autograd, m) { register_all<Autograd>(m); }
TORCH_LIBRARY_IMPL(rope, ADInplaceOrView, m) { register_in_place<VersionCounter>(m); }

}  // namespace rope
