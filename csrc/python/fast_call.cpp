// torch.ops parses every call against the schema: 1 us, half of what a decode-size call may cost. Three plain tensors
// need none of that. They go to the typed dispatcher handle, so that autograd, functorch, dispatch modes and fake
// tensors work as ever; everything else (keywords, subclasses, torch function modes) takes the torch.ops road.
#include "fast_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

namespace rope {
namespace {

using Apply = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                 const std::optional<at::Tensor>&, bool, std::optional<int64_t>, bool);

// A call that moves less than this is over before another thread could use the interpreter lock.
constexpr size_t kKeepLockBytes = 128 * 1024;

bool is_brief(const at::Tensor& x) {
  return x.is_cpu() && x.layout() == at::kStrided && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         x.nbytes() <= kKeepLockBytes;
}

PyObject* through_torch_ops(PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
  // not a plain static: its guard would be held while Python code runs, which may wait for a thread that waits for it
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::object> op;
  op.call_once_and_store_result([] {
    return pybind11::object(pybind11::module_::import("torch").attr("ops").attr("rope").attr("apply").attr("default"));
  });
  return PyObject_Vectorcall(op.get_stored().ptr(), args, n, keywords);
}

PyObject* apply(PyObject* /*module*/, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
  HANDLE_TH_ERRORS
  const bool plain = n == 3 && keywords == nullptr && THPVariable_CheckExact(args[0]) &&
                     THPVariable_CheckExact(args[1]) && THPVariable_CheckExact(args[2]) &&
                     !at::impl::torch_function_mode_enabled();
  if (!plain) return through_torch_ops(args, n, keywords);

  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("rope::apply", "").typed<Apply>();
  const auto& xq = THPVariable_Unpack(args[0]);
  const auto& xk = THPVariable_Unpack(args[1]);
  const auto& freqs_cis = THPVariable_Unpack(args[2]);
  std::optional<pybind11::gil_scoped_release> unlocked;
  if (!is_brief(xq) || !is_brief(xk)) unlocked.emplace();
  auto [q, k] = op.call(xq, xk, freqs_cis, std::nullopt, true, std::nullopt, false);
  unlocked.reset();
  PyObject* result = PyTuple_New(2);
  if (!result) return nullptr;
  PyTuple_SET_ITEM(result, 0, THPVariable_Wrap(std::move(q)));
  PyTuple_SET_ITEM(result, 1, THPVariable_Wrap(std::move(k)));
  return result;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef kApplyMethods[] = {
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(apply)), METH_FASTCALL | METH_KEYWORDS,
     "apply($module, xq, xk, freqs_cis)\n--\n\ntorch.ops.rope.apply without parsing."},
    {}};

}  // namespace rope
