// The operator on ATen ops, for devices without a kernel and for the gradient of the table.
// Every product and every sum is an op of its own, rounded on its own, as in the kernels.
#pragma once

#include "call.h"

namespace rope {

// The features that rotate as real and imaginary parts (..., heads, rotary_dim/2), in float32 or float64.
struct Parts {
  at::Tensor re, im;
};
Parts split(const at::Tensor& x, const Call& call, at::ScalarType type);

// cos and sin of each token, shaped to broadcast against Parts, conj applied.
Parts token_rows(const Call& call, at::ScalarType type);

// The type that x is rotated in: float64 if it or the table is float64, else float32.
at::ScalarType rotation_type(const at::Tensor& x, const Call& call);

// Writes the rotated x to out, which may be x.
void rotate_formula(const at::Tensor& x, const Call& call, const at::Tensor& out);

// The gradients of the table (of freqs_cis, or of cos and sin) from x and the gradient of the output.
Outputs table_gradients(const at::Tensor& x, const at::Tensor& grad, const Call& call);

}  // namespace rope
