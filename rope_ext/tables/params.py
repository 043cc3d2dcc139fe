"""The hyperparameters of one table, read from a Hugging Face rope dict of either generation and checked.

A dict is what a ``config.json`` holds under ``rope_parameters`` (``{"rope_type": ..., "rope_theta": ...}``) or, in
older checkpoints, ``rope_scaling`` (``{"type": ...}``). Keys that a method does not use are ignored, as transformers
does, since real checkpoints carry many; ``None`` counts as absent. Whatever a method does use is checked where it is
used, so every rule stands next to its formula in ``scaling.py``. Errors are ``ValueError`` and name the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

DEFAULT_THETA = 10000.0

# Names that checkpoints use for a method which has another name here.
ALIASES = {
    "su": "longrope",  # the first Phi-3 checkpoints
    "mrope": "default",  # Qwen2-VL: plain frequencies, several position axes
    "deepseek_yarn": "yarn",
}


def integer(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``; a bool, a fraction or a string is an error that names ``name``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def positive(name: str, value: Any) -> float | int:
    """``value`` as an int or a float if it is a finite number above zero, else an error that names ``name``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)


class RopeParams:
    """One method with its numbers: ``dim``, ``theta``, ``rope_type`` and the checked values of the dict.

    Args:
        dim: number of rotated features, even (for ``proportional`` the head dim).
        theta: base of the frequencies; None takes the dict's ``rope_theta``, else 10000.
        scaling: a rope dict, or None for plain tables.
    """

    def __init__(self, dim: int, theta: float | None = None, scaling: Mapping[str, Any] | None = None) -> None:
        self.dim = integer("dim", dim, least=2)
        if self.dim % 2:
            raise ValueError(f"dim must be even, got {dim}: features rotate in pairs")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise ValueError(f"scaling must be a rope dict or None, got {type(scaling).__name__}")
        self.scaled = scaling is not None
        self._values = {key: value for key, value in (scaling or {}).items() if value is not None}
        nested = [key for key, value in self._values.items() if isinstance(value, Mapping)]
        if nested:
            raise ValueError(
                f"scaling holds one dict per layer type ({', '.join(nested)}): pass one of them, as in "
                f"scaling[{nested[0]!r}], or let rope_ext.tables.from_config build one table for each"
            )
        self.rope_type = self._read_rope_type()
        self.theta = self._read_theta(theta)

    def _read_rope_type(self) -> str:
        names = {}
        for key in ("rope_type", "type"):
            value = self._values.get(key)
            if isinstance(value, str):
                names[key] = ALIASES.get(value, value)
            elif value is not None:
                raise ValueError(f"scaling[{key!r}] must be a string, got {value!r}")
        if len(set(names.values())) > 1:
            raise ValueError(
                f"scaling['rope_type'] = {self._values['rope_type']!r} and scaling['type'] = {self._values['type']!r} "
                f"name two methods"
            )
        rope_type = next(iter(names.values()), "default")
        if rope_type == "dynamic" and self._values.get("alpha"):
            return "ntk_alpha"  # Hunyuan writes "dynamic", but a fixed alpha does not depend on the length
        if rope_type == "yarn" and "short_factor" in self._values:
            return "longrope"  # so do early Phi-3 checkpoints with "yarn"
        return rope_type

    def _read_theta(self, theta: float | None) -> float:
        inside = self._values.get("rope_theta")
        for name, value in (("theta", theta), ("scaling['rope_theta']", inside)):
            if value is not None and not 1e-30 < positive(name, value) < 1e30:  # the frequencies are float32
                raise ValueError(f"{name} must be between 1e-30 and 1e30, got {value!r}")
        if theta is not None and inside is not None and theta != inside:
            raise ValueError(f"theta = {theta!r} contradicts scaling['rope_theta'] = {inside!r}: give one, or the same")
        return float(theta if theta is not None else inside if inside is not None else DEFAULT_THETA)

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._values.get(key)

    def number(self, key: str, default: float | int | None = None) -> float | int:
        """A positive number; absent and without a default, the error says which method needs it."""
        value = self._values.get(key, default)
        if value is None:
            raise ValueError(f"scaling[{key!r}] is missing: rope_type {self.rope_type!r} needs it")
        return positive(f"scaling[{key!r}]", value)

    def optional(self, key: str) -> float | int | None:
        """A positive number, or None if absent."""
        return None if key not in self._values else self.number(key)

    def original_length(self, first: str = "original_max_position_embeddings") -> int:
        """L0, the length of pretraining: ``first`` of the two keys that may hold it, else the other one."""
        others = {"original_max_position_embeddings", "max_position_embeddings"} - {first}
        value = self.number(first, self.optional(others.pop()))
        if value != int(value):
            raise ValueError(f"scaling[{first!r}] must be a whole number, got {value!r}")
        return int(value)

    def numbers(self, key: str) -> list[float | int]:
        """One positive number for every pair."""
        values = self._values.get(key)
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ValueError(f"scaling[{key!r}] must be a list of numbers, got {values!r}")
        if len(values) != self.dim // 2:
            raise ValueError(f"scaling[{key!r}] must hold dim/2 = {self.dim // 2} numbers, got {len(values)}")
        return [positive(f"scaling[{key!r}][{i}]", value) for i, value in enumerate(values)]

    def identity(self) -> str:
        """The same string for the same hyperparameters, whatever object they came in."""
        values = {key: value for key, value in self._values.items() if key not in ("rope_theta", "rope_type", "type")}
        everything = {"dim": self.dim, "theta": self.theta, "rope_type": self.rope_type, "scaled": self.scaled}
        return json.dumps(everything | {"values": values}, sort_keys=True, default=str)
