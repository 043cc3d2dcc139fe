// From checked tensors to the POD that the kernels read. Shared by the CPU and the CUDA backend.
#pragma once

#include "call.h"
#include "rope_params.h"

namespace rope {

// `out` holds the outputs of a functional call; ignored in place.
Params pack(const Call& call, const Outputs& out);

}  // namespace rope
