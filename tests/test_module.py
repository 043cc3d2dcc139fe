"""``RotaryEmbedding``: it rotates as the operator does, and nothing that happens to a module changes its table."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext import reference
from rope_ext.module import RotaryEmbedding
from rope_ext.tables import precompute_freqs_cis
from scalings import LENGTH, scalings

DIM = 16
BY_LENGTH = ["dynamic", "dynamic-odd-factor", "longrope", "longrope-factor"]


def qk(*tokens: int, dim: int = DIM, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(*tokens, 3, dim, device=device), torch.randn(*tokens, 1, dim, device=device)


def scaling_of(name: str) -> dict[str, Any]:
    return {**scalings(DIM)[name], "max_position_embeddings": LENGTH}


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


# What it computes


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", [None, "linear", "yarn", "llama3", "proportional"])
@pytest.mark.parametrize("exact", [False, True])
def test_rotates_by_the_table(interleaved: bool, name: str | None, exact: bool, device: str) -> None:
    scaling = scaling_of(name) if name else None
    rope = RotaryEmbedding(DIM, 40, scaling=scaling, exact=exact, interleaved=interleaved)
    table = precompute_freqs_cis(DIM, 40, scaling=scaling, exact=exact).to(device)
    q, k = qk(2, 5, device=device)
    assert_equal(rope(q, k), reference.apply(q, k, table[:5], interleaved=interleaved))
    assert_equal(rope(q, k, start=35), reference.apply(q, k, table[35:], interleaved=interleaved))
    for positions in (torch.tensor([0, 1, 2, 39, 7]), torch.tensor([[0, 0, 1, 2, 3], [35, 36, 37, 38, 39]])):
        ids = positions.to(device)
        expected = reference.apply(q, k, table, ids, interleaved=interleaved)
        assert_equal(rope(q, k, ids), expected)
        assert_equal(rope(q, k, ids.int()), expected)


def test_packed_tokens() -> None:
    rope, table, (q, k) = RotaryEmbedding(DIM, 20), precompute_freqs_cis(DIM, 20), qk(7)
    assert_equal(rope(q, k, start=3), reference.apply(q, k, table[3:10]))
    positions = torch.tensor([0, 1, 2, 0, 1, 19, 0])
    assert_equal(rope(q, k, positions), reference.apply(q, k, table, positions))


@pytest.mark.parametrize("interleaved", [True, False])
def test_partial_rotation_is_asked_for(interleaved: bool) -> None:
    rope = RotaryEmbedding(DIM, 20, head_dim=24, interleaved=interleaved)
    q, k = qk(2, 5, dim=24)
    expected = reference.apply(q, k, precompute_freqs_cis(DIM, 20)[:5], interleaved=interleaved, rotary_dim=DIM)
    assert_equal(rope(q, k), expected)
    with pytest.raises(ValueError):
        RotaryEmbedding(DIM, 20)(q, k)  # not asked for: a table of the wrong width


def test_gradients_are_the_operators() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 20), qk(2, 5)
    q.requires_grad_()
    rope(q, k)[0].sum().backward()
    ones = torch.ones(2, 5, 3, DIM)
    assert torch.equal(q.grad, reference.rotate(ones, precompute_freqs_cis(DIM, 20)[:5], conj=True))  # type: ignore[arg-type]


# What cannot corrupt it


def _through_pickle(rope: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(rope))  # type: ignore[no-any-return]


def _load(rope: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    rope.load_state_dict(state, strict=True)
    return rope


STALE = {
    "inv_freq": torch.zeros(8),
    "freqs_cis": torch.zeros(9),
    "cos_cached": torch.zeros(1),
    "sin_cached": torch.ones(1),
}
ORDEALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to-bfloat16": lambda rope: rope.to(torch.bfloat16),
    "half": lambda rope: rope.half(),
    "double": lambda rope: rope.double(),
    "meta-and-to_empty": lambda rope: rope.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": _through_pickle,
    "load-empty-state": lambda rope: _load(rope, {}),
    "load-stale-state": lambda rope: _load(rope, STALE),
    "fill-all-buffers": lambda rope: ([b.zero_() for b in [*rope.buffers(), *rope.parameters()]] and rope) or rope,
    "apply": lambda rope: rope._apply(lambda t: torch.zeros_like(t)),
    "share_memory": lambda rope: rope.share_memory(),
    "requires_grad": lambda rope: rope.requires_grad_(),
}


@pytest.mark.parametrize("ordeal", ORDEALS.values(), ids=ORDEALS)
@pytest.mark.parametrize("name", [None, "yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("used_before", [True, False])
def test_survives(ordeal: Callable[[nn.Module], nn.Module], name: str | None, used_before: bool) -> None:
    scaling = scaling_of(name) if name else None
    q, k = qk(2, 5)
    expected = RotaryEmbedding(DIM, 50, scaling=scaling)(q, k, start=30)
    rope: nn.Module = RotaryEmbedding(DIM, 50, scaling=scaling)
    if used_before:
        rope(q, k)
    assert_equal(ordeal(rope)(q, k, start=30), expected)


def test_owns_nothing() -> None:
    rope = RotaryEmbedding(DIM, 50)
    rope(*qk(2, 5))
    assert not [*rope.parameters(), *rope.buffers(), *rope.modules()][1:]
    assert rope.state_dict() == {}
    model = nn.Sequential(rope, nn.Linear(2, 2))
    old = {**model.state_dict(), "0.inv_freq": torch.zeros(8)}
    assert model.load_state_dict(old, strict=True) == ([], [])
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        model.load_state_dict({**old, "0.weight": torch.zeros(1)}, strict=True)  # not a table: still unexpected


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta-device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("name", [None, *BY_LENGTH])
def test_first_use_in_any_surroundings(surroundings: Callable[[], Any], name: str | None) -> None:
    """Made and used first under a mode; then, outside of it, rotating and training as ever."""
    scaling = scaling_of(name) if name else None
    q, k = qk(2, 5)
    positions = torch.tensor([[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]])
    end = 61  # no other test makes this table
    with surroundings():
        rope = RotaryEmbedding(DIM, end, scaling=scaling)
        inside = rope(q, k, positions), rope(q, k, start=9)
    table = precompute_freqs_cis(DIM, end, scaling=scaling, seq_len=45)
    q.requires_grad_()
    outside = rope(q, k, positions), rope(q, k, start=9)
    for found in (inside, outside):
        assert_equal(found[0], reference.apply(q, k, table, positions))
        assert_equal(found[1], reference.apply(q, k, table[9:14]))
    outside[0][0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [None, *BY_LENGTH])
def test_default_dtype_changes_nothing(dtype: torch.dtype, name: str | None) -> None:
    scaling = scaling_of(name) if name else None
    q, k = qk(2, 3)
    positions = torch.tensor([[0, 1, 2], [2000, 2001, 2002]])
    expected = RotaryEmbedding(DIM, 4000, scaling=scaling)(q, k, positions)
    try:
        torch.set_default_dtype(dtype)
        found = RotaryEmbedding(DIM, 4000, scaling=scaling)(q, k, positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, expected)


def test_first_use_under_a_transform() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 63), qk(2, 5)
    gradient = torch.func.grad(lambda q: rope(q, k, start=3)[0].square().sum())(q)
    assert torch.allclose(gradient, 2 * q, atol=1e-5)  # a rotation keeps lengths
    batched = torch.func.vmap(lambda q, k: rope(q, k, start=3))(torch.stack((q, q + 1)), torch.stack((k, k + 1)))
    for i in range(2):
        assert_equal((batched[0][i], batched[1][i]), rope(q + i, k + i, start=3))


def test_meta_tensors_need_no_table() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 50), qk(2, 5)
    for out, x in zip(rope(q.to("meta"), k.to("meta"), start=7), (q, k), strict=True):
        assert out.is_meta and out.shape == x.shape


# Sharing and growth


def test_tables_are_shared_and_die_with_the_last_module() -> None:
    first = RotaryEmbedding(DIM, 64, 31.0)
    q, k = qk(2, 5)
    first(q, k)
    table = first._tables.get(q.device, "rows", 64, 0)
    for other in (RotaryEmbedding(DIM, 64, 31), copy.deepcopy(first), _through_pickle(first)):
        assert other._tables.get(q.device, "rows", 64, 0) is table
    different = [RotaryEmbedding(DIM, 64, 32.0), RotaryEmbedding(DIM, 64, 31.0, exact=True)]
    different += [RotaryEmbedding(DIM, 64, 31.0, scaling={"rope_type": "default"})]
    assert all(module._tables is not first._tables for module in different)

    alive = weakref.ref(table)
    del table, other
    assert alive() is not None
    del first
    gc.collect()
    assert alive() is None


def test_growth_moves_and_changes_nothing() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 8), qk(2, 5)
    rope(q, k)
    first = rope._tables.get(q.device, "rows", 8, 0)
    address, before = first.data_ptr(), first.clone()
    whole = precompute_freqs_cis(DIM, 700)
    for start in (3, 4, 11, 12, 600):
        assert_equal(rope(q, k, start=start), reference.apply(q, k, whole[start : start + 5]))
    assert rope._tables.get(q.device, "rows", 8, 0) is first
    assert first.data_ptr() == address and torch.equal(first, before)
    rows = [key[2] for key in rope._tables._names]
    assert rows == [8, 16, 32, 1024]  # twice as often as needed, nothing in between


def test_positions_never_grow_a_table_but_seq_len_does() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 8), qk(2, 2)
    positions = torch.tensor([[0, 1], [8, 9]])
    with pytest.raises(IndexError, match="8"):
        rope(q, k, positions)
    assert_equal(rope(q, k, positions, seq_len=10), reference.apply(q, k, precompute_freqs_cis(DIM, 16), positions))


@pytest.mark.parametrize("name", [None, *BY_LENGTH])
def test_no_tokens(name: str | None) -> None:
    rope = RotaryEmbedding(DIM, 20, scaling=scaling_of(name) if name else None)
    for tokens in ((2, 0), (0, 4)):
        q, k = qk(*tokens)
        for positions in (None, torch.zeros(tokens, dtype=torch.int64)):
            assert [x.shape for x in rope(q, k, positions)] == [q.shape, k.shape]


@pytest.mark.parametrize(("fields", "dim"), [({}, 32), ({"partial_rotary_factor": 0.25}, 8)])
def test_from_config(fields: dict[str, Any], dim: int) -> None:
    config = {"hidden_size": 128, "num_attention_heads": 4, "rope_theta": 5e5, "max_position_embeddings": 30, **fields}
    rope, (q, k) = RotaryEmbedding.from_config(config), qk(2, 5, dim=32)
    assert rope.end == 30 and not rope.interleaved
    table = precompute_freqs_cis(dim, 30, 5e5, scaling={"rope_type": "default"})
    assert_equal(rope(q, k, start=9), reference.apply(q, k, table[9:14], interleaved=False, rotary_dim=dim))
    assert RotaryEmbedding.from_config(config, interleaved=True, end=7).extra_repr().startswith(f"dim={dim}, end=7")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim"),
        ({"dim": 8, "end": 0}, "end"),
        ({"dim": 8, "head_dim": 6}, "head_dim = 6"),
        ({"dim": 8, "scaling": {"rope_type": "cubic"}}, "cubic"),
        ({"dim": 8, "scaling": {"rope_type": "dynamic", "factor": 2.0}}, "max_position_embeddings"),
        ({"dim": 8, "axis_map": [0, 1, 2]}, "axis_map names 3 pairs for dim/2 = 4"),
        ({"dim": 8, "axis_map": [0, 1, 2, -1]}, "axis_map"),
    ],
)
def test_bad_hyperparameters_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(**arguments)


def test_bad_calls_are_refused() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 20, axis_map=[0, 1, 2, 0, 1, 2, 0, 1]), qk(2, 5)
    plain = RotaryEmbedding(DIM, 20)
    with pytest.raises(ValueError, match="not both"):
        plain(q, k, torch.arange(5), start=3)
    with pytest.raises(ValueError, match="start"):
        plain(q, k, start=-1)
    with pytest.raises(ValueError):
        plain(q[0, 0], k[0, 0])
    with pytest.raises(TypeError, match="positions"):
        rope(q, k, torch.zeros(3, 2, 5))
    with pytest.raises(ValueError, match="3 axes"):
        rope(q, k, torch.zeros(2, 2, 5, dtype=torch.int64))
    with pytest.raises(ValueError):
        rope(q, k, torch.zeros(3, 2, 6, dtype=torch.int64))
