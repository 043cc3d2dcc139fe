"""What ``patch`` does to one tiny model of an architecture: the comparisons of ``architectures.py``."""

from __future__ import annotations

import gc
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tiny_inputs import Inputs, candidates, ids
from benchmarks.tiny_models import MODELS, build, tiny, towers
from rope_ext.integrations.transformers import patch, unpatch
from rope_ext.integrations.transformers._rebind import rewrite

TOLERANCE = 1e-5  # of the largest output, float32
VISIBLE = 1e-3  # by this much, at least, the outputs change where nothing is rotated
ROTARY = re.compile(r"rotate_half|rotate_every_two|rotate_queries|apply_\w*(rotary|rope)")


class Tower(NamedTuple):
    """One model and what became of it.

    ``outcome`` is "equal" or "close" (patched, with these outputs), "kept" (it has rotary functions that ``patch``
    leaves, and says why), "failed", "not rotary" (it called no such function) or "not run".
    """

    name: str
    outcome: str
    reason: str = ""
    difference: float = 0.0
    bf16: float = math.nan  # error of the patched model over that of the original, to the float32 outputs
    generated: bool = False  # text from a left-padded batch too, with a cache


class Rotations(TorchDispatchMode):
    """Counts calls of the operator and notes the code they come from; ``skip`` leaves their tensors as they are."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.skip, self.count = skip, 0
        self.callers: set[CodeType] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "rope":
            return func(*args, **(kwargs or {}))
        self.count += 1
        frame: FrameType | None = sys._getframe()
        while frame:
            self.callers.add(frame.f_code)
            frame = frame.f_back
        if not self.skip:
            return func(*args, **(kwargs or {}))
        return tuple(x.clone() for x in args[:2]) if "apply" in func._opname else args[0].clone()


class Call(NamedTuple):
    function: FunctionType
    arguments: dict[str, Any]
    result: Any


@contextmanager
def tracing() -> Iterator[tuple[set[CodeType], list[Call]]]:
    """The code of transformers' own rotary functions that runs, and the first calls."""
    codes: set[CodeType] = set()
    calls: list[Call] = []
    entered: dict[FrameType, dict[str, Any]] = {}

    def event(frame: FrameType, kind: str, value: Any) -> None:
        code = frame.f_code
        if not (ROTARY.search(code.co_name) and code.co_filename.startswith(str(MODELS))):
            return
        function = frame.f_globals.get(code.co_name)
        if kind == "call":
            codes.add(code)
            if getattr(function, "__code__", None) is code and len(calls) + len(entered) < 8:
                entered[frame] = {n: converted(v, clone=True) for n, v in frame.f_locals.items()}
        elif kind == "return" and frame in entered:
            calls.append(Call(function, entered.pop(frame), converted(value, clone=True)))

    sys.setprofile(event)
    try:
        yield codes, calls
    finally:
        sys.setprofile(None)


def converted(value: Any, dtype: torch.dtype | None = None, clone: bool = False) -> Any:
    """Tensors, also within lists and dicts, cloned or with their floating point numbers in another precision."""
    if isinstance(value, Tensor):
        if clone:
            return value.clone()
        if value.is_complex() and dtype == torch.float64:
            return value.to(torch.complex128)
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: converted(v, dtype, clone) for k, v in value.items()}
    return type(value)(converted(v, dtype, clone) for v in value) if type(value) in (list, tuple) else value


