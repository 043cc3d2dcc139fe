// rope_ext._C: what a Python import loads. The operators live in librope_ext.so, which this module links and which
// holds no Python symbol, so that a C++ program can load it too. pybind11 binds no tensor function: one would see lazy
// conj views unresolved and accept fake tensors. fast_call.cpp goes through the dispatcher.
// None of it needs the interpreter lock, and a free-threaded Python is told so: else it would turn the lock back on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../build_info.h"
#include "fast_call.h"

PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  m.doc() = "Facts about the compiled operators. Importing it registers them.";
  m.def("version", &rope::version);
  m.def("cuda_toolkit", &rope::cuda_toolkit, "The CUDA toolkit the kernels were compiled with, or None.");
  m.def("cuda_archs", &rope::cuda_archs);
  m.def("cpu_isa", &rope::cpu_isa);
  m.def("cpu_isa_built", &rope::cpu_isa_built);
  PyModule_AddFunctions(m.ptr(), rope::kApplyMethods);
}
