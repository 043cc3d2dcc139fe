"""`rope_ext.integrations.transformers`: modules written otherwise than those of transformers, copies and threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext.integrations.transformers import kernel_mapping, patch, unpatch
from rotary_functions import B, D, H, K, S, count, pairs_by_halves, right, tables


def helper(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No rotation, but one in it."""
    return right(x, x, cos, sin)[0] + x


def deeper(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    return sum((lambda: (helper(x, *table), x))())


class Indirect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def rotated(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return deeper(x, table)

    @torch.no_grad()
    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return self.rotated(x, table) + pairs_by_halves(x, x, *table)[1]


class Child(Indirect):
    def rotated(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return super().rotated(x, table)


def test_functions_in_functions() -> None:
    module, x, table = Indirect(), torch.randn(B, H, S, D), tables(D, "halves", torch.float32)
    expected = module(x, table)
    patch(module)
    reason = "it computes no rotation that the operator has"
    assert module.rope_ext_report == {
        "patched": ["Indirect: right"],
        "skipped": [("Indirect: pairs_by_halves", reason)],
    }
    result, calls = count(lambda: module(x, table))
    assert calls == 1 and module.calls == 2 and torch.equal(result, expected)


def replica(module: nn.Module) -> nn.Module:
    """As nn.DataParallel makes one for each GPU."""
    return module._replicate_for_data_parallel()


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, replica, pickled], ids=lambda f: f.__name__)
def test_copies_run_methods_of_their_own(copied: Callable[[nn.Module], Any]) -> None:
    module, x, table = Indirect(), torch.randn(B, H, S, D), tables(D, "halves", torch.float32)
    expected = module(x, table)
    twin = copied(patch(module))
    assert isinstance(twin, Indirect) and repr(twin) == "Indirect()"
    result, calls = count(lambda: twin(x, table))
    assert calls == 1 and torch.equal(result, expected)
    assert (twin.calls, module.calls) == (2, 1)
    assert type(unpatch(twin)) is Indirect and count(lambda: module(x, table))[1] == 1


def test_unpatch_refuses_a_class_derived_since() -> None:
    """As FSDP's fully_shard and torch's parametrizations do."""
    module = patch(Indirect())
    module.__class__ = type("Derived", (type(module),), {})
    with pytest.raises(RuntimeError, match="cannot unpatch the model: its class, Derived"):
        unpatch(module)
    assert patch(module).rope_ext_report["patched"] == ["Derived: right"]


def test_threads_that_patch_at_the_same_moment() -> None:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return right(q, k, cos, sin)

    class Fresh(nn.Module):
        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
            return rotary(*args)

    start = threading.Barrier(4)

    def patched(module: nn.Module) -> nn.Module:
        start.wait()
        return patch(module)

    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(patched, (Fresh() for _ in range(4))))
    q, k, table = torch.randn(B, H, S, D), torch.randn(B, K, S, D), tables(D, "halves", torch.float32)
    for module in modules:
        assert module.rope_ext_report == {"patched": ["Fresh: rotary"], "skipped": []}
        assert count(lambda module=module: module(q, k, *table))[1] == 1


def rotates(x: Tensor, table: tuple[Tensor, Tensor], more: int) -> Tensor:
    x = right(x, x, *table)[0]
    return calls_back(x, table, more - 1) if more else x


def calls_back(x: Tensor, table: tuple[Tensor, Tensor], more: int) -> Tensor:
    return rotates(x, table, more)


class Outer(nn.Module):
    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return rotates(x, table, 2)


class Inner(nn.Module):
    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return calls_back(x, table, 2)


def test_functions_that_call_each_other_in_a_circle() -> None:
    x, table = torch.randn(B, H, S, D), tables(D, "halves", torch.float32)
    for module in (Outer(), Inner()):
        expected = module(x, table)
        result, calls = count(lambda module=module: patch(module)(x, table))
        assert calls == 3 and torch.equal(result, expected)


def test_a_method_that_rotates() -> None:
    """The speech models' form: heads merged, cos and sin in one tensor."""
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as modeling

    config = modeling.Wav2Vec2ConformerConfig(
        hidden_size=H * D, num_attention_heads=H, position_embeddings_type="rotary"
    )
    module, x = modeling.Wav2Vec2ConformerSelfAttention(config).eval(), torch.randn(B, S, H * D)
    table = modeling.Wav2Vec2ConformerRotaryPositionalEmbedding(config)(x)
    expected = module(x, relative_position_embeddings=table)[0]
    assert patch(module).rope_ext_report["patched"] == ["Wav2Vec2ConformerSelfAttention: _apply_rotary_embedding"]
    result, calls = count(lambda: module(x, relative_position_embeddings=table)[0])
    assert calls == 1 and torch.equal(result, expected)
    assert "_apply_rotary_embedding" not in vars(unpatch(module))


class Static(nn.Module):
    @staticmethod
    def rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return right(x, x, *table)[0]


def test_static_methods_are_mentioned() -> None:
    report = patch(Static()).rope_ext_report
    assert report == {"patched": [], "skipped": [("Static: right", "it is called in a static method")]}


def kernelised(function: Callable[..., Any]) -> nn.Module:
    """What the kernels package makes of a function that it may replace."""

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Func()


right_as_a_module = kernelised(right)


class WithKernels(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return right_as_a_module(q, k, cos, sin)


@pytest.mark.parametrize("road", ["patch", "mapping"])
def test_functions_that_the_kernels_package_has_made_into_modules(road: str) -> None:
    module = WithKernels()
    q, k, table = torch.randn(B, H, S, D), torch.randn(B, K, S, D), tables(D, "halves", torch.float32)
    expected = module(q, k, *table)
    if road == "patch":
        assert patch(module).rope_ext_report["patched"] == ["WithKernels: right"]
    else:
        layer = kernel_mapping()["rotary_pos_emb"]["cpu"].load()
        right_as_a_module.forward = MethodType(layer.forward, right_as_a_module)
    results, calls = count(lambda: module(q, k, *table))
    vars(right_as_a_module).pop("forward", None)
    assert calls == 1 and all(map(torch.equal, results, expected))


def test_methods_of_a_base_class() -> None:
    module = patch(Child())
    assert ("Child: right", "it is reached through super()") in module.rope_ext_report["skipped"]
    assert not module.rope_ext_report["patched"]
