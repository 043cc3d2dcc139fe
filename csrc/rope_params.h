// What crosses the line between torch and the arithmetic: sizes, strides and pointers of one call.
// No torch and no CUDA header is needed to read it, so a kernel file compiles in a second.
//
// All strides are in elements of the tensor they belong to, not in bytes. All offsets are 64-bit.
#pragma once

#include <cstdint>

namespace rope {

enum class DType : int32_t { f16, bf16, f32, f64 };

// xq or xk: (batch, seqlen, heads, head_dim). Packed tokens (T, H, D) are batch = 1, seqlen = T.
struct Heads {
  const void* in;
  void* out;             // in place: out == in, with the same strides
  int64_t heads;         // 0: nothing to do for this tensor
  int64_t in_stride[4];  // batch, token, head, feature
  int64_t out_stride[4];
  DType dtype;
};

// One real half of the table: cos (the real part) or sin (the imaginary part).
struct Factor {
  const void* data;
  int64_t stride[3];  // batch (0 when shared by the batch), row, pair
  bool negate;        // a conj argument, a lazy conj view or a lazy neg view
};

struct Params {
  Heads x[2];  // xq and xk; an absent one has heads == 0
  Factor cos;
  Factor sin;
  DType table_dtype;  // of cos and sin: a complex64 table is two f32 halves with a pair stride of 2

  int64_t batch;
  int64_t seqlen;
  int64_t head_dim;
  int64_t rotary_dim;  // even; features rotary_dim .. head_dim-1 pass through with their bits
  bool interleaved;    // pairs (0,1), (2,3) ...; else (0, R/2), (1, R/2 + 1) ...

  // Which table row a token takes: its index in the sequence (positions == nullptr) or positions[b, s],
  // which must lie in [0, rows).
  const void* positions;
  bool positions_are_int64;     // else int32
  int64_t positions_stride[2];  // batch (0 when shared by the batch), token
  int64_t rows;
};

// The type a tensor is rotated in: float64 when it or the table is float64, else float32.
constexpr bool rotates_in_f64(DType x, DType table) { return x == DType::f64 || table == DType::f64; }

}  // namespace rope
