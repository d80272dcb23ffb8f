"""What `load_engine` opens: a checkpoint to be read, or a packed cache to be mapped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from transformers import PretrainedConfig, PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from runtime.machine.nodes import ONE_NODE, MemoryNodes
from runtime.planning.config import CHOSEN
from runtime.planning.placement import CPU, Placement
from runtime.program.weights import WeightStore
from runtime.workers.matrix import Pack

from .architectures.decoder import Decoder, make_decoder
from .architectures.moe import check_experts
from .architectures.packed import CacheWeights, check_cache
from .architectures.schema import Schema, stored_schema
from .architectures.weights import CheckpointWeights
from .checkpoint import memory
from .checkpoint.config import resolve_dtype
from .checkpoint.load import check_kernels, warn_of
from .checkpoint.open import open_checkpoint
from .checkpoint.packed.manifest import is_packed
from .checkpoint.packed.mapped import PackedFolder
from .checkpoint.packed.populate import populate, resident
from .checkpoint.plan import Plan, make_plan
from .checkpoint.progress import Adder, Callback
from .checkpoint.read import nbytes
from .checkpoint.tensors.safetensors import Checkpoint
from .modules.inject import inject
from .modules.linear import linears
from .modules.moe import FusedMoE
from .modules.placed import Placed, placed_nodes
from .modules.placement import ModulePlacement, check_places, place
from .pretrained import build_meta
from .rules import Rule, Rules, resolve_rules


class Opened(Protocol):
    """A model's weights before they are read.

    Attributes:
        model: injected, on the meta device.
        decoder: lowers programs, from which a placement follows.
        placed: weights and layers that rules place elsewhere than on the engine's first device.
        follow: makes ``placed`` that of another device of the engine.
    """

    model: PreTrainedModel
    decoder: Decoder
    placed: Placed

    def follow(self, device: str) -> None:
        """Places by rules around an engine on that device. Raises as ``followed``."""

    @property
    def files(self) -> Collection[Path]:
        """Where the weights lie."""

    def needed(self, placement: Placement) -> int:
        """Bytes of main memory that loading takes at its peak."""

    def smaller(self, placement: Placement) -> Mapping[str, int]:
        """Bytes that loading takes with the experts converted, by format."""

    def readable(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        """The decoder, whose store reads what devices ask for.

        Args:
            pack: packs it for the CPU.
            report: called with the bytes that were read, and all.
            nodes: NUMA nodes that have a slice of each matrix.

        Raises:
            PykernelsError: a node has no room for its slices.
        """


class Packable:
    """A checkpoint's weights, each in the format that it is stored in or a rule asks for."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        checkpoint: Checkpoint,
        kv_dtype: str,
        rules: Sequence[Rule],
        device: str,
    ) -> None:
        self._rules = rules
        self.model, self._plan, self._checkpoint = model, plan, checkpoint
        self._schema = stored_schema(model, plan)
        self.decoder = make_decoder(model, self._schema, WeightStore(), kv_dtype)
        self._packed = memory.needed_by_engine(plan, model, checkpoint)
        self.follow(device)

    def follow(self, device: str) -> None:
        program = self.decoder.lower()
        self.placed = placed_nodes(program, followed(self.model, self._rules, device))
        on_cpu = [name for name, device in self.placed.weights.items() if device == CPU]
        self._beside = sum(program.weights[name].nbytes for name in on_cpu)

    @property
    def files(self) -> Collection[Path]:
        return {tensor.file for tensor in self._checkpoint.tensors.values()}

    def needed(self, placement: Placement) -> int:
        return self._packed.peak(placement) + self._beside

    def smaller(self, placement: Placement) -> Mapping[str, int]:
        return self._packed.smaller(placement)

    def readable(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        memory.check_nodes(self._plan, self.model, nodes, self._packed.by_item)
        warn_of(self._plan)
        total = sum(nbytes(self._checkpoint, item) for item in self._plan.items)
        add = Adder(report, total)
        store = self.decoder.store
        store.read_from(
            CheckpointWeights(self.model, self._plan, self._checkpoint, self._schema, add),
            pack,
            nodes,
        )
        return self.decoder


class Mapped:
    """A packed cache's weights: what is not in memory yet is read into it, nothing is packed for
    the CPU.

    Args:
        sliced: whether they will be dealt over NUMA nodes, and so copied.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: PackedFolder,
        kv_dtype: str,
        rules: Sequence[Rule],
        device: str,
        sliced: bool,
    ) -> None:
        self._rules = rules
        self.model, self._folder, self._sliced = model, folder, sliced
        schema = Schema.from_json(folder.manifest.schema)
        check_cache(folder, model, schema)
        self.decoder = make_decoder(model, schema, WeightStore(CacheWeights(folder)), kv_dtype)
        self.follow(device)

    def follow(self, device: str) -> None:
        placement = followed(self.model, self._rules, device)
        self.placed = placed_nodes(self.decoder.lower(), placement)

    @property
    def files(self) -> Collection[Path]:
        return [file.path for file in self._folder.files]

    def needed(self, placement: Placement) -> int:
        """What others have in memory takes none, nor what goes to a GPU whole."""
        if CPU not in (placement.device, placement.experts):
            return 0
        if self._sliced:
            return self._folder.nbytes
        return sum(f.memory.nbytes - resident(f.memory) for f in self._folder.files)

    def smaller(self, placement: Placement) -> Mapping[str, int]:
        return {}

    def readable(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        if len(nodes) > 1:
            memory.check_node_memory([self._folder.nbytes / len(nodes)] * len(nodes), nodes)
            add = Adder(report, self._folder.nbytes)
            self.decoder.store.read_from(CacheWeights(self._folder, add), pack, nodes)
            return self.decoder
        populate(self._folder.files, Adder(report, self._folder.nbytes))
        return self.decoder


@contextmanager
def open_weights(
    folder: Path,
    config: PretrainedConfig,
    rules: Rules = None,
    kernel: str = "auto",
    kv_dtype: str = "bf16",
    device: str = CPU,
    sliced: bool = False,
) -> Iterator[Opened]:
    """Reads headers, and checks them against the model.

    Args:
        rules, kernel, kv_dtype, device: as in ``load_engine``.
        sliced: whether the weights will be dealt over NUMA nodes.

    Raises:
        PykernelsError: what is wrong with the folder, the rules or the kernel.
    """
    packed = PackedFolder(folder) if is_packed(folder) else None
    if packed is not None:
        made, experts, matrices = packed.manifest, None, None
        if rules is None:
            rules, experts, matrices = made.rules, made.experts, made.linears
        parsed = resolve_rules(rules, config.model_type)
        model = injected(config, parsed, kernel, experts, matrices)
        yield Mapped(model, packed, kv_dtype, parsed, device, sliced)
        return
    with open_checkpoint(folder) as checkpoint:
        parsed = resolve_rules(rules, config.model_type)
        model = injected(config, parsed, kernel)
        plan = make_plan(model, checkpoint, resolve_dtype(None, config))
        check_kernels(model, plan)
        yield Packable(model, plan, checkpoint, kv_dtype, parsed, device)


def followed(model: PreTrainedModel, rules: Sequence[Rule], device: str = CPU) -> ModulePlacement:
    """Where rules place a model's modules around an engine on that device, or several GPUs.

    Raises:
        PykernelsError: on another GPU than the engine's.
    """
    gpus = device.split(",") if device.startswith("cuda") else [CPU]  # "auto": nothing yet
    placement = place(model, rules, gpus[0])
    if device == "ref":  # stands for all of them
        return ModulePlacement(CPU)
    others = [each for each in placement.devices if each not in (*gpus, CPU)]
    if others:
        raise PykernelsError(
            f"a rule places modules on {others[0]}, and the engine is on {device}",
            f"Name {others[0]} in --device too, or leave out that rule",
        )
    check_places(model, rules, placement)
    return placement


def engine_device(device: str, rules: Rules, model_type: str) -> str:
    """The engine's device: the one that was asked for, or the GPUs on which rules place modules
    where that is the CPU or open."""
    if device not in (CPU, CHOSEN) or rules is None:
        return device
    named = {each for rule in resolve_rules(rules, model_type) for each in rule.devices} - {CPU}
    return ",".join(sorted(named, key=lambda gpu: int(gpu.partition(":")[2]))) or device


def injected(
    config: PretrainedConfig,
    rules: Sequence[Rule],
    kernel: str = "auto",
    experts: str | None = None,
    matrices: str | None = None,
) -> PreTrainedModel:
    """The model of a configuration, on the meta device, its rules applied.

    Args:
        experts: format of the routed experts, whatever a rule says; ``matrices``: of linears that
            a rule converts, where they can be in it.

    Raises:
        PykernelsError: rules that do not fit, or that leave experts to transformers.
    """
    model = build_meta(config, resolve_dtype(None, config))
    inject(model, rules, kernel)
    check_experts(model)
    for module in model.modules():
        if experts is not None and isinstance(module, FusedMoE):
            module.format = experts
    for linear in linears(model).values():
        if matrices is not None and linear.format != "auto":
            fits = linear.in_features % get_format(matrices).k_multiple == 0
            linear.format = matrices if fits else linear.format
    return model
