"""torch.export: strict and not, dynamic batch and sequence, decomposed, saved, and run in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from cases import BF16, random_table
from harness import assert_same, op
from rope_ext import RotaryEmbedding, reference

ROWS, HEAD_DIM = 40, 16
Pair = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Rotates q and k as slices of one fresh buffer, which is the hard case for an operator that writes in place."""

    def __init__(self, rotate: Callable, in_place: bool = False) -> None:
        super().__init__()
        self.rotate, self.in_place = rotate, in_place

    def forward(self, qkv: Tensor, *rest: Tensor) -> Pair:
        q, k, _ = (qkv * 2).split((4, 2, 1), 2)
        out = self.rotate(q, k, *rest)
        return (q * 1, k * 1) if self.in_place else out


@dataclass(frozen=True)
class Form:
    model: Callable[[], Model]
    expected: Callable[..., Pair]
    rest: Callable[[int, int], tuple[Tensor, ...]]  # what goes with qkv, for a batch and a number of tokens
    dynamic: tuple[dict[int, str], ...]  # its dynamic dimensions

    def inputs(self, batch: int, seqlen: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, seqlen, 7, HEAD_DIM).to(BF16), *self.rest(batch, seqlen)

    def shapes(self) -> tuple:
        dims = {"batch": Dim("batch"), "seqlen": Dim("seqlen", max=ROWS)}
        first, *rest = [
            {i: dims[name] for i, name in each.items()} for each in ({0: "batch", 1: "seqlen"}, *self.dynamic)
        ]
        return (first, tuple(rest)) if rest else (first,)

    def want(self, inputs: tuple[Tensor, ...]) -> Pair:
        return self.expected(*(inputs[0] * 2).split((4, 2, 1), 2)[:2], *inputs[1:])


def rows(batch: int, seqlen: int) -> tuple[Tensor]:
    return (random_table((seqlen, HEAD_DIM // 2)).contiguous(),)


def rows_by_sample(batch: int, seqlen: int) -> Pair:
    table = random_table((batch, seqlen, HEAD_DIM // 2)).contiguous()
    return table.real.clone(), table.imag.clone()


def ids(batch: int, seqlen: int) -> Pair:
    return random_table((ROWS, HEAD_DIM // 2)).contiguous(), torch.randint(ROWS, (batch, seqlen))


def by_module(xq: Tensor, xk: Tensor, positions: Tensor | None = None) -> Pair:
    table = reference.precompute_freqs_cis(HEAD_DIM, ROWS)
    if positions is None:
        return reference.apply(xq, xk, table[: xq.shape[1]])
    return reference.apply(xq, xk, table, positions, False)


TOKENS, SAMPLES = {0: "seqlen"}, {0: "batch", 1: "seqlen"}
FORMS = {
    "rows": Form(lambda: Model(op("apply")), reference.apply, rows, (TOKENS,)),
    "positions": Form(lambda: Model(op("apply")), reference.apply, ids, ({}, SAMPLES)),
    "cos_sin": Form(lambda: Model(op("apply_cos_sin")), reference.apply_cos_sin, rows_by_sample, (SAMPLES, SAMPLES)),
    "in-place": Form(lambda: Model(op("apply_"), in_place=True), reference.apply, rows, (TOKENS,)),
    "in-place-cos_sin": Form(
        lambda: Model(op("apply_cos_sin_"), in_place=True), reference.apply_cos_sin, rows_by_sample, (SAMPLES, SAMPLES)
    ),
    "module": Form(lambda: Model(RotaryEmbedding(HEAD_DIM, ROWS)), by_module, lambda *shape: (), ()),
    "module-positions": Form(
        lambda: Model(RotaryEmbedding(HEAD_DIM, ROWS, interleaved=False)),
        by_module,
        lambda *shape: ids(*shape)[1:],
        (SAMPLES,),
    ),
}
each_form = pytest.mark.parametrize("form", FORMS)


@cache
def exported(form: str, strict: bool) -> ExportedProgram:
    return export(FORMS[form].model(), FORMS[form].inputs(2, 7), dynamic_shapes=FORMS[form].shapes(), strict=strict)


@each_form
@pytest.mark.parametrize("strict", (True, False), ids=("strict", "non-strict"))
def test_one_program_serves_every_size(form: str, strict: bool) -> None:
    program = exported(form, strict)
    assert any(str(node.target).startswith("rope.") for node in program.graph.nodes)
    for each in (program, program.run_decompositions()):
        run = each.module()
        for shape in ((3, 9), (1, ROWS), (5, 2)):
            inputs = FORMS[form].inputs(*shape)
            for out, want in zip(run(*inputs), FORMS[form].want(inputs), strict=True):
                assert_same(out, want)


@pytest.mark.parametrize("form", ("positions", "in-place", "module"))
@pytest.mark.skipif(not hasattr(torch.export, "draft_export"), reason="torch 2.6 has no draft_export")
def test_draft_export_has_nothing_to_report(form: str) -> None:
    """No form of halves without positions: draft_export of torch 2.13 takes an optional tensor that is None, where an
    option follows it, for one that was written."""
    model, inputs, shapes = FORMS[form].model(), FORMS[form].inputs(2, 7), FORMS[form].shapes()
    program = torch.export.draft_export(model, inputs, dynamic_shapes=shapes)
    assert program._report.successful(), str(program._report)


LOAD_AND_RUN = """
import sys, torch
import rope_ext
for path in sys.argv[1:]:
    run = torch.export.load(path + ".pt2").module()
    for inputs, expected in torch.load(path + ".inputs"):
        assert all(map(torch.equal, run(*inputs), expected)), path
print("equal", len(sys.argv) - 1)
"""


def test_saved_programs_run_in_a_new_process(tmp_path: Path) -> None:
    for name, form in FORMS.items():
        torch.export.save(exported(name, strict=False), tmp_path / f"{name}.pt2")
        calls = [form.inputs(*shape) for shape in ((3, 9), (1, ROWS))]
        torch.save([(inputs, form.want(inputs)) for inputs in calls], tmp_path / f"{name}.inputs")
    command = [sys.executable, "-c", LOAD_AND_RUN, *(str(tmp_path / name) for name in FORMS)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.stdout == f"equal {len(FORMS)}\n", result.stderr
