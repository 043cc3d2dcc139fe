// Every rule that a call must keep, and every message that says which one it broke.
#pragma once

#include "call.h"

namespace rope {

// The first thing in every backend, real or fake (not on the Autograd key, which inference_mode skips, and not in
// Python, which torch.ops skips). Raises TypeError for dtypes, ValueError for shapes and values, RuntimeError for
// devices and overlapping memory. Reads sizes, strides, dtypes and devices, never a value.
// Int is int64_t, or c10::SymInt where the sizes may be symbols.
template <class Int>
void check(const Call& call);

extern template void check<int64_t>(const Call&);
extern template void check<c10::SymInt>(const Call&);

}  // namespace rope
