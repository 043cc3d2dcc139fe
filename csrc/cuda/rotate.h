// The CUDA launcher: plain sizes, strides and pointers in, an error code out. No torch header is needed to use it.
#pragma once

#include <cuda_runtime_api.h>

#include "../rope_params.h"

namespace rope {

// The largest grid one launch may have; a call that needs more is split. These are the limits of every CUDA device,
// so only tests pass smaller ones.
struct GridLimits {
  int64_t x = 2147483647;
  int64_t y = 65535;
  int64_t z = 65535;
};

// Rotates xq and xk of `params`, whose pointers are device memory, on `stream` of the current device. One launch for
// both tensors when they share a dtype, else one for each; nothing is launched for a tensor without elements. Neither
// allocates nor synchronises, so it can be captured in a CUDA graph. The caller has validated `params`; a position
// outside [0, rows) stops the kernel with a device assert.
cudaError_t rotate_cuda(const Params& params, cudaStream_t stream, const GridLimits& limits = {});

}  // namespace rope
