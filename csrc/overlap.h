// Whether in-place writes would meet: exact for strided tensors, not the safe guess of at::get_overlap_status, which
// calls the q and k slices of one qkv buffer too hard to tell.
#pragma once

#include <ATen/core/Tensor.h>

namespace rope {

// Whether two elements of t lie in one place.
bool overlaps_itself(const at::Tensor& t);

// Whether a byte belongs to both.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace rope
