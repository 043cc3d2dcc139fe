"""How torch.compile and export see the in-place operators that take a complex table.

Inductor cannot lower a mutating custom operator with a complex argument ("auto_functionalized_v2 was not removed"), so
when a graph is functionalised `apply_` and `rotate_` become their `_cos_sin_` forms on the two halves of the table.
These are views: nothing is copied, and the operator still writes into its own tensors.
"""

from typing import Any

import torch
from torch import Tensor

from rope_ext import _C  # noqa: F401  (registers the operators)


def _real_form(name: str, tensors: int) -> None:
    in_place = getattr(torch.ops.rope, f"{name}_").default
    cos_sin = getattr(torch.ops.rope, f"{name}_cos_sin_").default

    def rule(ctx: Any, *args: Any, **options: Any) -> None:
        x, freqs_cis, rest = args[:tensors], args[tensors], args[tensors + 1 :]
        names = ("positions", "interleaved", "rotary_dim", "conj")
        options = {"conj": False, **dict(zip(names, rest, strict=False)), **options}
        # the rule takes the place of FunctionalTensorMode: what it calls is to be functionalised in turn
        with ctx.mode:
            table: Tensor = freqs_cis
            if table.is_conj():  # a lazy view, which view_as_real refuses
                table, options["conj"] = table.conj(), not options["conj"]
            halves = torch.view_as_real(table)
            cos_sin(*x, halves[..., 0], halves[..., 1], **options)

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


_real_form("apply", 2)
_real_form("rotate", 1)
