"""What a checkpoint is worth on files that its training never saw.

    python -m model.embedded.evaluate --stdlib DIR [--checkpoint DIR] [--device cuda]

runs transformers' own model on the dequantized weights, in float32, and writes `evaluation.json`
and the model card into the checkpoint's folder.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import PATH
from .balance import LoadCounter
from .card import write_card
from .corpus import SourceFile, default_stdlib, find_sources, fingerprint, split, total_bytes
from .export import load_dequantized
from .references import shared_line_fraction, xz_bits_per_byte
from .samples import write_samples
from .tokenizer import BOS_ID, EOS_ID, encode_files, load_tokenizer

WINDOW = 2048
"""Tokens of a forward pass; every second half of one is scored, the first half is its context."""


def windows(document: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets that score each token of `document` (bos ... eos) once, -100: unscored.

    The first window scores all its targets; each later one starts half a window on, has bos in
    front as in training, and scores the second half only.
    """
    inputs, targets = document[:-1], document[1:]
    out = [(inputs[:length], targets[:length])]
    half = length // 2
    for start in range(half, len(inputs) - half, half):
        part_inputs = [BOS_ID, *inputs[start + 1 : start + length]]
        part_targets = [-100] * half + targets[start + half : start + length]
        out.append((part_inputs, part_targets))
    return out


@torch.no_grad()
def total_bits(
    model: nn.Module,
    documents: list[list[int]],
    window: int = WINDOW,
    rows: int = 16,
    counter: LoadCounter | None = None,
    progress: bool = False,
) -> float:
    """Bits that the model needs to code all `documents`, their eos included.

    `counter` receives the expert loads of the scored positions. `progress` shows a bar.
    """
    device = next(model.parameters()).device
    parts = [part for document in documents for part in windows(document, window)]
    parts.sort(key=lambda part: len(part[0]))
    total = torch.zeros((), dtype=torch.float64, device=device)
    starts = range(0, len(parts), rows)
    for start in track(starts, "held-out batches", disable=not progress):
        batch = parts[start : start + rows]
        longest = max(len(inputs) for inputs, _ in batch)
        inputs = torch.full((len(batch), longest), EOS_ID, dtype=torch.int64, device="cpu")
        targets = torch.full((len(batch), longest), -100, dtype=torch.int64, device="cpu")
        for row, (tokens, wanted) in enumerate(batch):
            inputs[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
            targets[row, : len(wanted)] = torch.tensor(wanted, dtype=torch.int64, device="cpu")
        inputs, targets = inputs.to(device), targets.to(device)
        if counter is not None:
            counter.mask = targets.flatten() != -100
        # Padding is on the right: under the causal mask no scored token sees it.
        logits = model(input_ids=inputs, use_cache=False).logits.float()  # [rows, longest, V]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        total += loss.double()
    return float(total) / math.log(2)


def load_table(loads: dict[int, Tensor]) -> dict[str, list[float]]:
    """Per layer, each expert's load over the mean load: 1 is perfect balance."""
    return {
        str(layer): [round(float(v), 4) for v in load / load.mean()]
        for layer, load in sorted(loads.items())
    }


def evaluate_heldout(
    model: PreTrainedModel, folder: Path, files: Sequence[SourceFile], progress: bool = False
) -> tuple[float, dict[str, list[float]], int]:
    """Bits per byte, the load table and the number of tokens of `files` under `model`."""
    documents = encode_files(load_tokenizer(folder), [f.text for f in files])
    counter = LoadCounter(model)
    window = model.config.max_position_embeddings
    bits = total_bits(model, documents, window, counter=counter, progress=progress)
    counter.close()
    tokens = sum(len(d) - 1 for d in documents)
    return bits / total_bytes(files), load_table(counter.loads), tokens


def evaluate_checkpoint(
    folder: Path, stdlib: Path, version: str, device: str = "cpu"
) -> dict[str, Any]:
    """Measure the checkpoint in `folder` on the held-out files of `stdlib`, Python `version`'s."""
    parts = split(find_sources(stdlib))
    files, known = parts.heldout, parts.train + parts.validation
    model = load_dequantized(folder).to(device)
    started = time.perf_counter()
    bpb, loads, tokens = evaluate_heldout(model, folder, files, progress=True)
    seconds = time.perf_counter() - started
    return {
        "library": version,
        "heldout_sha256": fingerprint(files),
        "heldout_files": len(files),
        "heldout_bytes": total_bytes(files),
        "heldout_tokens": tokens,
        "window": model.config.max_position_embeddings,
        "bits_per_byte_fp8": round(bpb, 4),
        "xz_bits_per_byte": {k: round(v, 4) for k, v in xz_bits_per_byte(files, known).items()},
        "shared_line_fraction": round(shared_line_fraction(files, known), 4),
        "load_over_mean": loads,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint, write its model card.")
    parser.add_argument("--stdlib", type=Path, default=default_stdlib())
    parser.add_argument("--version", default=platform.python_version(), help="the library's Python")
    parser.add_argument("--checkpoint", type=Path, default=PATH)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--card-only", action="store_true", help="keep the figures and samples")
    args = parser.parse_args()
    if not args.card_only:
        result = evaluate_checkpoint(args.checkpoint, args.stdlib, args.version, args.device)
        (args.checkpoint / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        write_samples(args.checkpoint)
        print(json.dumps({k: v for k, v in result.items() if k != "load_over_mean"}, indent=1))
    write_card(args.checkpoint)


if __name__ == "__main__":
    main()
