"""The calls of other engines: each against its engine's own semantics, written here token by token in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BF16, F16, F32, F64, Layout, short
from harness import assert_same, whole_storage
from rope_ext import RotaryEmbedding
from rope_ext.integrations import flash_attn, onnx, torchtune, vllm

ROWS = 41


def cos_sin(pairs: int, dtype: torch.dtype = F32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Factors of any length, no two alike: a row, a column or a sign taken for another shows."""
    return torch.randn(ROWS, pairs, device=device).to(dtype), torch.randn(ROWS, pairs, device=device).to(dtype)


def turn(head: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One token, (H, R), by its row, (R/2,): what all four engines compute, in the dtype of the arguments."""
    pairs = cos.shape[-1]
    a, b = (head[:, 0::2], head[:, 1::2]) if interleaved else (head[:, :pairs], head[:, pairs:])
    real, imag = a * cos - b * sin, b * cos + a * sin
    return torch.stack((real, imag), -1).flatten(1) if interleaved else torch.cat((real, imag), 1)


def turn_tokens(x: Tensor, rows: list[int], cos: Tensor, sin: Tensor, interleaved: bool, first: int = 0) -> Tensor:
    """Packed tokens (T, H, D), each by the row of its own, in float32: features ``first`` to ``first + R``."""
    out, last = x.clone(), first + 2 * cos.shape[1]
    for token, row in enumerate(rows):
        part = turn(x[token, :, first:last].float(), cos[row].float(), sin[row].float(), interleaved)
        out[token, :, first:last] = part.to(x.dtype)
    return out


# ---- vLLM


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=short)
@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize(("rotary_dim", "offset", "inverse"), ((80, 0, False), (48, 0, True), (48, 21, False)))
@pytest.mark.parametrize("cache_dtype", (F32, BF16), ids=short)
def test_vllm(
    dtype: torch.dtype,
    is_neox: bool,
    rotary_dim: int,
    offset: int,
    inverse: bool,
    cache_dtype: torch.dtype,
    device: str,
) -> None:
    cache = torch.cat(cos_sin(rotary_dim // 2, cache_dtype, device), -1)
    cos, sin = cache[:, : rotary_dim // 2], cache[:, rotary_dim // 2 :] * (-1 if inverse else 1)
    positions = torch.tensor([[3, 40, 0], [7, 7, 8]], device=device)
    qkv = torch.randn(6, (4 + 2 + 2) * 80, device=device).to(dtype)
    heads = qkv.view(6, 8, 80)
    rotated = turn_tokens(heads, positions.flatten().tolist(), cos, sin, not is_neox, offset)
    for flat_tokens, flat_heads, with_key in itertools.product((True, False), repeat=3):
        buffer = qkv.clone()
        q, k = buffer[:, : 4 * 80], buffer[:, 4 * 80 : 6 * 80]
        if not flat_heads:
            q, k = q.view(6, 4, 80), k.view(6, 2, 80)
        if not flat_tokens:
            q, k = q.unflatten(0, (2, 3)), k.unflatten(0, (2, 3))
        ids = positions.flatten().int() if flat_tokens else positions
        options = (offset, inverse) if offset or inverse else ()  # older versions do not have them
        assert vllm.rotary_embedding(ids, q, k if with_key else None, 80, cache, is_neox, *options) is None
        turned = 6 if with_key else 4
        expected = torch.cat((rotated[:, :turned], heads[:, turned:]), 1)
        assert_same(buffer, expected.flatten(1))


def test_vllms_older_kernels_round_every_product() -> None:
    """Against their arithmetic, in bfloat16 throughout: apart, but by no more than those roundings can."""
    cache = torch.cat(cos_sin(40, BF16), -1)
    q = torch.randn(ROWS, 3, 80).to(BF16)
    theirs = torch.stack([turn(head, *row.chunk(2), False) for head, row in zip(q, cache, strict=True)])
    (a, b), (c, s) = q.double().abs().chunk(2, -1), cache.double().abs().unsqueeze(1).chunk(2, -1)
    sizes = torch.cat((a * c + b * s, a * s + b * c), -1)
    vllm.rotary_embedding(torch.arange(ROWS), q, None, 80, cache, True)
    assert not torch.equal(q, theirs)
    # 2^-9 of each product, of their sum, and of this operator's own result: below 2^-7 of the products together
    assert bool(((q.double() - theirs.double()).abs() <= sizes * 2**-7).all())


# ---- flash-attn


def flash_attn_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: list[int],
    lengths: list[int] | None,
    conjugate: bool,
) -> Tensor:
    """Sequence by sequence, each from its own offset."""
    sequences = x.unbind() if lengths is None else x.split(lengths)
    sin = -sin if conjugate else sin
    turned = [
        turn_tokens(tokens, list(range(offset, offset + len(tokens))), cos, sin, interleaved)
        for tokens, offset in zip(sequences, offsets, strict=True)
    ]
    return torch.stack(turned) if lengths is None else torch.cat(turned)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
@pytest.mark.parametrize("interleaved", (True, False))
@pytest.mark.parametrize("conjugate", (True, False))
@pytest.mark.parametrize("rotary_dim", (48, 80))
@pytest.mark.parametrize("lengths", (None, [4, 0, 7, 1]), ids=("batch", "packed"))
@pytest.mark.parametrize("offsets", (0, 5, [5, 30, 0, 9]), ids=("start", "offset", "offsets"))
def test_flash_attn(
    dtype: torch.dtype,
    interleaved: bool,
    conjugate: bool,
    rotary_dim: int,
    lengths: list[int] | None,
    offsets: int | list[int],
    device: str,
) -> None:
    cos, sin = cos_sin(rotary_dim // 2, dtype, device)
    layout = Layout("sliced", pad={"d": 29})
    x = layout.place((4, 7, 3, 80) if lengths is None else (12, 3, 80), dtype, device)
    every = [offsets] * 4 if isinstance(offsets, int) else offsets
    expected = flash_attn_reference(x, cos, sin, interleaved, every, lengths, conjugate)
    packing: dict[str, Any] = {}
    if lengths is not None:
        ends = torch.tensor(lengths, device=device).cumsum(0)
        packing = {"cu_seqlens": torch.nn.functional.pad(ends, (1, 0)).int(), "max_seqlen": 7}
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets, device=device)
    call = (cos, sin, interleaved)
    before = whole_storage(x).clone()
    out = flash_attn.apply_rotary_emb(x, *call, False, given, **packing, conjugate=conjugate)
    assert_same(out, expected)
    assert torch.equal(whole_storage(x), before)
    assert flash_attn.apply_rotary_emb(x, *call, True, given, **packing, conjugate=conjugate) is x
    assert_same(x, expected)


def test_flash_attn_tokens_past_the_last_sequence_stay_inside_the_table() -> None:
    cos, sin = cos_sin(8)
    x = torch.randn(100, 2, 16)
    ends = torch.tensor([0, 3, 5])
    out = flash_attn.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([30, 36]), cu_seqlens=ends, max_seqlen=3)
    assert_same(out, turn_tokens(x, [30, 31, 32, 36, 37] + [0] * 95, cos, sin, False))


def test_flash_attn_gradient_is_its_own_conjugate() -> None:
    """As its backward: the same call with ``conjugate`` turned."""
    (cos, sin), offsets = cos_sin(20), torch.tensor([1, 9])
    x, gradient = torch.randn(2, 5, 3, 40, requires_grad=True), torch.randn(2, 5, 3, 40)
    flash_attn.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=offsets).backward(gradient)
    assert_same(x.grad, flash_attn.apply_rotary_emb(gradient, cos, sin, True, seqlen_offsets=offsets, conjugate=True))


# ---- torchtune


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=short)
@pytest.mark.parametrize("base", (10_000, 500_000))
def test_torchtune(dtype: torch.dtype, base: int, device: str) -> None:
    dim, rows = 80, 500
    theta = 1.0 / base ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
    angles = torch.einsum("i,j->ij", torch.arange(rows, dtype=F32), theta)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    module = torchtune.RotaryPositionalEmbeddings(dim, rows, base).to(device).to(BF16)  # which rounds torchtune's table
    assert not module.state_dict() and not list(module.buffers())
    x = torch.randn(2, 9, 3, dim, device=device).to(dtype)
    flat = x.flatten(0, 1)
    expected = turn_tokens(flat, [*range(9), *range(9)], cos, sin, True).view_as(x)
    assert_same(module(x), expected)
    ids = torch.randint(0, rows, (2, 9), device=device)
    expected = turn_tokens(flat, ids.flatten().tolist(), cos, sin, True).view_as(x)
    assert_same(module(x, input_pos=ids), expected)
    assert_same(module(x[:1], input_pos=ids[0]), expected[:1])
    if device == "cpu":
        with pytest.raises(IndexError, match="500"):
            module(x, input_pos=ids.fill_(500))


def test_torchtune_longer_than_its_table_and_float64() -> None:
    module, plain = (
        torchtune.RotaryPositionalEmbeddings(16, 8),
        RotaryEmbedding(16, 32, scaling={"rope_type": "default"}),
    )
    x = torch.randn(1, 21, 3, 16, dtype=F64)
    assert_same(module(x), plain(x, x)[0])


# ---- ONNX


@pytest.mark.parametrize("dtype", (F32, F64, BF16, F16), ids=short)
@pytest.mark.parametrize("interleaved", (True, False))
@pytest.mark.parametrize("rotary_dim", (0, 48))
@pytest.mark.parametrize("by_ids", (True, False))
def test_onnx(dtype: torch.dtype, interleaved: bool, rotary_dim: int, by_ids: bool) -> None:
    """Against torch's own: equal where that does not round between, and else nearer to the true result."""
    reference = pytest.importorskip("torch.onnx.ops").rotary_embedding
    cos, sin = cos_sin((rotary_dim or 80) // 2, dtype)
    ids = torch.randint(0, ROWS, (2, 7))
    tables = (cos, sin, ids) if by_ids else (cos[ids], sin[ids])
    options = {"interleaved": interleaved, "rotary_embedding_dim": rotary_dim}
    four, three = torch.randn(2, 3, 7, 80).to(dtype), torch.randn(2, 7, 240).to(dtype)
    for x, heads in ((four, 0), (four.mT.contiguous().mT, 3), (three, 3)):
        mine = onnx.rotary_embedding(x, *tables, **options, num_heads=heads)
        theirs = reference(x, *tables, **options, num_heads=heads)
        assert mine.shape == x.shape and mine.stride() == x.stride()
        if dtype in (F32, F64):
            assert_same(mine, theirs.contiguous())
            continue
        wide = (t.double() if t.is_floating_point() else t for t in tables)
        exact = reference(x.double(), *wide, **options, num_heads=heads)
        unit = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6  # one rounding; float32's own are in the 1e-6
        assert bool(((mine.double() - exact).abs() <= unit).all())
        assert bool(((theirs.double() - exact).abs() > unit).any())


# ---- all


def test_compiled_they_are_the_same() -> None:
    """One graph for each, with an operator in it; mutation of a slice of a fused buffer included."""
    cos, sin = cos_sin(8)
    cache, ids = torch.cat((cos, sin), -1), torch.tensor([4, 0, 9, 30, 1])
    x = torch.randn(2, 5, 3, 16)
    packed, ends = torch.randn(5, 3, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    module = torchtune.RotaryPositionalEmbeddings(16, 64)

    def fused(qkv: Tensor) -> Tensor:
        qkv = qkv * 2
        vllm.rotary_embedding(ids, qkv[:, :48], qkv[:, 48:80], 16, cache, True)
        return qkv

    def in_place(x: Tensor) -> Tensor:
        return flash_attn.apply_rotary_emb(x * 2, cos, sin, inplace=True, seqlen_offsets=ends[:2])

    calls: list[tuple[Callable[..., Tensor], Tensor]] = [
        (fused, torch.randn(5, 96)),
        (in_place, x),
        (lambda x: flash_attn.apply_rotary_emb(x, cos, sin, seqlen_offsets=3), x),
        (lambda x: flash_attn.apply_rotary_emb(x, cos, sin, cu_seqlens=ends, max_seqlen=3), packed),
        (lambda x: module(x), x),
        (lambda x: onnx.rotary_embedding(x.transpose(1, 2), cos, sin, ids.expand(2, 5)), x),
    ]
    everything = torch.compile(
        lambda *xs: [call(x) for (call, _), x in zip(calls, xs, strict=True)], fullgraph=True, backend="aot_eager"
    )
    for (call, x), out in zip(calls, everything(*(x for _, x in calls)), strict=True):
        assert_same(out, call(x))


X4, X3 = torch.zeros(2, 5, 3, 16), torch.zeros(5, 3, 16)
COS = torch.zeros(ROWS, 8)
IDS = torch.arange(5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: vllm.rotary_embedding(IDS, torch.zeros(5, 40), None, 16, torch.zeros(9, 16), True),
            ValueError,
            "query.*heads.*16",
        ),
        (lambda: vllm.rotary_embedding(IDS, X3, X3[:, 0, :8], 16, torch.zeros(9, 16), True), ValueError, "key"),
        (
            lambda: vllm.rotary_embedding(IDS, X3.clone(), None, 16, torch.zeros(9, 18), True),
            ValueError,
            "18 rotated.*head_size = 16",
        ),
        (
            lambda: vllm.rotary_embedding(IDS, X3.clone(), None, 16, torch.zeros(9, 8), True, 10),
            ValueError,
            "rope_dim_offset = 10",
        ),
        (
            lambda: vllm.rotary_embedding(IDS, X3.clone(), None, 16, torch.zeros(9, 7), True),
            ValueError,
            "cos_sin_cache",
        ),
        (lambda: vllm.rotary_embedding(IDS, X3.clone(), None, 16, torch.zeros(4, 16), True), IndexError, "4"),
        (lambda: vllm.rotary_embedding(IDS, X3, X3, 16, torch.zeros(9, 16), True), RuntimeError, "share memory"),
        (lambda: flash_attn.apply_rotary_emb(X3, COS, COS), ValueError, "batch, seqlen, heads"),
        (lambda: flash_attn.apply_rotary_emb(X4, COS, COS, cu_seqlens=IDS), ValueError, "tokens, heads"),
        (
            lambda: flash_attn.apply_rotary_emb(X4, COS, COS, seqlen_offsets=37),
            ValueError,
            "41 rows.*5 tokens from position 37",
        ),
        (lambda: flash_attn.apply_rotary_emb(X4, COS, COS, seqlen_offsets=-1), ValueError, "position -1"),
        (lambda: flash_attn.apply_rotary_emb(X4, COS, COS[:, :4]), ValueError, "one shape"),
        (lambda: flash_attn.apply_rotary_emb(X4, COS, COS, seqlen_offsets=IDS), ValueError, r"seqlen_offsets.*\(2,\)"),
        (lambda: flash_attn.apply_rotary_emb(X4, COS, COS, seqlen_offsets=torch.tensor([0, 37])), IndexError, "41"),
        (lambda: flash_attn.apply_rotary_emb(X3, COS, COS, cu_seqlens=IDS, max_seqlen=42), ValueError, "42 tokens"),
        (lambda: torchtune.RotaryPositionalEmbeddings(15), ValueError, "even"),
        (lambda: torchtune.RotaryPositionalEmbeddings(16)(torch.zeros(2, 5, 3, 18)), ValueError, "head_dim = 18"),
        (lambda: onnx.rotary_embedding(X3, COS, COS, IDS), ValueError, "num_heads = 0"),
        (lambda: onnx.rotary_embedding(X3, COS, COS, IDS, num_heads=3), ValueError, "num_heads = 3"),
        (lambda: onnx.rotary_embedding(X4, COS, COS, IDS, num_heads=3), ValueError, "num_heads = 3"),
        (lambda: onnx.rotary_embedding(X4, COS, COS), ValueError, "one row per token"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
