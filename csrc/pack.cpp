#include "pack.h"

namespace rope {
namespace {

DType real_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat:
    case at::kComplexFloat:
      return DType::f32;
    default:
      return DType::f64;
  }
}

int64_t element_size(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

// Strides of size-1 dimensions are whatever the tensor's history left there, up to 2^40: read none of them.
int64_t stride(const at::Tensor& t, int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); }

// Packed tokens (T, H, D) are a batch of one. The feature stride is real even where it is never stepped.
void set_strides(const at::Tensor& t, int64_t (&strides)[4]) {
  const auto rank = t.dim();
  strides[0] = rank == 4 ? stride(t, 0) : 0;
  for (int64_t d = 1; d < 4; ++d) strides[d] = stride(t, d + rank - 4);
}

// A row per token of each sample, or, shared by the batch, a batch stride of 0.
Factor factor(const at::Tensor& table, const void* data, int64_t scale, bool negate) {
  const auto rank = table.dim();
  return {data,
          {rank == 3 ? stride(table, 0) * scale : 0, stride(table, rank - 2) * scale, stride(table, rank - 1) * scale},
          negate};
}

}  // namespace

Params pack(const Call& call, const Outputs& out) {
  Params p{};
  const auto& x = *call.x[0];
  const auto rank = x.dim();
  p.batch = rank == 4 ? x.size(0) : 1;
  p.seqlen = x.size(rank - 3);
  p.head_dim = x.size(rank - 1);
  p.rotary_dim = call.rotary_dim.value_or(p.head_dim);
  p.interleaved = call.interleaved;
  for (const int i : {0, 1}) {
    if (!call.x[i]) continue;
    const auto& in = *call.x[i];
    const auto& to = call.in_place ? in : out[i];
    auto& heads = p.x[i];
    heads.heads = in.size(rank - 2);
    heads.dtype = real_type(in.scalar_type());
    heads.in = in.const_data_ptr();
    heads.out = to.mutable_data_ptr();
    set_strides(in, heads.in_stride);
    set_strides(to, heads.out_stride);
  }

  const auto& table = *call.table[0];
  p.table_dtype = real_type(table.scalar_type());
  p.rows = table.size(table.dim() - 2);
  if (call.complex_table()) {
    const auto* data = static_cast<const char*>(table.const_data_ptr());
    p.cos = factor(table, data, 2, false);
    p.sin = factor(table, data + element_size(p.table_dtype), 2, table.is_conj());
  } else {
    const auto& sin = *call.table[1];
    p.cos = factor(table, table.const_data_ptr(), 1, table.is_neg());
    p.sin = factor(sin, sin.const_data_ptr(), 1, sin.is_neg());
  }
  p.sin.negate ^= call.conj;

  if (call.positions) {
    const auto& positions = *call.positions;
    p.positions = positions.const_data_ptr();
    p.positions_are_int64 = positions.scalar_type() == at::kLong;
    p.positions_stride[0] = positions.dim() == 2 ? stride(positions, 0) : 0;
    p.positions_stride[1] = stride(positions, positions.dim() - 1);
  }
  return p;
}

}  // namespace rope
