"""How a call reaches the operator: a `Form` for each arrangement of arguments, and the adapter that chooses one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Roles(NamedTuple):
    """The parameters of a rotary function: the tensors it rotates, one complex table or cos and sin, the others."""

    names: tuple[str, ...]
    xs: tuple[str, ...]
    tables: tuple[str, ...]
    defaults: dict[str, Any]


# tensors to rotate, their rank, the table's rank, unsqueeze_dim, how wide the table is beside the head
Key = tuple[int, int, int, Any, str]


class Rotation(NamedTuple):
    """What a function computes, whatever the layout of its arguments.

    Attributes:
        spread: how the R/2 angles lie in the table: "single" (as they are), "halves" (written twice, one after the
            other) or "pairs" (each written twice).
        guarded: the function reads both copies of an angle, so that it only rotates where they are equal.
        interleaved: neighbouring features are pairs; otherwise halves are.
        to_half: it takes neighbours as pairs and returns them as halves.
        conj: it rotates the other way.
        trailing: the last R features of a head rotate instead of the first.
    """

    spread: str
    guarded: bool
    interleaved: bool
    to_half: bool
    conj: bool
    trailing: bool

    def rotary_dim(self, columns: int) -> int:
        """R, for a table of so many columns."""
        return 2 * columns if self.spread == "single" else columns


@dataclass(frozen=True)
class Form:
    """One arrangement of arguments and the rotation that the function does then.

    Layouts name the axes before the last, in order: b(atch), s(equence), h(eads).

    Attributes:
        rows: the table has one for "each" token; for the "last" tokens only, and those before them pass through; or for
            tokens before those of a tensor too, which takes the "latest".
        promotes: the result has the type of x * cos; otherwise that of x.
        result: the tensors returned, by index, with None where the function returns None; a bare index for no tuple.
    """

    x_layout: str
    table_layout: str
    rotation: Rotation
    rows: str
    promotes: bool = False
    result: int | tuple[int | None, ...] = 0

    def fits(self, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> bool:
        """Whether the operator may be given these: it neither broadcasts nor slices a table, as functions do."""
        x, table = xs[0], tables[0]
        shape, rows = table.shape, table.shape[self.table_layout.index("s")]
        if len(tables) == 2:
            sin = tables[1]
            if sin.shape != shape or sin.dtype != table.dtype or sin.device != table.device:
                return False
        rotated = self.rotation.rotary_dim(shape[-1])
        if rotated % 2 or rotated > x.shape[-1] or table.device != x.device:
            return False
        for axis, size in zip(self.table_layout, shape, strict=False):
            if axis == "h" and size != 1:
                return False
        for x in xs:
            sizes = x.shape
            tokens = sizes[self.x_layout.index("s")]
            if len(sizes) != len(self.x_layout) + 1 or sizes[-1] != xs[0].shape[-1]:
                return False
            if rows != tokens:
                if self.rows != ("last" if rows < tokens else "latest") or (rows > tokens and x is not xs[0]):
                    return False
            elif self.rows == "last":
                return False
            if self.table_layout[0] == "b" and shape[0] != 1 and shape[0] != sizes[0]:
                return False
        return True

    def results(self, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> Any:
        """What the function returns."""
        rotated = self.rotate(xs, tables)
        if isinstance(self.result, int):
            return rotated[self.result]
        return tuple(None if i is None else rotated[i] for i in self.result)

    def rotate(self, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
        """The tensors rotated by the operator, in the layout and with the type that the function returns."""
        rotary_dim = self.rotation.rotary_dim(tables[0].shape[-1])
        rows = tables[0].shape[self.table_layout.index("s")]
        dtype = tables[0].dtype
        if self.promotes:
            xs = [x if x.dtype == dtype else x.to(torch.promote_types(x.dtype, dtype)) for x in xs]
        tables = [self._table(t) for t in tables]
        inputs = moving = [self._input(x) for x in xs]
        if self.rows == "last":
            moving = [x[:, x.shape[1] - rows :] for x in moving]
        if self.rotation.trailing:
            moving = [x[..., x.shape[-1] - rotary_dim :] for x in moving]
        options = (None, self.rotation.interleaved, rotary_dim, self.rotation.conj)
        if len(moving) == 2 and self.rows != "latest" and moving[0].shape[:2] == moving[1].shape[:2]:
            apply = torch.ops.rope.apply if len(tables) == 1 else torch.ops.rope.apply_cos_sin
            outputs = apply(*moving, *tables, *options)
        else:
            rotate = torch.ops.rope.rotate if len(tables) == 1 else torch.ops.rope.rotate_cos_sin
            outputs = [
                rotate(x, *(t[..., rows - x.shape[1] :, :] if self.rows == "latest" else t for t in tables), *options)
                for x in moving
            ]
        return [self._output(x, y, rotary_dim) for x, y in zip(inputs, outputs, strict=True)]

    def _table(self, table: Tensor) -> Tensor:
        """(S, R/2) or (batch, S, R/2)."""
        heads = self.table_layout.find("h")
        if heads >= 0:
            table = table.squeeze(heads)
        if self.rotation.spread == "halves":
            return table.narrow(-1, 0, table.shape[-1] // 2)
        return table[..., ::2] if self.rotation.spread == "pairs" else table

    def _input(self, x: Tensor) -> Tensor:
        """(batch, S, heads, head_dim)."""
        if self.x_layout == "bsh":
            return x
        if self.x_layout == "bhs":
            return x.transpose(1, 2)
        if self.x_layout == "bs":
            return x.unsqueeze(2)
        return (x if self.x_layout == "sh" else x.transpose(0, 1)).unsqueeze(0)

    def _output(self, x: Tensor, rotated: Tensor, rotary_dim: int) -> Tensor:
        """Back from (batch, S, heads, head_dim); x is the tensor that was to be rotated."""
        if self.rotation.to_half:
            head = torch.unflatten(rotated[..., :rotary_dim], -1, (-1, 2)).transpose(-1, -2).flatten(-2)
            rotated = head if rotary_dim == rotated.shape[-1] else torch.cat((head, rotated[..., rotary_dim:]), -1)
        if self.rotation.trailing:
            rotated = torch.cat((x[:, x.shape[1] - rotated.shape[1] :, :, : x.shape[-1] - rotary_dim], rotated), -1)
        if self.rows == "last":
            rotated = torch.cat((x[:, : x.shape[1] - rotated.shape[1]], rotated), 1)
        if self.x_layout == "bsh":
            return rotated
        if self.x_layout == "bhs":
            return rotated.transpose(1, 2)
        if self.x_layout == "bs":
            return rotated.squeeze(2)
        return rotated.squeeze(0) if self.x_layout == "sh" else rotated.squeeze(0).transpose(0, 1)


def _copies(table: Tensor, spread: str) -> tuple[Tensor, Tensor]:
    half = table.shape[-1] // 2
    return (table[..., :half], table[..., half:]) if spread == "halves" else (table[..., ::2], table[..., 1::2])


class _Guard:
    """Whether both copies of every angle are equal, which a table cut to the size of a smaller head, say, is not.

    Tables are read once each; the layers of a model share them. Inference tensors do not count their changes, so that
    each layer reads them, for a tenth of the time of a rotation. On an accelerator reading would stop the queue of
    kernels: there the first table of a kind is read and the others are asserted, as all are under torch.compile, and
    inference tensors are taken for unchanged.
    """

    def __init__(self, name: str) -> None:
        self._message = (
            f"{name} was given a table whose two copies of the angles differ, which the operator of rope_ext cannot "
            "express: run the model once before compiling it, or unpatch it"
        )
        self._seen: dict[tuple[int, int], bool] = {}

    def passes(self, rotation: Rotation, tables: Sequence[Tensor], sizes: tuple[int, int]) -> bool:
        """For tables of so many columns and heads of so many features."""
        if not rotation.guarded:
            return True
        return all(self._passes(table, rotation.spread, sizes) for table in tables)

    def _passes(self, table: Tensor, spread: str, sizes: tuple[int, int]) -> bool:
        seen = self._seen.get(sizes)
        if torch.compiler.is_compiling():
            return seen is not False and self._assert(table, spread)
        version = 0 if table.is_inference() else table._version
        if not (table.is_cpu and table.is_inference()):
            known: tuple[int, str, bool] | None = getattr(table, "_rope_ext_copies", None)
            if known is not None and known[:2] == (version, spread):
                return known[2]
        if table.is_cpu or seen is None:
            try:
                equal = torch.equal(*_copies(table, spread))
            except (RuntimeError, NotImplementedError):  # no values: a fake or meta tensor, or one under vmap
                return False
            self._seen[sizes] = equal and seen is not False
        else:
            equal = seen and self._assert(table, spread)
        table._rope_ext_copies = version, spread, equal  # type: ignore[attr-defined]
        return equal

    def _assert(self, table: Tensor, spread: str) -> bool:
        one, other = _copies(table, spread)
        torch._assert_async((one == other).all(), self._message)
        return True


def adapter(function: Callable[..., Any], roles: Roles, forms: Mapping[Key, Sequence[Form]]) -> Callable[..., Any]:
    """A function with the parameters of ``function``, over the operator for calls in one of ``forms``.

    Any other call reaches ``function`` itself.
    """
    guard = _Guard(function.__name__)
    tried = {*roles.xs, *roles.tables, "unsqueeze_dim"}
    split, whole = len(roles.xs), len(roles.xs) + len(roles.tables)
    usual = roles.names[:whole] == (*roles.xs, *roles.tables)
    default_place = roles.defaults.get("unsqueeze_dim")

    def moved(xs: Sequence[Tensor], tables: Sequence[Tensor], place: Any) -> Any:
        if place is not None and place < 0:
            place += tables[0].dim() + 1
        columns, head_dim = tables[0].shape[-1], xs[0].shape[-1]
        width = "full" if columns == head_dim else "half" if 2 * columns == head_dim else "other"
        for form in forms.get((len(xs), xs[0].dim(), tables[0].dim(), place, width), ()):
            if form.fits(xs, tables) and guard.passes(form.rotation, tables, (columns, head_dim)):
                return form.results(xs, tables)
        return None

    @functools.wraps(function)
    def rotary(*args: Any, **kwargs: Any) -> Any:
        if usual and not kwargs and len(args) == whole and all(a is not None for a in args):
            results = moved(args[:split], args[split:], default_place)
            return function(*args) if results is None else results
        given = dict(zip(roles.names, args, strict=False))
        given.update(kwargs)
        xs = [given[name] for name in roles.xs if given.get(name) is not None]
        tables = [given[name] for name in roles.tables if given.get(name) is not None]
        # an argument that was not tried has its default, whatever it would do otherwise
        known = all(name in tried or value is roles.defaults.get(name, given) for name, value in given.items())
        if known and given.get(roles.xs[0]) is not None and len(tables) == len(roles.tables):
            results = moved(xs, tables, given.get("unsqueeze_dim", default_place))
            if results is not None:
                return results
        return function(*args, **kwargs)

    return rotary
