"""torchtune's rotary module, on the operator."""

from __future__ import annotations

from torch import Tensor, nn

from rope_ext.module import RotaryEmbedding


class RotaryPositionalEmbeddings(nn.Module):
    """In place of ``torchtune.modules.RotaryPositionalEmbeddings``: the same arguments, the same bits.

    torchtune keeps its table in a buffer that ``module.to(dtype)`` rounds; this has no tensor (see
    ``rope_ext.RotaryEmbedding``), so ``rope_init`` and ``reset_parameters`` have nothing to do and are left out. The
    table is computed on the CPU and copied, so that a GPU rotates by the same bits. A sequence longer than
    ``max_seq_len`` gets a longer table, where torchtune fails; a float64 x is rotated in float64, where torchtune
    rounds it to float32.

    Args:
        dim: features of a head, all of which rotate; pairs are neighbours.
        max_seq_len: rows of the table; positions in ``input_pos`` must be below it.
        base: of the frequencies.

    Source: ``torchtune/modules/position_embeddings.py`` in https://github.com/pytorch/torchtune
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10_000) -> None:
        super().__init__()
        self.dim, self.max_seq_len, self.base = dim, max_seq_len, base
        # the cos and sin of torchtune are those of a scaled table: Meta's polar differs in 4 % of last bits
        self.rotary = RotaryEmbedding(dim, max_seq_len, base, scaling={"rope_type": "default"})

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """A rotated copy of ``x``.

        Args:
            x: ``(B, S, H, dim)``, float16, bfloat16, float32 or float64.
            input_pos: int32 or int64 ids, ``(B, S)``, ``(1, S)`` or ``(S,)``; None: 0, 1, 2 ...

        Raises:
            ValueError, TypeError, IndexError: as ``torch.ops.rope.apply``.
        """
        if x.dim() != 4:
            raise ValueError(f"x must have shape (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
        rotated, _ = self.rotary(x, x[..., :0, :], input_pos)  # keys of no heads cost nothing
        return rotated  # type: ignore[no-any-return]
