"""Every scaling method: its formula, its source and ten lines, in one registry by ``rope_type``.

A method gets the checked hyperparameters, the dtype to compute in and the length of the sequence, and returns the
frequencies ``(dim/2,)`` of that dtype on the CPU and the magnitude ``m``: row ``p`` of the table is
``m * exp(i * p * w)``.

Notation: d = dim, pairs i = 0 .. d/2-1, w_i = theta^(-2i/d), s = factor, L0 = original_max_position_embeddings,
L = length of the sequence.

The order of the operations is transformers' (``modeling_rope_utils.py``), so that in float32 every frequency has the
bits that a published checkpoint was run with; the same lines in float64 are the exact recipe. Where implementations
disagree, transformers is followed and the method says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rope_ext.tables.params import RopeParams

Method = Callable[[RopeParams, torch.dtype, "int | None"], "tuple[Tensor, float]"]
METHODS: dict[str, Method] = {}


def method(rope_type: str) -> Callable[[Method], Method]:
    """Register a function under the ``rope_type`` that checkpoints name it by."""

    def register(function: Method) -> Method:
        METHODS[rope_type] = function
        return function

    return register


def frequencies(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """Frequencies and magnitude by the method that ``p`` names; never a NaN or an infinity."""
    if p.rope_type not in METHODS:
        hint = "two position axes: see rope_ext.tables.axial_2d" if p.rope_type == "axial" else "unknown"
        raise ValueError(f"scaling['rope_type'] = {p.rope_type!r} is {hint}, not one of {', '.join(sorted(METHODS))}")
    inv_freq, magnitude = METHODS[p.rope_type](p, dtype, seq_len)
    if not (all_finite(inv_freq) and math.isfinite(magnitude) and magnitude > 0):
        raise ValueError(f"theta = {p.theta!r} and the values of rope_type {p.rope_type!r} leave the range of {dtype}")
    return inv_freq, magnitude


def all_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN; of a fake tensor, which has no values, True."""
    return type(values) is not Tensor or bool(values.isfinite().all())


