// The CUDA backend: checks, outputs, device and stream. The arithmetic is in rotate.cuh. Nothing here waits for the GPU
// or allocates more than the outputs, so a call can be captured in a CUDA graph. Values of positions are not read
// here: a bad one stops the kernel with a device assert, as with torch's own indexing.
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../checks.h"
#include "../pack.h"
#include "rotate.h"

namespace rope {
namespace {

struct Cuda {
  static Outputs run(const Call& call) {
    check<int64_t>(call);
    const c10::cuda::CUDAGuard guard(call.x[0]->device());
    Outputs out;
    if (!call.in_place) {
      for (const int i : {0, 1}) {
        if (call.x[i]) out[i] = at::empty_like(*call.x[i]);
      }
    }
    C10_CUDA_CHECK(rotate_cuda(pack(call, out), c10::cuda::getCurrentCUDAStream()));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, CUDA, m) { register_all<Cuda>(m); }

}  // namespace rope
