"""``RotaryEmbedding`` where a row alone does not say the factor: per-sequence lengths and several position axes."""

from __future__ import annotations

import pytest
import torch

from rope_ext import reference
from rope_ext.module import RotaryEmbedding
from rope_ext.tables import freqs_cis_at, inv_freq, mrope_interleaved, precompute_freqs_cis
from scalings import LENGTH, ORIGINAL, scalings
from test_module import BY_LENGTH, DIM, assert_equal, qk, scaling_of


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("exact", [False, True])
def test_each_sequence_by_its_own_length(name: str, exact: bool, device: str) -> None:
    """A batch of short, borderline and long sequences: each row is what it is alone."""
    scaling = scaling_of(name)
    rope = RotaryEmbedding(DIM, 100, scaling=scaling, exact=exact)
    border = ORIGINAL if name.startswith("longrope") else LENGTH
    lengths = [4, border - 1, border, border + 1, 2500, 1999, *range(3000, 3030)]  # past any vector width
    positions = torch.tensor([[length - 4 + s for s in range(4)] for length in lengths])
    q, k = qk(len(lengths), 4)
    found = rope(q.to(device), k.to(device), positions.to(device))
    for b, length in enumerate(lengths):
        table = precompute_freqs_cis(DIM, length, scaling=scaling, exact=exact)
        expected = reference.apply(q[b : b + 1], k[b : b + 1], table[length - 4 :])
        alone = rope(q[b : b + 1], k[b : b + 1], start=length - 4)
        assert_equal(alone, expected)
        for x, y in zip(found, expected, strict=True):
            if device == "cpu":
                assert torch.equal(x[b], y[0]), length
            else:  # another device's pow, sin and cos
                assert torch.allclose(x[b].cpu(), y[0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_one_sequence_has_transformers_bits(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the transformers package")
    transformers.logging.set_verbosity_error()
    scaling = scaling_of(name)
    rope_parameters = {**scalings(DIM)[name], "rope_theta": 1e4}
    config = transformers.LlamaConfig(head_dim=DIM, max_position_embeddings=LENGTH, rope_parameters=rope_parameters)
    rope = RotaryEmbedding.from_config(config)
    assert not rope.interleaved and rope.end == LENGTH
    for length in (100, ORIGINAL, ORIGINAL + 1, LENGTH, LENGTH + 1, 3333):
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        positions = torch.arange(length)[None]
        cos, sin = theirs(torch.zeros(1), positions)
        for module in (rope, RotaryEmbedding(DIM, scaling=scaling)):
            found = module.cos_sin(positions)
            assert_equal(found, (cos[..., : DIM // 2], sin[..., : DIM // 2]))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_seq_len_says_which_length_is_meant(name: str) -> None:
    """Chunked prefill, shared positions and packed tokens."""
    scaling, (q, k) = scaling_of(name), qk(2, 5)
    rope = RotaryEmbedding(DIM, 100, scaling=scaling)
    tables = [precompute_freqs_cis(DIM, 5, scaling=scaling, seq_len=length) for length in (3000, 7)]
    chunk = reference.apply(q, k, tables[0])
    assert_equal(rope(q, k, seq_len=3000), chunk)
    assert_equal(rope(q, k, torch.arange(5), seq_len=3000), chunk)
    assert_equal(rope(q, k, torch.arange(5), seq_len=torch.tensor([3000, 3000])), chunk)

    mixed = [reference.apply(q[b : b + 1], k[b : b + 1], tables[b]) for b in range(2)]
    expected = torch.cat([m[0] for m in mixed]), torch.cat([m[1] for m in mixed])
    lengths, positions = torch.tensor([3000, 7]), torch.arange(5).expand(2, 5)
    assert_equal(rope(q, k, positions, seq_len=lengths), expected)
    assert_equal(rope(q, k, torch.arange(5), seq_len=lengths), expected)

    packed = q.flatten(0, 1), k.flatten(0, 1)
    per_token = lengths.repeat_interleave(5)
    found = rope(*packed, positions.flatten(), seq_len=per_token)
    assert_equal(found, (expected[0].flatten(0, 1), expected[1].flatten(0, 1)))
    with pytest.raises(ValueError, match=r"packed.*seq_len"):
        rope(*packed, positions.flatten())


# Several position axes


@pytest.mark.parametrize("name", [None, "yarn", "longrope", "dynamic"])
def test_position_axes(name: str | None) -> None:
    scaling, axis_map, (q, k) = scaling_of(name) if name else None, mrope_interleaved([4, 2, 2]), qk(2, 5)
    rope = RotaryEmbedding(DIM, 20, scaling=scaling, axis_map=axis_map)
    positions = torch.randint(0, 200, (3, 2, 5))
    positions[1, 1, 2] = 2999  # one long sequence: its largest id on any axis decides
    w = [inv_freq(DIM, scaling=scaling, seq_len=length) for length in (200, 3000)]
    rows = freqs_cis_at(positions, torch.stack(w)[:, None], axis_map=axis_map, attention_factor=rope._tables.magnitude)
    expected = reference.apply(q, k, rows)
    assert_equal(rope(q, k, positions), expected)
    if not rope._tables.depends_on_length:
        packed = rope(q.flatten(0, 1), k.flatten(0, 1), positions.flatten(1))
        assert_equal(packed, (expected[0].flatten(0, 1), expected[1].flatten(0, 1)))

    text = torch.arange(5).expand(2, 5)
    same = rope(q, k, text.expand(3, 2, 5))
    for form in ((text,), (torch.arange(5),), (None,)):
        assert_equal(rope(q, k, *form), same)