def powers(theta: float | Tensor, dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """theta^(2i/d), the periods over 2 pi; a tensor ``theta`` (..., 1) gives (..., d/2)."""
    return theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


@method("default")
def default(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i. Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2."""
    return 1.0 / powers(p.theta, p.dim, dtype), 1.0


@method("linear")
def linear(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i / s: positions squeezed by s. Source: position interpolation, https://arxiv.org/abs/2306.15595."""
    return 1.0 / powers(p.theta, p.dim, dtype) / p.number("factor"), 1.0


@method("ntk_alpha")
def ntk_alpha(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i of theta' = theta alpha^(d/(d-2)) at any length. Source: Hunyuan, ``{"type": "dynamic", "alpha": ...}``."""
    return 1.0 / powers(p.theta * p.number("alpha") ** ntk_exponent(p.dim), p.dim, dtype), 1.0


@method("dynamic")
def dynamic(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i of theta' = theta (s L/L0 - (s - 1))^(d/(d-2)), L at least L0 = max_position_embeddings.

    Stretches the slowest pair by s L/L0 - (s - 1) and leaves the fastest alone. Source: "dynamic NTK",
    https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr. transformers computes theta' from a float32 tensor once L
    passes L0 and from Python floats before, and a model rotates with those bits: so does this.
    """
    s, original = p.number("factor"), p.original_length(first="max_position_embeddings")
    if seq_len is not None and seq_len > original:
        theta = dynamic_theta(p.theta, s, original, p.dim, torch.tensor(seq_len, device="cpu"), dtype)
        return 1.0 / powers(theta, p.dim, dtype), 1.0
    return 1.0 / powers(p.theta * (s * original / original - (s - 1)) ** ntk_exponent(p.dim), p.dim, dtype), 1.0


def ntk_exponent(dim: int) -> float:
    """d/(d-2), which makes the slowest pair turn slower by the whole ratio."""
    if dim == 2:
        raise ValueError("dim = 2: the exponent dim/(dim - 2) of NTK scaling divides by zero")
    return dim / (dim - 2)


def dynamic_theta(
    theta: float, factor: float, original: float, dim: int, seq_len: Tensor, dtype: torch.dtype
) -> Tensor:
    """theta' for each length from L0 up in ``seq_len``, on its device.

    The power is taken in float64 and rounded, as ATen does for the single length that transformers passes; its vector
    loop would take it in float32, and a sequence's theta' would depend on how many others stand beside it.
    """
    ratio = factor * seq_len.to(dtype) / original - (factor - 1)
    return theta * (ratio.double() ** ntk_exponent(dim)).to(dtype)


@method("yarn")
def yarn(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i for pairs that turn often within L0, w_i / s for those that never do, a ramp between; magnitude m.

    corr(n) = d ln(L0/(2 pi n)) / (2 ln theta) is the pair that turns n times. low = corr(beta_fast = 32) and
    high = corr(beta_slow = 1), rounded outwards unless ``truncate`` is false; ramp_i = clamp((i - low)/(high - low));
    w' = (w/s) ramp + w (1 - ramp). Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.

    As in transformers, ``beta_fast`` or ``beta_slow`` of 0 counts as absent, and a missing factor is
    max_position_embeddings / L0. ``truncate`` is read wherever it stands; some engines ignore it.
    """
    original = p.original_length()
    s = p.number("factor", p.optional("max_position_embeddings") and p.number("max_position_embeddings") / original)
    fast, slow = (p.number(key) if p.get(key) else value for key, value in (("beta_fast", 32), ("beta_slow", 1)))
    if fast < slow:
        raise ValueError(f"scaling['beta_fast'] = {fast!r} must not be below scaling['beta_slow'] = {slow!r}")
    if p.theta <= 1:
        raise ValueError(f"theta = {p.theta!r}: rope_type 'yarn' divides by ln(theta), so theta must be above 1")

    low, high = (p.dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(p.theta)) for n in (fast, slow))
    if p.get("truncate") is None or p.get("truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(p.dim // 2, dtype=dtype, device="cpu") - low) / (high - low)).clamp(0, 1)

    keep = 1 - ramp
    periods = powers(p.theta, p.dim, dtype)
    return 1.0 / (s * periods) * (1 - keep) + 1.0 / periods * keep, yarn_magnitude(p, s)


def yarn_magnitude(p: RopeParams, s: float) -> float:
    """``attention_factor`` if given, else M(s, mscale) / M(s, mscale_all_dim) if both are truthy, else M(s, 1).

    ``mscale_all_dim = 0`` counts as absent, as in transformers and vLLM; SGLang and DeepSeek's own code divide
    by M = 1 then.
    """
    if (given := p.optional("attention_factor")) is not None:
        return float(given)
    if p.get("mscale") and p.get("mscale_all_dim"):
        return float(yarn_mscale(s, p.number("mscale")) / yarn_mscale(s, p.number("mscale_all_dim")))
    return yarn_mscale(s)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """M(s, a) = 0.1 a ln s + 1, or 1 if s <= 1. Source: YaRN, section 3.4.

    DeepSeek's models keep m = 1 in the table (mscale = mscale_all_dim) and multiply the softmax scale by
    ``yarn_mscale(factor, mscale_all_dim) ** 2`` instead: that part is the attention's, not the rotation's.
    """
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


@method("llama3")
def llama3(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """By wavelength lam = 2 pi / w: w below L0/high, w/s above L0/low, between them (1-u) w/s + u w.

    u = (L0/lam - low)/(high - low). high = low leaves no band between: a step. Source: Llama 3.1,
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, ``apply_scaling``.
    """
    original, s = p.original_length(), p.number("factor")
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if high < low:
        raise ValueError(f"scaling['high_freq_factor'] = {high!r} is below scaling['low_freq_factor'] = {low!r}")

    w = 1.0 / powers(p.theta, p.dim, dtype)
    wavelength = 2 * math.pi / w
    stepped = torch.where(wavelength > original / low, w / s, w)
    if high == low:
        return stepped, 1.0
    u = (original / wavelength - low) / (high - low)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, (1 - u) * w / s + u * w, stepped), 1.0


@method("longrope")
def longrope(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """w_i / e_i, e = long_factor if L > L0 else short_factor; m = sqrt(1 + ln S / ln L0) unless attention_factor.

    S = factor, else max_position_embeddings / L0; m = 1 if S <= 1. Source: LongRoPE,
    https://arxiv.org/abs/2402.13753, as Phi-3 uses it. Without a length (``seq_len`` None) the short list.
    """
    original = p.original_length()
    short, long = p.numbers("short_factor"), p.numbers("long_factor")
    extend = torch.tensor(long if (seq_len or 0) > original else short, dtype=dtype, device="cpu")
    return 1.0 / (extend * powers(p.theta, p.dim, dtype)), longrope_magnitude(p, original)


def longrope_magnitude(p: RopeParams, original: float) -> float:
    """``attention_factor`` if given, else from S and L0; the same for the short and the long list."""
    if (given := p.optional("attention_factor")) is not None:
        return float(given)
    if own := [key for key in ("short_mscale", "long_mscale") if p.get(key) is not None]:
        raise ValueError(
            f"scaling[{own[0]!r}]: PhiMoE multiplies by these instead of longrope's magnitude; pass the one of the "
            "length meant as attention_factor, and neither of them"
        )
    s = p.optional("factor") or p.number("max_position_embeddings", original) / original
    if s <= 1:
        return 1.0
    if original <= 1:
        raise ValueError(f"scaling['original_max_position_embeddings'] = {original!r}: 'longrope' divides by its log")
    return math.sqrt(1 + math.log(s) / math.log(original))


@method("proportional")
def proportional(p: RopeParams, dtype: torch.dtype, seq_len: int | None) -> tuple[Tensor, float]:
    """The first r = int(partial_rotary_factor D // 2) pairs turn at theta^(-2i/D) / s, the rest stand still.

    D = dim is the head dim: pairs span the whole head, unlike partial rotation. Source: Gemma 4 in transformers.
    """
    partial = p.get("partial_rotary_factor")
    partial = 1.0 if partial is None else partial
    if isinstance(partial, bool) or not isinstance(partial, (int, float)) or not 0 <= partial <= 1:
        raise ValueError(f"scaling['partial_rotary_factor'] must be between 0 and 1, got {partial!r}")
    w = 1.0 / powers(p.theta, p.dim, dtype)
    w[int(partial * p.dim // 2) :] = 0
    return w / p.number("factor", 1.0), 1.0
