"""Hugging Face transformers on the operator.

    from rope_ext.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

A model calls the rotary functions of its own modelling file. `patch` gives the modules of this one model a class
derived from theirs, whose methods call the operator instead; no other model and no file of transformers changes. Copies
and pickles of the model are patched too, and `unpatch` gives the modules their own class again. A function is replaced
only where it was seen to compute what the operator computes; calls in a form that was not seen still reach it. Patch
before torch.compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn

from rope_ext.integrations.transformers._derive import ORIGINAL, bases, class_methods, derived, replaced
from rope_ext.integrations.transformers._kernels import kernel_mapping
from rope_ext.integrations.transformers._rebind import rewrite

__all__ = ["kernel_mapping", "patch", "patch_all", "unpatch", "unpatch_all"]

_Module = TypeVar("_Module", bound=nn.Module)
_REPORT = "rope_ext_report"
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

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch needs a model, which is a torch.nn.Module; got {type(model).__name__}")
    patched: list[str] = []
    skipped: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        path = path or type(module).__name__
        names: dict[str, None] = {}
        reasons: dict[tuple[str, str], None] = {}
        for attribute, method in list(_methods(module)):
            other = rewrite(method)
            names.update(dict.fromkeys(other.patched))
            reasons.update(dict.fromkeys(other.skipped))
            if other.patched and attribute in vars(module):  # which comes before the class: a hook's doing
                vars(module)[attribute] = MethodType(replaced(method), module)
        for function, reason in _out_of_reach(module):
            other = rewrite(function)
            reasons.update(dict.fromkeys([*other.skipped, *((name, reason) for name in other.patched)]))
        patched += [f"{path}: {name}" for name in names]
        skipped += [(f"{path}: {name}", reason) for name, reason in reasons if name not in names]
        if (cls := derived(type(module))) is not type(module):
            module.__class__ = cls
    vars(model)[_REPORT] = {"patched": patched, "skipped": skipped}
    if verbose:
        print(_summary(type(model).__name__, patched, skipped), file=sys.stderr)
    return model


def unpatch(model: _Module) -> _Module:
    """Undo `patch`: the model's modules have their own class and methods again. Returns the same model.

    Raises:
        RuntimeError: since `patch` a module was given a class derived from the patched one, as FSDP does.
    """
    for path, module in model.named_modules():
        cls = type(module)
        if hasattr(cls, ORIGINAL) and ORIGINAL not in vars(cls):
            raise RuntimeError(
                f"cannot unpatch {path or 'the model'}: its class, {cls.__name__}, derives from a patched one"
            )
    for module in model.modules():
        module.__class__ = vars(type(module)).get(ORIGINAL, type(module))
        attributes = vars(module)
        attributes.pop(_REPORT, None)
        for attribute, value in attributes.items():  # a hook's, put there before patch or since
            original = getattr(getattr(value, "__func__", None), ORIGINAL, None)
            if original is not None:
                attributes[attribute] = MethodType(original, module)
    return model


def patch_all() -> None:
    """`patch` every transformers model that is built from now on in this process, until `unpatch_all`."""
    model_class = _model_class()
    post_init = model_class.post_init
    if hasattr(post_init, ORIGINAL):
        return

    @functools.wraps(post_init)
    def patched(self: Any) -> None:
        post_init(self)
        _built.add(patch(self, verbose=False))

    setattr(patched, ORIGINAL, post_init)
    model_class.post_init = patched


def unpatch_all() -> None:
    """End `patch_all`, and `unpatch` the models built under it."""
    model_class = _model_class()
    model_class.post_init = getattr(model_class.post_init, ORIGINAL, model_class.post_init)
    for model in list(_built):
        unpatch(model)
    _built.clear()


def _model_class() -> Any:
    from transformers import PreTrainedModel  # a package of its own weight, needed by nothing else here

    return PreTrainedModel


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """The functions that are this module's methods without patch, by the attribute that holds them."""
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module and isinstance(value.__func__, FunctionType):
            yield name, getattr(value.__func__, ORIGINAL, value.__func__)
    for name, functions in class_methods(type(module)).items():
        if name not in vars(module):
            yield name, functions[0]


def _out_of_reach(module: nn.Module) -> Iterator[tuple[FunctionType, str]]:
    """Functions of the module's classes that a derived class cannot replace, and why."""
    for first, *others in class_methods(type(module)).values():
        if "super" in first.__code__.co_names:
            for function in others:
                yield function, "it is reached through super()"
    for base in bases(type(module)):
        for value in vars(base).values():
            if isinstance(value, staticmethod) and isinstance(value.__func__, FunctionType):
                yield value.__func__, "it is called in a static method"


def _summary(model: str, patched: list[str], skipped: list[tuple[str, str]]) -> str:
    if not patched and not skipped:
        return f"rope_ext: no rotary function found in {model}: nothing changed"
    lines = [f"rope_ext: {len(patched)} rotary functions now call the operator, {len(skipped)} do not"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, reason in skipped:
        path, function = name.rsplit(": ", 1)
        reasons.setdefault((function, reason), []).append(path)
    lines += [f"  {function} in {', '.join(paths)}: {reason}" for (function, reason), paths in reasons.items()]
    return "\n".join(lines)
