#include "checks.h"

#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>

#include "overlap.h"
#include "torch_versions.h"

namespace rope {
namespace {

using c10::SymInt;

template <class Int>
auto sizes(const at::Tensor& t) {
  if constexpr (std::is_same_v<Int, SymInt>) {
    return t.sym_sizes();
  } else {
    return t.sizes();
  }
}

// Whether two sizes agree. Between symbols this is a promise that the compiled graph asserts, also for unbacked ones.
bool same(int64_t a, int64_t b) { return a == b; }
bool same(const SymInt& a, const SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }
bool is_one(int64_t a) { return a == 1; }
bool is_one(const SymInt& a) { return surely(a.sym_eq(1)); }
bool at_most(int64_t a, int64_t b) { return a <= b; }
bool at_most(int64_t a, const SymInt& b) { return b.sym_ge(a).expect_true(__FILE__, __LINE__); }

std::string dtype_name(const at::Tensor& t) {
  return "torch." + std::string(c10::getDtypeNames(t.scalar_type()).first);
}

bool is_float(const at::Tensor& t) {
  const auto type = t.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

// torch.ops lets None pass for a tensor.
void check_defined(const Call& call) {
  for (const int i : {0, 1}) {
    TORCH_CHECK_TYPE(!call.x[i] || call.x[i]->defined(), call.op, ": ", call.x_name(i),
                     " must be a tensor, found None");
    TORCH_CHECK_TYPE(!call.table[i] || call.table[i]->defined(), call.op, ": ", call.table_name(i),
                     " must be a tensor, found None");
  }
}

void check_devices(const Call& call) {
  const auto device = call.x[0]->device();
  const auto here = [&](const at::Tensor* t) { return !t || t->device() == device; };
  if (here(call.x[1]) && here(call.table[0]) && here(call.table[1]) &&
      (!call.positions || call.positions->device() == device)) {
    return;
  }
  std::ostringstream found;
  for (const int i : {0, 1}) {
    if (call.x[i]) found << call.x_name(i) << " is on " << call.x[i]->device() << ", ";
  }
  for (const int i : {0, 1}) {
    if (call.table[i]) found << (i ? ", " : "") << call.table_name(i) << " on " << call.table[i]->device();
  }
  if (call.positions) found << ", positions on " << call.positions->device();
  TORCH_CHECK(false, call.op, ": all tensors must be on one device, but ", found.str(),
              ". Move the odd one once, when the model is loaded, with .to(device)");
}

void check_dtypes(const Call& call) {
  for (const int i : {0, 1}) {
    if (const auto* x = call.x[i]) {
      TORCH_CHECK_TYPE(is_float(*x), call.op, ": ", call.x_name(i),
                       " must be float16, bfloat16, float32 or float64, found ", dtype_name(*x));
    }
  }
  const auto& table = *call.table[0];
  if (call.complex_table()) {
    const auto type = table.scalar_type();
    if (type != at::kComplexFloat && type != at::kComplexDouble) {
      TORCH_CHECK_TYPE(!is_float(table), call.op, ": freqs_cis must be complex64 or complex128, found ",
                       dtype_name(table),
                       ". module.to(dtype) casts complex buffers to real and drops the imaginary part: rebuild the "
                       "table with precompute_freqs_cis, or keep it out of .to(). Pairs of real numbers need "
                       "view_as_complex, two real tables "
                       "go to ",
                       call.op, call.in_place ? "cos_sin_" : "_cos_sin");
      TORCH_CHECK_TYPE(false, call.op, ": freqs_cis must be complex64 or complex128, found ", dtype_name(table),
                       type == at::kComplexHalf ? "; .to(torch.complex64) widens it" : "");
    }
  } else {
    for (const int i : {0, 1}) {
      TORCH_CHECK_TYPE(
          is_float(*call.table[i]), call.op, ": ", call.table_name(i),
          " must be float16, bfloat16, float32 or float64, found ", dtype_name(*call.table[i]),
          call.table[i]->is_complex() ? ". A complex table goes to the op without cos_sin in its name" : "");
    }
    TORCH_CHECK_TYPE(table.scalar_type() == call.table[1]->scalar_type(), call.op,
                     ": cos and sin must have one dtype, found ", dtype_name(table), " and ",
                     dtype_name(*call.table[1]));
  }
  if (call.positions) {
    const auto type = call.positions->scalar_type();
    TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt, call.op, ": positions must be int32 or int64, found ",
                     dtype_name(*call.positions));
  }
}

template <class Int>
void check_x(const Call& call) {
  const auto& x = *call.x[0];
  const auto rank = x.dim();
  const auto shape_hint =
      " must have shape (batch, seqlen, heads, head_dim) or, for packed tokens, (tokens, heads, head_dim)";
  TORCH_CHECK_VALUE(rank == 3 || rank == 4, call.op, ": ", call.x_name(0), shape_hint, ", found rank ", rank,
                    ", shape ", x.sym_sizes());
  if (call.pair()) {
    const auto& xk = *call.x[1];
    TORCH_CHECK_VALUE(xk.dim() == 3 || xk.dim() == 4, call.op, ": xk", shape_hint, ", found rank ", xk.dim(),
                      ", shape ", xk.sym_sizes());
    const auto q = sizes<Int>(x);
    const auto k = sizes<Int>(xk);
    bool agree = xk.dim() == rank;
    for (int64_t d = 0; agree && d < rank; ++d) agree = d == rank - 2 || same(q[d], k[d]);
    TORCH_CHECK_VALUE(agree, call.op, ": xq and xk may differ only in their number of heads, found shapes ",
                      x.sym_sizes(), " and ", xk.sym_sizes(),
                      ". The number of heads is the last but one dimension: transpose(1, 2) where heads come before "
                      "tokens");
  }

  const auto head_dim = sizes<Int>(x)[rank - 1];
  TORCH_CHECK_VALUE(same(head_dim % 2, Int(0)) && at_most(2, head_dim), call.op,
                    ": head_dim must be even and at least 2, because features rotate in pairs, found ", head_dim);
  if (call.rotary_dim) {
    const int64_t rotary_dim = *call.rotary_dim;
    TORCH_CHECK_VALUE(rotary_dim > 0 && rotary_dim % 2 == 0 && at_most(rotary_dim, head_dim), call.op,
                      ": rotary_dim must be even, at least 2 and at most head_dim = ", head_dim, ", found ",
                      rotary_dim);
  }
}

template <class Int>
void check_table(const Call& call) {
  const auto& x = *call.x[0];
  const auto& table = *call.table[0];
  const auto* name = call.complex_table() ? "freqs_cis" : "cos and sin";
  const auto* row_name = call.table_name(0);
  if (!call.complex_table()) {
    const auto& sin = *call.table[1];
    bool agree = table.dim() == sin.dim();
    for (int64_t d = 0; agree && d < table.dim(); ++d) agree = same(sizes<Int>(table)[d], sizes<Int>(sin)[d]);
    TORCH_CHECK_VALUE(agree, call.op, ": cos and sin must have one shape, found ", table.sym_sizes(), " and ",
                      sin.sym_sizes());
  }

  const bool packed = x.dim() == 3;
  const auto rank = table.dim();
  TORCH_CHECK_VALUE(rank == 2 || (rank == 3 && !packed && !call.positions), call.op, ": ", name, " must have shape ",
                    call.positions ? "(rows, rotary_dim/2) when positions are given"
                    : packed       ? "(tokens, rotary_dim/2) for packed tokens"
                                   : "(seqlen, rotary_dim/2) or (batch, seqlen, rotary_dim/2)",
                    ", found rank ", rank, ", shape ", table.sym_sizes());

  const auto t = sizes<Int>(table);
  const auto head_dim = sizes<Int>(x)[x.dim() - 1];
  const auto rotary_dim = call.rotary_dim ? Int(*call.rotary_dim) : head_dim;
  if (!same(t[rank - 1] * 2, rotary_dim)) {
    const auto* width = call.rotary_dim ? "rotary_dim" : "head_dim";
    TORCH_CHECK_VALUE(!same(t[rank - 1], rotary_dim), call.op, ": the last dimension of ", name, " must be half of ",
                      width, " = ", rotary_dim, ", one column per pair, found ", t[rank - 1],
                      ". Where it holds each of them twice, as in Hugging Face models, pass [..., : ", width, " // 2]");
    TORCH_CHECK_VALUE(false, call.op, ": the last dimension of ", name, " must be half of ", width, " = ", rotary_dim,
                      ", one column per pair, found ", t[rank - 1],
                      call.rotary_dim ? "" : ". To rotate only the first features of each head, pass rotary_dim");
  }
  if (rank == 3) {
    const auto batch = sizes<Int>(x)[0];
    TORCH_CHECK_VALUE(is_one(t[0]) || same(t[0], batch), call.op,
                      ": a table of rank 3 holds one table per sample: ", name,
                      " must have first dimension 1 or batch = ", batch, ", found ", t[0]);
  }
  if (!call.positions) {
    const auto tokens = sizes<Int>(x)[packed ? 0 : 1];
    TORCH_CHECK_VALUE(
        same(t[rank - 2], tokens), call.op, ": ", name, " must have one row per token, found ", t[rank - 2],
        " rows for a sequence of ", tokens, ". Pass ", row_name,
        "[start_pos : start_pos + seqlen], or positions with the whole table; if a slice came out short, "
        "the table is too short. xq and xk are (batch, seqlen, heads, head_dim): transpose(1, 2) where heads come "
        "first");
  }
}

template <class Int>
void check_positions(const Call& call) {
  const auto& x = *call.x[0];
  const auto p = sizes<Int>(*call.positions);
  const auto s = sizes<Int>(x);
  const bool packed = x.dim() == 3;
  bool fits = false;
  if (p.size() == 1) {
    fits = same(p[0], s[packed ? 0 : 1]);
  } else if (p.size() == 2 && !packed) {
    fits = same(p[1], s[1]) && (is_one(p[0]) || same(p[0], s[0]));
  }
  TORCH_CHECK_VALUE(
      fits, call.op, ": positions must have shape ", packed ? "(tokens,)" : "(seqlen,), (1, seqlen) or (batch, seqlen)",
      ", found ", call.positions->sym_sizes(), " for ", call.x_name(0), " of shape ", x.sym_sizes(),
      packed ? "" : ", which is (batch, seqlen, heads, head_dim): transpose(1, 2) where heads come first");
}

void check_overlaps(const Call& call) {
  for (const int i : {0, 1}) {
    if (!call.x[i] || !call.x[i]->has_storage()) continue;  // a wrapper: what it wraps is checked below it
    TORCH_CHECK(
        !overlaps_itself(*call.x[i]), call.op, ": ", call.x_name(i),
        " has several elements in one place (an expanded tensor?), which cannot be written in place; clone() it. "
        "Shape ",
        call.x[i]->sym_sizes(), ", strides ", call.x[i]->sym_strides());
    const auto refuse = [&](const at::Tensor& other, const char* name) {
      TORCH_CHECK(!overlap(*call.x[i], other), call.op, ": ", call.x_name(i), " and ", name,
                  " share memory, so writing one in place would change the other; clone() one of them");
    };
    for (const int j : {0, 1}) {
      if (call.table[j]) refuse(*call.table[j], call.table_name(j));
    }
    if (call.positions) refuse(*call.positions, "positions");
    if (i == 0 && call.pair()) refuse(*call.x[1], "xk");
  }
}

}  // namespace

template <class Int>
void check(const Call& call) {
  check_defined(call);
  check_devices(call);
  check_dtypes(call);
  check_x<Int>(call);
  check_table<Int>(call);
  if (call.positions) check_positions<Int>(call);
  if (call.in_place) check_overlaps(call);
}

template void check<int64_t>(const Call&);
template void check<SymInt>(const Call&);

}  // namespace rope
