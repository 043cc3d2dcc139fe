// The shortest road from Python to rope::apply.
#pragma once

#include <Python.h>

namespace rope {

extern PyMethodDef kApplyMethods[];  // rope_ext._C.apply, and an end mark

}  // namespace rope
