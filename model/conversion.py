"""`convert`: from a checkpoint to a packed cache, one layer in memory at a time.

model.convert("DeepSeek-R1", "DeepSeek-R1.packed", experts="int4")
llm = model.load_engine("DeepSeek-R1.packed")
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from runtime.devices.cpu.weights import CPU_DEVICE, layouts
from runtime.program import Program
from runtime.program.weight_spec import WeightSpec
from runtime.program.weights import Layout, WeightStore
from runtime.workers.matrix import Pack, packer
from runtime.workers.pool import WorkerPool

from .architectures.decoder import make_decoder
from .architectures.families import check_lowered
from .architectures.packed import object_key, stored_object
from .architectures.schema import Schema, stored_schema
from .architectures.weights import CheckpointWeights
from .checkpoint import memory
from .checkpoint.config import read_config, resolve_dtype
from .checkpoint.gguf import find_gguf
from .checkpoint.load import warn_of
from .checkpoint.open import open_checkpoint
from .checkpoint.packed.begin import begun, is_whole
from .checkpoint.packed.errors import Errors
from .checkpoint.packed.manifest import Manifest, identity, is_packed
from .checkpoint.packed.mapped import MappedFile, described
from .checkpoint.packed.verify import header_digest
from .checkpoint.packed.write import write_file
from .checkpoint.plan import Plan, make_plan
from .checkpoint.progress import Adder, Callback, reporting
from .checkpoint.read import nbytes
from .checkpoint.tensors.safetensors import Checkpoint
from .hub import local
from .opened import followed, injected
from .pretrained import has_tokenizer, load_tokenizer, read_generation_config
from .rules import Rules, resolve_rules

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt")
_OTHERS = 64 << 20
"""Bytes of a file that is copied along (tokenizers are the largest), at most."""


@dataclass(frozen=True)
class TensorSlice:
    """A file of the cache.

    Attributes:
        name: without its ending; ``layer``: whose weights it has, None for those outside layers.
        stored, packed: bytes that are read and about those that are written.
    """

    name: str
    layer: int | None
    stored: int
    packed: int

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"


@dataclass(frozen=True)
class Row:
    """What became of a part.

    Attributes:
        formats: of its matrices, with the bytes that each takes.
        errors: relative error by kind of matrix, of those that were converted.
    """

    name: str
    nbytes: int
    formats: dict[str, int]
    errors: dict[str, float]


def convert(
    source: str | Path,
    target: str | Path,
    experts: str | None = None,
    linears: str | None = None,
    rules: Rules = None,
    threads: int | None = None,
    progress: bool | Callback | None = None,
) -> list[Row]:
    """Writes the packed cache of a checkpoint; one that was interrupted is gone on with.

    Args:
        source: folder of the checkpoint, or a GGUF file, or a name on the hub.
        target: folder of the cache, new or of an earlier run of the same conversion.
        experts: format of the routed experts; None: as they are stored, or as a rule says.
        linears: of the other matrices: attention, dense MLPs, shared experts, the head. Routers and
            embeddings stay, and so does what has inputs that the format does not take.
        rules, progress: as in ``from_pretrained``.
        threads: that pack; None: one on each physical core.

    Raises:
        PykernelsError: anything wrong with the source, a target that is something else or that
            another process writes, too little memory or disk.
    """
    source, target = local(source), Path(target)
    if is_packed(source):
        raise PykernelsError(
            f"{source} is a packed cache, and its weights are in other layouts than stored ones",
            "Convert the checkpoint that it was made from",
        )
    config = read_config(source)
    check_lowered(config)
    for name in (experts, linears):
        if name is not None:
            get_format(name)
    with open_checkpoint(source) as checkpoint:
        parsed = resolve_rules(rules, config.model_type)
        model = injected(config, parsed, experts=experts, matrices=linears)
        followed(model, parsed)
        plan = make_plan(model, checkpoint, resolve_dtype(None, config))
        schema = stored_schema(model, plan, linears)
        has_config = find_gguf(source) is None
        manifest = Manifest(
            source=str(source.resolve()),
            identity=identity(checkpoint, source / "config.json" if has_config else None),
            model_type=config.model_type,
            rules=[rule.model_dump(mode="json", by_alias=True) for rule in parsed],
            experts=experts,
            linears=linears,
            schema=schema.to_json(),
        )
        sizes = memory.needed_by_engine(plan, model, checkpoint, linears)
        parts = _parts(model, plan, checkpoint, sizes)
        with begun(target, manifest):
            left = [part for part in parts if not is_whole(target / part.file)]
            _check_room(target, left, sizes.step)
            if has_config:
                _copy(source, target)
            else:
                _save(source, config, target)
            with WorkerPool(threads) as pool, reporting(progress, "converting") as report:
                _write(target, parts, left, model, plan, checkpoint, schema, packer(pool), report)
            files = [target / part.file for part in parts]
            entries = {
                f.name: {"bytes": f.stat().st_size, "header": header_digest(f)} for f in files
            }
            replace(manifest, files=entries).write(target)
            return [_row(part.name, MappedFile(target / part.file)) for part in parts]


def _parts(
    model: PreTrainedModel, plan: Plan, checkpoint: Checkpoint, sizes: memory.Packed
) -> list[TensorSlice]:
    """The files of a cache."""
    layers = len(model.model.layers)
    stored, packed = [0] * (layers + 1), [0] * (layers + 1)
    for item in plan.items:
        match = _LAYER.match(item.name)
        at = int(match[1]) if match else layers
        stored[at] += nbytes(checkpoint, item)
        packed[at] += sizes.by_item[item.name]
    parts = [TensorSlice(f"layer-{i:05d}", i, stored[i], packed[i]) for i in range(layers)]
    return [TensorSlice("ends", None, stored[layers], packed[layers]), *parts]


def _check_room(target: Path, parts: list[TensorSlice], step: int) -> None:
    """Raises PykernelsError unless the disk has room for all parts, and the memory for one, and
    for `step` bytes while it is packed."""
    needed = sum(part.packed for part in parts)
    free = shutil.disk_usage(target).free
    if needed > free:
        raise PykernelsError(
            f"the packed cache needs {memory.size(needed)} more in {target},"
            f" {memory.size(free)} are free there",
            "Free some space, choose another disk, or convert to a smaller format (--format)",
        )
    largest = max((part.packed for part in parts), default=0) + step
    if largest > (free := memory.available()):
        raise PykernelsError(
            f"packing a layer needs {memory.size(largest)} of main memory, {memory.size(free)} are"
            " free",
            "Free memory, or convert to a smaller format (--format)",
        )


def _write(
    target: Path,
    parts: list[TensorSlice],
    left: list[TensorSlice],
    model: PreTrainedModel,
    plan: Plan,
    checkpoint: Checkpoint,
    schema: Schema,
    pack: Pack,
    report: Callback,
) -> None:
    warn_of(plan)
    add = Adder(report, sum(part.stored for part in parts))
    add(sum(part.stored for part in parts if part not in left))
    errors = Errors()
    source = CheckpointWeights(model, plan, checkpoint, schema, add, errors.add)
    store = WeightStore(source, pack)
    weights = _weights(make_decoder(model, schema, store).lower())
    for part in left:
        about: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for spec, layout in weights[part.layer]:
            if store.is_given(spec):  # computed from the config
                continue
            key = object_key(spec, layout.__name__)
            about[key], found = stored_object(layout(spec, store, CPU_DEVICE))
            tensors |= {f"{key}.{name}": tensor for name, tensor in found.items()}
        metadata = {"objects": about, "errors": errors.take()}
        texts = {key: json.dumps(value) for key, value in metadata.items()}
        write_file(target / part.file, tensors, texts)
        del tensors, found  # before the next layer takes its memory


def _weights(program: Program) -> dict[int | None, list[tuple[WeightSpec, Layout]]]:
    """Weights with the layouts in which the CPU reads them, by layer."""
    layout_of = layouts(program)
    weights: dict[int | None, dict[str, tuple[WeightSpec, Layout]]] = {}
    for node in program.nodes:
        for port in node.weights:
            spec, (_, layout) = program.weight(node, port), layout_of(node, port)
            weights.setdefault(node.layer, {})[object_key(spec, layout.__name__)] = spec, layout
    return {layer: list(layouts_by_name.values()) for layer, layouts_by_name in weights.items()}


def _copy(source: Path, target: Path) -> None:
    """What else a checkpoint has: config, tokenizer, templates, generation config, licences."""
    for file in sorted(source.iterdir()):
        other = file.is_file() and not file.name.lower().endswith(_WEIGHTS)
        if other and file.stat().st_size <= _OTHERS:
            shutil.copyfile(file, target / file.name)


def _save(source: Path, config: PretrainedConfig, target: Path) -> None:
    """Config, tokenizer and generation config of a GGUF file, which has them in itself."""
    config.save_pretrained(target)
    if (generation := read_generation_config(source)) is not None:
        generation.to_json_file(target / "generation_config.json")
    if has_tokenizer(source):
        load_tokenizer(source).save_pretrained(target)


def _row(name: str, file: MappedFile) -> Row:
    formats: dict[str, int] = {}
    about: dict[str, Any] = described(file)
    for key, entry in about.items():
        if fmt := entry.get("format"):
            nbytes = sum(
                info.nbytes for tensor, info in file.tensors.items() if tensor.startswith(f"{key}.")
            )
            both = "/".join(dict.fromkeys((fmt, entry.get("down_format", fmt))))
            formats[both] = formats.get(both, 0) + nbytes
    return Row(name, file.memory.nbytes, formats, described(file, "errors"))
