#include "formula.h"

#include <ATen/ATen.h>

namespace rope {
namespace {

c10::SymInt rotary_dim(const at::Tensor& x, const Call& call) {
  return call.rotary_dim ? c10::SymInt(*call.rotary_dim) : x.sym_size(-1);
}

Parts views(const at::Tensor& x, const Call& call) {
  const auto r = rotary_dim(x, call);
  if (call.interleaved) return {x.slice_symint(-1, 0, r, 2), x.slice_symint(-1, 1, r, 2)};
  return {x.slice_symint(-1, 0, r / 2), x.slice_symint(-1, r / 2, r)};
}

// This runs below the key that would resolve lazy negative views for each op.
Parts real_tables(const Call& call) {
  const auto table = at::resolve_neg(*call.table[0]);
  if (call.complex_table()) return {at::resolve_neg(at::real(table)), at::resolve_neg(at::imag(table))};
  return {table, at::resolve_neg(*call.table[1])};
}

}  // namespace

at::ScalarType rotation_type(const at::Tensor& x, const Call& call) {
  const auto table = call.table[0]->scalar_type();
  return x.scalar_type() == at::kDouble || table == at::kDouble || table == at::kComplexDouble ? at::kDouble
                                                                                               : at::kFloat;
}

Parts split(const at::Tensor& x, const Call& call, at::ScalarType type) {
  const auto [re, im] = views(x, call);
  return {re.to(type), im.to(type)};
}

Parts token_rows(const Call& call, at::ScalarType type) {
  auto [cos, sin] = real_tables(call);
  const auto of_tokens = [&](at::Tensor table) {
    if (call.positions) {
      const auto& positions = *call.positions;
      table = table.index_select(0, positions.reshape(-1));
      table = positions.dim() == 1 ? table : table.unflatten_symint(0, positions.sym_sizes());
    }
    return table.unsqueeze(-2).to(type);
  };
  auto sin_rows = of_tokens(sin);
  return {of_tokens(cos), call.conj ? sin_rows.neg() : sin_rows};
}

void rotate_formula(const at::Tensor& x, const Call& call, const at::Tensor& out) {
  const auto type = rotation_type(x, call);
  const auto [a, b] = split(x, call, type);
  const auto [c, s] = token_rows(call, type);
  const auto re = a * c - b * s;
  const auto im = a * s + b * c;
  const auto [out_re, out_im] = views(out, call);
  out_re.copy_(re);
  out_im.copy_(im);
  if (!call.in_place && call.rotary_dim) {
    out.slice(-1, *call.rotary_dim).copy_(x.slice(-1, *call.rotary_dim));
  }
}

Outputs table_gradients(const at::Tensor& x, const at::Tensor& grad, const Call& call) {
  const auto type = rotation_type(x, call);
  const auto [a, b] = split(x, call, type);
  const auto [g_re, g_im] = split(grad, call, type);
  const auto& table = *call.table[0];

  const auto to_table = [&](const at::Tensor& per_head) {
    auto g = per_head.sum(-2);  // (..., tokens, rotary_dim/2)
    if (!call.positions) return at::sum_to(g, table.sym_sizes());
    const auto& positions = *call.positions;
    if (g.dim() > positions.dim() + 1) {
      g = g.sum(0);
    } else if (g.dim() == 3 && positions.sym_size(0) != g.sym_size(0)) {
      g = g.sum(0, /*keepdim=*/true);
    }
    // index_add by another name, which DTensor knows to be a partial sum where tokens are sharded
    return at::embedding_dense_backward_symint(g, positions, table.sym_size(0), /*padding_idx=*/-1, false);
  };
  const auto g_cos = to_table(g_re * a + g_im * b);
  const auto g_sin = to_table(call.conj ? g_re * b - g_im * a : g_im * a - g_re * b);
  if (call.complex_table()) return {at::complex(g_cos, g_sin).to(table.scalar_type()), at::Tensor()};
  return {g_cos.to(table.scalar_type()), g_sin.to(table.scalar_type())};
}

}  // namespace rope
