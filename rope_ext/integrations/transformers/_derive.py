"""The class of a patched module: derived from the module's own, with other methods in it.

Methods kept in a module's own attributes would be bound to that module: a shallow copy, and so every replica that
`nn.DataParallel` makes, would run the module it was copied from. A class is shared by copies, and its name, file and
place among the classes are those of the class it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rope_ext.integrations.transformers._rebind import plain, rewrite
from rope_ext.integrations.transformers._recognise import lock

# holds what a patched class or function stands for
ORIGINAL = "__rope_ext_original__"
_methods_of: WeakKeyDictionary[type[nn.Module], dict[str, list[FunctionType]]] = WeakKeyDictionary()
_derived: dict[type[nn.Module], type[nn.Module]] = {}


def derived(cls: type[nn.Module]) -> type[nn.Module]:
    """The class for patched modules of ``cls``: one for all of them, or ``cls`` where nothing in it is replaced."""
    if hasattr(cls, ORIGINAL):  # it is one, or something has derived a class from one, as FSDP does
        return cls
    with lock:
        if cls not in _derived:
            _derived[cls] = _derive(cls)
        return _derived[cls]


def replaced(function: FunctionType) -> Callable[..., Any]:
    """What `rewrite` made of a method, remembering the method."""
    call = rewrite(function).call
    if call is not function:
        setattr(call, ORIGINAL, function)
    return call


def bases(cls: type[nn.Module]) -> list[type]:
    """A class and its bases up to nn.Module, as they are without patch."""
    return [base for base in cls.__mro__[: cls.__mro__.index(nn.Module)] if ORIGINAL not in vars(base)]


def class_methods(cls: type[nn.Module]) -> dict[str, list[FunctionType]]:
    """By name, the functions of a class and of its bases up to nn.Module, the one that is called first."""
    if cls not in _methods_of:
        methods: dict[str, list[FunctionType]] = {}
        for base in bases(cls):
            for name, value in vars(base).items():
                if (function := plain(value)) is not None:
                    methods.setdefault(name, []).append(function)
        _methods_of[cls] = methods
    return _methods_of[cls]


def _derive(cls: type[nn.Module]) -> type[nn.Module]:
    methods = {name: replaced(first) for name, (first, *_) in class_methods(cls).items() if rewrite(first).patched}
    if not methods:
        return cls

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        """Copied and pickled as a module of ``cls`` that is patched when it is there again."""
        reduced: Any = cls.__reduce_ex__(self, protocol)
        make, args, *state = reduced
        return _revive, (make, *(cls if argument is patched else argument for argument in args)), *state

    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace = {**methods, **same, "__reduce_ex__": __reduce_ex__, ORIGINAL: cls}
    metaclass: Any = type(cls)
    patched: type[nn.Module] = metaclass(cls.__name__, (cls,), namespace)
    return patched


def _revive(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Pickles hold the name of this function: it stays where it is."""
    module = make(*args)
    module.__class__ = derived(type(module))
    return module
