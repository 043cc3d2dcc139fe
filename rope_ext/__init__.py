"""Rotary position embedding as PyTorch operators.

    xq, xk = torch.ops.rope.apply(xq, xk, freqs_cis)

Importing this package registers the operators `torch.ops.rope.{apply, apply_cos_sin, rotate, rotate_cos_sin}` and their
in-place forms with a trailing underscore.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch

from rope_ext.tables import precompute_freqs_cis

if TYPE_CHECKING:
    from rope_ext.module import RotaryEmbedding

try:
    from rope_ext._built_for import TORCH as _BUILT_FOR
except ImportError:
    _CANNOT = (
        "rope_ext is not built: run `pip install --no-build-isolation -e .` in its folder, or import the installed "
        "package from outside the source tree"
    )
else:
    _CANNOT = ""
    if torch.__version__ != _BUILT_FOR:
        from rope_ext.__main__ import REBUILD

        _CANNOT = (
            f"rope_ext was built for torch {_BUILT_FOR} and this is torch {torch.__version__}: rebuild it with "
            f"`{REBUILD}` in its source folder"
        )

if _CANNOT:
    if sys.argv[:1] == ["-m"] and "rope_ext" in sys.orig_argv:
        # `python -m rope_ext` comes here before it comes to the doctor, who has more to say
        from rope_ext.__main__ import main

        sys.exit(main())
    raise ImportError(_CANNOT)

from rope_ext import distributed, functionalize  # noqa: F401
from rope_ext._info import build_info
from rope_ext.llama import apply_rotary_emb, reshape_for_broadcast
from rope_ext.weights import half_to_interleaved, interleaved_to_half

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "build_info",
    "half_to_interleaved",
    "interleaved_to_half",
    "precompute_freqs_cis",
    "reshape_for_broadcast",
]
__version__ = build_info()["version"]


def __getattr__(name: str) -> Any:
    # its decorators load torch's compiler, which takes as long as torch itself
    if name == "RotaryEmbedding":
        from rope_ext.module import RotaryEmbedding

        return RotaryEmbedding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