def tensors(value: Any) -> list[Tensor]:
    """Those of floating point in an output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in values for t in tensors(v)]


def forward(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.clone() for t in tensors(model(**inputs))]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest over the tensors of max |a - b| / max |b|; infinite where shapes or non-finite numbers differ."""
    worst = 0.0 if len(ours) == len(theirs) else math.inf
    for a, b in zip(ours, theirs, strict=False):
        finite = b.isfinite()
        if a.shape != b.shape or not torch.equal(finite, a.isfinite()):
            return math.inf
        a, b = a[finite].double(), b[finite].double()
        if b.numel():
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Root of the mean square difference, each tensor over its own scale."""
    means = [
        (a.double() - b.double()).pow(2).mean() / b.double().pow(2).mean() for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(means).mean().sqrt())


def generated(model: nn.Module) -> list[Tensor]:
    """Tokens and logits of a greedy continuation of two prompts, the second padded on the left; [] if it cannot."""
    if not type(model).__name__.endswith("ForCausalLM") or not model.can_generate():
        return []
    prompt = ids(model.config, 2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    torch.manual_seed(0)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return [out.sequences.float(), *out.logits]


def compared(calls: list[Call]) -> tuple[int, list[str]]:
    """How many calls have a replacement, and where it is further off than the model's function, by the float64 formula.

    Number by number: where the model's own is nearer than float32 arithmetic allows to tell apart, ours must be too.
    """
    count, problems = 0, []
    for function, arguments, theirs in calls:
        replacement = rewrite(function).call
        if replacement is function:
            continue
        count += 1
        exact = tensors(function(**converted(arguments, torch.float64)))
        for e, t, o in zip(exact, tensors(theirs), tensors(replacement(**arguments)), strict=True):
            slack = 2.0**-20 * e.abs() + 2.0**-22 * e.abs().max()
            worse = (o.double() - e).abs() > (t.double() - e).abs() + slack
            if o.dtype != t.dtype or worse.any():
                problems.append(
                    f"{t.dtype}: {int(worse.sum())} of {worse.numel()} numbers of {function.__name__} worse"
                )
    return count, problems


def runnable(model: nn.Module) -> tuple[Inputs, list[Tensor], set[CodeType], list[Call]]:
    """Inputs that the model takes, its outputs, the rotary functions that it called and some calls of them."""
    error: Exception | None = None
    for inputs in candidates(model):
        try:
            with tracing() as (codes, calls):
                return inputs, forward(model, inputs), codes, calls
        except Exception as e:  # of the layout of its inputs, which nothing but the model knows
            error = error or e
    assert error is not None
    raise error


def check(model: nn.Module, inputs: Inputs, before: list[Tensor], calls: list[Call]) -> Tower:
    """What ``patch`` does to this model, and that ``unpatch`` undoes it."""
    name = type(model).__name__
    problems: list[str] = []
    try:
        before_text = generated(model)
    except Exception:  # a model may have a need of its own here; the summary counts those that can
        before_text = []

    patch(model, verbose=False)
    report = model.rope_ext_report
    with Rotations() as rotations, tracing() as (still, _):
        after = forward(model, inputs)
    apart = difference(after, before)
    left = {code.co_name for code in still - rotations.callers}
    declined = sorted({f"{path.rsplit(': ', 1)[-1]}: {reason}" for path, reason in report["skipped"]} if left else ())
    for function in sorted(left & {path.rsplit(": ", 1)[-1] for path in report["patched"]}):
        declined.append(f"{function}: calls of it in another form keep its own code")
    if left and not declined:
        problems.append(f"still called, and not reported: {', '.join(sorted(left))}")
    if not left and not (rotations.count and report["patched"]):
        problems.append(f"{rotations.count} calls of the operator, of {len(report['patched'])} functions patched")
    if apart > TOLERANCE:
        problems.append(f"outputs differ by {apart:.1e}")
    with Rotations(skip=True):
        seen = difference(forward(model, inputs), before)
    told, worse = compared(calls)
    problems += worse
    note = ""
    if rotations.count and seen < VISIBLE:
        note = f"a missing rotation changes the outputs by {seen:.1e} only"
        if not told:  # nothing here would have shown a wrong one
            problems.append(note)
    if before_text and (far := difference(generated(model), before_text)) > TOLERANCE:
        problems.append(f"generated logits differ by {far:.1e}")
    unpatch(model)
    again = forward(model, inputs)
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, before, strict=True)):
        problems.append(f"outputs after unpatch differ by {difference(again, before):.1e}")

    ratio = math.nan
    try:
        model.bfloat16()
        low = converted(inputs, torch.bfloat16)
        with tracing() as (_, calls):
            theirs = distance(forward(model, low), before)
        problems += compared(calls)[1]
        if theirs > 0:
            ratio = distance(forward(patch(model, verbose=False), low), before) / theirs
    except RuntimeError:  # a module of it, or an input, does not go with bfloat16
        note = note or "not in bfloat16"
    outcome = "failed" if problems else "kept" if declined else "equal" if apart == 0 else "close"
    return Tower(name, outcome, "; ".join([*problems, *declined] or [note]), apart, ratio, bool(before_text))


def run(architecture: str) -> Iterator[Tower]:
    """Each model of an architecture; the composite only if none of its towers rotates."""
    rotary = False
    for model_class, config_class in towers(architecture):
        if rotary and config_class.sub_configs:
            continue
        try:
            model = build(model_class, tiny(config_class()))
            inputs, before, codes, calls = runnable(model)
        except Exception as e:  # whatever transformers raises is the reason
            yield Tower(model_class.__name__, "not run", f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")
            continue
        if not codes:
            yield Tower(model_class.__name__, "not rotary")
            continue
        rotary = True
        try:
            yield check(model, inputs, before, calls)
        except Exception as e:
            yield Tower(model_class.__name__, "failed", f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")
        del model, calls
        gc.collect()
