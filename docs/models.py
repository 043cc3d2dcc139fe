"""Which table, which pairing, which call: a line for every family of models, and docs/models.md made of them.

    python docs/models.py    # writes docs/models.md

The lines are data. tests/test_model_table.py executes the code in each, next to transformers' own model of every type
that it names, so that none can say what is not so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WHOLE = "q, k = rope.apply(q, k, table, positions, {})"
PARTIAL = "q, k = rope.apply(q, k, table, positions, {}, rotary_dim)"
LAST = "rope.apply_(q[..., -rotary_dim:], k[..., -rotary_dim:], table, positions, {})"
PER_TOKEN = "q, k = rope.apply(q, k, table, None, {})"
PER_TOKEN_PARTIAL = "q, k = rope.apply(q, k, table, None, {}, rotary_dim)"

FRACTION = "int(head_dim * partial_rotary_factor)"
PLAIN = "from_config(config)"
BY_LAYER = "from_config(config, layer_type=layer_type)"
BY_LENGTH = "from_config(config, seq_len=seq_len)"
GPTJ = 'precompute_freqs_cis(config.rotary_dim, end, scaling={"rope_type": "default"})'
AXES = "freqs_cis_at(positions, inv_freq(**rope_arguments(config)), axis_map={}(sections))"
GRID = "freqs_cis_at(positions, **{}(head_dim, theta)._asdict())"


@dataclass(frozen=True)
class Family:
    """One line. ``rotary_dim``, ``table`` and ``call`` are Python, in the names that docs/models.md explains."""

    name: str
    model_types: tuple[
        str, ...
    ]  # as in the config.json of transformers; of multimodal models, of the part that rotates
    interleaved: bool
    rotary_dim: str = "head_dim"
    table: str = PLAIN
    template: str = WHOLE
    rotates: str = "True"  # which layers do
    note: str = ""

    @property
    def call(self) -> str:
        return self.template.format(self.interleaved)


PREAMBLE = """\
import torch
from rope_ext import precompute_freqs_cis
from rope_ext.tables import *

