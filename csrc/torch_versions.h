// What differs between the releases of torch that this library is built with, from 2.6 on.
#pragma once

#include <c10/core/SymBool.h>
#include <torch/version.h>

#define ROPE_TORCH_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= minor)

namespace rope {

// Whether a condition on sizes holds for sure: false where only a symbol's value could tell.
inline bool surely(const c10::SymBool& condition) {
#if ROPE_TORCH_SINCE(8)
  return condition.guard_or_false(__FILE__, __LINE__);
#else
  return condition.guard_size_oblivious(__FILE__, __LINE__);
#endif
}

}  // namespace rope
