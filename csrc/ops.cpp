// The whole surface: eight names, one kernel. Two tensors or one, one complex table or two real ones,
// fresh outputs or in place. Which kernel answers is said at the end of the file that implements it.
//
// A published schema is never changed: a new need gets a new argument with a default, or a new op.
// The options may be passed by position, because a keyword costs about 1 us in torch.ops.
#include <torch/library.h>

#define ROPE_OPTIONS "Tensor? positions=None, bool interleaved=True, int? rotary_dim=None, bool conj=False"

TORCH_LIBRARY(rope, m) {
  m.def("apply(Tensor xq, Tensor xk, Tensor freqs_cis, " ROPE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("apply_cos_sin(Tensor xq, Tensor xk, Tensor cos, Tensor sin, " ROPE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("rotate(Tensor x, Tensor freqs_cis, " ROPE_OPTIONS ") -> Tensor");
  m.def("rotate_cos_sin(Tensor x, Tensor cos, Tensor sin, " ROPE_OPTIONS ") -> Tensor");

  m.def("apply_(Tensor(a!) xq, Tensor(b!) xk, Tensor freqs_cis, " ROPE_OPTIONS ") -> ()");
  m.def("apply_cos_sin_(Tensor(a!) xq, Tensor(b!) xk, Tensor cos, Tensor sin, " ROPE_OPTIONS ") -> ()");
  m.def("rotate_(Tensor(a!) x, Tensor freqs_cis, " ROPE_OPTIONS ") -> ()");
  m.def("rotate_cos_sin_(Tensor(a!) x, Tensor cos, Tensor sin, " ROPE_OPTIONS ") -> ()");
}
