"""Which functions are rotary embeddings, told by what they compute.

Functions of one name differ between modelling files: in the features they pair, in the sign of sin, in where heads
stand, in how a table of R/2 angles is spread over R features. Each of these is an independent choice, so a function is
called with small random tensors in every arrangement that its parameters allow, and its results are compared with the
operator's for every combination of the other choices. An arrangement in which none agrees is not replaced.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rope_ext.integrations.transformers._form import Form, Key, Roles, Rotation, adapter

# functions of these names are mentioned where they stay; what they are is never told by the name
_NAMES = re.compile(r"apply_.*(rotary|rope)|rotate_.*(quer|key)")
_COMPLEX = ("freqs_cis", "freqs_ci")
_LAYOUTS = [
    *itertools.product(("bhs", "bsh"), ("s", "bs", "sh", "hs", "bhs", "bsh")),
    *itertools.product(("hs", "sh", "bs"), ("s", "bs", "sh", "hs")),
]
# all different, so that an axis taken for another shows; the table's columns are full, half or another part of a head
_SIZES = {"b": 2, "h": 3, "s": 5}
_WIDTHS = {"full": (8, 8), "half": (8, 4), "other": (12, 4)}
# the unguarded ones first: a table with two unlike copies tells whether the second one is read at all
_ROTATIONS = [
    Rotation(spread, guarded, interleaved, to_half, conj, trailing)
    for (spread, guarded), (interleaved, to_half), conj, trailing in itertools.product(
        (("single", False), ("halves", False), ("pairs", False), ("halves", True), ("pairs", True)),
        ((False, False), (True, False), (True, True)),
        (False, True),
        (False, True),
    )
]


@dataclass(frozen=True)
class Refusal:
    """Why a function that looks like a rotary embedding keeps its own code."""

    reason: str


# held while functions are probed and rewritten: a second thread waits for the first one's result
lock = threading.RLock()
_known: dict[Callable[..., Any], Callable[..., Any] | Refusal | None] = {}


def recognise(function: Callable[..., Any]) -> Callable[..., Any] | Refusal | None:
    """What may stand for ``function``: an adapter over the operator, a refusal, or None where it is no rotary function.

    A function is probed once in a process: on the CPU, without gradients and without touching torch's random state.
    """
    if function not in _known:
        with lock:
            if function not in _known:
                _known[function] = _probe(function)
    return _known[function]


def _roles(function: Callable[..., Any]) -> Roles | None:
    parameters = inspect.signature(function).parameters
    names = tuple(name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    tables = ("cos", "sin") if {"cos", "sin"} <= set(names) else tuple(n for n in names if n in _COMPLEX)[:1]
    first = min((names.index(table) for table in tables), default=0)
    if not first or names[0] in ("self", "cls"):
        return None
    defaults = {n: parameters[n].default for n in names if parameters[n].default is not inspect.Parameter.empty}
    return Roles(names, names[:first], tables, defaults)


def _probe(function: Callable[..., Any]) -> Callable[..., Any] | Refusal | None:
    roles = _roles(function)
    if roles is None:
        if not _NAMES.search(function.__name__):
            return None
        return _method(function) or Refusal("its parameters are of no known form")
    required = set(roles.names) - {*roles.xs, *roles.tables, *roles.defaults}
    if required:
        return Refusal(f"it needs {', '.join(sorted(required))} beside a table")
    forms: dict[Key, list[Form]] = {}
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, form in _forms(function, roles):
            forms.setdefault(key, []).append(form)
    if not forms:
        return Refusal("it computes no rotation that the operator has")
    return adapter(function, roles, forms)


def _method(function: Callable[..., Any]) -> Callable[..., Any] | Refusal | None:
    """For methods ``(self, x, table)``: x is (batch, S, heads * head_dim), the table (2, S, 1, 1, head_dim)."""
    code = function.__code__
    if code.co_argcount != 3 or code.co_varnames[0] != "self":
        return None

    def parted(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        owner = SimpleNamespace(num_heads=x.shape[2], head_size=x.shape[3])
        table = torch.stack((cos, sin))[:, :, None, None]
        return torch.unflatten(function(owner, x.flatten(2), table), 2, x.shape[2:])

    found = recognise(parted)
    if not callable(found):
        return found

    @functools.wraps(function)
    def method(self: Any, x: Tensor, table: Tensor) -> Any:
        head_dim = table.shape[-1]
        if table.shape == (2, x.shape[1], 1, 1, head_dim) and x.dim() == 3 and x.shape[2] % head_dim == 0:
            return found(torch.unflatten(x, 2, (-1, head_dim)), *table[:, :, 0, 0]).flatten(2)
        return function(self, x, table)

    return method


def _forms(function: Callable[..., Any], roles: Roles) -> Iterator[tuple[Key, Form]]:
    """Every arrangement of arguments in which the function and the operator agree."""
    counts = (2, 1) if len(roles.xs) == 2 else (len(roles.xs),)  # some take None for k
    places = (1, 2, 0) if "unsqueeze_dim" in roles.names else (None,)
    likely: list[Rotation] = []
    for count, place, (x_layout, table_layout), width, rows in itertools.product(
        counts, places, _LAYOUTS, _WIDTHS, ("each", "last", "latest")
    ):
        if not set(table_layout) <= set(x_layout) or (rows == "latest" and count != 2):
            continue
        probe = _Probe(function, roles, count, place, x_layout, table_layout, width, rows)
        form = probe.agreed([*likely, *_ROTATIONS])
        if form is not None:
            if form.rotation not in likely:
                likely.insert(0, form.rotation)
            yield (count, len(x_layout) + 1, len(table_layout) + 1, place, width), form


class _Probe:
    """One arrangement of arguments, tried with random numbers."""

    def __init__(
        self,
        function: Callable[..., Any],
        roles: Roles,
        count: int,
        place: int | None,
        x_layout: str,
        table_layout: str,
        width: str,
        rows: str,
    ) -> None:
        self._function, self._roles, self._place = function, roles, place
        self._layouts, self._kind_of_rows = (x_layout, table_layout), rows
        self._generator = torch.Generator().manual_seed(0)
        head_dim, self._columns = _WIDTHS[width]
        fewer = {**_SIZES, "s": _SIZES["s"] - 2}
        self._rows = [1 if axis == "h" else (fewer if rows == "last" else _SIZES)[axis] for axis in table_layout]
        # large, so that a limit on the values would show
        self._xs = [64 * self._random(*(_SIZES[axis] for axis in x_layout), head_dim) for _ in range(count)]
        if rows == "latest":
            self._xs[0] = 64 * self._random(*(fewer[axis] for axis in x_layout), head_dim)
        self._seen: dict[tuple[str, bool], tuple[list[Tensor], Any]] = {}

    def agreed(self, rotations: list[Rotation]) -> Form | None:
        """The form of this arrangement with the first of the rotations that gives the function's results."""
        kind = torch.complex64 if len(self._roles.tables) == 1 else torch.float32
        if self._call(self._xs, [torch.ones(*self._rows, self._columns, dtype=kind)] * len(self._roles.tables)) is None:
            return None
        for rotation in rotations:
            form = Form(*self._layouts, rotation, self._kind_of_rows)
            tables, results = self._results(rotation.spread, rotation.guarded)
            if rotation.trailing and rotation.rotary_dim(self._columns) == self._xs[0].shape[-1]:
                continue
            if [r.shape for r in _tensors(results)] != [x.shape for x in self._xs] or not form.fits(self._xs, tables):
                continue
            pairs = zip(_tensors(results), form.rotate(self._xs, tables), strict=True)
            if all(torch.allclose(result, rotated, rtol=1e-5, atol=1e-4) for result, rotated in pairs):
                return self._typed(form, tables)
        return None

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32)

    def _results(self, spread: str, written_twice: bool) -> tuple[list[Tensor], Any]:
        if (spread, written_twice) not in self._seen:
            tables = []
            for _ in range(2):
                table = self._random(*self._rows, self._columns)
                if written_twice:
                    half = table[..., : self._columns // 2]
                    table = torch.cat((half, half), -1) if spread == "halves" else half.repeat_interleave(2, -1)
                tables.append(table)
            if len(self._roles.tables) == 1:
                tables = [torch.complex(*tables)]
            self._seen[spread, written_twice] = tables, self._call(self._xs, tables)
        return self._seen[spread, written_twice]

    def _call(self, xs: list[Tensor], tables: list[Tensor]) -> Any:
        given: dict[str, Any] = {**dict.fromkeys(self._roles.xs), **dict(zip(self._roles.xs, xs, strict=False))}
        given.update(zip(self._roles.tables, tables, strict=True))
        if self._place is not None:
            given["unsqueeze_dim"] = self._place
        try:
            return self._function(**given)
        except Exception:  # whatever it says, it does not take this arrangement
            return None

    def _typed(self, form: Form, tables: list[Tensor]) -> Form | None:
        """The form with the types and the structure of the function's results."""
        halved = [x.bfloat16() for x in self._xs]
        mixed = self._call(halved, tables)
        results = self._call(halved, [t.bfloat16() for t in tables] if len(tables) == 2 else tables)
        promotes = {r.dtype for r in _tensors(mixed)} == {torch.float32}
        dtypes = {r.dtype for r in [*_tensors(results), *([] if promotes else _tensors(mixed))]}
        if dtypes != {torch.bfloat16}:
            return None
        if isinstance(results, Tensor):
            return replace(form, promotes=promotes)
        order = iter(range(len(halved)))
        return replace(form, promotes=promotes, result=tuple(None if r is None else next(order) for r in results))


def _tensors(results: Any) -> list[Tensor]:
    return [r for r in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(r, Tensor)]
