"""What the model writes after a few prompts: greedy, and sampled at 0.7."""

import json
from pathlib import Path
from typing import Any

import torch

from .export import load_dequantized
from .tokenizer import load_tokenizer

PROMPTS = (
    "def quicksort(xs):",
    "class Stack:\n",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n",
    'def read_file(path):\n    """Return',
)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}


@torch.no_grad()
def write_samples(folder: Path, tokens: int = 96) -> None:
    """Write `samples.json`: for each prompt, its greedy and one sampled continuation (seed 0)."""
    tokenizer = load_tokenizer(folder)
    model = load_dequantized(folder)
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.int64, device="cpu")
        texts = {}
        for name, options in WAYS.items():
            torch.manual_seed(0)
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                pad_token_id=model.config.eos_token_id,
                **options,
            )
            texts[name] = tokenizer.decode(made[0, ids.shape[1] :].tolist())
        out.append({"prompt": prompt, **texts})
    (folder / "samples.json").write_text(json.dumps(out, indent=1) + "\n")
