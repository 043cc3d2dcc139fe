#include "build_info.h"

#include <sstream>

#include "cpu/isa.h"

// setup.py defines ROPE_VERSION always, ROPE_CUDA_TOOLKIT and ROPE_CUDA_ARCHS in a CUDA build.
#define ROPE_STRINGIFY_(x) #x
#define ROPE_STRINGIFY(x) ROPE_STRINGIFY_(x)

namespace rope {

std::string version() { return ROPE_STRINGIFY(ROPE_VERSION); }

std::optional<std::string> cuda_toolkit() {
#ifdef ROPE_CUDA_TOOLKIT
  return ROPE_STRINGIFY(ROPE_CUDA_TOOLKIT);
#else
  return std::nullopt;
#endif
}

std::vector<std::string> cuda_archs() {
  std::vector<std::string> archs;
#ifdef ROPE_CUDA_ARCHS
  std::istringstream list(ROPE_STRINGIFY(ROPE_CUDA_ARCHS));
  for (std::string arch; std::getline(list, arch, '|');) archs.push_back(arch);
#endif
  return archs;
}

std::string cpu_isa() { return cpu::isa().name; }

std::vector<std::string> cpu_isa_built() { return cpu::isa_built(); }

}  // namespace rope
