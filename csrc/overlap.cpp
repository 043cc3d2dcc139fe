#include "overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "torch_versions.h"

namespace rope {
namespace {

// Two index tuples of a strided tensor meet where their difference d satisfies sum d[i] * stride[i] == distance, with
// every d[i] in an interval. Strides sorted downwards, each d[i] has few candidates, since the smaller strides can only
// make up a bounded rest; for tensors that are slices of a buffer there are one or two at each step.
struct Term {
  int64_t stride;  // positive, bytes
  int64_t low, high;
};

class Equation {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    if (low == high) return;  // a single index: low == high == 0
    if (stride == 0) free_choice_ = true;
    if (stride != 0 && n_ < terms_.size()) terms_[n_++] = {stride, low, high};
  }

  // A tensor over `bytes`-wide elements: index i in [0, size) of each dimension, counted forwards or backwards.
  void add(const at::Tensor& t, bool forwards) {
    const auto bytes = static_cast<int64_t>(t.element_size());
    for (int64_t d = 0; d < t.dim(); ++d) {
      const int64_t last = t.size(d) - 1;
      add(t.stride(d) * bytes, forwards ? 0 : -last, forwards ? last : 0);
    }
    add(1, forwards ? 0 : 1 - bytes, forwards ? bytes - 1 : 0);
  }

  // Terms of one stride move the same way: d[i] + d[j] has the sum of their intervals.
  bool solvable(int64_t distance) {
    std::sort(terms_.begin(), terms_.begin() + n_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    size_t merged = 0;
    for (size_t i = 0; i < n_; ++i) {
      if (merged > 0 && terms_[merged - 1].stride == terms_[i].stride) {
        terms_[merged - 1].low += terms_[i].low;
        terms_[merged - 1].high += terms_[i].high;
      } else {
        terms_[merged++] = terms_[i];
      }
    }
    n_ = merged;
    return search(0, distance);
  }

  bool has_free_choice() const { return free_choice_; }

 private:
  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool search(size_t i, int64_t distance) {
    if (i == n_) return distance == 0;
    if (--steps_ < 0) return true;  // a shape made to be hard: refuse it
    int64_t rest_low = 0, rest_high = 0;
    for (size_t j = i + 1; j < n_; ++j) {
      rest_low += terms_[j].low * terms_[j].stride;
      rest_high += terms_[j].high * terms_[j].stride;
    }
    const auto& term = terms_[i];
    const int64_t first = std::max(term.low, -floor_div(rest_high - distance, term.stride));
    const int64_t last = std::min(term.high, floor_div(distance - rest_low, term.stride));
    for (int64_t d = first; d <= last; ++d) {
      if (search(i + 1, distance - d * term.stride)) return true;
    }
    return false;
  }

  std::array<Term, 16> terms_;
  size_t n_ = 0;
  bool free_choice_ = false;
  int steps_ = 20000;
};

bool has_symbols(const at::Tensor& t) { return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

// Two views of one storage, or two storages over one memory (from_blob, numpy). Fake tensors have no address.
bool distance(const at::Tensor& a, const at::Tensor& b, int64_t* bytes) {
  const auto& storage_a = a.unsafeGetTensorImpl()->unsafe_storage();
  const auto& storage_b = b.unsafeGetTensorImpl()->unsafe_storage();
  if (storage_a.unsafeGetStorageImpl() == storage_b.unsafeGetStorageImpl()) {
    *bytes = b.storage_offset() * static_cast<int64_t>(b.element_size()) -
             a.storage_offset() * static_cast<int64_t>(a.element_size());
    return true;
  }
  if (!a.storage().data() || !b.storage().data()) return false;  // meta and fake tensors
  *bytes = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  return true;
}

// The usual case, told in a few instructions.
bool apart(const at::Storage& a, const at::Storage& b) {
  const auto* a_begin = static_cast<const char*>(a.data());
  const auto* b_begin = static_cast<const char*>(b.data());
  if (!a_begin || !b_begin) return false;  // meta and fake tensors: the size of their storage may be a symbol
  return a_begin + a.nbytes() <= b_begin || b_begin + b.nbytes() <= a_begin;
}

int64_t extent(const at::Tensor& t) {  // bytes from the first to past the last element
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

}  // namespace

bool overlaps_itself(const at::Tensor& t) {
  if (has_symbols(t)) {  // only what needs no guard on the sizes: an expanded dimension
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (surely(t.sym_stride(d).sym_eq(0)) && surely(t.sym_size(d).sym_gt(1))) return true;
    }
    return false;
  }
  if (t.is_non_overlapping_and_dense() || t.numel() < 2) return false;
  // Some d, not all zero, with sum d[i] * stride[i] == 0: let the first nonzero one be positive.
  for (int64_t first = 0; first < t.dim(); ++first) {
    if (t.size(first) < 2) continue;
    Equation equation;
    for (int64_t d = first + 1; d < t.dim(); ++d) equation.add(t.stride(d), 1 - t.size(d), t.size(d) - 1);
    // first's own d runs from 1: shift it to 0 .. size - 2 and move one stride to the other side
    equation.add(t.stride(first), 0, t.size(first) - 2);
    if (t.stride(first) == 0 || equation.has_free_choice() || equation.solvable(-t.stride(first))) return true;
  }
  return false;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (has_symbols(a) || has_symbols(b)) {
    return a.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
               b.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() &&
           surely(a.sym_storage_offset().sym_eq(b.sym_storage_offset()));
  }
  if (apart(a.storage(), b.storage())) return false;
  int64_t bytes;
  if (a.numel() == 0 || b.numel() == 0 || !distance(a, b, &bytes)) return false;
  if (bytes >= extent(a) || -bytes >= extent(b)) return false;
  // a's index minus b's index, in bytes, must make up the distance
  Equation equation;
  equation.add(a, true);
  equation.add(b, false);
  return equation.solvable(bytes);
}

}  // namespace rope
