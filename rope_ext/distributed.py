"""Sharding rules: how the operators run on DTensors, without communication where none is needed.

A token is rotated by its row of the table and by nothing else, so every dimension but the features may be sharded:

    heads (tensor parallel)      the table and the positions are whole on every rank
    batch (data parallel)        a table or positions per sample are sharded alike, others are whole
    tokens (context parallel)    positions are sharded alike and their table is whole; without, the table is sharded

The heads of q and of k may be sharded differently: k with fewer heads than ranks stays whole beside a sharded q. The
rotation is linear in x, so partial sums rotate to partial sums, as they pass every linear operator of torch.

`import rope_ext` is enough. Loading DTensor takes half as long as loading torch, so the rules wait until somebody does.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import product
from types import ModuleType
from typing import Any

import torch

from rope_ext import _C  # noqa: F401  (registers the operators)

_DTENSOR = "torch.distributed.tensor"


def shardings(xs: int, tables: int, in_place: bool, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """What one dimension of a device mesh may do to a call, so that every rank can rotate its part alone.

    Args:
        xs: 2 for xq and xk, 1 for x alone.
        tables: 1 for freqs_cis, 2 for cos and sin.
        in_place: x keeps its placements, because what is written into a redistributed copy is lost.
        args: the arguments of the operator, with DTensorSpecs in place of tensors.

    Returns:
        Pairs of (placements of the outputs, placements of the arguments that are tensors).

    Raises:
        RuntimeError: xk would have to be redistributed by an in-place call.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, table = args[:xs], args[xs]
    positions = args[xs + tables] if len(args) > xs + tables else None
    tokens, heads = x[0].ndim - 3, x[0].ndim - 2
    whole = Replicate()

    def rest(table: Any = whole, rows: Any = whole) -> list[Any]:
        return [table] * tables + ([] if positions is None else [rows])

    def alone(t: Any) -> list[Any]:
        """What one x may be whatever the other is: whole, and as it is where that is by heads or a sum."""

        def linear(p: Any) -> bool:
            return type(p) is Partial and p.reduce_op in ("sum", "avg")

        # no set: the order must be one on all ranks, for they must choose alike
        return list(dict.fromkeys([whole, *(p for p in t.placements if getattr(p, "dim", None) == heads or linear(p))]))

    def by_sample(t: Any, rank: int) -> Any:
        return Shard(0) if t.ndim == rank and t.shape[0] != 1 else whole

    found = [(list(each), rest()) for each in product(*map(alone, x))]
    by_token = rest(Shard(table.ndim - 2)) if positions is None else rest(whole, Shard(positions.ndim - 1))
    found.append(([Shard(tokens)] * xs, by_token))
    if tokens == 1:
        rows = whole if positions is None else by_sample(positions, 2)
        found.append(([Shard(0)] * xs, rest(by_sample(table, 3), rows)))
    if not in_place:
        return [(out, out + others) for out, others in found]

    for t in x:
        for size, placement in zip(t.mesh.shape, t.placements, strict=True):
            if isinstance(placement, Shard) and t.shape[placement.dim] < size:
                raise RuntimeError(
                    f"in place, a dimension of {t.shape[placement.dim]} cannot be sharded over {size} ranks, of which "
                    "some would have nothing: use the op without the underscore"
                )
    present = set(zip(*(t.placements for t in x), strict=True))
    possible = [(each, others) for each, others in found if tuple(each) in present]
    # DTensor holds the first argument to its placements. They must leave xk no choice, also across a mesh's dimensions.
    if {tuple(each) for each, _ in possible} != present or len({first for first, *_ in present}) != len(present):
        raise RuntimeError(
            "in place, xq and xk must be sharded alike (but for their heads) and not by features: found placements "
            f"{' and '.join(str(t.placements) for t in x)}; redistribute them, or use the op without the underscore"
        )
    return [([], each + others) for each, others in possible]


def register() -> None:
    """Gives DTensor the rules of all eight operators."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, xs in (("apply", 2), ("rotate", 1)):
        for suffix, tables in (("", 1), ("_cos_sin", 2)):
            for mark in ("", "_"):
                op = getattr(torch.ops.rope, name + suffix + mark).default
                register_sharding(op)(partial(shardings, xs, tables, mark == "_"))


class _RegisterWhenLoaded(MetaPathFinder):
    """Finds the one module that it waits for as everybody would, and lets loading it end with `register`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _DTENSOR else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            sys.meta_path.remove(self)
            register()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if _DTENSOR in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _RegisterWhenLoaded())
