"""Four gloo ranks on one machine, and what is checked there: python tests/distributed_worker.py RESULTS.json

torch is loaded once and the ranks are forked from there, before it has computed anything.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import rope_ext
from benchmarks.llama import ModelArgs, Transformer, generate
from benchmarks.tensor_parallel import build
from cases import CASES, Case
from distributed_harness import RANKS, Silent, assert_part, errors_of_all_ranks, mesh, place, placements
from harness import assert_same, forms, op

CHECKS: dict[str, Callable[[], None]] = {}


def check(f: Callable[[], None]) -> Callable[[], None]:
    CHECKS[f.__name__] = f
    return f


@dataclass(frozen=True)
class Plan:
    name: str
    mesh: str
    q: str  # per dimension of the mesh: b, s or h is cut, r is whole
    k: str


PLANS = (
    Plan("heads", "2", "h", "h"),
    Plan("heads-of-q", "4", "h", "r"),
    Plan("heads-of-k", "2", "r", "h"),
    Plan("heads-twice", "2x2", "hh", "rr"),
    Plan("batch", "2", "b", "b"),
    Plan("tokens", "2", "s", "s"),
    Plan("tokens-of-4", "4", "s", "s"),
    Plan("batch-and-heads", "2x2", "bh", "bh"),
    Plan("tokens-and-heads-of-q", "2x2", "sh", "sr"),
    Plan("batch-and-tokens", "2x2", "bs", "bs"),
)


def fits(plan: Plan, case: Case) -> bool:
    """DTensor gathers a dimension that has fewer elements than there are ranks to share them."""
    size = dict(zip("dhsb", reversed(case.q), strict=False))
    ranks = 4 if plan.mesh == "4" else 2
    q = all(size.get(c, 0) >= ranks ** plan.q.count(c) for c in plan.q if c != "r")
    return q and ("h" not in plan.k or case.k_heads >= ranks)


def cases_of(plan: Plan) -> list[Case]:
    """On a grid every other one: DTensor weighs all combinations of placements, which takes the most time here."""
    found = [case for case in CASES if fits(plan, case)][:: 2 if "x" in plan.mesh else 1]
    assert len(found) > 1, plan
    return found


def in_parts(plan: Plan) -> None:
    """All operators and their gradients: the bits of one process, no communication, placements kept."""
    where = mesh(plan.mesh)
    for case in cases_of(plan):
        torch.manual_seed(zlib.crc32(case.name.encode()))
        xq, xk, table, positions, *options = case.make()
        dims = "bshd"[-xq.ndim :]
        how = [placements(cut, dims) for cut in (plan.q, plan.k)]
        cotangents = [torch.randn(x.shape).to(x.dtype) for x in (xq, xk)]
        rows = None
        if positions is not None:
            of = "bs"[-positions.ndim :]
            rows = place(positions, where, placements(plan.q, of, positions.shape))

        def leaves(x: Sequence[Tensor]) -> list[Tensor]:
            return [t.detach().requires_grad_() for t in x]

        for suffix, tables in forms(table):
            of = "pf" if positions is not None else "bsf"[-tables[0].ndim :]
            parts = [place(t, where, placements(plan.q, of, t.shape)) for t in tables]
            pair, single = ("apply", (xq, xk), how), ("rotate", (xk,), how[1:])
            for name, x, kinds in (pair,) if "x" in plan.mesh else (pair, single):
                whole, cut = leaves(x), leaves([place(t, where, p) for t, p in zip(x, kinds, strict=True)])
                gs = cotangents[-len(x) :]
                g_parts = [place(g, where, p) for g, p in zip(gs, kinds, strict=True)]
                expected = op(name + suffix)(*whole, *tables, positions, *options)
                with Silent():
                    outs = op(name + suffix)(*cut, *parts, rows, *options)
                    grads = torch.autograd.grad(outs, cut, g_parts[0] if len(x) == 1 else g_parts)
                    copies = [t.detach().clone() for t in cut]
                    op(f"{name}{suffix}_")(*copies, *parts, rows, *options)
                outs, expected = ((o,) if isinstance(o, Tensor) else o for o in (outs, expected))
                wanted = torch.autograd.grad(expected, whole, gs)
                for out, copy, grad, want, want_grad, p in zip(
                    outs, copies, grads, expected, wanted, kinds, strict=True
                ):
                    assert_part(out, want.detach(), p)
                    assert_part(copy, want.detach(), p)
                    assert_part(grad, want_grad, p)


for each in PLANS:
    CHECKS[f"bits_{each.name}"] = lambda plan=each: in_parts(plan)


@check
def zigzag_order_through_positions() -> None:
    """Rank r holds pieces r and 2n - 1 - r of the sequence, so that causal attention costs every rank the same."""
    where, rank = mesh("4"), dist.get_rank()
    xq, xk, table = torch.randn(2, 24, 6, 64), torch.randn(2, 24, 2, 64), rope_ext.precompute_freqs_cis(64, 40)
    pieces = torch.arange(24).chunk(2 * RANKS)
    mine = torch.cat([pieces[rank], pieces[2 * RANKS - 1 - rank]])
    q, k = (DTensor.from_local(x[:, mine], where, [Shard(1)]).requires_grad_() for x in (xq, xk))
    positions = DTensor.from_local(mine, where, [Shard(0)])
    with Silent():
        outs = op("apply")(q, k, place(table, where, [Replicate()]), positions)
        grads = torch.autograd.grad(outs, (q, k), [out.detach() for out in outs])
    for x, out, grad in zip((xq, xk), outs, grads, strict=True):
        want = op("rotate")(x, table[:24])
        assert_same(out.to_local(), want[:, mine])
        assert_same(grad.to_local(), op("rotate")(want, table[:24], None, True, None, True)[:, mine])


@check
def a_table_that_is_whole_is_sliced_where_it_lies() -> None:
    where = mesh("4")
    x, table = torch.randn(2, 9, 3, 8), torch.randn(9, 4, dtype=torch.complex64)
    per_sample = torch.randn(2, 9, 4, dtype=torch.complex64)
    for rows in (table, per_sample):
        part, all_rows = place(x, where, [Shard(1)]), place(rows, where, [Replicate()])
        with Silent():
            out = op("rotate")(part, all_rows)
            op("rotate_")(part, all_rows)
        for one in (out, part):
            assert_part(one, op("rotate")(x, rows), [Shard(1)])


@check
def partial_sums_stay_partial_sums() -> None:
    where, rank = mesh("4"), dist.get_rank()
    x, table = torch.randint(-8, 9, (RANKS, 2, 5, 3, 8)).float(), torch.ones(5, 4, dtype=torch.complex64) * 1j
    for how, whole in ((Partial(), x.sum(0)), (Partial("avg"), x.mean(0))):
        part = DTensor.from_local(x[rank], where, [how])
        with Silent():
            out = op("rotate")(part, place(table, where, [Replicate()]))
        assert out.placements == (how,)
        assert torch.equal(out.full_tensor(), op("rotate")(whole, table))  # small integers: no sum is rounded
    largest = DTensor.from_local(x[rank], where, [Partial("max")])  # not linear: reduced before it is rotated
    assert torch.equal(
        op("rotate")(largest, place(table, where, [Replicate()])).full_tensor(), op("rotate")(x.amax(0), table)
    )


@check
def gradients_of_the_table_are_partial_sums() -> None:
    where = mesh("2x2")
    for rows, shape in (("none", (6, 4)), ("ids", (7, 4)), ("ids-by-sample", (7, 4)), ("by-sample", (2, 6, 4))):
        ids = torch.randint(7, (2, 6) if rows == "ids-by-sample" else (6,)) if rows.startswith("ids") else None
        for cut, k_cut in (("bh", "br"), ("sh", "sh"), ("bs", "bs")):
            torch.manual_seed(5)
            xq, xk = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 2, 8)
            gs, table = (torch.randn_like(xq), torch.randn_like(xk)), torch.randn(shape, dtype=torch.complex64)
            q, k, g_q, g_k = (
                place(x, where, placements(c, "bshd"))
                for x, c in ((xq, cut), (xk, k_cut), (gs[0], cut), (gs[1], k_cut))
            )
            dims = "pf" if ids is not None else "bsf"[-table.ndim :]
            rows_cut = placements(cut, dims)
            part = place(table, where, rows_cut).requires_grad_()
            where_ids = None if ids is None else place(ids, where, placements(cut, "bs"[-ids.ndim :]))
            with Silent():
                outs = op("apply")(q, k, part, where_ids)
                (grad,) = torch.autograd.grad(outs, part, (g_q, g_k))
            for have, want in zip(grad.placements, rows_cut, strict=True):
                assert have == want or have.is_partial()
            wide = table.to(torch.complex128).requires_grad_()
            whole = op("apply")(xq.double(), xk.double(), wide, ids)
            (expected,) = torch.autograd.grad(whole, wide, [g.double() for g in gs])
            # 168 products at most and one rounding for each that is added, of sums that stay below 168 here
            error = torch.view_as_real(grad.full_tensor() - expected).abs().max()
            assert error < 168 * 168 * 2**-24, (rows, cut, error)


@check
def compiled() -> None:
    where = mesh("2x2")
    xq, xk, table = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 2, 8), torch.randn(6, 4, dtype=torch.complex64)
    q, k = (place(x, where, placements(c, "bshd")).requires_grad_() for x, c in ((xq, "bh"), (xk, "br")))
    part = place(table, where, placements("bh", "sf"))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def step(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        q, k = torch.ops.rope.apply(q, k, table)
        torch.ops.rope.apply_(q, k, table)
        return q, k

    expected = step(xq, xk, table)
    twice_back = [op("rotate")(x, table, None, True, None, True) for x in expected]
    twice_back = [op("rotate")(x, table, None, True, None, True) for x in twice_back]
    for backend in (aot_autograd(fw_compiler=keep, bw_compiler=keep), "inductor"):
        torch._dynamo.reset()
        outs = torch.compile(step, fullgraph=True, backend=backend)(q, k, part)
        grads = torch.autograd.grad(outs, (q, k), [out.detach() for out in outs])
        for out, grad, want, want_grad, cut in zip(outs, grads, expected, twice_back, ("bh", "br"), strict=True):
            assert_part(out.detach(), want, placements(cut, "bshd"))
            assert_part(grad, want_grad, placements(cut, "bshd"))
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) == 2 and any("rope" in name for name in called)
    assert not [name for name in called if "c10d" in name]


@check
def what_would_lose_a_write_is_refused() -> None:
    table = torch.randn(6, 4, dtype=torch.complex64)
    for shape, q_cut, k_cut in (("2", "s", "r"), ("2", "b", "s"), ("2", "d", "d"), ("2x2", "hh", "hr")):
        where = mesh(shape)
        xs = [place(torch.randn(2, 6, 4, 8), where, placements(c, "bshd")) for c in (q_cut, k_cut)]
        before = [x.to_local().clone() for x in xs]
        with pytest.raises(RuntimeError, match="in place, xq and xk must be sharded alike"):
            op("apply_")(*xs, place(table, where, placements("rr"[: where.ndim], "sf")))
        assert all(torch.equal(x.to_local(), old) for x, old in zip(xs, before, strict=True))
    for dim, shape in enumerate(((1, 6, 4, 8), (2, 1, 4, 8), (2, 6, 1, 8))):
        x = place(torch.randn(shape), mesh("2"), [Shard(dim)])
        rows = place(table[: shape[1]], mesh("2"), placements("s" if dim == 1 else "r", "sf"))
        with pytest.raises(RuntimeError, match="cannot be sharded over 2 ranks"):
            op("rotate_")(x, rows)


@check
def other_placements_are_redistributed() -> None:
    where = mesh("2")
    xq, xk, table = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 2, 8), torch.randn(6, 4, dtype=torch.complex64)
    for q_cut, k_cut, rows in (("d", "d", "r"), ("s", "h", "r"), ("b", "b", "s"), ("h", "h", "f"), ("r", "r", "s")):
        q, k = (place(x, where, placements(c, "bshd")) for x, c in ((xq, q_cut), (xk, k_cut)))
        outs = op("apply")(q, k, place(table, where, placements(rows, "sf")))
        for out, want in zip(outs, op("apply")(xq, xk, table), strict=True):
            assert_same(out.full_tensor(), want)


@check
def a_llama_by_heads_generates_the_same() -> None:
    for heads, kv_heads, shape in ((9, 3, "2"), (8, 2, "2"), (8, 2, "4")):  # k whole beside uneven q; both cut; k whole
        torch.manual_seed(0)
        args = ModelArgs(heads * 16, n_layers=2, n_heads=heads, n_kv_heads=kv_heads, hidden_dim=72, vocab_size=101)
        table = rope_ext.precompute_freqs_cis(args.head_dim, 24)
        weights = Transformer(args, op("apply"), table).state_dict()
        whole, cut = (build(args, weights, table, where) for where in (None, mesh(shape)))
        for (token, logits), (want, want_logits) in zip(
            generate(cut, [3, 1, 4, 1, 5], 19), generate(whole, [3, 1, 4, 1, 5], 19), strict=True
        ):
            assert token == want
            torch.testing.assert_close(logits, want_logits, rtol=0, atol=1e-5)  # wo and w2 are summed in another order


@check
def snippets_of_the_page() -> None:
    page = Path(__file__).parents[1] / "docs" / "distributed.md"
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(snippet, names)


def run(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # torch 2.13's takes the parts of an uneven sharding for one
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    verdicts = {}
    for name, f in CHECKS.items():
        torch.manual_seed(1234)
        try:
            f()
            error = ""
        except BaseException:
            error = traceback.format_exc()
        verdicts[name] = errors_of_all_ranks(error)
    if rank == 0:
        Path(results).write_text(json.dumps(verdicts))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            run, (os.path.join(folder, "store"), sys.argv[1]), nprocs=RANKS, start_method="fork", join=True
        )
