"""Writes an upcycled model's checkpoint, once, and what upcycling cost it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.devices.cpu import precompile

from ..custom_generate import engine_of
from ..evaluation.likelihood import ROWS
from ..llm import load_engine
from ..pretrained import build_meta
from .dense import DenseModel
from .experts import Recipe, mixtral_config, upcycle
from .perplexity import perplexity

SHARD_BYTES = 1 << 28
FIGURES = "upcycling.json"
"""Written last: a folder with it is whole."""


@dataclass(frozen=True)
class Figures:
    """What was made, and the perplexity of a held-out text before and after."""

    source: str
    recipe: Recipe
    dense_perplexity: float
    perplexity: float


def default_folder(source: Path, recipe: Recipe) -> Path:
    """In PYKERNELS_CACHE_DIR, by the source and the recipe."""
    kind = f"{recipe.experts}x-top{recipe.topk}-noise{recipe.noise:g}-seed{recipe.seed}"
    return env.cache_dir / "upcycled" / f"{source.stem}-{kind}"


def make(
    source: Path, folder: Path, recipe: Recipe, report: Callable[[str], None] = lambda what: None
) -> Figures:
    """The upcycled model of a GGUF file; one that is there already is left as it is.

    Args:
        folder: of the checkpoint; it is there whole or not at all.
        report: told what is being done.

    Raises:
        PykernelsError: a source that cannot be upcycled, a recipe that cannot be, no room.
    """
    if not 1 <= recipe.topk <= recipe.experts:
        raise PykernelsError(
            f"{recipe.topk} of {recipe.experts} experts a token", "Give --topk 1 to --experts"
        )
    if (folder / FIGURES).is_file():
        return _figures(folder / FIGURES)
    if folder.exists():
        raise PykernelsError(f"{folder} is there already", "Name another folder")
    report("reading the GGUF file")
    dense = DenseModel(source)
    head = dense.config["hidden_size"] // dense.config["num_attention_heads"]
    precompile.begin([(head, head)])  # meanwhile
    config, tokenizer, tensors = dense.config, dense.tokenizer(), dict(dense.tensors())
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        report("writing the experts")
        tokenizer.save_pretrained(partial)
        ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
        _write_json(partial / "config.json", mixtral_config(config, recipe))
        _write_json(partial / "generation_config.json", ends)
        write_shards(partial, upcycle(tensors.items(), recipe))
        report("measuring the dense model")
        before = _dense_perplexity(config, tensors, tokenizer)
        report("measuring the upcycled model")
        with load_engine(partial, context=2048, max_sequences=1, max_rows=ROWS) as llm:
            after = perplexity(llm, tokenizer)
        figures = Figures(source.name, recipe, round(before, 3), round(after, 3))
        _write_json(partial / FIGURES, asdict(figures))
        partial.rename(folder)
    except OSError as error:
        raise PykernelsError(
            f"{partial} cannot be written: {error.strerror}", "Free some space, or set"
            " PYKERNELS_CACHE_DIR",
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return figures


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Safetensors files of about ``SHARD_BYTES`` and their index; one shard in memory."""
    places: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    count = total = 0

    def flush() -> None:
        nonlocal count, shard
        count += 1
        save_file(shard, folder / f"model-{count:05d}.safetensors", metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, count))
        shard = {}

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    files = {name: f"model-{number:05d}.safetensors" for name, number in places.items()}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _write_json(folder / "model.safetensors.index.json", index)


def _dense_perplexity(
    config: dict[str, object], tensors: dict[str, torch.Tensor], tokenizer: object
) -> float:
    """Of the model as it was, by the same engine, without a file."""
    lm = build_meta(CONFIG_MAPPING["llama"].from_dict(config), torch.bfloat16)
    values = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    lm.load_state_dict(values, assign=True, strict=False)
    lm.tie_weights()
    left = [name for name, tensor in lm.named_parameters() if tensor.is_meta]
    if left:
        raise PykernelsError(f"the GGUF file has no {left[0]}", "Download it again")
    with engine_of(lm) as llm:
        return perplexity(llm, tokenizer)


def _figures(file: Path) -> Figures:
    found = json.loads(file.read_text())
    return Figures(**{**found, "recipe": Recipe(**found["recipe"])})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")
