"""Which functions `rope_ext.integrations.transformers` takes for rotary embeddings, and what it makes of them."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from rope_ext.integrations.transformers._recognise import Refusal, recognise
from rotary_functions import B, D, H, K, S, count, pairs_by_halves, right, rotate_half, tables

# file and function, how its table is spread, columns of the table, layout of x, further arguments
FUNCTIONS = {
    "llama": ("llama.apply_rotary_pos_emb", "halves", D, "bhsd", {}),
    "llama-heads-last": ("llama.apply_rotary_pos_emb", "halves", D, "bshd", {"unsqueeze_dim": 2}),
    "phi3-partial": ("phi3.apply_rotary_pos_emb", "halves", 8, "bhsd", {}),
    "cohere": ("cohere.apply_rotary_pos_emb", "pairs", D, "bhsd", {}),
    "glm-partial": ("glm.apply_rotary_pos_emb", "halves", 6, "bhsd", {}),
    "deepseek_v3-interleaved-to-half": ("deepseek_v3.apply_rotary_pos_emb_interleave", "halves", D, "bhsd", {}),
    "deepseek_v4-trailing": ("deepseek_v4.apply_rotary_pos_emb", "single", 4, "bhsd", {}),
    "deepseek_v2-complex": ("deepseek_v2.apply_rotary_emb", "complex", D // 2, "bhsd", {}),
    "gptj-sin-first": ("gptj.apply_rotary_pos_emb", "single", D // 2, "bshd", {}),
    "gpt_oss": ("gpt_oss.apply_rotary_pos_emb", "single", D // 2, "bhsd", {}),
    "nanochat-other-sign": ("nanochat.apply_rotary_pos_emb", "halves", D, "bhsd", {}),
    "gemma3n-q-only": ("gemma3n.apply_rotary_pos_emb", "halves", D, "bshd", {"unsqueeze_dim": 2}),
    "mistral_large4-no-k": ("mistral_large4.apply_rotary_pos_emb_interleave", "halves", D, "bhsd", {"k": None}),
    "musicflamingo-float64": ("musicflamingo.apply_rotary_time_emb", "pairs", 8, "bsd", {}),
    "qwen2_vl-vision": ("qwen2_vl.apply_rotary_pos_emb_vision", "halves", D, "shd", {}),
    "sam2-broadcast": ("sam2_video.apply_rotary_pos_emb_2d", "pairs", D, "bhsd one", {}),
    "muse-latest-q": ("muse_glimmer_assistant.apply_rotary_pos_emb", "halves", D, "bhsd latest", {}),
    "dinov3-prefix": ("dinov3_vit.apply_rotary_pos_emb", "halves", D, "bhsd prefix", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_transformers_functions(case: str, dtype: torch.dtype) -> None:
    path, spread, columns, layout, options = FUNCTIONS[case]
    name, function_name = path.split(".")
    function = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), function_name)
    adapter = recognise(function)
    assert callable(adapter)

    sizes = {"b": (B,), "s": (S,), "d": (D,)}
    q, k = (
        torch.randn([size for axis in layout.split()[0] for size in {**sizes, "h": (heads,)}[axis]]).to(dtype)
        for heads in (H, K)
    )
    if "latest" in layout:  # q is that of the last tokens, k that of all
        q = q[:, :, 2:]
    arguments: dict[str, Any] = {x: {"q": q, "k": k, "xq": q, "xk": k}.get(x, q) for x in _xs(function)}
    # a table may be finer than what it rotates, as under autocast
    for table_dtype in {dtype, torch.float32}:
        cos, sin = tables(
            columns, "single" if spread == "complex" else spread, table_dtype, S - 2 * ("prefix" in layout)
        )
        if "b" not in layout or "prefix" in layout:
            cos, sin = cos[0], sin[0]
        if "one" in layout:
            cos, sin = cos[:1], sin[:1]
        given = (
            {"freqs_cis": torch.complex(cos.float(), sin.float())} if spread == "complex" else {"cos": cos, "sin": sin}
        )
        given = {**arguments, **given, **options}
        expected = function(**given)
        results, calls = count(lambda given=given: adapter(**given))
        assert calls == 1 + ("latest" in layout)
        exact = function(**{n: _wide(v) for n, v in given.items()})
        assert type(results) is type(expected)
        for result, old, true in zip(*map(_list, (results, expected, exact)), strict=True):
            assert (result is None) == (old is None)
            if old is not None:
                assert (result.dtype, result.shape) == (old.dtype, old.shape)
                if dtype == torch.float32:
                    # the same products and sums; but ATen's complex product may use FMA, and one is in float64
                    exactly = "complex" not in case and "float64" not in case
                    torch.testing.assert_close(result, old, rtol=0, atol=0 if exactly else 1e-6)
                else:
                    ours, theirs = ((y - true).abs().contiguous() for y in (result, old))
                    assert ours.max() <= theirs.max() and ours.square().sum() <= theirs.square().sum()


def _xs(function: FunctionType) -> list[str]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [n for n in names if n in ("q", "k", "xq", "xk", "x", "tensor", "hidden_states")]


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


def k_turns_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q, k, cos, sin)[0], right(q, k, cos, -sin)[1]


def k_stays(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q, k, cos, sin)[0], k


def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q, k, sin, cos)


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = right(q, k, cos, sin)
    return q * 1.001, k


def clamped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q.clamp(-100, 100), k, cos, sin)


def first_token_stays(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rotated = right(q, k, cos, sin)
    return torch.cat((q[:, :, :1], rotated[0][:, :, 1:]), 2), rotated[1]


def mixed_up(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(k, q, cos, sin)


@pytest.mark.parametrize(
    "function",
    [k_turns_back, k_stays, swapped, scaled, clamped, first_token_stays, pairs_by_halves, mixed_up],
    ids=lambda f: f.__name__,
)
def test_look_alikes_are_refused(function: FunctionType) -> None:
    assert isinstance(recognise(function), Refusal)


def test_right_is_recognised() -> None:
    """Or the test above could not fail."""
    assert callable(recognise(right))


def test_a_table_that_is_not_written_twice_reaches_the_original() -> None:
    adapter = recognise(right)
    q, k = torch.randn(B, H, S, D), torch.randn(B, K, S, D)
    cut = [t[..., :D] for t in tables(D + 4, "halves", torch.float32)]
    results, calls = count(lambda: adapter(q, k, *cut))
    assert calls == 0
    assert all(map(torch.equal, results, right(q, k, *cut)))

    table = tables(D, "halves", torch.float32)
    assert count(lambda: adapter(q, k, *table))[1] == 1
    table[0][0, 0, 0] += 1  # in place: the very tensor that was found right before
    results, calls = count(lambda: adapter(q, k, *table))
    assert calls == 0 and all(map(torch.equal, results, right(q, k, *table)))


def test_inference_tensors_do_not_tell_that_they_changed() -> None:
    adapter = recognise(right)
    with torch.inference_mode():
        q, k, table = torch.randn(B, H, S, D), torch.randn(B, K, S, D), tables(D, "halves", torch.float32)
        assert count(lambda: adapter(q, k, *table))[1] == 1
        table[0][0, 0, 0] += 1
        results, calls = count(lambda: adapter(q, k, *table))
        assert calls == 0 and all(map(torch.equal, results, right(q, k, *table)))


def test_a_compiled_graph_refuses_a_table_that_is_not_written_twice() -> None:
    def fresh(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    compiled = torch.compile(recognise(fresh), fullgraph=True, backend="eager")
    q, k = torch.randn(B, H, S, D), torch.randn(B, K, S, D)
    good, bad = ([t[0] for t in tables(c, "halves", torch.float32)] for c in (D, D + 4))
    assert all(map(torch.equal, compiled(q, k, *good), fresh(q, k, *good)))
    with pytest.raises(RuntimeError, match="run the model once before compiling"):
        compiled(q, k, *(t[..., :D] for t in bad))


@pytest.mark.parametrize("change", ["more rows", "broadcast batch", "unlike types", "no sin", "other device", "scale"])
def test_other_arguments_reach_the_original(change: str) -> None:
    def fresh(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None, scale: int = 1) -> Any:
        return change if sin is None or cos.is_meta else right(scale * q, k, cos, sin)

    adapter = recognise(fresh)
    q, k = torch.randn(1, H, S, D), torch.randn(1, K, S, D)
    cos, sin = tables(D, "halves", torch.float32)
    if change == "more rows":
        q, k = q[:, :, :1], k[:, :, :1]
    elif change == "unlike types":
        cos, sin = cos[:1].double(), sin[:1]
    elif change == "no sin":
        sin = None
    elif change == "scale":
        q, k = q.repeat(B, 1, 1, 1), k.repeat(B, 1, 1, 1)
    elif change == "other device":
        cos, sin = cos.to("meta"), sin.to("meta")
    options = {"scale": 2} if change == "scale" else {}
    results, calls = count(lambda: adapter(q, k, cos, sin, **options))
    expected = fresh(q, k, cos, sin, **options)
    assert calls == 0
    assert results == change if isinstance(expected, str) else all(map(torch.equal, results, expected))
