"""Other globals for the methods of one patched module.

A method finds a rotary function by name among the globals of its file. Replacing it there would change every model of
the process, so a patched one gets a method of its own: the same code, with the globals of a twin of that file in which
the name stands for something else. The twin is a real module in `sys.modules`, since torch.compile imports by name the
module whose globals a function has; its other names mean what they meant when the file was first patched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from rope_ext.integrations.transformers._recognise import Refusal, lock, recognise

_SUFFIX = "__rope_ext"


class Rewritten(NamedTuple):
    """What is to be called in place of a function: itself where nothing in it is replaced.

    Attributes:
        patched: the rotary functions replaced in it, by name.
        skipped: those that keep their own code, and why.
    """

    call: Callable[..., Any]
    patched: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


_known: dict[FunctionType, Rewritten] = {}
_open: dict[FunctionType, Rewritten] = {}  # being rewritten: what is known of them so far
_met: set[FunctionType] = set()  # those of them that were called by what they call


def rewrite(function: FunctionType) -> Rewritten:
    """``function`` with the rotary functions replaced that it calls, itself or through functions of its own file."""
    with lock:
        if function in _open:
            _met.add(function)
            return _open[function]
        if function in _known:
            return _known[function]
        found = Rewritten(function)
        try:
            while True:
                _open[function] = found
                found = _rewrite(function)
                # in a circle of calls the others were rewritten for what was known of this one: once more, if that grew
                if function not in _met or found.patched == _open[function].patched:
                    break
        finally:
            del _open[function]
            _met.discard(function)
        if not _met:  # or it is only as good as what is known of a function further out
            _known[function] = found
        return found


def plain(value: Any) -> FunctionType | None:
    """The function behind a global: the kernels package, where it is installed, makes some into modules."""
    made: Any = value if isinstance(value, type) else type(value)
    if hasattr(made, "kernel_layer_name"):
        for cell in made.forward.__closure__ or ():
            value = _content(cell)
    return value if isinstance(value, FunctionType) else None


def _rewrite(function: FunctionType) -> Rewritten:
    direct = _directly(function)
    if direct.patched:
        return direct
    patched: dict[str, None] = {}
    skipped: dict[tuple[str, str], None] = {}
    names = {}
    for name in sorted(set(_names(function.__code__))):
        value = function.__globals__.get(name)
        inner = plain(value)
        if inner is None:
            continue
        # a function of another file is replaced, but not looked into
        other = rewrite(inner) if inner.__globals__ is function.__globals__ else _directly(inner)
        patched.update(dict.fromkeys(other.patched))
        skipped.update(dict.fromkeys(other.skipped))
        if other.call is not inner:
            names[name] = other.call
    cells = []
    for cell in function.__closure__ or ():  # a decorated method is in its wrapper's
        inner = plain(_content(cell))
        if inner is not None:
            other = rewrite(inner)
            patched.update(dict.fromkeys(other.patched))
            skipped.update(dict.fromkeys(other.skipped))
            cell = cell if other.call is inner else CellType(other.call)
        cells.append(cell)
    if not patched:  # a function that does more than rotate has its reason, unless what it calls is replaced
        return Rewritten(function, (), direct.skipped or tuple(skipped))
    namespace = _twin(function.__globals__, names) if names else function.__globals__
    return Rewritten(_copy(function, namespace, tuple(cells)), tuple(patched), tuple(skipped))


def _directly(function: FunctionType) -> Rewritten:
    found = recognise(function)
    if isinstance(found, Refusal):
        return Rewritten(function, (), ((function.__name__, found.reason),))
    return Rewritten(found or function, (function.__name__,) if found else ())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _twin(namespace: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The globals of a file with other values for ``names``: one twin a file, however many models use it."""
    name = namespace["__name__"] + _SUFFIX
    twin = sys.modules.get(name)
    if twin is None:
        twin = sys.modules[name] = ModuleType(name)
        twin.__dict__.update(namespace, __name__=name)
    twin.__dict__.update(names)
    return twin.__dict__


def _copy(function: FunctionType, namespace: dict[str, Any], cells: tuple[CellType, ...]) -> FunctionType:
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    vars(copy).pop("__wrapped__")
    vars(copy).update(vars(function))
    return copy
