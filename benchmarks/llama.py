"""A small LLaMA with Meta's names (llama/model.py of Llama 2), to run the rotary operator inside a real model.

The two things that make a rotary embedding come from outside: the function that rotates and the table it reads.
Everything else is the architecture of https://arxiv.org/abs/2302.13971 with the grouped-query attention of
https://arxiv.org/abs/2307.09288: RMSNorm, attention over a KV cache, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (xq, xk, freqs_cis) -> (xq, xk), as Meta's apply_rotary_emb.
RotaryFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ModelArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_seq_len: int = 2048

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    # Made by Transformer.setup_caches: (max_batch_size, max_seq_len, n_kv_heads, head_dim).
    cache_k: Tensor
    cache_v: Tensor

    def __init__(self, args: ModelArgs, apply_rotary_emb: RotaryFn) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.head_dim
        self.apply_rotary_emb = apply_rotary_emb
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = self.apply_rotary_emb(xq, xk, freqs_cis)

        end = start_pos + seqlen
        self.cache_k[:bsz, start_pos:end] = xk
        self.cache_v[:bsz, start_pos:end] = xv
        keys, values = self.cache_k[:bsz, :end], self.cache_v[:bsz, :end]

        xq, keys, values = (t.transpose(1, 2) for t in (xq, keys, values))  # (bsz, heads, tokens, head_dim)
        output = F.scaled_dot_product_attention(xq, keys, values, attn_mask=mask, enable_gqa=True)
        return self.wo(output.transpose(1, 2).reshape(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs, apply_rotary_emb: RotaryFn) -> None:
        super().__init__()
        self.attention = Attention(args, apply_rotary_emb)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Logits of the next token, from tokens and the KV cache of those before them.

    Args:
        args: the architecture.
        apply_rotary_emb: rotates ``xq (B, S, n_heads, head_dim)`` and ``xk (B, S, n_kv_heads, head_dim)`` by table
            rows ``(S, head_dim / 2)``.
        freqs_cis: the table, complex64 ``(rows, head_dim / 2)``, with a row for every position that will be used.

    Call ``setup_caches`` once the weights are in place and before the first ``forward``.
    """

    def __init__(self, args: ModelArgs, apply_rotary_emb: RotaryFn, freqs_cis: Tensor) -> None:
        super().__init__()
        self.args = args
        # Not a buffer: Module.to(dtype) would cast it to real numbers and drop the imaginary part.
        self.freqs_cis = freqs_cis
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args, apply_rotary_emb) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        super()._apply(fn, recurse)
        self.freqs_cis = self.freqs_cis.to(self.norm.weight.device)  # follows the weights to a device, not to a dtype
        return self

    def setup_caches(self, max_batch_size: int, max_seq_len: int) -> None:
        """Allocates empty KV caches with the dtype and device of the weights; they are no part of the state dict."""
        for module in self.modules():
            if isinstance(module, Attention):
                for name in ("cache_k", "cache_v"):
                    shape = (max_batch_size, max_seq_len, module.n_kv_heads, module.head_dim)
                    cache = torch.zeros(shape, dtype=module.wk.weight.dtype, device=module.wk.weight.device)
                    module.register_buffer(name, cache, persistent=False)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        """Maps token ids ``(B, S)``, of which the first stands at ``start_pos``, to float32 logits ``(B, vocab_size)``.

        The caches must hold the ``start_pos`` tokens before, and have room for S more.
        """
        seqlen = tokens.shape[1]
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = None  # one new token sees everything in the cache
        if seqlen > 1:
            mask = torch.ones(seqlen, start_pos + seqlen, dtype=torch.bool, device=tokens.device).tril(start_pos)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        return self.output(self.norm(h[:, -1])).float()


@torch.inference_mode()
def generate(model: Transformer, prompt: list[int], max_new_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Yields ``max_new_tokens`` greedy tokens after ``prompt``, each with its logits ``(vocab_size,)``.

    An end-of-text token does not end it: where an answer stops is for the caller to say.
    """
    device = model.norm.weight.device
    tokens, start_pos = torch.tensor([prompt], device=device), 0
    for _ in range(max_new_tokens):
        logits = model(tokens, start_pos)[0]
        token = logits.argmax()
        yield int(token), logits
        start_pos += tokens.shape[1]
        tokens = token.view(1, 1)
