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
int64_t stride(at::IntArrayRef sizes, at::IntArrayRef strides, size_t d) {
  return sizes.data()[d] == 1 ? 0 : strides.data()[d];
}

// Packed tokens (T, H, D) are a batch of one.
void set_strides(const at::Tensor& t, int64_t (&to)[4]) {
  const auto sizes = t.sizes(), strides = t.strides();
  const bool batched = sizes.size() == 4;
  to[0] = batched ? stride(sizes, strides, 0) : 0;
  for (size_t d = 1; d < 4; ++d) to[d] = stride(sizes, strides, d - !batched);
}

// A row per token of each sample, or, shared by the batch, a batch stride of 0.
Factor factor(const at::Tensor& table, const void* data, int64_t scale, bool negate) {
  const auto sizes = table.sizes(), strides = table.strides();
  const auto rank = sizes.size();
  return {data,
          {rank == 3 ? stride(sizes, strides, 0) * scale : 0, stride(sizes, strides, rank - 2) * scale,
           stride(sizes, strides, rank - 1) * scale},
          negate};
}

}  // namespace

Params pack(const Call& call, const Outputs& out) {
  Params p{};
  const auto sizes = call.x[0]->sizes();
  const auto rank = sizes.size();
  p.batch = rank == 4 ? sizes.data()[0] : 1;
  p.seqlen = sizes.data()[rank - 3];
  p.head_dim = sizes.data()[rank - 1];
  p.rotary_dim = call.rotary_dim.value_or(p.head_dim);
  p.interleaved = call.interleaved;
  for (const int i : {0, 1}) {
    if (!call.x[i]) continue;
    const auto& in = *call.x[i];
    const auto& to = call.in_place ? in : out[i];
    auto& heads = p.x[i];
    heads.heads = in.sizes().data()[rank - 2];
    heads.dtype = real_type(in.scalar_type());
    heads.in = in.const_data_ptr();
    heads.out = to.mutable_data_ptr();
    set_strides(in, heads.in_stride);
    set_strides(to, heads.out_stride);
  }

  const auto& table = *call.table[0];
  p.table_dtype = real_type(table.scalar_type());
  p.rows = *(table.sizes().end() - 2);
  if (call.complex_table()) {
    const auto* data = static_cast<const char*>(table.const_data_ptr());
    p.cos = factor(table, data, 2, table.is_neg());
    p.sin = factor(table, data + element_size(p.table_dtype), 2, table.is_conj() != table.is_neg());
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
    const auto p_sizes = positions.sizes(), p_strides = positions.strides();
    p.positions_stride[0] = p_sizes.size() == 2 ? stride(p_sizes, p_strides, 0) : 0;
    p.positions_stride[1] = stride(p_sizes, p_strides, p_sizes.size() - 1);
  }
  return p;
}

}  // namespace rope
