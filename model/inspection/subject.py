"""Opens what `pykernels plan` plans for: a checkpoint's headers, a configuration, a known shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.quant import get_format

from ..architectures.decoder import Decoder
from ..checkpoint.config import read_config
from ..checkpoint.gguf import find_gguf
from ..checkpoint.packed.manifest import is_packed
from ..hub import NAME, local
from ..llm import meta_decoder
from ..named import ARCHS, RELEASED, make_config
from ..planner.subject import Subject
from ..random_model import random_decoder
from .formats import check_sizes, configured


def open_subject(
    which: str,
    fmt: str | None = None,
    kv_dtype: str = "bf16",
    layers: int | None = None,
    vocab: int | None = None,
) -> Subject:
    """Reads what there is of a model.

    Args:
        which: a checkpoint's folder, a GGUF file, a config.json, a shape's name, or a name on the
            hub.
        fmt: in which all its matrices are to be; None: as they are stored or published.
        layers, vocab: of a shape or a configuration, in place of its own.

    Raises:
        PykernelsError: no such model; one without sizes; layers of a checkpoint.
    """
    if fmt is not None:
        get_format(fmt)
    if which in ARCHS:
        config = make_config(which, num_hidden_layers=layers, vocab_size=vocab)
        found = fmt or RELEASED.get(which, ("bf16", "bf16"))[1]
        return _shape(which, "its known shape", config, found, kv_dtype)
    if not Path(which).exists() and not NAME.fullmatch(which):
        raise PykernelsError(
            f"There is no folder {which}, and no known shape of that name",
            f"Give a checkpoint's folder, its config.json, or one of {', '.join(ARCHS)}",
        )
    path = Path(local(which, weights=False))
    folder = path.parent if path.name == "config.json" else path
    config = read_config(folder)
    has_weights = find_gguf(folder) is not None or is_packed(folder)
    has_weights = has_weights or (folder.is_dir() and any(folder.glob("*.safetensors")))
    if has_weights and path.name != "config.json":
        if layers or vocab:
            raise PykernelsError(
                "--layers and --vocab are for shapes and configurations", "Leave them out"
            )
        decoder = replace(meta_decoder(folder), kv_dtype=kv_dtype)
        subject = Subject(which, "its headers", config, decoder, format_of(decoder), _random)
        return subject if fmt is None else subject.in_format(fmt)
    data = json.loads((folder / "config.json").read_text())
    check_sizes(folder / "config.json", data)
    for name, value in (("num_hidden_layers", layers), ("vocab_size", vocab)):
        if value is not None:
            setattr(config, name, value)
    if fmt is None:
        fmt = configured(data.get("quantization_config")).experts or "bf16"
    return _shape(which, "its config.json alone", config, fmt, kv_dtype)


def _shape(given: str, source: str, config: PretrainedConfig, fmt: str, kv_dtype: str) -> Subject:
    decoder = replace(_random(config, fmt), kv_dtype=kv_dtype)
    return Subject(given, source, config, decoder, fmt, _random)


def _random(config: PretrainedConfig, fmt: str) -> Decoder:
    return random_decoder(config, fmt, None)  # type: ignore[arg-type] # none is packed


def format_of(decoder: Decoder) -> str:
    """The format of most of a model's weights."""
    sizes: dict[str, int] = {}
    for spec in decoder.lower().weights.values():
        sizes[spec.fmt] = sizes.get(spec.fmt, 0) + spec.nbytes
    return max(sizes, key=lambda fmt: sizes[fmt])
