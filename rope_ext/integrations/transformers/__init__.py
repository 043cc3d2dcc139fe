"""Hugging Face transformers on the operator.

    from rope_ext.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

A model calls the rotary functions of its own modelling file. `patch` gives the modules of this one model methods of
their own that call the operator instead; no other model and no file of transformers changes, and `unpatch` takes them
away again. A function is replaced only where it was seen to compute what the operator computes; calls in a form that
was not seen still reach it. Patch before torch.compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from rope_ext.integrations.transformers._kernels import kernel_mapping
from rope_ext.integrations.transformers._rebind import plain, rewrite

__all__ = ["kernel_mapping", "patch", "patch_all", "unpatch", "unpatch_all"]

_Module = TypeVar("_Module", bound=nn.Module)
_REPORT = "rope_ext_report"
_BEFORE = "_rope_ext_before"  # in a patched module: the attributes that it held under the names of the new ones
_methods_of: WeakKeyDictionary[type[nn.Module], dict[str, list[FunctionType]]] = WeakKeyDictionary()
_built: WeakSet[nn.Module] = WeakSet()


def patch(model: _Module, *, verbose: bool = True) -> _Module:
    """Make a model, or one module of it, rotate with the operator.

    Args:
        model: a transformers model or any module written like one: its methods call a rotary function by name. On any
            device and of any dtype; functions are tried on the CPU with numbers of their own.
        verbose: print what was done, in a line or two on stderr.

    Returns:
        The same model. ``model.rope_ext_report`` is ``{"patched": [name], "skipped": [(name, reason)]}``, a name being
        ``"path of the module: function"``.
    """
    patched: list[str] = []
    skipped: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        path = path or type(module).__name__
        names: dict[str, None] = {}
        reasons: dict[tuple[str, str], None] = {}
        for attribute, method in list(_methods(module)):
            other = rewrite(getattr(method, "__rope_ext_original__", method))
            names.update(dict.fromkeys(other.patched))
            reasons.update(dict.fromkeys(other.skipped))
            if other.patched and not hasattr(method, "__rope_ext_original__"):
                other.call.__rope_ext_original__ = method  # type: ignore[attr-defined]
                if attribute in vars(module):
                    vars(module).setdefault(_BEFORE, {})[attribute] = vars(module)[attribute]
                vars(module)[attribute] = MethodType(other.call, module)
        for function, reason in _out_of_reach(module):
            other = rewrite(function)
            reasons.update(dict.fromkeys([*other.skipped, *((name, reason) for name in other.patched)]))
        patched += [f"{path}: {name}" for name in names]
        skipped += [(f"{path}: {name}", reason) for name, reason in reasons if name not in names]
    vars(model)[_REPORT] = {"patched": patched, "skipped": skipped}
    if verbose:
        print(_summary(patched, skipped), file=sys.stderr)
    return model


def unpatch(model: _Module) -> _Module:
    """Undo `patch`: the model's modules hold the very attributes that they held before. Returns the same model."""
    for module in model.modules():
        attributes = vars(module)
        before = attributes.pop(_BEFORE, {})
        attributes.pop(_REPORT, None)
        for attribute, value in list(attributes.items()):
            original = getattr(getattr(value, "__func__", None), "__rope_ext_original__", None)
            if original is None:
                continue
            if attribute in before:
                attributes[attribute] = before[attribute]
            elif getattr(type(module), attribute, None) is original:
                del attributes[attribute]
            else:  # under another name, where a hook has put it since
                attributes[attribute] = MethodType(original, module)
    return model


def patch_all() -> None:
    """`patch` every transformers model that is built from now on in this process, until `unpatch_all`."""
    model_class = _model_class()
    post_init = model_class.post_init
    if hasattr(post_init, "__rope_ext_original__"):
        return

    @functools.wraps(post_init)
    def patched(self: Any) -> None:
        post_init(self)
        _built.add(patch(self, verbose=False))

    patched.__rope_ext_original__ = post_init  # type: ignore[attr-defined]
    model_class.post_init = patched


def unpatch_all() -> None:
    """End `patch_all`, and `unpatch` the models built under it."""
    model_class = _model_class()
    model_class.post_init = getattr(model_class.post_init, "__rope_ext_original__", model_class.post_init)
    for model in list(_built):
        unpatch(model)
    _built.clear()


def _model_class() -> Any:
    from transformers import PreTrainedModel  # a package of its own weight, needed by nothing else here

    return PreTrainedModel


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """The functions that are this module's methods, by the attribute that holds them."""
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module and isinstance(value.__func__, FunctionType):
            yield name, value.__func__
    for name, functions in _class_methods(type(module)).items():
        if name not in vars(module):
            yield name, functions[0]


def _out_of_reach(module: nn.Module) -> Iterator[tuple[FunctionType, str]]:
    """Functions of the module's classes that an attribute of the module cannot replace, and why."""
    for first, *others in _class_methods(type(module)).values():
        if "super" in first.__code__.co_names:
            for function in others:
                yield function, "it is reached through super()"
    for base in _bases(type(module)):
        for value in vars(base).values():
            if isinstance(value, staticmethod) and isinstance(value.__func__, FunctionType):
                yield value.__func__, "it is called in a static method"


def _bases(cls: type[nn.Module]) -> tuple[type, ...]:
    return cls.__mro__[: cls.__mro__.index(nn.Module)]


def _class_methods(cls: type[nn.Module]) -> dict[str, list[FunctionType]]:
    """By name, the functions of a class and of its bases up to nn.Module, the one that is called first."""
    if cls not in _methods_of:
        methods: dict[str, list[FunctionType]] = {}
        for base in _bases(cls):
            for name, value in vars(base).items():
                if (function := plain(value)) is not None:
                    methods.setdefault(name, []).append(function)
        _methods_of[cls] = methods
    return _methods_of[cls]


def _summary(patched: list[str], skipped: list[tuple[str, str]]) -> str:
    lines = [f"rope_ext: {len(patched)} rotary functions now call the operator, {len(skipped)} do not"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, reason in skipped:
        path, function = name.rsplit(": ", 1)
        reasons.setdefault((function, reason), []).append(path)
    lines += [f"  {function} in {', '.join(paths)}: {reason}" for (function, reason), paths in reasons.items()]
    return "\n".join(lines)
