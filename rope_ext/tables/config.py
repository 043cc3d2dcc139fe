"""Tables straight from a model's configuration: a transformers config object, or the dict of a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rope_ext.tables.build import precompute_freqs_cis
from rope_ext.tables.params import RopeParams


def from_config(
    config: Any,
    end: int | None = None,
    *,
    layer_type: str | None = None,
    exact: bool = False,
    seq_len: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor | dict[str, Tensor]:
    """The table of a model, with the bits of transformers.

    Args:
        config: a transformers config, or the dict of a ``config.json``; of a multimodal one the text part. A dict says
            only what it holds: defaults of its model's class, such as GPT-NeoX's ``rotary_pct``, are not known here.
        end: number of rows; None is the config's ``max_position_embeddings``.
        layer_type: for models whose layers differ (Gemma 3 and 4, ModernBERT), which of them.
        exact, seq_len, device: as for ``precompute_freqs_cis``.

    Returns:
        complex64, ``(end, dim/2)``; one such table for each layer type if the layers differ and ``layer_type`` is None.

    Raises:
        ValueError: as ``precompute_freqs_cis``; also a config that says nothing of its heads or layer types.
    """

    def table(name: str | None) -> Tensor:
        arguments = rope_arguments(config, name)
        rows = arguments["scaling"].get("max_position_embeddings") if end is None else end
        if rows is None:
            raise ValueError("end is needed: the config has no max_position_embeddings")
        return precompute_freqs_cis(**arguments, end=rows, exact=exact, seq_len=seq_len, device=device)

    names = layer_types(config)
    return {name: table(name) for name in names} if names and layer_type is None else table(layer_type)


def layer_types(config: Any) -> list[str]:
    """Names of the layer types that have tables of their own; empty where all layers share one."""
    return [key for key, value in _rope_dict(_reader(config)).items() if isinstance(value, Mapping)]


def rope_arguments(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """``dim`` and ``scaling`` for ``precompute_freqs_cis``, ``inv_freq`` and ``RotaryEmbedding``.

    The rules are those of transformers: ``dim`` is the head dim times ``partial_rotary_factor``, lengths that stand
    beside the rope dict (Phi-3's ``original_max_position_embeddings``) are moved into it.
    """
    read = _reader(config)
    scaling = _rope_dict(read)
    names = layer_types(config)
    if layer_type is not None and not names:
        raise ValueError(f"layer_type = {layer_type!r}, but all layers of this config share one table")
    if names:
        if layer_type not in names:
            raise ValueError(f"layer_type must be one of {', '.join(names)}, got {layer_type!r}")
        # transformers looks for yarn's truncate beside the layer types only; a config may have it in either place.
        beside = {"truncate": scaling["truncate"]} if "truncate" in scaling else {}
        scaling = {**beside, **scaling[layer_type]}
        read = _reader(_layer_config(config, layer_type))

    for key, others in {
        "rope_theta": ("rotary_emb_base", "default_theta"),
        "partial_rotary_factor": ("rotary_pct",),
        "max_position_embeddings": (),
    }.items():
        if scaling.get(key) is None and (value := read(key, *others)) is not None and not isinstance(value, Mapping):
            scaling[key] = value
    original = read("original_max_position_embeddings")
    if original is not None and not names:  # Phi-3: the one beside the dict is the right one
        scaling["original_max_position_embeddings"] = original

    dim = _head_dim(read)
    if RopeParams(2, None, scaling).rope_type != "proportional":
        partial = scaling.get("partial_rotary_factor")
        dim = int(dim * partial) if partial is not None else read("rotary_dim") or dim  # GPT-J says it in features
    return {"dim": dim, "scaling": scaling}


def head_dim(config: Any, layer_type: str | None = None) -> int:
    """Features of a head, of which the first ``rope_arguments(...)["dim"]`` rotate."""
    return _head_dim(_reader(config if layer_type is None else _layer_config(config, layer_type)))


def _head_dim(read: Callable[..., Any]) -> int:
    if (given := read("head_dim", "qk_rope_head_dim")) is not None:
        return int(given)
    width, heads = read("hidden_size", "embed_dim", "n_embd"), read("num_attention_heads", "num_heads", "n_head")
    if not width or not heads:
        raise ValueError("config has neither head_dim nor hidden_size and num_attention_heads")
    return int(width // heads)


def _text_part(config: Any) -> Any:
    """What describes the text model, where ``config`` is that of a multimodal one."""
    if not isinstance(config, Mapping):
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    own = config.get("rope_parameters") or config.get("rope_scaling")
    return config if own else {**config, **config.get("text_config", {})}


def _reader(config: Any) -> Callable[..., Any]:
    """``read(*names)``: the first of the named fields that the config has a value for, else None."""
    if isinstance(config, str):
        raise TypeError(f"config must be a transformers config or the dict of a config.json, got the string {config!r}")
    text = _text_part(config)

    def read(*names: str) -> Any:
        found = (text.get(name) if isinstance(text, Mapping) else getattr(text, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    return read


def _rope_dict(read: Callable[..., Any]) -> dict[str, Any]:
    """``rope_parameters``, else ``rope_scaling``, else nothing, as a new dict."""
    found = dict(read("rope_parameters") or read("rope_scaling") or {})
    local = read("rope_local_base_freq")
    if local is not None and not any(isinstance(value, Mapping) for value in found.values()):
        # Gemma 3 before rope_parameters: the scaling and rope_theta are the full layers', sliding ones are plain.
        full = {"rope_type": "default", "rope_theta": read("rope_theta"), **found}
        return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return found


def _layer_config(config: Any, layer_type: str) -> Any:
    """Gemma 4's layer types differ in their head dim too."""
    text = _text_part(config)
    if not isinstance(text, Mapping):
        try:
            return text.per_layer_config[layer_type]
        except (AttributeError, KeyError, TypeError, ValueError):  # only some classes have one, for some layer types
            return text
    if layer_type == "full_attention" and text.get("global_head_dim"):
        return {**text, "head_dim": text["global_head_dim"]}
    overrides = text.get("per_layer_config") or {}  # {"05": {"head_dim": 512}, ...} by index into layer_types
    return {**text, **next((o for i, o in overrides.items() if text["layer_types"][int(i)] == layer_type), {})}
