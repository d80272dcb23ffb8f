"""Random models of well-known shapes as GGUF files, for llama.cpp's programs.

As in ours (``model.random_model``), a matrix is 128 random rows again and again: only
shapes and bytes count. So a file of any type takes seconds: these rows are quantized, by our own
formats, which store them as GGUF does. All matrices have that type (`llama-quantize --pure`), but
for those that it does not fit. There is no tokenizer in it, only a size of the vocabulary; or, for
servers, one of bytes and numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from pykernels.quant import get_format

from . import delta_nets, gemma4, plain, short_convs
from .types import TYPES, type_of

FAMILIES = {
    **plain.FAMILIES,
    **delta_nets.FAMILIES,
    **short_convs.FAMILIES,
    **gemma4.FAMILIES,
}
"""What is written, by ``model_type``."""
_ROWS = 128
_AT_ONCE = 8 << 20
"""Bytes of a call that writes, about."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, outermost dimension first."""

    name: str
    shape: tuple[int, ...]


def tensors(config: Any) -> Iterator[Tensor]:
    """The tensors of a configuration, by llama.cpp's names."""
    family, table = FAMILIES[config.model_type], (config.vocab_size, config.hidden_size)
    yield Tensor("token_embd.weight", table)
    if not config.tie_word_embeddings:
        yield Tensor("output.weight", table)
    for name, shape in family.rest(config).items():
        yield Tensor(name, shape)
    for layer in range(config.num_hidden_layers):
        for name, shape in family.layer(config, layer).items():
            yield Tensor(f"blk.{layer}.{name}", shape)


def write_model(config: Any, fmt: str, path: Path, vocabulary: bool = False) -> None:
    """A file of a configuration's shapes, written tensor by tensor.

    Args:
        config: of transformers, its ``model_type`` one of ``FAMILIES``.
        fmt: of all matrices that it fits, one of ``TYPES``.
        vocabulary: whether tokens have texts.

    Raises:
        PykernelsError: a matrix that cannot have the format.
        OSError: it cannot be written.
    """
    import gguf

    family = FAMILIES[config.model_type]
    w = gguf.GGUFWriter(str(path), family.architecture)
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_head_count(config.num_attention_heads)
    family.add_metadata(w, config)
    w.add_vocab_size(config.vocab_size)
    if vocabulary:
        _add_vocabulary(w, config.vocab_size)
    else:
        w.add_tokenizer_model("no_vocab")
    w.add_file_type(int(gguf.LlamaFileType[TYPES[fmt][1]]))
    every = list(tensors(config))
    for tensor in every:
        shape, count = tensor.shape, int(np.prod(tensor.shape))
        own = type_of(tensor.name, shape, fmt)
        if own == "f32":
            w.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * count)
        else:  # of bytes, as the writer wants what it does not know
            raw = gguf.GGMLQuantizationType[TYPES[own][0]]
            shape = gguf.quant_shape_to_byte_shape(shape, raw)
            w.add_tensor_info(
                tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=raw
            )
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        for tensor in every:
            if len(tensor.shape) == 1:
                w.write_tensor_data(family.vector(config, tensor.name, tensor.shape))
            else:
                own = type_of(tensor.name, tensor.shape, fmt)
                w.write_tensor_data(_RepeatedRows.of(tensor, own))  # type: ignore[arg-type]
    finally:
        w.close()


def _add_vocabulary(writer: Any, V: int) -> None:
    """Bytes, an end token, one merge (llama.cpp wants some), and numbers, each with a space."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, "<|end|>", "ab"]
    tokens += [f"\u0120{number}" for number in range(V - len(tokens))]
    types = [gguf.TokenType.NORMAL] * V
    types[len(letters)] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(letters))
    writer.add_add_bos_token(False)


def model_file(config: Any, fmt: str, folder: Path, name: str, vocabulary: bool = False) -> Path:
    """The file of a format in a folder; made unless it is there. Raises as ``write_model`` does."""
    path = folder / f"{name}-{fmt}.gguf"
    if path.exists():
        return path
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # another process may make it, too
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_model(config, fmt, new, vocabulary)
        new.replace(path)  # whole, or not there
    finally:
        new.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class _RepeatedRows:
    """A matrix that is a few rows again and again; of an array it has what the writer asks for.

    Attributes:
        rows: bytes of some of its rows, from the first on.
        nbytes: of all of them.
    """

    rows: bytes
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, fmt: str) -> _RepeatedRows:
        """A matrix of variance 1 / K, as the file has it in ``fmt``."""
        K, count = tensor.shape[-1], int(np.prod(tensor.shape[:-1]))
        few = min(count, _ROWS)
        rows = _quantized(few, K, count + K, fmt)
        return cls(rows, len(rows) // few * count)

    def tofile(self, file: BinaryIO) -> None:
        """Writes it, without an array of it all: that would take longer than the writing."""
        many = memoryview(self.rows * max(1, _AT_ONCE // len(self.rows)))
        for at in range(0, self.nbytes, len(many)):
            file.write(many[: self.nbytes - at])


@lru_cache(maxsize=64)
def _quantized(few: int, K: int, seed: int, fmt: str) -> bytes:
    """Rows of K random numbers; layers have the same ones."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((few, K), np.float32) / np.float32(K**0.5)
    if fmt == "f32":
        return rows.tobytes()
    weight = get_format(fmt).quantize(torch.from_numpy(rows))
    return weight.data.view(torch.uint8).numpy().tobytes()