rope = torch.ops.rope"""

FAMILIES = (
    Family(
        "LLaMA 1 to 3, Meta's own weights",
        (),
        True,
        table="precompute_freqs_cis(head_dim, end, theta)",
        note="`theta` is 10000, for LLaMA 3 500000. The weights on Hugging Face are the same ones with the rows of q "
        "and k permuted (`interleaved_to_half`), hence the other pairing in the next line.",
    ),
    Family("Llama 1 to 3.3", ("llama",), False, note="Llama 3.1 and later scale by `llama3`: the config says so."),
    Family("Mistral, Mixtral, Ministral", ("mistral", "mixtral", "ministral"), False),
    Family(
        "Qwen 2, 2.5, 3",
        ("qwen2", "qwen3", "qwen3_moe"),
        False,
        note="Long contexts by `yarn`, whose attention factor is in the table.",
    ),
    Family("Gemma 1 and 2", ("gemma", "gemma2"), False),
    Family(
        "Gemma 3",
        ("gemma3_text",),
        False,
        table=BY_LAYER,
        note="Sliding layers have another theta than full ones: two tables.",
    ),
    Family(
        "Gemma 4",
        ("gemma4_text",),
        False,
        table=BY_LAYER,
        note="Full layers have wider heads, of which `proportional` turns the first pairs only; the others are in the "
        "table with the factor 1, so that the whole head goes through the call.",
    ),
    Family("OLMo 1 and 2, Granite, StarCoder 2", ("olmo", "olmo2", "granite", "starcoder2"), False),
    Family("OLMo 3, ModernBERT", ("olmo3", "modernbert"), False, table=BY_LAYER, note="A table for each layer type."),
    Family("Falcon", ("falcon",), False, note="Only those without alibi."),
    Family(
        "Hunyuan", ("hunyuan_v1_dense",), False, note="The config says `dynamic`, `alpha` means NTK by a fixed factor."
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        False,
        note="`yarn` without truncation; an attention factor of 1.35 is in the table: never normalise it away.",
    ),
    Family(
        "Phi-3, Phi-3.5-mini, Phi-4-mini",
        ("phi3",),
        False,
        FRACTION,
        BY_LENGTH,
        PARTIAL,
        note="`longrope` has two lists of factors: `seq_len`, the largest position plus one, chooses. Phi-4-mini "
        "rotates three quarters of a head.",
    ),
    Family(
        "Phi-1, 1.5, 2; GPT-NeoX, Pythia; StableLM; Persimmon; Nemotron; GLM-4.5",
        ("phi", "gpt_neox", "stablelm", "persimmon", "nemotron", "glm4_moe"),
        False,
        FRACTION,
        PLAIN,
        PARTIAL,
    ),
    Family(
        "GPT-J, CodeGen",
        ("gptj", "codegen"),
        True,
        "config.rotary_dim",
        GPTJ,
        PARTIAL,
        note="The config has a `rotary_dim` where others have a fraction, and no theta, which is 10000.",
    ),
    Family("GLM-4", ("glm", "glm4"), True, FRACTION, PLAIN, PARTIAL, note="GLM-4.5 pairs halves."),
    Family("Cohere Command R", ("cohere",), True),
    Family(
        "Command R7B, Command A",
        ("cohere2",),
        True,
        rotates='layer_type == "sliding_attention"',
        note="Full layers have no positions.",
    ),
    Family(
        "EXAONE 4",
        ("exaone4",),
        False,
        rotates='config.sliding_window is None or layer_type == "sliding_attention"',
        note="Full layers between sliding ones have no positions.",
    ),
    Family(
        "SmolLM3",
        ("smollm3",),
        False,
        rotates="config.no_rope_layers[layer]",
        note="`no_rope_layers` holds 1 where a layer rotates and 0 where it does not.",
    ),
    Family(
        "Llama 4",
        ("llama4_text",),
        True,
        rotates="config.no_rope_layers[layer]",
        note="As in SmolLM3. transformers' table is made by `torch.polar`: some factors differ in the last bit.",
    ),
    Family(
        "DeepSeek V2, V3, R1",
        ("deepseek_v2", "deepseek_v3"),
        True,
        "config.qk_rope_head_dim",
        PLAIN,
        LAST,
        note="MLA: heads are `[nope | rope]`, the last features rotate, here in place. V3 in transformers also sorts "
        "them into halves on the way, q and k alike, which no score can see. `yarn` with mscale = mscale_all_dim "
        "leaves the table at length 1 and scales the softmax instead, by `yarn_mscale(factor, mscale_all_dim) ** 2`. "
        "V2's table is made by `torch.polar` in transformers: some factors differ in the last bit.",
    ),
    Family("ERNIE 4.5", ("ernie4_5",), True),
    Family(
        "Qwen2-VL, Qwen2.5-VL",
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        False,
        "head_dim",
        AXES.format("mrope_chunked"),
        PER_TOKEN,
    ),
    Family("Qwen3-VL", ("qwen3_vl_text",), False, "head_dim", AXES.format("mrope_interleaved"), PER_TOKEN),
    Family("ERNIE 4.5 VL", ("ernie4_5_vl_moe_text",), True, "head_dim", AXES.format("ernie"), PER_TOKEN),
    Family("GLM-4.1V, GLM-4V", ("glm4v_text",), True, FRACTION, AXES.format("mrope_chunked"), PER_TOKEN_PARTIAL),
    Family(
        "Vision tower of Qwen2-VL, 2.5-VL, 3-VL",
        ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"),
        False,
        "head_dim",
        GRID.format("axial_2d"),
        PER_TOKEN,
        note="`positions = grid_positions(rows, columns, merge_size=config.spatial_merge_size)`, of patches; 2.5-VL "
        "sorts its patches by windows, and their positions with them.",
    ),
    Family(
        "Vision tower of Pixtral",
        ("pixtral",),
        False,
        "head_dim",
        GRID.format("pixtral_2d"),
        PER_TOKEN,
        note="`positions = grid_positions(rows, columns)`, of patches.",
    ),
    Family(
        "Vision tower of Llama 4",
        ("llama4_vision_model",),
        True,
        "head_dim",
        GRID.format("axial_2d"),
        PER_TOKEN,
        note="`positions = llama4_positions(rows)`: the image is square, the class token comes last and does not turn.",
    ),
)

INTRODUCTION = f"""\
# Which table, which pairing, which call

Find the family, or the `model_type` in the `config.json`. Each line is executed by the tests beside transformers' own
model of that type; this page is written by `docs/models.py`.

```python
{PREAMBLE}
```

| name | is |
| --- | --- |
| `q`, `k` | (batch, seqlen, heads, head_dim): where heads come before tokens, their `transpose(1, 2)` |
| `head_dim` | `q.shape[-1]`; `rotary_dim` of its features rotate, twice as many as `table` has columns |
| `positions` | ids of the tokens, (batch, seqlen); with `sections` (3, batch, seqlen): time, row, column |
| `config` | the model's, of a multimodal one `config.text_config` or `config.vision_config` |
| `partial_rotary_factor`, `theta`, `sections` | `config.rope_parameters`'s, with `sections` its `mrope_section` |
| `layer`, `layer_type` | the index of the layer, and `config.layer_types[layer]` |
| `seq_len` | the length of the longest sequence, where the table depends on it |
| `end` | rows of the table: more than the largest position |

A table is made once, when the model is loaded; one that is made of `positions`, once per step. Neighbours are the pairs
(0, 1), (2, 3) ... of features, halves are (0, R/2), (1, R/2 + 1) ..., R = `rotary_dim`.
"""


def markdown() -> str:
    rows = [
        "| family | `model_type` | pairing | `rotary_dim` | `table` | call |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    notes = []
    for family in FAMILIES:
        note = family.note
        if family.rotates != "True":
            note = f"Only layers where `{family.rotates}` rotate. {note}"
        mark = ""
        if note:
            notes.append(f"{len(notes) + 1}. {family.name}: {note}")
            mark = f" ({len(notes)})"
        cells = (
            family.name + mark,
            ", ".join(f"`{name}`" for name in family.model_types),
            "neighbours" if family.interleaved else "halves",
            *(f"`{code}`" for code in (family.rotary_dim, family.table, family.call)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([INTRODUCTION, *rows, "", *notes, ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(markdown())
