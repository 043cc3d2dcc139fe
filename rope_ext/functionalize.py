"""How torch.compile and export see the in-place operators.

Left alone, a functionalised graph has views rebuilt and written in place, without a copy. Two things of torch 2.13 need
a rule of our own:

- Inductor cannot lower a mutating custom operator with a complex argument ("auto_functionalized_v2 was not removed"):
  `apply_` and `rotate_` become their `_cos_sin_` forms on the two halves of the table, which are views.
- Inductor loses a storage offset that is not a constant (https://github.com/pytorch/pytorch/issues/198068), and would
  write k's rotation over q: such tensors are rotated out of place and copied back.
"""

from typing import Any

import torch
from torch import Tensor

from rope_ext import _C  # noqa: F401  (registers the operators)


def _has_symbolic_offset(x: Tensor) -> bool:
    return isinstance(x.storage_offset(), torch.SymInt)


def _register_rule(name: str, tensors: int) -> None:
    in_place = getattr(torch.ops.rope, f"{name}_").default
    functional = getattr(torch.ops.rope, name).default
    is_complex = not name.endswith("_cos_sin")
    cos_sin = getattr(torch.ops.rope, f"{name}_cos_sin_").default if is_complex else in_place

    def rule(ctx: Any, *args: Any, **options: Any) -> None:
        x, rest = args[:tensors], args[tensors:]
        if any(map(_has_symbolic_offset, x)):
            # the rule takes the place of FunctionalTensorMode: what it calls is to be functionalised in turn
            with ctx.mode:
                rotated = functional(*args, **options)
                for old, new in zip(x, rotated if tensors > 1 else (rotated,), strict=True):
                    old.copy_(new)
            return
        if is_complex:
            table: Tensor = rest[0]
            names = ("positions", "interleaved", "rotary_dim", "conj")
            options = {"conj": False, **dict(zip(names, rest[1:], strict=False)), **options}
            with ctx.mode:
                if table.is_conj():  # a lazy view, which view_as_real refuses
                    table, options["conj"] = table.conj(), not options["conj"]
                halves = torch.view_as_real(table)
                rest = (halves[..., 0], halves[..., 1])
        # torch's own way with an operator that has no rule; called as an operator, this rule would meet itself
        ctx.mode.__torch_dispatch__(cos_sin, (), (*x, *rest), options)

    # an operator outlives its Python module: after a second import the rule of the first one stands
    if torch._C.DispatchKey.Functionalize not in in_place.py_kernels:
        in_place.py_functionalize_impl(rule)
        _let_subclasses_pass(in_place)


def _let_subclasses_pass(op: Any) -> None:
    """A subclass that wraps functional tensors, such as DTensor, answers first and calls again with what it wraps.

    torch's own rule declines these by NotImplemented, which its Python dispatcher then takes for the result.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    plain = op.python_key_table[FunctionalTensorMode]

    def rule(mode: Any, *args: Any, **options: Any) -> Any:
        result = plain(mode, *args, **options)
        if result is NotImplemented:
            with mode:
                return op._op_dk(torch._C.DispatchKey.Python, *args, **options)
        return result

    op.python_key_table[FunctionalTensorMode] = rule


for _name, _tensors in (("apply", 2), ("apply_cos_sin", 2), ("rotate", 1), ("rotate_cos_sin", 1)):
    _register_rule(_name, _tensors)
