"""SmolLM2-135M-Instruct under tensor parallelism: every process computes some of the heads, and the text is the same.

    python benchmarks/tensor_parallel.py [--ranks 2] [--prompt TEXT] [--tokens 64]

Greedy, float32, on the CPU over gloo. The model has 9 query heads and 3 key heads: 3 ranks divide both, 2 ranks take 5
and 4 of the query heads and all of the key heads. Exit status: 0 when every rank generates the tokens of one process,
1 when not, 2 when something is absent.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Run as a script, only this folder is on the path. Appended, so that an installed rope_ext goes before the source tree.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import rope_ext
from benchmarks.llama import Attention, ModelArgs, Transformer, generate


class ByHeads(ParallelStyle):
    """Attention of which every rank computes some of the query heads; ColwiseParallel could cut through a head.

    The key and value heads are cut too where the ranks divide them. Elsewhere every rank has them all, and q is sharded
    beside a k that is whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Attention)
        attention, mesh = module, device_mesh
        n_heads, n_kv_heads, head_dim = attention.n_heads, attention.n_kv_heads, attention.head_dim
        kv_placement: Placement = Replicate() if n_kv_heads % mesh.size() else Shard(2)

        def cut(x: Tensor, dim: int, placement: Placement) -> Tensor:
            """This rank's part; it has the whole, so nothing is sent."""
            part = Shard(dim) if placement.is_shard() else placement
            return distribute_tensor(x, mesh, [part], src_data_rank=None).to_local()

        for linear, heads, dim, placement in (
            (attention.wq, n_heads, 0, Shard(2)),
            (attention.wk, n_kv_heads, 0, kv_placement),
            (attention.wv, n_kv_heads, 0, kv_placement),
            (attention.wo, n_heads, 1, Shard(2)),
        ):
            by_head = linear.weight.detach().unflatten(dim, (heads, head_dim))
            linear.weight = nn.Parameter(cut(by_head, dim, placement).flatten(dim, dim + 1), requires_grad=False)
        attention.n_kv_heads = attention.wk.weight.shape[0] // head_dim  # of the cache
        kv_heads = cut(torch.arange(n_kv_heads), 0, kv_placement)
        kv_head_of = cut(torch.arange(n_heads) * n_kv_heads // n_heads, 0, Shard(2)) - kv_heads[0]

        def forward(x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
            bsz, seqlen, _ = x.shape

            def project(linear: nn.Module, heads: int, placement: Placement) -> DTensor:
                part = linear(x).unflatten(-1, (-1, head_dim))
                shape = torch.Size((bsz, seqlen, heads, head_dim))
                stride = (seqlen * heads * head_dim, heads * head_dim, head_dim, 1)
                return DTensor.from_local(part, mesh, [placement], shape=shape, stride=stride)

            xq = project(attention.wq, n_heads, Shard(2))
            xk = project(attention.wk, n_kv_heads, kv_placement)
            rows = DTensor.from_local(freqs_cis, mesh, [Replicate()])
            xq, xk = attention.apply_rotary_emb(xq, xk, rows)

            end = start_pos + seqlen
            attention.cache_k[:bsz, start_pos:end] = xk.to_local()
            attention.cache_v[:bsz, start_pos:end] = attention.wv(x).unflatten(-1, (-1, head_dim))
            keys, values = (cache[:bsz, :end, kv_head_of] for cache in (attention.cache_k, attention.cache_v))
            q, keys, values = (t.transpose(1, 2) for t in (xq.to_local(), keys, values))
            output = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            part = attention.wo(output.transpose(1, 2).flatten(2))
            return DTensor.from_local(part, mesh, [Partial()]).full_tensor()

        attention.forward = forward
        return attention


def build(args: ModelArgs, weights: dict[str, Tensor], freqs_cis: Tensor, mesh: DeviceMesh | None) -> Transformer:
    """The model with room in its cache for every row of ``freqs_cis``: whole, or this rank's part of it."""
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = Transformer(args, torch.ops.rope.apply, freqs_cis)
    model.load_state_dict(weights, assign=True)
    if mesh is not None:
        plan = {
            "layers.*.attention": ByHeads(),
            "layers.*.feed_forward.w1": ColwiseParallel(),
            "layers.*.feed_forward.w3": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(model, mesh, plan)
    model.setup_caches(max_batch_size=1, max_seq_len=freqs_cis.shape[0])
    return model


def run(rank: int, ranks: int, prompt: list[int], tokens: int, folder: str) -> None:
    """One rank, or for rank -1 one process without any; leaves its tokens in the folder."""
    from benchmarks.smollm2 import SmolLM2, find_weights

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    mesh = None
    if rank >= 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
    checkpoint = SmolLM2(find_weights())
    rows = len(prompt) + tokens
    freqs_cis = rope_ext.precompute_freqs_cis(checkpoint.args.head_dim, rows, checkpoint.args.rope_theta)
    model = build(checkpoint.args, checkpoint.load_weights(torch.float32), freqs_cis, mesh)
    torch.save([token for token, _ in generate(model, prompt, tokens)], f"{folder}/{rank}")
    if rank >= 0:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--prompt", default="Write a short story about a lighthouse keeper.")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default 64)")
    args = parser.parse_args(argv)
    try:
        from benchmarks.smollm2 import SmolLM2, find_weights

        checkpoint = SmolLM2(find_weights())
    except (ImportError, FileNotFoundError) as error:
        print(f"tensor_parallel: {error}\nIt needs what demo.py needs, which says how to get it", file=sys.stderr)
        return 2

    prompt = checkpoint.chat_tokens(args.prompt)
    with tempfile.TemporaryDirectory() as folder:
        run(-1, 1, prompt, args.tokens, folder)
        os.environ["TQDM_DISABLE"] = "1"  # one progress bar was enough
        mp.spawn(run, (args.ranks, prompt, args.tokens, folder), nprocs=args.ranks)
        expected, *found = (torch.load(f"{folder}/{rank}") for rank in range(-1, args.ranks))
    print(f"> {args.prompt}\n{checkpoint.tokenizer.decode(found[0])}\n")
    equal = all(tokens == expected for tokens in found)
    print(f"{args.ranks} ranks: {args.tokens} tokens {'equal' if equal else 'DIFFER from'} those of one process")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
