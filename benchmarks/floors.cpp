// What bounds the operator from below: a call with its schema that does nothing, and its bytes without arithmetic.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <tuple>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> allocate(const Tensor& xq, const Tensor& xk, const Tensor&, const std::optional<Tensor>&,
                                    bool, std::optional<int64_t>, bool) {
  return {at::empty_like(xq), at::empty_like(xk)};
}

void nothing(Tensor&, Tensor&, const Tensor&, const std::optional<Tensor>&, bool, std::optional<int64_t>, bool) {}

void stream(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  auto* target = reinterpret_cast<__m128i*>(to);
  const auto* source = reinterpret_cast<const __m128i*>(from);
  for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
  _mm_sfence();
  to += bytes / 16 * 16;
  from += bytes / 16 * 16;
  bytes %= 16;
#endif
  std::memcpy(to, from, bytes);
}

void copy_one(const Tensor& to, const Tensor& from, bool streaming) {
  TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  constexpr int64_t kLine = 64;
  const int64_t bytes = to.nbytes();
  at::parallel_for(0, (bytes + kLine - 1) / kLine, 256 * 1024 / kLine, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLine, count = std::min(end * kLine, bytes) - first;
    if (streaming) return stream(target + first, source + first, count);
    std::memcpy(target + first, source + first, count);
  });
}

void copy(Tensor& yq, Tensor& yk, const Tensor& xq, const Tensor& xk, bool streaming) {
  copy_one(yq, xq, streaming);
  copy_one(yk, xk, streaming);
}

}  // namespace

#define ROPE_OPTIONS "Tensor? positions=None, bool interleaved=True, int? rotary_dim=None, bool conj=False"

TORCH_LIBRARY(rope_floor, m) {
  m.def("allocate(Tensor xq, Tensor xk, Tensor freqs_cis, " ROPE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("nothing_(Tensor(a!) xq, Tensor(b!) xk, Tensor freqs_cis, " ROPE_OPTIONS ") -> ()");
  m.def("copy_(Tensor(a!) yq, Tensor(b!) yk, Tensor xq, Tensor xk, bool streaming) -> ()");
}

TORCH_LIBRARY_IMPL(rope_floor, CPU, m) {
  m.impl("allocate", allocate);
  m.impl("nothing_", nothing);
  m.impl("copy_", copy);
}
