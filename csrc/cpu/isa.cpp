#include "isa.h"

#include <ATen/Version.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cctype>

namespace rope::cpu {
namespace {

#if defined(__x86_64__)
bool has_f16c() {  // clang below 18 and GCC below 11 do not know it by name
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct Level {
  Isa isa;
  bool (*supported)();  // every instruction set the file is compiled for, and its registers saved by the system
};

const Level kLevels[] = {
    {{"default", isa_default::rotate_rows}, [] { return true; }},
#if defined(__x86_64__)
    {{"avx2", isa_avx2::rotate_rows},
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }},
    {{"avx512", isa_avx512::rotate_rows},
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_f16c();
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
