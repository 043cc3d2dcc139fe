"""What the extension was built from, and what of it is in use."""

from pathlib import Path
from typing import Any

from rope_ext import _C
from rope_ext._built_for import TORCH


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict of

        * ``version``: of rope_ext.
        * ``torch``: the version of torch it was built for.
        * ``cuda``: None in a CPU build, else ``{"toolkit": "13.0", "archs": ["sm_90", ..., "compute_120"]}``
          (compute_*: PTX).
        * ``cpu_isa``: the instruction set in use: "default", "avx2" or "avx512". It follows torch's own
          ATEN_CPU_CAPABILITY, read once.
        * ``cpu_isa_built``: those in this binary.
        * ``library``: the path of librope_ext.so, which registers the operators in any program that links or loads it,
          with Python or without; docs/cpp.md says how.
    """
    toolkit = _C.cuda_toolkit()
    return {
        "version": _C.version(),
        "torch": TORCH,
        "cuda": None if toolkit is None else {"toolkit": toolkit, "archs": _C.cuda_archs()},
        "cpu_isa": _C.cpu_isa(),
        "cpu_isa_built": _C.cpu_isa_built(),
        "library": str(Path(_C.__file__).with_name("librope_ext.so")),
    }
