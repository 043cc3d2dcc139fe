// The CPU backend: checks, outputs, position values, threads. The arithmetic is in rotate.inl.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include "../checks.h"
#include "../pack.h"
#include "isa.h"

namespace rope {
namespace {

// A fresh output of this size comes from mmap: most of its cost is page faults, which huge pages divide by 512 (torch's
// THP_MEM_ALLOC_ENABLE does the same for every tensor). Smaller ones are reused by malloc and have their pages.
constexpr size_t kHugePageBytes = 32 * 1024 * 1024;

void advise_huge_pages(const at::Tensor& t) {
#if defined(__linux__)
  const size_t bytes = t.storage().nbytes();
  if (bytes < kHugePageBytes) return;
  constexpr uintptr_t kPage = 2 * 1024 * 1024;
  const auto begin = (reinterpret_cast<uintptr_t>(t.storage().mutable_data()) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(t.storage().mutable_data()) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

// What empty_like gives, without its trip through the dispatcher (0.4 us) where q is dense, as nearly always.
at::Tensor empty_output(const at::Tensor& x) {
  if (x.is_non_overlapping_and_dense()) {
    return at::Tensor(at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.scalar_type()));
  }
  return at::empty_like(x);
}

// Every position is read before anything is written: a bad one leaves all tensors as they were.
template <class Index>
void check_position_values(const Call& call, const Params& p) {
  const auto* values = static_cast<const Index*>(p.positions);
  const auto& positions = *call.positions;
  const int64_t samples = positions.dim() == 2 ? positions.size(0) : 1;
  const int64_t tokens = positions.size(positions.dim() - 1);
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t value = values[b * p.positions_stride[0] + t * p.positions_stride[1]];
      if (value >= 0 && value < p.rows) continue;
      std::ostringstream index;
      if (positions.dim() == 2) index << b << ", ";
      index << t;
      TORCH_CHECK_INDEX(false, call.op, ": positions[", index.str(), "] = ", value, " is out of range for a table of ",
                        p.rows, " rows (0 to ", p.rows - 1, "); nothing was rotated. ",
                        value < 0 ? "Positions start at 0: give padding any row of the table, as clamp(min=0) does"
                                  : "Positions are rows of the whole table: make it longer, or pass it unsliced");
    }
  }
}

// Outputs of this size leave the caches before anybody reads them. Below, streaming loses up to 1.6x; above, it saves
// the read of every line that is to be overwritten. In place the lines are there already.
constexpr int64_t kStreamBytes = 16 * 1024 * 1024;

// Below this many bytes moved per thread a parallel region costs more than it gains, with sleeping workers 60 us.
constexpr int64_t kGrainBytes = 256 * 1024;

void rotate(const Params& p) {
  const int64_t heads = p.x[0].heads + p.x[1].heads;
  const int64_t rows = p.batch * p.seqlen * heads;
  if (rows == 0) return;
  const auto rotate_rows = cpu::isa().rotate_rows;
  const auto dtype = p.x[0].heads ? p.x[0].dtype : p.x[1].dtype;
  const int64_t row_bytes = p.head_dim * (dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2);
  const int64_t grain = std::max<int64_t>(kGrainBytes / row_bytes, 1);
  const bool in_place = p.x[0].in == p.x[0].out && p.x[1].in == p.x[1].out;
  const bool stream = !in_place && rows * row_bytes >= kStreamBytes;
  if (rows <= grain) return rotate_rows(p, 0, rows, stream);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) { rotate_rows(p, begin, end, stream); });
}

bool alike(const Heads& q, const Heads& k) {
  const auto contiguous = [](const Heads& x) { return x.in_stride[3] == 1 && x.out_stride[3] == 1; };
  return q.heads == 0 || k.heads == 0 || (q.dtype == k.dtype && contiguous(q) == contiguous(k));
}

struct Cpu {
  static Outputs run(const Call& call) {
    check<int64_t>(call);
    Outputs out;
    if (!call.in_place) {
      for (const int i : {0, 1}) {
        if (!call.x[i]) continue;
        out[i] = empty_output(*call.x[i]);
        advise_huge_pages(out[i]);
      }
    }
    const Params p = pack(call, out);
    if (p.positions) {
      p.positions_are_int64 ? check_position_values<int64_t>(call, p) : check_position_values<int32_t>(call, p);
    }
    if (alike(p.x[0], p.x[1])) {
      rotate(p);
    } else {  // two dtypes, or one tensor with strided features: a pass each
      for (const int other : {1, 0}) {
        Params one = p;
        one.x[other].heads = 0;
        rotate(one);
      }
    }
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, CPU, m) { register_all<Cpu>(m); }

}  // namespace rope
