"""The model card, written from the JSON files that training and evaluation leave."""

import json
from pathlib import Path
from typing import Any


def write_card(folder: Path) -> None:
    """Write `README.md` beside the checkpoint in `folder`."""
    (folder / "README.md").write_text(render(folder))


def render(folder: Path) -> str:
    """The card's text."""
    read = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("config", "training", "evaluation", "samples")
    }
    config, training, evaluation = read["config"], read["training"], read["evaluation"]
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    parts = [
        _HEAD.format(mib=size / 2**20, experts=config["n_routed_experts"]),
        _architecture(config),
        _data(training, evaluation),
        _training(training),
        _results(training, evaluation),
        _balance(config, evaluation),
        _samples(read["samples"]),
        _LIMITS.format(bpb=evaluation["bits_per_byte_fp8"], length=training["settings"]["length"]),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


_HEAD = """
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [deepseek_v3, moe, fp8, python]
---

# The embedded model: a small DeepSeek-V3 that writes Python

A Mixture-of-Experts language model of the DeepSeek-V3 architecture, trained from nothing on the
source of the Python standard library and stored just as DeepSeek's FP8 checkpoints are: E4M3 codes
in `*.weight`, one float32 scale per 128x128 block in `*.weight_scale_inv`, each expert's matrices
under their own names. {mib:.1f} MiB of weights, {experts} routed experts a layer. It exists so that
the whole road from checkpoint to text can be run, tested and timed anywhere.
"""


def _architecture(config: dict[str, Any]) -> str:
    c = config
    latent = c["kv_lora_rank"] + c["qk_rope_head_dim"]
    rows = [
        ["layers", f"{c['num_hidden_layers']}, the first {c['first_k_dense_replace']} dense"],
        ["hidden size H", c["hidden_size"]],
        ["routed experts E", c["n_routed_experts"]],
        ["active experts K", f"{c['num_experts_per_tok']}, and {c['n_shared_experts']} shared"],
        ["expert size I", c["moe_intermediate_size"]],
        ["dense layer's size", c["intermediate_size"]],
        ["router", "sigmoid with a correction bias"],
        ["router groups", f"{c['n_group']}, of which {c['topk_group']} are open to a token"],
        ["routed scaling factor", c["routed_scaling_factor"]],
        ["attention", f"MLA, {c['num_attention_heads']} heads"],
        ["q_lora, kv_lora", f"{c['q_lora_rank']}, {c['kv_lora_rank']}"],
        [
            "nope, rope, v of a head",
            f"{c['qk_nope_head_dim']}, {c['qk_rope_head_dim']}, {c['v_head_dim']}",
        ],
        ["vocabulary", f"{c['vocab_size']}, byte-level BPE, lossless"],
        ["context", f"{c['max_position_embeddings']} tokens"],
        ["ragged FP8 block", f"`kv_a_proj_with_mqa`, {latent} rows (DeepSeek-V3's has 576)"],
    ]
    return "## Architecture\n\n" + _table(["", ""], rows)


def _data(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    files, nbytes = training["files"], training["bytes"]
    rows = [[part, files[part], f"{nbytes[part]:,}"] for part in ("train", "validation", "heldout")]
    return f"""
## Data

Every UTF-8 `*.py` file of the standard library of Python {evaluation["library"]}, its tests
included, without installed packages and the build's own `_sysconfigdata*`. A hash of a file's
relative path puts it into one part. The tokenizer and the weights saw the training files only; the
validation files chose the step that was kept; the held-out files were only measured.

{_table(["part", "files", "bytes"], rows)}
"""


def _training(training: dict[str, Any]) -> str:
    s, o = training["settings"], training["optimizer"]
    kept = min(training["curve"], key=lambda point: point["validation"])
    device = training["device"]
    rows = [
        ["device", "a CPU" if device == "CPU" else f"one {device}"],
        ["time of the whole script", f"{training['total_seconds']:.0f} s"],
        ["tokens of an epoch", f"{training['training_tokens']:,}"],
        ["steps run", f"{training['steps']:,} of {s['rows']} rows of {s['length']} tokens"],
        ["epochs run", training["epochs"]],
        ["step kept", f"{kept['step']:,}, epoch {kept['epoch']:.1f}"],
        ["validation bits per byte there", f"{kept['validation']:.4f}"],
        ["Muon (the layers' matrices)", f"peak rate {o['muon_lr']:g}, decay {o['muon_decay']:g}"],
        ["AdamW (all else)", f"peak rate {o['adam_lr']:g}, decay {o['adam_decay']:g}"],
        ["dropout on embedding, attention, MLP", f"{s['dropout']:g}"],
        ["router bias step", f"{s['gamma']:g}"],
    ]
    return f"""
## Training

    python -m model.embedded.train --stdlib DIR --out OUT \\
        --minutes {s["minutes"]:g} --reserve {s["reserve"]:g}
    python -m model.embedded.evaluate --stdlib DIR --checkpoint OUT

{_table(["", ""], rows)}

Float32 masters under bfloat16 weights; a constant rate, then a linear decay to zero, during which
the forward pass sees the weights rounded to FP8. The corpus is small for the model: the run goes on
into over-fitting, and the step with the best validation loss is the one kept. The router's bias
follows each expert's load error; there is no balancing loss. `training.json` holds the settings,
the versions and the whole curve. A second run gives other weights of about the same quality: its
length is a time, and GPU sums are not deterministic.
"""


def _results(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    e, xz = evaluation, evaluation["xz_bits_per_byte"]
    rows = [
        ["**this checkpoint, FP8**", f"**{e['bits_per_byte_fp8']:.4f}**"],
        ["the same weights in bfloat16, before FP8", f"{training['bits_per_byte_bf16']:.4f}"],
        ["`xz -9e`, the files as one stream", f"{xz['concatenated']:.4f}"],
        ["`xz -9e`, each file alone", f"{xz['per_file']:.4f}"],
        ["`xz -9e`, the stream after all other files", f"{xz['after_known']:.4f}"],
    ]
    return f"""
## Held-out results

{e["heldout_files"]} files, {e["heldout_bytes"]:,} bytes, {e["heldout_tokens"]:,} tokens. Windows of
{e["window"]} tokens; each token is scored once, with half a window or more of its own file before
it (near a file's start, all there is). transformers' own model, float32 arithmetic.

{_table(["", "bits per byte"], rows)}

The last row is the fair one for repetition: xz may copy from all that the model was trained on.
The weights' own size counts for nothing here. {100 * e["shared_line_fraction"]:.0f} % of the
held-out text stands on lines (of 12 characters or more) that some training file has too.
"""


def _balance(config: dict[str, Any], evaluation: dict[str, Any]) -> str:
    rows = []
    for layer, load in evaluation["load_over_mean"].items():
        cells = " ".join(f"{value:.2f}" for value in load)
        dead = sum(value == 0 for value in load)
        rows.append([layer, f"{min(load):.2f}", f"{max(load):.2f}", dead, cells])
    last = config["n_routed_experts"] - 1
    return f"""
## Load per expert

Each expert's tokens on the held-out files over the layer's mean, experts 0 to {last} in order.

{_table(["layer", "min", "max", "dead", "load over mean"], rows)}
"""


def _samples(samples: list[dict[str, str]]) -> str:
    legend = "The prompt, `|`, and 96 tokens: greedy, and sampled at temperature 0.7."
    parts = ["## Samples", legend]
    for sample in samples:
        for way in ("greedy", "sampled"):
            lines = (sample["prompt"] + "|" + sample[way]).rstrip().split("\n")
            text = "\n".join(line.rstrip() for line in lines)
            parts.append(f"{way}:\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


_LIMITS = """
## Limits

- It knows the standard library's style, not programming: expect plausible names and a clean layout,
  not code that works. Greedy text soon repeats itself. It cannot chat.
- {bpb:.2f} bits per byte hold for held-out files of the same library. Other Python will cost more.
- It may repeat passages of the standard library word for word.
- It was trained on rows of {length} tokens and knows no longer context.

## Licence

Weights: Apache-2.0. Corpus: Python's standard library, under the PSF License Agreement.
"""
