"""``RotaryEmbedding``: a rotary embedding as a module that owns no tensor, so that nothing can corrupt it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext.tables.axes import cos_sin_at
from rope_ext.tables.cache import SharedTables
from rope_ext.tables.config import head_dim, rope_arguments
from rope_ext.tables.params import integer


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, for every kind of table in ``rope_ext.tables``.

    **What it owns.** Hyperparameters only. A table is a pure function of them, of the device and of its number of rows,
    so the module has no parameter and no buffer: ``.to(bfloat16)``, ``.half()``, ``to("meta")`` and ``to_empty()``,
    ``state_dict`` loading, autocast, ``set_default_dtype`` and ``set_default_device`` have nothing to get at. Tables
    are made when first needed on a device, away from every mode of the calling thread, and are shared by all modules
    with the same hyperparameters (the layers of a model, copies, unpickled ones); they die with the last such module.

    **Growth.** A table has ``end`` rows. A call that needs more (``start + S``, or ``seq_len``) uses a second table of
    2, 4, 8 ... times ``end`` rows. A table never moves, changes or shrinks while a module lives, and its rows have the
    same bits in every length, so a captured CUDA graph or a compiled graph stays right after any growth. Values of
    ``positions`` never grow a table, since reading them would make the host wait for the device: ids must be below
    ``end`` or ``seq_len``, and the operator refuses others. During CUDA graph capture no table can be made: call the
    module once before (any warm-up does). ``torch.compile`` and ``torch.export`` take the table as a constant; each
    doubling recompiles once.

    **Methods that depend on the length** (``dynamic``, ``longrope``) scale each sequence by its own length, the largest
    of its ``positions`` plus one, so that a row of a batch is what it would be alone. (transformers takes the largest
    of the batch, and for ``dynamic`` of earlier calls.) Pass ``seq_len`` where that is not the length meant: in a
    chunked prefill, or for packed tokens, which have no batch to tell sequences by.

    Args:
        dim: number of rotated features, even (for ``proportional`` the head dim).
        end: rows of the first table, at least 1.
        theta, scaling, exact: as for ``precompute_freqs_cis``.
        interleaved: pairs (0,1), (2,3) ... (Meta's checkpoints) or halves (0, R/2) ... (Hugging Face's).
        head_dim: set it where only the first ``dim`` of ``head_dim`` features rotate; None means all do.
        axis_map: for positions of several axes, one axis index per pair: see ``rope_ext.tables.axes``.

    Raises:
        ValueError: as ``precompute_freqs_cis``, at once rather than at the first call.
    """

    def __init__(
        self,
        dim: int,
        end: int = 2048,
        theta: float | None = None,
        *,
        scaling: Mapping[str, Any] | None = None,
        exact: bool = False,
        interleaved: bool = True,
        head_dim: int | None = None,
        axis_map: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.end = dim, integer("end", end, least=1)
        self.interleaved = bool(interleaved)
        if head_dim is not None and integer("head_dim", head_dim, least=2) < dim:
            raise ValueError(f"head_dim = {head_dim} is smaller than dim = {dim}")
        self.rotary_dim = dim if head_dim is not None and head_dim != dim else None
        self._tables = SharedTables.of(dim, theta, deepcopy(scaling), bool(exact), axis_map and tuple(axis_map))

    @classmethod
    def from_config(cls, config: Any, *, layer_type: str | None = None, **options: Any) -> RotaryEmbedding:
        """The module of a transformers model: ``config`` and ``layer_type`` as for ``tables.from_config``.

        ``options`` are those of the constructor; ``interleaved`` defaults to False, Hugging Face's usual layout (its
        GLM, Cohere, DeepSeek and Llama 4 models are interleaved), ``end`` to ``max_position_embeddings``.
        """
        arguments = rope_arguments(config, layer_type)
        arguments["end"] = arguments["scaling"].get("max_position_embeddings", 2048)
        arguments["head_dim"] = head_dim(config, layer_type)
        return cls(**{"interleaved": False, **arguments, **options})

    def forward(
        self,
        xq: Tensor,
        xk: Tensor,
        positions: Tensor | None = None,
        *,
        start: int = 0,
        seq_len: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotated copies of ``xq`` and ``xk``.

        Args:
            xq, xk: ``(B, S, H, D)`` or packed ``(T, H, D)``, as for ``torch.ops.rope.apply``.
            positions: int32 or int64 ids: ``(S,)``, ``(B, S)``, ``(1, S)`` or packed ``(T,)``; with an ``axis_map``
                also ``(axes, B, S)`` or packed ``(axes, T)``. None: ``start, start + 1, ...``.
            start: the position of the first token, where ``positions`` is None.
            seq_len: the length of the sequences, for the methods that depend on it and to say how many rows
                ``positions`` need: one number, or a tensor ``(B,)``, or one per token, ``(T,)`` or ``(B, S)``.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as ``torch.ops.rope.apply``.
        """
        if positions is not None and start != 0:
            raise ValueError(f"give positions or start, not both (start = {start})")
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        tokens = xq.shape[-3] if xq.dim() > 2 else 0  # of a wrong rank the operator says what is wrong
        length = seq_len if seq_len is not None or positions is not None else start + tokens
        key = self._tables.length_key(length)
        if key is None:
            ids = torch.arange(start, start + tokens, device=xq.device) if positions is None else positions
            cos, sin = self.cos_sin(ids, packed=xq.dim() == 3, seq_len=length)
            return torch.ops.rope.apply_cos_sin.default(  # type: ignore[no-any-return]
                xq, xk, cos, sin, None, self.interleaved, self.rotary_dim
            )

        needed = start + tokens if positions is None else 0 if isinstance(length, Tensor) else length or 0
        rows = self.end
        while rows < needed:
            rows *= 2
        table = self._tables.get(xq.device, "rows", rows, key)
        if positions is None:
            table = table.narrow(0, start, tokens)
        return torch.ops.rope.apply.default(  # type: ignore[no-any-return]
            xq, xk, torch.view_as_complex(table), positions, self.interleaved, self.rotary_dim
        )

    def cos_sin(
        self, positions: Tensor, *, packed: bool = False, seq_len: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What ``forward`` rotates by where no table of rows can exist: per-sequence lengths, several axes.

        Worth calling once per step, for ``torch.ops.rope.apply_cos_sin`` in every layer. Arguments as for ``forward``.

        Returns:
            cos and sin, float32, ``(S, R/2)``, ``(B, S, R/2)`` or packed ``(T, R/2)``.
        """
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"positions must be int32 or int64, got {positions.dtype}")
        tables, device = self._tables, positions.device
        token_dims = 1 if packed else 2
        axes = tables.axes > 0 and positions.dim() > token_dims
        if axes and positions.shape[0] < tables.axes:
            raise ValueError(f"axis_map names {tables.axes} axes, positions {tuple(positions.shape)} have fewer")

        if seq_len is None and tables.depends_on_length:
            if packed:
                raise ValueError(
                    f"rope_type {tables.rope_type!r} scales by the length of each sequence, which packed positions "
                    f"do not tell: pass seq_len, one number per token"
                )
            furthest = positions.amax(0) if axes else positions
            seq_len = furthest.amax(-1) + 1 if positions.shape[-1] else 0  # no token, no length
        if isinstance(seq_len, Tensor) and not packed and seq_len.dim() == 1:
            seq_len = seq_len.unsqueeze(-1)  # one per sequence, whatever the token
        inv_freq = tables.inv_freq(seq_len, device)

        axis_map = None
        if tables.axes:
            axis_map = tables.get(device, "axis_map")
            if not axes:
                positions = positions.expand(tables.axes, *positions.shape)  # text: the same id on every axis
        return cos_sin_at(positions, inv_freq, axis_map=axis_map, attention_factor=tables.magnitude)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Older checkpoints stored what other rotary modules kept in buffers. It is derived, so it is not read.
        for name in ("inv_freq", "freqs_cis", "cos_cached", "sin_cached"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        tables = self._tables
        return (
            f"dim={self.dim}, end={self.end}, theta={tables.theta}, rope_type={tables.rope_type!r}, "
            f"exact={tables.exact}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
        )
