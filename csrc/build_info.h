// What this library was built from and for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#define ROPE_EXPORT __attribute__((visibility("default")))

namespace rope {

ROPE_EXPORT std::string version();
ROPE_EXPORT std::optional<std::string> cuda_toolkit();  // "13.0", or nothing in a CPU build
ROPE_EXPORT std::vector<std::string> cuda_archs();      // "sm_90", ..., "compute_120" for PTX
ROPE_EXPORT std::string cpu_isa();                      // the level in use
ROPE_EXPORT std::vector<std::string> cpu_isa_built();

}  // namespace rope
