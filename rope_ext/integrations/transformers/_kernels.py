"""The operator as a layer for the mappings of the kernels package, which transformers' own `kernelize` reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rope_ext.integrations.transformers._rebind import plain
from rope_ext.integrations.transformers._recognise import recognise

_known: dict[type[nn.Module], Callable[..., Any]] = {}


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """A mapping for `kernels.register_kernel_mapping` or `kernels.use_kernel_mapping`, for models on the CPU and CUDA.

        with kernels.use_kernel_mapping(kernel_mapping()):
            model.kernelize()

    It serves the rotary functions that transformers has opened to kernels, in inference, training and under
    torch.compile. They are shared by all models of a modelling file, whereas `patch` changes one model. A function that
    was not seen to compute what the operator does runs as it is. Run the model once before torch.compile.
    """
    return {"rotary_pos_emb": dict.fromkeys(("cpu", "cuda"), _Repository())}


class RotaryPosEmb(nn.Module):
    """Its forward becomes that of the module which the kernels package has made of a rotary function."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return _standing_for(type(self))(q, k, cos, sin, unsqueeze_dim)


def _standing_for(module: type[nn.Module]) -> Callable[..., Any]:
    if module not in _known:
        function = plain(module)
        assert function is not None  # or the kernels package would not have given it this forward
        found = recognise(function)
        _known[module] = found if callable(found) else function
    return _known[module]


class _Repository:
    layer_name = RotaryPosEmb.__name__

    def load(self) -> type[nn.Module]:
        return RotaryPosEmb

    def __str__(self) -> str:
        return "rope_ext"
