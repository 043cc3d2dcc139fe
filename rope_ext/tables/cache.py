"""The tables of a process: made once for each set of hyperparameters and device, shared, and never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rope_ext.tables.build import precompute_freqs_cis
from rope_ext.tables.params import RopeParams, integer
from rope_ext.tables.scaling import dynamic_theta, frequencies, powers

# torch 2.6 only tells whether it compiles: a table is then a plain tensor to torch.compile too, which CUDA graphs copy.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class SharedTables:
    """Every constant made from one set of hyperparameters, by device: one object in a process for all its modules."""

    _alive: ClassVar[WeakValueDictionary[str, SharedTables]] = WeakValueDictionary()

    @classmethod
    def of(cls, *hyperparameters: Any) -> SharedTables:
        new = cls(*hyperparameters)
        return cls._alive.setdefault(f"{new.params.identity()} {new.exact} {new._hyperparameters[-1]}", new)

    def __init__(
        self,
        dim: int,
        theta: float | None,
        scaling: Mapping[str, Any] | None,
        exact: bool,
        axis_map: tuple[int, ...] | None,
    ) -> None:
        self._hyperparameters = (dim, theta, scaling, exact, axis_map)
        self._names: dict[tuple[Any, ...], str] = {}
        self.params = RopeParams(dim, theta, scaling)
        self.dim, self.theta, self.rope_type = dim, self.params.theta, self.params.rope_type
        self.exact, self.dtype = exact, torch.float64 if exact else torch.float32
        if axis_map is not None:
            if len(axis_map) != dim // 2:
                raise ValueError(
                    f"axis_map names {len(axis_map)} pairs for dim/2 = {dim // 2}: sections must sum to it"
                )
            for axis in axis_map:
                integer("axis_map", axis, least=0)
        self.axes = 0 if axis_map is None else max(axis_map) + 1
        self.magnitude = self._isolated(lambda: frequencies(self.params, self.dtype, None))[1]
        self.depends_on_length = self.rope_type in ("dynamic", "longrope")
        if self.rope_type == "longrope":
            self.original = self.params.original_length()
        if self.rope_type == "dynamic":
            self.original = self.params.original_length(first="max_position_embeddings")
            self.factor = self.params.number("factor")

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables:
        return self

    def __reduce__(self) -> tuple[Callable[..., SharedTables], tuple[Any, ...]]:
        return SharedTables.of, self._hyperparameters

    def length_key(self, length: int | Tensor | None) -> int | None:
        """A length that has the same table of rows as ``length``, or None where rows alone do not say the factor."""
        if self.axes:
            return None
        if not self.depends_on_length:
            return 0
        if length is None or isinstance(length, Tensor):
            return None
        if length <= self.original:
            return self.original
        return None if self.rope_type == "dynamic" else self.original + 1

    def inv_freq(self, length: int | Tensor | None, device: torch.device) -> Tensor:
        """Frequencies for lengths of any shape: ``(R/2,)`` or ``(*length.shape, R/2)``."""
        if not self.depends_on_length:
            return self.get(device, "inv_freq", 0)
        lengths = length if isinstance(length, Tensor) else torch.full((), length or 0, device=device)
        if self.rope_type == "longrope":
            beyond = self.get(device, "inv_freq", self.original + 1)
        else:
            grown = lengths.clamp(min=self.original)
            theta = dynamic_theta(self.theta, self.factor, self.original, self.dim, grown, self.dtype)
            beyond = 1.0 / powers(theta.unsqueeze(-1), self.dim, self.dtype, device)
        return torch.where((lengths > self.original).unsqueeze(-1), beyond, self.get(device, "inv_freq", self.original))

    def get(self, device: torch.device, kind: str, *key: int) -> Tensor:
        """The constant of this kind, made at its first use on a device."""
        name = self._ensure(device, kind, *key)
        if _is_exporting():
            return self._plain(name)  # type: ignore[no-any-return]
        constant: Tensor = getattr(self, name)
        return constant

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _ensure(self, device: torch.device, kind: str, *key: int) -> str:
        """Makes a constant if there is none and returns its attribute's name: run, not traced, by the compiler."""
        which = (device, kind, *key)
        name = self._names.get(which)
        if name is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"RotaryEmbedding needs a new table (rows {key[0] if key else 0}) on {device} during CUDA graph "
                    f"capture: call the module once before, with as long a sequence"
                )
            make = getattr(self, f"_make_{kind}")
            # A Parameter, though no module registers it: the compiler takes a parameter's sizes and address as fixed,
            # and would copy another tensor into its CUDA graphs at each replay.
            fresh = self._isolated(lambda: nn.Parameter(make(*key).to(device), requires_grad=False))
            name = f"{kind} {device} {key}"
            self.__dict__.setdefault(name, fresh)
            self._names[which] = name
        return name

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _plain(self, name: str) -> Tensor:
        """The constant as a tensor, not a Parameter: torch.export wants every parameter to belong to a module."""
        constant: Tensor = getattr(self, name)
        return constant.detach()

    def _make_rows(self, rows: int, length: int) -> Tensor:
        # Real pairs, because torch.compile handles slices of real tensors only.
        dim, theta, scaling, exact, _ = self._hyperparameters
        table = precompute_freqs_cis(dim, rows, theta, scaling=scaling, exact=exact, seq_len=length)
        return torch.view_as_real(table)

    def _make_inv_freq(self, length: int) -> Tensor:
        return frequencies(self.params, self.dtype, length)[0]

    def _make_axis_map(self) -> Tensor:
        return torch.tensor(self._hyperparameters[-1], device="cpu")

    @staticmethod
    def _isolated(make: Callable[[], Any]) -> Any:
        # A constant outlives the call that needs it first, so it must not be made as that call's fake tensor, functorch
        # wrapper or inference tensor. All such modes belong to a thread, and a new thread has none.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(make).result()
