"""Tables over several position axes, against the models that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rope_ext.tables import (
    axial_2d,
    ernie,
    freqs_cis_at,
    grid_positions,
    inv_freq,
    llama4_positions,
    mrope_chunked,
    mrope_interleaved,
    pixtral_2d,
    precompute_freqs_cis,
)

T, H, W = 0, 1, 2


def ids(*shape: int) -> Tensor:
    """Random ids, different on every axis: (3, B, S)."""
    return torch.randint(0, 5000, (3, *shape))


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers", reason="parity needs the transformers package, a test dependency")
    module.logging.set_verbosity_error()
    return module


# The maps, by their definitions


def test_chunked() -> None:
    assert mrope_chunked([2, 3, 1]) == (T, T, H, H, H, W)
    assert [mrope_chunked([16, 24, 24]).count(axis) for axis in (T, H, W)] == [16, 24, 24]


def test_interleaved() -> None:
    assert mrope_interleaved([4, 2, 2]) == (T, H, W, T, H, W, T, T)
    assert mrope_interleaved([2, 1, 0]) == (T, H, T)
    qwen3 = mrope_interleaved([24, 20, 20])
    assert all(axis == (c % 3 if c < 60 else T) for c, axis in enumerate(qwen3))
    assert len(qwen3) == 64


def test_ernie() -> None:
    assert ernie([2, 2, 3]) == (H, W, H, W, T, T, T)


@pytest.mark.parametrize("axis_map", [mrope_chunked([4, 2, 2]), mrope_interleaved([4, 2, 2]), ernie([2, 2, 4])])
@pytest.mark.parametrize("exact", [False, True])
def test_text_tokens_have_the_rows_of_one_axis(axis_map: tuple[int, ...], exact: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4999], [7, 7, 0, 1, 2]])
    table = precompute_freqs_cis(16, 5000, scaling={"rope_type": "default"}, exact=exact)
    rows = freqs_cis_at(positions.expand(3, 2, 5), inv_freq(16, exact=exact), axis_map=axis_map)
    assert rows.shape == (2, 5, 8) and rows.dtype == torch.complex64
    assert torch.equal(rows, table[positions])


def test_each_pair_reads_its_own_axis() -> None:
    positions, w = ids(2, 7), inv_freq(16)
    axis_map = mrope_interleaved([4, 2, 2])
    rows = freqs_cis_at(positions, w, axis_map=axis_map, attention_factor=1.25)
    for c, axis in enumerate(axis_map):
        angle = positions[axis].float() * w[c]
        assert torch.equal(rows[..., c], torch.complex(angle.cos() * 1.25, angle.sin() * 1.25))


def test_one_axis_and_frequencies_by_sequence() -> None:
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    w = torch.stack((inv_freq(8), inv_freq(8, 5e5)))
    rows = freqs_cis_at(positions, w.unsqueeze(1))
    for b in range(2):
        assert torch.equal(rows[b], freqs_cis_at(positions[b], w[b]))


def test_a_map_may_be_a_tensor_and_positions_int32(device: str) -> None:
    positions, w, axis_map = ids(2, 5).to(device), inv_freq(12), mrope_chunked([2, 3, 1])
    rows = freqs_cis_at(positions, w, axis_map=axis_map)
    assert rows.device.type == device
    as_tensor = torch.tensor(axis_map, device=device)
    assert torch.equal(freqs_cis_at(positions.int(), w, axis_map=as_tensor), rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: freqs_cis_at(ids(2, 5), inv_freq(16), axis_map=mrope_chunked([2, 3, 2])), "7 pairs for 8"),
        (lambda: freqs_cis_at(ids(2, 5)[:2], inv_freq(12), axis_map=mrope_chunked([2, 3, 1])), "axis_map"),
        (lambda: freqs_cis_at(ids(2, 5), inv_freq(4), axis_map=(0, -1)), "axis_map"),
        (lambda: mrope_chunked([8, 8]), "three"),
        (lambda: mrope_chunked([8, -1, 8]), "sections"),
        (lambda: mrope_interleaved([1, 4, 4]), "interleave"),
        (lambda: ernie([22, 20, 22]), "equal"),
        (lambda: axial_2d(6), "divisible by 4"),
        (lambda: pixtral_2d(10), "divisible by 4"),
        (lambda: grid_positions(4, 6, merge_size=4), "width = 6.*merge_size = 4"),
        (lambda: grid_positions(0, 6), "height"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Against transformers


def test_qwen2_vl(transformers: Any) -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = transformers.Qwen2VLTextConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    positions = ids(2, 33)
    cos, sin = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
    rows = freqs_cis_at(positions, inv_freq(128, 1e6), axis_map=mrope_chunked([16, 24, 24]))
    assert torch.equal(rows, torch.complex(cos[..., :64], sin[..., :64]))


def test_qwen3_vl(transformers: Any) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    config = transformers.Qwen3VLTextConfig(head_dim=128, rope_parameters=rope)
    positions = ids(2, 33)
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions)
    rows = freqs_cis_at(positions, inv_freq(128, 5e6), axis_map=mrope_interleaved([24, 20, 20]))
    assert torch.equal(rows, torch.complex(cos[..., :64], sin[..., :64]))


def test_glm_4v(transformers: Any) -> None:
    from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    config = transformers.Glm4vTextConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    positions = ids(2, 33)
    cos, sin = Glm4vTextRotaryEmbedding(config)(torch.zeros(1), positions)
    rows = freqs_cis_at(positions, inv_freq(64), axis_map=mrope_chunked([8, 12, 12]))
    assert torch.equal(rows, torch.complex(cos[..., ::2], sin[..., ::2]))  # neighbours share a factor: interleaved


def test_ernie_4_5_vl(transformers: Any) -> None:
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}
    config = transformers.Ernie4_5_VLMoeTextConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    positions = ids(2, 33)
    cos, sin = Ernie4_5_VLMoeTextRotaryEmbedding(config)(torch.zeros(1), positions)
    rows = freqs_cis_at(positions, inv_freq(128, 5e5), axis_map=ernie([22, 22, 20]))
    assert torch.equal(rows, torch.complex(cos[..., ::2], sin[..., ::2]))


@pytest.mark.parametrize("merge_size", [1, 2])
def test_qwen_vision_tower(transformers: Any, merge_size: int) -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding
    from transformers.vision_utils import get_vision_position_ids

    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(embed_dim=320, num_heads=4)
    theirs = get_vision_position_ids(torch.tensor([[1, 6, 10]]), merge_size)
    cos, sin = Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), theirs)
    w, axis_map = axial_2d(80)
    positions = grid_positions(6, 10, merge_size=merge_size)
    assert torch.equal(positions, theirs.t())
    assert torch.equal(freqs_cis_at(positions, w, axis_map=axis_map), torch.complex(cos[:, :40], sin[:, :40]))


def test_pixtral(transformers: Any) -> None:
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    config = transformers.PixtralVisionConfig(hidden_size=256, num_attention_heads=4)
    positions = grid_positions(6, 10)
    cos, sin = PixtralVisionRotaryEmbedding(config)(torch.zeros(1), positions.t())
    w, axis_map = pixtral_2d(64)
    assert torch.equal(freqs_cis_at(positions, w, axis_map=axis_map), torch.complex(cos[:, :32], sin[:, :32]))


def test_llama4_vision_tower(transformers: Any) -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding

    config = transformers.models.llama4.configuration_llama4.Llama4VisionConfig(
        hidden_size=352, num_attention_heads=4, image_size=70, patch_size=14
    )
    w, axis_map = axial_2d(88)
    rows = freqs_cis_at(llama4_positions(5), w, axis_map=axis_map)
    assert torch.equal(rows, Llama4VisionRotaryEmbedding(config)(torch.zeros(1))[:, 0])
    assert torch.equal(rows[-1], torch.ones(44, dtype=torch.complex64))  # the class token stays as it is
