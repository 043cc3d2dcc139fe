"""What ``precompute_freqs_cis`` refuses, by the field's name; and that whatever it accepts holds no NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_ext.tables import precompute_freqs_cis
from scalings import scalings, spread

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("unknown-type", {"rope_type": "cubic"}, "rope_type.*'cubic'.*yarn"),
    ("axial", {"rope_type": "axial"}, "rope_type.*axial_2d"),
    ("type-not-a-string", {"rope_type": 3}, "rope_type"),
    ("two-types", {"rope_type": "linear", "type": "yarn", "factor": 2.0}, "'rope_type'.*'type'"),
    ("no-factor", {"rope_type": "linear"}, "'factor'.*linear"),
    ("factor-0", {"rope_type": "linear", "factor": 0}, "'factor'.*0"),
    ("factor-negative", {"rope_type": "dynamic", "factor": -1.0, "max_position_embeddings": 8}, "'factor'"),
    ("factor-nan", {"rope_type": "linear", "factor": math.nan}, "'factor'"),
    ("factor-bool", {"rope_type": "linear", "factor": True}, "'factor'"),
    ("factor-string", {"rope_type": "linear", "factor": "2"}, "'factor'"),
    ("dynamic-no-length", {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings"),
    ("yarn-no-length", {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
    ("yarn-no-factor", {**scalings(8)["yarn"], "factor": None}, "'factor'"),
    ("yarn-betas", {**scalings(8)["yarn"], "beta_fast": 1, "beta_slow": 32}, "beta_fast.*beta_slow"),
    ("yarn-beta-negative", {**scalings(8)["yarn"], "beta_slow": -1}, "beta_slow"),
    ("yarn-attention-0", {**scalings(8)["yarn"], "attention_factor": 0}, "attention_factor"),
    ("yarn-theta-1", {**scalings(8)["yarn"], "rope_theta": 1.0}, "theta"),
    ("llama3-order", {**scalings(8)["llama3"], "high_freq_factor": 0.5}, "high_freq_factor.*low_freq_factor"),
    ("llama3-low-0", {**scalings(8)["llama3"], "low_freq_factor": 0}, "low_freq_factor"),
    ("llama3-missing", {**scalings(8)["llama3"], "high_freq_factor": None}, "high_freq_factor"),
    ("longrope-missing", {**scalings(8)["longrope"], "long_factor": None}, "long_factor"),
    ("longrope-short-list", {**scalings(8)["longrope"], "long_factor": [1.0] * 3}, "long_factor.*4.*3"),
    ("longrope-zero", {**scalings(8)["longrope"], "short_factor": [1.0, 0, 1, 1]}, r"short_factor'\]\[1\]"),
    ("longrope-length-1", {**scalings(8)["longrope-factor"], "original_max_position_embeddings": 1}, "original_max"),
    ("longrope-mscale", {**scalings(8)["longrope"], "attention_factor": None, "long_mscale": 1.2}, "long_mscale"),
    ("proportional-part", {"rope_type": "proportional", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("alpha-negative", {"rope_type": "dynamic", "alpha": -2.0}, "alpha"),
    ("theta-0", {"rope_theta": 0}, "rope_theta"),
    ("theta-huge", {"rope_theta": 1e60}, "rope_theta"),
    (
        "per-layer-type",
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {}},
        "full_attention, sliding",
    ),
]


@pytest.mark.parametrize(("scaling", "message"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_bad_dicts_are_refused_by_field(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precompute_freqs_cis(8, 300, scaling=scaling)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7, "end": 4}, "dim must be even"),
        ({"dim": 0, "end": 4}, "dim"),
        ({"dim": 8.0, "end": 4}, "dim"),
        ({"dim": 8, "end": -1}, "end"),
        ({"dim": 8, "end": 2.5}, "end"),
        ({"dim": 2, "end": 2**24 + 2}, "exact=True"),
        ({"dim": 8, "end": 4, "theta": -1.0}, "theta"),
        ({"dim": 8, "end": 4, "theta": math.inf}, "theta"),
        ({"dim": 64, "end": 10**6, "theta": 1e-29, "seq_len": "8"}, "seq_len"),
        ({"dim": 8, "end": 4, "theta": 1e4, "scaling": {"rope_theta": 5e5}}, "theta.*rope_theta"),
        ({"dim": 8, "end": 4, "scaling": ["linear"]}, "scaling"),
        ({"dim": 2, "end": 99, "scaling": {"rope_type": "ntk_alpha", "alpha": 9.0}}, "dim = 2"),
        ({"dim": 2, "end": 99, "scaling": {**scalings(2)["dynamic"], "max_position_embeddings": 8}}, "dim = 2"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precompute_freqs_cis(**arguments)


KEYS = [
    *("factor", "alpha", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
]
numbers = st.one_of(st.none(), st.sampled_from([0, 1, 1.0, 0.5, 2, 1e-3, 1e6, -1, math.inf]), st.floats(1e-6, 1e6))


@given(
    dim=st.sampled_from([2, 4, 6, 16]),
    theta=st.sampled_from([1e-9, 0.5, 1.0, 1.0000001, 2.0, 1e4, 1e25]),
    rope_type=st.sampled_from(
        ["default", "linear", "dynamic", "ntk_alpha", "yarn", "llama3", "longrope", "proportional"]
    ),
    keys=st.fixed_dictionaries(dict.fromkeys(KEYS, numbers)),
    original=st.sampled_from([1, 2, 7, 8, 4096]),
    truncate=st.sampled_from([None, False, True]),
    rows=st.sampled_from([1, 9, 5000]),
    exact=st.booleans(),
)
def test_never_a_nan(
    dim: int,
    theta: float,
    rope_type: str,
    keys: dict[str, Any],
    original: int,
    truncate: bool | None,
    rows: int,
    exact: bool,
) -> None:
    lists = {"short_factor": spread(dim // 2, 0.3), "long_factor": spread(dim // 2, 9.0)}
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": 8}
    scaling = {"rope_type": rope_type, "truncate": truncate, **lists, **lengths, **keys}
    try:
        table = precompute_freqs_cis(dim, rows, theta, scaling=scaling, exact=exact)
    except ValueError as error:
        assert any(word in str(error) for word in ("scaling[", "theta", "dim")), error
    else:
        assert torch.view_as_real(table).isfinite().all()
        assert table.shape == (rows, dim // 2)
