#include "isa.h"

#include <ATen/Version.h>

#include <algorithm>
#include <cctype>

namespace rope::cpu {
namespace {

struct Level {
  Isa isa;
  bool (*supported)();  // every instruction set the file is compiled for, and its registers saved by the system
};

const Level kLevels[] = {
    {{"default", isa_default::rotate_rows}, [] { return true; }},
#if defined(__x86_64__)
    {{"avx2", isa_avx2::rotate_rows},
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
    {{"avx512", isa_avx512::rotate_rows},
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
};

// torch's level follows ATEN_CPU_CAPABILITY, else the machine. A level forced beyond what the machine has would end in
// an illegal instruction, in torch too: take the best below it that runs. Levels we have no kernel for ("SVE256")
// take the one for "default".
const Isa& choose() {
  auto level = at::get_cpu_capability();
  std::transform(level.begin(), level.end(), level.begin(), [](unsigned char c) { return std::tolower(c); });
  const Isa* best = &kLevels[0].isa;
  for (const auto& candidate : kLevels) {
    if (candidate.supported()) best = &candidate.isa;
    if (level == candidate.isa.name) return *best;
  }
  return kLevels[0].isa;
}

}  // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

std::vector<std::string> isa_built() {
  std::vector<std::string> names;
  for (const auto& level : kLevels) names.emplace_back(level.isa.name);
  return names;
}

}  // namespace rope::cpu
