"""Our engine beside llama.cpp on one GGUF file and one text: do they say the same?

    python -m bench.peers.agreement MODEL.gguf TEXT [--chunks 8] [--theirs F32.gguf]

`llama-perplexity` cuts the text into chunks of 512 tokens and scores the second half of each; what
it saves has its own tokens, so both are given the same. Teacher-forced: a token agrees if both find
the same one the likeliest there.

llama.cpp quantizes the inputs of quantized matrices to 8 bits; ours are bfloat16. What that makes
out, ``--theirs`` shows: the same model dequantized (`llama-quantize --allow-requantize MODEL.gguf
F32.gguf F32`), for llama.cpp alone.
"""

from __future__ import annotations

import argparse
import math
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import model
from model.evaluation.teacher import Teacher

from .llama_tools import find

CONTEXT = 512
"""Tokens of a chunk."""
_HEADER = struct.Struct("<8sIii")


@dataclass(frozen=True)
class Saved:
    """What llama.cpp says.

    Attributes:
        tokens: int64 [chunks, CONTEXT].
        likeliest: int64 [chunks, scored]: after each token of the second half but the last.
        perplexity: over these.
    """

    tokens: torch.Tensor
    likeliest: torch.Tensor
    perplexity: float


def saved(path: Path, text: Path, chunks: int, threads: int) -> Saved:
    """A run of `llama-perplexity`.

    Raises:
        ToolMissing: it is not built.
        CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        file = Path(folder) / "logits"
        command: list[str | Path] = [
            find("llama-perplexity"),
            "-m",
            path,
            "-f",
            text,
            "-c",
            str(CONTEXT),
            "-b",
            str(CONTEXT),
            "--chunks",
            str(chunks),
            "-t",
            str(threads),
            "--save-all-logits",
            file,
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        match = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
        assert match is not None, done.stderr[-500:]
        tokens, likeliest = _read(file)
    return Saved(tokens, likeliest, float(match[1]))


def compare(path: Path, text: Path, chunks: int, threads: int, given: Path | None = None) -> str:
    """One line: the share of tokens that agree, and both perplexities. Raises as ``saved`` does.

    Args:
        given: the file that llama.cpp runs; None: the same.
    """
    theirs = saved(given or path, text, chunks, threads)
    with model.load_engine(
        path, device="cpu", max_model_len=CONTEXT, threads=threads, draft="off"
    ) as llm:
        ids = llm.encode(text.read_text(encoding="utf-8"))[: theirs.tokens.numel()]
        alike = ids == theirs.tokens.flatten().tolist()
        teacher = Teacher(llm, theirs.tokens)
        ours = teacher.score(teacher.program())
    scored = theirs.likeliest.shape[1]
    same = (ours.likeliest[:, -scored:] == theirs.likeliest).float().mean().item()
    perplexity = math.exp(ours.bits[:, -scored:].mean().item() * math.log(2))
    off = perplexity / theirs.perplexity - 1
    return (
        f"{path.name}: {same:.1%} of {theirs.likeliest.numel()} tokens agree; perplexity"
        f" {perplexity:.4f}, llama.cpp {theirs.perplexity:.4f} ({off:+.2%}); the text is"
        f" {'tokenized alike' if alike else 'TOKENIZED OTHERWISE'}"
    )


def _read(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the likeliest ones of what `--save-all-logits` writes: after a header and the
    tokens, for each scored one two floats and log-probabilities of 16 bits."""
    data = file.read_bytes()
    magic, context, vocabulary, chunks = _HEADER.unpack_from(data)
    assert magic == b"_logits_", magic
    tokens = np.frombuffer(data, np.int32, chunks * context, _HEADER.size)
    scored, width = context - 1 - context // 2, 2 * ((vocabulary + 1) // 2) + 4
    codes = np.frombuffer(
        data, np.uint16, chunks * scored * width, _HEADER.size + tokens.nbytes
    ).reshape(chunks, scored, width)
    likeliest = codes[..., 4 : 4 + vocabulary].argmax(-1)
    return (
        torch.from_numpy(tokens.reshape(chunks, context).astype(np.int64)),
        torch.from_numpy(likeliest),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--theirs", type=Path)
    chosen = parser.parse_args()
    print(compare(chosen.model, chosen.text, chosen.chunks, chosen.threads, chosen.theirs))


if __name__ == "__main__":
    main()
