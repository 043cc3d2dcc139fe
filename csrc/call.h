// One call of any of the eight operators, in one form. Every backend and every dispatch key is written once, for a
// Call; the templates below reduce the eight schemas to it and register all eight names for a backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace rope {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalInt = std::optional<int64_t>;

struct Call {
  const char* op;                          // "rope::apply", for messages
  std::array<const at::Tensor*, 2> x;      // xq and xk, or x and nullptr
  std::array<const at::Tensor*, 2> table;  // cos and sin, or freqs_cis and nullptr
  const OptionalTensor& positions;
  bool interleaved;
  OptionalInt rotary_dim;
  bool conj;
  bool in_place;

  bool pair() const { return x[1] != nullptr; }
  bool complex_table() const { return table[1] == nullptr; }
  const char* x_name(int i) const { return pair() ? (i == 0 ? "xq" : "xk") : "x"; }
  const char* table_name(int i) const { return complex_table() ? "freqs_cis" : (i == 0 ? "cos" : "sin"); }
};

// The rotated xq and xk (or x alone). In place: both undefined.
using Outputs = std::array<at::Tensor, 2>;

// Calls the operator through the dispatcher. A kernel sets its guard first, so that the call lands below it.
Outputs dispatch(const Call& call);

// A Backend has `static Outputs run(const Call&)`.
template <class Backend>
struct Kernels {
  using Pair = std::tuple<at::Tensor, at::Tensor>;
  using X = const at::Tensor&;

#define ROPE_OPTION_ARGS const OptionalTensor &positions, bool interleaved, OptionalInt rotary_dim, bool conj
#define ROPE_CALL(name, xk, sin, in_place) \
  Backend::run({"rope::" name, {&x, xk}, {&table, sin}, positions, interleaved, rotary_dim, conj, in_place})

  static Pair apply(X x, X xk, X table, ROPE_OPTION_ARGS) {
    auto [q, k] = ROPE_CALL("apply", &xk, nullptr, false);
    return {std::move(q), std::move(k)};
  }
  static Pair apply_cos_sin(X x, X xk, X table, X sin, ROPE_OPTION_ARGS) {
    auto [q, k] = ROPE_CALL("apply_cos_sin", &xk, &sin, false);
    return {std::move(q), std::move(k)};
  }
  static at::Tensor rotate(X x, X table, ROPE_OPTION_ARGS) {
    return std::move(ROPE_CALL("rotate", nullptr, nullptr, false)[0]);
  }
  static at::Tensor rotate_cos_sin(X x, X table, X sin, ROPE_OPTION_ARGS) {
    return std::move(ROPE_CALL("rotate_cos_sin", nullptr, &sin, false)[0]);
  }
  static void apply_(X x, X xk, X table, ROPE_OPTION_ARGS) { ROPE_CALL("apply_", &xk, nullptr, true); }
  static void apply_cos_sin_(X x, X xk, X table, X sin, ROPE_OPTION_ARGS) {
    ROPE_CALL("apply_cos_sin_", &xk, &sin, true);
  }
  static void rotate_(X x, X table, ROPE_OPTION_ARGS) { ROPE_CALL("rotate_", nullptr, nullptr, true); }
  static void rotate_cos_sin_(X x, X table, X sin, ROPE_OPTION_ARGS) {
    ROPE_CALL("rotate_cos_sin_", nullptr, &sin, true);
  }

#undef ROPE_CALL
#undef ROPE_OPTION_ARGS
};

template <class Backend>
void register_functional(torch::Library& m) {
  m.impl("apply", TORCH_FN(Kernels<Backend>::apply));
  m.impl("apply_cos_sin", TORCH_FN(Kernels<Backend>::apply_cos_sin));
  m.impl("rotate", TORCH_FN(Kernels<Backend>::rotate));
  m.impl("rotate_cos_sin", TORCH_FN(Kernels<Backend>::rotate_cos_sin));
}

template <class Backend>
void register_in_place(torch::Library& m) {
  m.impl("apply_", TORCH_FN(Kernels<Backend>::apply_));
  m.impl("apply_cos_sin_", TORCH_FN(Kernels<Backend>::apply_cos_sin_));
  m.impl("rotate_", TORCH_FN(Kernels<Backend>::rotate_));
  m.impl("rotate_cos_sin_", TORCH_FN(Kernels<Backend>::rotate_cos_sin_));
}

template <class Backend>
void register_all(torch::Library& m) {
  register_functional<Backend>(m);
  register_in_place<Backend>(m);
}

}  // namespace rope
