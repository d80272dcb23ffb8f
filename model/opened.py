"""What `load_engine` opens: a checkpoint to be packed, or a packed cache to be mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from transformers import PretrainedConfig, PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from runtime.machine.nodes import ONE_NODE, MemoryNodes
from runtime.matrix import Pack, pack_nothing

from .architectures.converted import Converted
from .architectures.copied import CopiedCache
from .architectures.decoder import Decoder, make_decoder
from .architectures.moe import check_experts
from .architectures.packed import FromCache
from .architectures.packing import FromSource
from .architectures.weights import MetaWeights, Stored
from .checkpoint import memory
from .checkpoint.config import resolve_dtype
from .checkpoint.load import check_kernels, warn_of
from .checkpoint.open import open_checkpoint
from .checkpoint.packed.manifest import is_packed
from .checkpoint.packed.mapped import PackedFolder
from .checkpoint.packed.populate import populate, resident
from .checkpoint.plan import Experts, Plan, make_plan
from .checkpoint.progress import Adder, Callback
from .checkpoint.read import nbytes
from .checkpoint.safetensors import Checkpoint
from .modules.inject import inject
from .modules.linear import linears
from .modules.moe import FusedMoE
from .modules.placement import place
from .pretrained import build_meta
from .rules import Rule, Rules, resolve_rules


class Opened(Protocol):
    """A model's weights before they are read.

    Attributes:
        model: injected, on the meta device.
        needed: bytes of main memory that loading takes at its peak; ``smaller``: with the experts
            converted, by format.
    """

    model: PreTrainedModel

    @property
    def needed(self) -> int: ...

    @property
    def smaller(self) -> Mapping[str, int]: ...

    def decoder(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        """Loads them, a slice of each matrix on each of the NUMA nodes.

        Raises:
            PykernelsError: a node has no room for its slices.
        """

    def meta_decoder(self) -> Decoder:
        """Their shapes alone."""


class Packable:
    """A checkpoint's weights: every matrix is packed in the format that it is stored in."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, checkpoint: Checkpoint, kv_dtype: str
    ) -> None:
        self.model, self._plan, self._checkpoint = model, plan, checkpoint
        self._kv_dtype = kv_dtype
        self._packed = memory.needed_by_engine(plan, model, checkpoint)

    @property
    def needed(self) -> int:
        return self._packed.peak

    @property
    def smaller(self) -> Mapping[str, int]:
        return self._packed.smaller()

    def decoder(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        experts = {item.name for item in self._plan.items if isinstance(item, Experts)}
        others = {n: size for n, size in self._packed.by_item.items() if n not in experts}
        memory.check_nodes(self._plan, self.model, nodes, others)
        warn_of(self._plan)
        total = sum(nbytes(self._checkpoint, item) for item in self._plan.items)
        source = Stored(self._plan, self._checkpoint, Adder(report, total))
        converted = Converted(source, linears(self.model))
        return make_decoder(self.model, FromSource(converted, pack, nodes), self._kv_dtype)

    def meta_decoder(self) -> Decoder:
        packing = FromSource(Converted(MetaWeights(self._plan), linears(self.model)), pack_nothing)
        return make_decoder(self.model, packing, self._kv_dtype)


class Mapped:
    """A packed cache's weights: what is not in memory yet is read into it, nothing is packed.

    Args:
        copied: whether they will be dealt over NUMA nodes, and so copied: the pages of a file are
            wherever they were read first.
    """

    def __init__(
        self, model: PreTrainedModel, folder: PackedFolder, kv_dtype: str, copied: bool
    ) -> None:
        self.model, self._folder = model, folder
        self._kv_dtype, self._copied = kv_dtype, copied
        self._decoder = make_decoder(model, FromCache(folder, model), kv_dtype)

    @property
    def needed(self) -> int:
        """What others have in memory takes none."""
        if self._copied:
            return self._folder.nbytes
        return sum(f.memory.nbytes - resident(f.memory) for f in self._folder.files)

    @property
    def smaller(self) -> Mapping[str, int]:
        return {}

    def decoder(self, pack: Pack, report: Callback, nodes: MemoryNodes = ONE_NODE) -> Decoder:
        if len(nodes) > 1:
            memory.check_room([self._folder.nbytes / len(nodes)] * len(nodes), nodes)
            add = Adder(report, self._folder.nbytes)
            return make_decoder(
                self.model, CopiedCache(self._folder, self.model, nodes, add), self._kv_dtype
            )
        populate(self._folder.files, Adder(report, self._folder.nbytes))
        return self._decoder

    def meta_decoder(self) -> Decoder:
        return self._decoder


@contextmanager
def open_weights(
    folder: Path,
    config: PretrainedConfig,
    rules: Rules = None,
    kernel: str = "auto",
    kv_dtype: str = "bf16",
    sliced: bool = False,
) -> Iterator[Opened]:
    """Reads headers, and checks them against the model.

    Args:
        rules, kernel, kv_dtype: as in ``load_engine``.
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
        yield Mapped(model, packed, kv_dtype, sliced)
        return
    with open_checkpoint(folder) as checkpoint:
        model = injected(config, resolve_rules(rules, config.model_type), kernel)
        plan = make_plan(model, checkpoint, resolve_dtype(None, config))
        check_kernels(model, plan)
        yield Packable(model, plan, checkpoint, kv_dtype)


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
        PykernelsError: rules that do not fit, that leave experts to transformers, or that place
            something elsewhere than on the CPU.
    """
    model = build_meta(config, resolve_dtype(None, config))
    inject(model, rules, kernel)
    check_experts(model)
    if device := place(model, rules).gpu():
        raise PykernelsError(
            f"a rule places modules on {device}, which the engine does not follow",
            "Use --eager, or --device cuda:0 and rules without a GPU",
        )
    for module in model.modules():
        if experts is not None and isinstance(module, FusedMoE):
            module.format = experts
    for linear in linears(model).values():
        if matrices is not None and linear.format != "auto":
            fits = linear.in_features % get_format(matrices).k_multiple == 0
            linear.format = matrices if fits else linear.format
    return model
