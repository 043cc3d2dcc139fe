// Rotates some tokens with one kernel and does nothing else, for an instruction counter to watch:
//     instructions <level> <bf16|fp32> <neighbours|halves> <tokens>
// 32 query heads and 8 key heads of 128 features, a complex table. No data decides what the kernels do: all is zero.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../csrc/cpu/isa.h"

namespace {

constexpr int64_t kMaxTokens = 256;  // allocated whatever is rotated, so that two runs differ by the rotation only
constexpr int64_t kHeadDim = 128;
constexpr int64_t kHeads[2] = {32, 8};

rope::cpu::RotateRows kernel(const char* level) {
  if (!std::strcmp(level, "default")) return rope::cpu::isa_default::rotate_rows;
#if defined(__x86_64__)
  if (!std::strcmp(level, "avx2")) return rope::cpu::isa_avx2::rotate_rows;
  if (!std::strcmp(level, "avx512")) return rope::cpu::isa_avx512::rotate_rows;
#endif
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const auto rotate_rows = argc == 5 ? kernel(argv[1]) : nullptr;
  const int64_t tokens = argc == 5 ? std::atoll(argv[4]) : 0;
  if (!rotate_rows || tokens < 1 || tokens > kMaxTokens) {
    std::fprintf(stderr, "usage: instructions <level> <bf16|fp32> <neighbours|halves> <tokens, at most %d>\n",
                 static_cast<int>(kMaxTokens));
    return 2;
  }

  rope::Params p{};
  const bool bf16 = !std::strcmp(argv[2], "bf16");
  std::vector<float> memory[4], table(kMaxTokens * kHeadDim);
  for (int i = 0; i < 2; ++i) {
    const int64_t heads = kHeads[i];
    auto& in = memory[2 * i];
    auto& out = memory[2 * i + 1];
    in.resize(kMaxTokens * heads * kHeadDim);
    out.resize(in.size());
    const int64_t token = heads * kHeadDim;
    p.x[i] = {in.data(),
              out.data(),
              heads,
              {tokens * token, token, kHeadDim, 1},
              {tokens * token, token, kHeadDim, 1},
              bf16 ? rope::DType::bf16 : rope::DType::f32};
  }
  p.cos = {table.data(), {0, kHeadDim, 2}, false};
  p.sin = {table.data() + 1, {0, kHeadDim, 2}, false};
  p.table_dtype = rope::DType::f32;
  p.batch = 1;
  p.seqlen = tokens;
  p.head_dim = p.rotary_dim = kHeadDim;
  p.interleaved = !std::strcmp(argv[3], "neighbours");
  p.rows = kMaxTokens;
  rotate_rows(p, 0, tokens * (kHeads[0] + kHeads[1]), false);
  return 0;
}
