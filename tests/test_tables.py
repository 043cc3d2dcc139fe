"""Tables of one position axis: the bits of Meta and transformers, the exact recipe, golden values, refusals."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rope_ext import reference
from rope_ext.tables import attention_factor, from_config, inv_freq, precompute_freqs_cis, yarn_mscale
from scalings import LENGTH, ORIGINAL, scalings


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers", reason="parity needs the transformers package, a test dependency")
    module.logging.set_verbosity_error()  # it warns of half of the odd dicts here
    return module


def config_of(transformers: Any, dim: int, theta: float, scaling: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=LENGTH,
        rope_parameters={**scaling, "rope_theta": theta},
    )


def transformers_table(transformers: Any, config: Any, rows: int) -> torch.Tensor:
    """What a Llama with this config rotates a sequence of ``rows`` tokens by."""
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(rows)[None])
    pairs = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :pairs], sin[0, :, :pairs])


# The plain table


@pytest.mark.parametrize(
    ("dim", "end", "theta"),
    [(128, 2048, 1e4), (64, 4096, 5e5), (2, 8, 1e4), (80, 33, 1e6), (96, 1, 1e4), (6, 0, 1e4), (10, 5, 1.0)],
)
def test_plain_has_metas_bits(dim: int, end: int, theta: float) -> None:
    table = precompute_freqs_cis(dim, end, theta)
    assert table.dtype == torch.complex64
    assert torch.equal(table, reference.precompute_freqs_cis(dim, end, theta))


def test_theta_defaults_to_10000_unless_the_dict_says() -> None:
    assert torch.equal(precompute_freqs_cis(8, 5), precompute_freqs_cis(8, 5, 10000.0))
    inside = precompute_freqs_cis(8, 5, scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert torch.equal(inside, precompute_freqs_cis(8, 5, 5e5, scaling={"rope_type": "linear", "factor": 2.0}))


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}]
)
@pytest.mark.parametrize("exact", [False, True])
def test_rows_do_not_depend_on_the_number_of_rows(scaling: dict[str, Any] | None, exact: bool) -> None:
    whole = precompute_freqs_cis(80, 5000, scaling=scaling, exact=exact)
    for rows in (1, 7, 256, 4999):
        assert torch.equal(precompute_freqs_cis(80, rows, scaling=scaling, exact=exact), whole[:rows])


# Scaled tables


@pytest.mark.parametrize("name", scalings(8))
@pytest.mark.parametrize(("dim", "theta"), [(128, 1e4), (64, 5e5), (80, 1e6), (24, 1e4), (4, 1e4)])
def test_scaled_tables_have_transformers_bits(transformers: Any, name: str, dim: int, theta: float) -> None:
    scaling = scalings(dim)[name]
    config = config_of(transformers, dim, theta, scaling)
    for rows in (3, ORIGINAL, ORIGINAL + 1, LENGTH, LENGTH + 1, 2222):
        expected = transformers_table(transformers, config, rows)
        table = precompute_freqs_cis(dim, rows, theta, scaling={**scaling, "max_position_embeddings": LENGTH})
        assert torch.equal(table, expected), f"{rows} rows"
        assert torch.equal(from_config(config, rows), expected), f"{rows} rows, from_config"


def test_hunyuan_alpha_has_transformers_bits(transformers: Any) -> None:
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    scaling = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    config = transformers.HunYuanDenseV1Config(head_dim=128, rope_parameters={**scaling, "rope_theta": 1e4})
    cos, sin = HunYuanDenseV1RotaryEmbedding(config)(torch.zeros(1), torch.arange(999)[None])
    assert torch.equal(precompute_freqs_cis(128, 999, scaling=scaling), torch.complex(cos[0, :, :64], sin[0, :, :64]))
    assert torch.equal(
        inv_freq(128, scaling={"rope_type": "ntk_alpha", "alpha": 1000.0}), inv_freq(128, scaling=scaling)
    )


def test_a_dict_takes_the_scaled_road_even_where_it_scales_nothing() -> None:
    """cos and polar differ in a few last bits: a short prompt must not differ from a long one in the road it takes."""
    plain, scaled = precompute_freqs_cis(128, 2048), precompute_freqs_cis(128, 2048, scaling={"rope_type": "default"})
    assert not torch.equal(plain, scaled)
    assert (plain - scaled).abs().max() <= 2**-23


def test_seq_len_decides_and_end_does_where_it_is_not_given() -> None:
    scaling = scalings(16)["longrope"] | {"max_position_embeddings": LENGTH}
    long = precompute_freqs_cis(16, 300, scaling=scaling)
    assert torch.equal(precompute_freqs_cis(16, 10, scaling=scaling, seq_len=300), long[:10])
    assert not torch.equal(precompute_freqs_cis(16, 10, scaling=scaling), long[:10])
    assert torch.equal(inv_freq(16, scaling=scaling), inv_freq(16, scaling=scaling, seq_len=ORIGINAL))


def test_dynamic_prefers_max_position_embeddings_and_the_others_the_original_length() -> None:
    both = {"factor": 2.0, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    for rope_type, length in (("dynamic", 64), ("yarn", 16)):
        one = {"rope_type": rope_type, "factor": 2.0, "original_max_position_embeddings": length}
        assert torch.equal(
            inv_freq(16, scaling={"rope_type": rope_type, **both}, seq_len=99), inv_freq(16, scaling=one, seq_len=99)
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "linear", "rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, {"rope_type": "default"}),
        ({"type": "mrope", "rope_type": "default"}, {"rope_type": "default"}),
        ({}, {"rope_type": "default"}),
        ({"type": "su"} | scalings(8)["longrope"] | {"rope_type": None}, scalings(8)["longrope"]),
        (scalings(8)["longrope"] | {"rope_type": "yarn"}, scalings(8)["longrope"]),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": None}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_old_keys_and_names_mean_the_new_ones(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert torch.equal(precompute_freqs_cis(8, 300, scaling=old), precompute_freqs_cis(8, 300, scaling=new))


# Golden values, float64

GOLDEN: list[tuple[int, dict[str, Any], float, list[float]]] = [
    # dim, dict, magnitude, frequencies at 0, d/8, d/4, d/2 - 1
    (
        128,
        {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        1.138629436,
        [1, 3.162277660e-2, 6.029411765e-4, 3.102344402e-7],
    ),
    (
        64,
        {"rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        1.346573590,
        [1, 5.081327482e-2, 4.564839192e-4, 3.023511428e-7],
    ),
    (
        128,
        {"rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4096},
        1.277258872,
        [1, 1e-1, 5.673076923e-3, 7.217387404e-6],
    ),
]


@pytest.mark.parametrize(("dim", "scaling", "magnitude", "expected"), GOLDEN, ids=["qwen", "gpt-oss", "llama-2"])
def test_golden_yarn(dim: int, scaling: dict[str, Any], magnitude: float, expected: list[float]) -> None:
    scaling = {"rope_type": "yarn", **scaling}
    w = inv_freq(dim, scaling=scaling, exact=True)
    assert w.dtype == torch.float64
    assert [w[i].item() for i in (0, dim // 8, dim // 4, dim // 2 - 1)] == pytest.approx(expected, rel=1e-9)
    assert attention_factor(dim, scaling=scaling) == pytest.approx(magnitude, rel=1e-9)


@pytest.mark.parametrize(("case", "low", "high"), [(GOLDEN[0], 23, 40), (GOLDEN[2], 20, 46)], ids=["qwen", "llama-2"])
def test_golden_yarn_bounds(case: tuple[int, dict[str, Any], float, list[float]], low: int, high: int) -> None:
    dim, scaling, _, _ = case
    kept = inv_freq(dim, scaling["rope_theta"], exact=True)
    ratio = kept / inv_freq(dim, scaling={"rope_type": "yarn", **scaling}, exact=True)
    assert torch.allclose(ratio[: low + 1], torch.ones(low + 1, dtype=torch.float64), rtol=1e-12)
    assert ratio[low + 1] > 1 and ratio[high - 1] < scaling["factor"]
    assert torch.allclose(ratio[high:], torch.full((dim // 2 - high,), scaling["factor"], dtype=torch.float64))


def test_golden_llama3() -> None:
    original = {"original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
    w = inv_freq(128, 5e5, scaling=scaling, exact=True)
    golden = [2.166570764e-3, 5.248461610e-4, 3.068925989e-7]
    assert [w[i].item() for i in (29, 32, 63)] == pytest.approx(golden, rel=1e-9)
    plain = inv_freq(128, 5e5, exact=True)
    assert torch.equal(w[:29], plain[:29]) and torch.equal(w[35:], plain[35:] / 8)
    assert all(plain[i] / 8 < w[i] < plain[i] for i in range(29, 35))


def test_golden_longrope_and_dynamic() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096, **lists}
    assert attention_factor(8, scaling=longrope) == pytest.approx(1.190238071, rel=1e-9)

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4096}
    w = inv_freq(128, 1e4, scaling=dynamic, seq_len=8192, exact=True)
    assert w[1].item() ** -64 == pytest.approx(30527.7367, rel=1e-8)  # theta'


def test_deepseek_keeps_the_table_at_length_1_and_scales_the_softmax() -> None:
    scaling = scalings(64)["yarn-deepseek"]
    assert attention_factor(64, scaling=scaling) == 1.0
    assert yarn_mscale(40, 1.0) ** 2 == pytest.approx((0.1 * math.log(40) + 1) ** 2, rel=1e-15)
    assert yarn_mscale(1.0) == yarn_mscale(0.25) == 1.0


# The exact recipe


def exact_case(name: str) -> tuple[dict[str, Any], torch.Tensor, float]:
    """A dict, its float64 frequencies written out independently, its magnitude; d = 8, theta = 10000."""
    w = 10000.0 ** (-np.arange(4) / 4)
    if name == "plain":
        return {}, w, 1.0
    if name == "linear":
        return {"rope_type": "linear", "factor": 3.0}, w / 3.0, 1.0
    if name == "dynamic":
        theta = 10000.0 * (2.0 * 2**20 / 4096 - 1.0) ** (8 / 6)
        return {"rope_type": name, "factor": 2.0, "max_position_embeddings": 4096}, theta ** (-np.arange(4) / 4), 1.0
    factors = [1.5, 2.5, 3.5, 4.5]
    lists = {"short_factor": [1.0] * 4, "long_factor": factors, "original_max_position_embeddings": 4096}
    return {"rope_type": "longrope", "factor": 4.0, **lists}, w / np.array(factors), math.sqrt(1 + math.log(4, 4096))


@pytest.mark.parametrize("name", ["plain", "linear", "dynamic", "longrope"])
def test_exact_is_within_6e_8_to_position_2_20(name: str) -> None:
    rows = 2**20 + 1
    scaling, w, magnitude = exact_case(name)
    table = precompute_freqs_cis(8, rows, 1e4, scaling=scaling or None, exact=True, seq_len=2**20).numpy()
    true = magnitude * np.exp(1j * np.outer(np.arange(rows, dtype=np.float64), w))
    error = max(np.abs(table.real - true.real).max(), np.abs(table.imag - true.imag).max())
    assert error <= 6e-8
    with mpmath.workdps(40):  # float64 itself is close enough to the truth: ask a third party at a few far rows
        for p in (1, 32767, 131071, 999983, 2**20):
            for i in range(4):
                angle = mpmath.mpf(p) * mpmath.mpf(float(w[i]))
                assert abs(float(magnitude * mpmath.cos(angle)) - float(table[p, i].real)) <= 6e-8


def test_the_default_recipe_is_not_exact_at_long_range() -> None:
    """Why ``exact`` exists: the bits of published checkpoints are off by 2e-3 at 32k and more beyond."""
    far = slice(32768 - 64, 32768)
    default, exact = precompute_freqs_cis(128, 32768)[far], precompute_freqs_cis(128, 32768, exact=True)[far]
    assert 1e-3 < (default.real - exact.real).abs().max() < 4e-3


@pytest.mark.parametrize("name", scalings(8))
def test_exact_is_the_same_formula(name: str) -> None:
    scaling = scalings(64)[name] | {"max_position_embeddings": LENGTH}
    w, w64 = inv_freq(64, scaling=scaling, seq_len=2000), inv_freq(64, scaling=scaling, seq_len=2000, exact=True)
    assert torch.allclose(w.double(), w64, rtol=3e-6, atol=0)
    table = precompute_freqs_cis(64, 50, scaling=scaling, seq_len=2000, exact=True)
    m = attention_factor(64, scaling=scaling)
    assert (table.abs().double() - m).abs().max() <= 1.2e-7 * m


# Surroundings


def _set_default(dtype: torch.dtype | None = None, device: str | None = None) -> None:
    torch.set_default_dtype(dtype or torch.float32)
    torch.set_default_device(device)


@pytest.mark.parametrize("scaling", [None, *(scalings(16)[name] for name in ("dynamic", "yarn", "llama3", "longrope"))])
@pytest.mark.parametrize(
    "surroundings", ["float64", "bfloat16", "meta", "autocast-bf16", "autocast-fp16", "inference_mode", "no_grad"]
)
@pytest.mark.parametrize("exact", [False, True])
def test_surroundings_change_nothing(scaling: dict[str, Any] | None, surroundings: str, exact: bool) -> None:
    scaling = scaling and {**scaling, "max_position_embeddings": LENGTH}
    expected = precompute_freqs_cis(16, 1500, scaling=scaling, exact=exact)
    context: Any = nullcontext()
    try:
        if surroundings in ("float64", "bfloat16"):
            _set_default(dtype=getattr(torch, surroundings))
        elif surroundings == "meta":
            _set_default(device="meta")
        elif surroundings.startswith("autocast"):
            context = torch.autocast("cpu", torch.bfloat16 if surroundings.endswith("bf16") else torch.float16)
        else:
            context = getattr(torch, surroundings)()
        with context:
            table = precompute_freqs_cis(16, 1500, scaling=scaling, exact=exact)
    finally:
        _set_default()
    assert table.dtype == torch.complex64 and table.device.type == "cpu"
    assert torch.equal(table, expected)
    assert not table.is_inference()  # or a backward pass could not use it
    assert not table.requires_grad


def test_fake_tensors_have_no_values_to_check() -> None:
    """A model that is built under FakeTensorMode, to plan its memory, makes its table there."""
    with FakeTensorMode():
        for scaling in (None, scalings(16)["yarn"]):
            table = precompute_freqs_cis(16, 50, scaling=scaling)
            assert isinstance(table, FakeTensor) and table.shape == (50, 8) and table.dtype == torch.complex64


def test_device_is_obeyed(device: str) -> None:
    on_device = precompute_freqs_cis(16, 50, device=device)
    assert on_device.device.type == device
    assert torch.equal(on_device.cpu(), precompute_freqs_cis(16, 50))  # built on the CPU, whatever the device
    meta = precompute_freqs_cis(16, 50, device="meta")
    assert meta.is_meta and meta.shape == (50, 8) and meta.dtype == torch.complex64


def test_equal_llama3_factors_are_a_step() -> None:
    """transformers computes 0/0 for a wavelength that meets the step exactly; here it counts as short, undivided."""
    step = {**scalings(8)["llama3"], "low_freq_factor": 2.0, "high_freq_factor": 2.0}
    ratio = inv_freq(64, exact=True) / inv_freq(64, scaling=step, exact=True)
    below = 2 * math.pi / inv_freq(64, exact=True) <= ORIGINAL / 2.0
    assert torch.allclose(ratio, torch.where(below, 1.0, 8.0).double(), rtol=1e-12)
    assert 0 < below.sum() < 32

    wavelength = 2 * math.pi  # of theta = 1, for every pair: just on the step
    on_it = {"low_freq_factor": ORIGINAL / wavelength, "high_freq_factor": ORIGINAL / wavelength}
    assert torch.equal(inv_freq(8, 1.0, scaling={**step, **on_it}), torch.ones(4))
