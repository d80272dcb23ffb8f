"""What a user chooses of how a model is run: devices, where its weights lie, in what the workers
compute. Sizes and what requests share are the engine's (``engine.scheduling.config``)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pykernels.registry import names

from ..workers.numa import AUTO, OFF, check_numa
from .option import SettingError, check_number, check_one_of, check_whole, option, options_of

if TYPE_CHECKING:  # it imports torch, for which a start of any command would wait
    from ..experts.cache import CachePolicy

CHOSEN = "auto"
"""``device`` where the plan's is taken (``model.planner.choose``); elsewhere the CPU is meant."""
DEVICES = ("cpu", "ref", CHOSEN)
"""Devices that are no GPU."""
EXPERTS = ("auto", "cpu", "gpu")
"""Where routed experts may be; "auto": on the GPU if all fit, else on the CPU."""
PREFILL = ("auto", "cpu", "split", "stream")
"""Where a prompt's experts are computed, if a GPU leaves them in main memory."""
GPUS = ("auto", "pipeline", "tensor", "dslp", "disaggregated", "routed")
"""How several GPUs share a model; see ``ExecutionConfig.gpus``."""
MOST_EXPERTS = 1 << 16
"""Most experts, and so slots, of a layer."""
LONG = 16384
"""Tokens of the context by which "auto" chooses where longer ones are possible."""
_AUTO_DEFER = re.compile(r"auto(?::([1-9][0-9]*)(?:x([1-9][0-9]*))?)?")
"""``defer`` that leaves the number open, with a context and a batch."""
MICROBATCHES = {"auto": "auto", "on": True, "off": False}
"""``dual_batch`` by what is typed for it."""


def _count(text: str) -> int | str:
    return text if text in ("auto", OFF) else _whole(text)


def _defer(text: str) -> int | str:
    return text if _AUTO_DEFER.fullmatch(text) else _count(text)


def _gib(text: str) -> float | str:
    if text == "auto":
        return text
    if not 0 <= (gib := float(text)) < math.inf:
        raise ValueError
    return gib


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


@dataclass(frozen=True)
class ExecutionConfig:
    """How a model is run; each setting is checked when the object is made. Their help says what
    they are on the command line too.

    Attributes:
        device: "cpu"; "cuda:0": attention, dense layers and shared experts on that GPU;
            "cuda:0,cuda:1": these GPUs, which share it as ``gpus`` says; or "ref": the reference
            ops in float32, exact and slow, the cache too; "auto": what ``load_engine`` predicts to
            be fastest, which it takes where no configuration is given.
        gpus: how several GPUs share a model. "pipeline": a part of the layers each. "tensor": of
            each layer a part of the heads, the MLPs and the experts. With the experts in main
            memory the first GPU decodes, and prompts are streamed: "dslp": to all GPUs at once,
            each of which has a part of the tokens and of the experts; "disaggregated": to the other
            ones, beside decode steps; "routed": to all while nothing decodes, else to the others.
            "auto": "routed" where the experts do not fit on the GPUs, else "pipeline".
        gpu_shares: numbers in proportion to which GPUs that share a prompt have its experts,
            "4,1"; "auto": by the rates of their links, if these differ.
        experts: where routed experts are if there is a GPU: "cpu", "gpu", or "auto": on the GPU if
            all fit.
        gpu_experts: experts of each layer that the GPU has besides, where the others are on the
            CPU: a number (the first ones), "auto": as many as fit, or a file of `pykernels profile
            experts`: the most used of all layers, as many as fit.
        prefill: where experts that lie in main memory beside a GPU are computed in steps with
            chunks of prompts: "cpu"; "stream": on the GPU, to which all of them cross in such a
            step; "split": some there, the others on the CPU; "auto": by the way that takes the
            least time for so many tokens, as measured.
        dense_gib: GiB of GPU memory for the dense weights of a model's layers. Those of as few
            layers as can be lie in main memory besides, and cross to the GPU in every step; "auto":
            of none, if all fit.
        kv_gpu_gib: GiB of GPU memory for keys and values. Those of as few layers as can be lie in
            main memory besides, and of them what a step reads crosses to the GPU; "auto": of none,
            if all fit.
        kv_attention: where decode steps attend in layers whose keys and values lie in main memory:
            "gpu", to which they cross, "cpu", or "auto": where a step took less time. Prompts and
            latent attention: on the GPU. The CPU rounds elsewhere: the text may be another one.
        gpu_gib: GiB of each GPU that are taken at most, as if it had no more; None: all that is
            free.
        expert_cache: slots of each layer for experts that a GPU computes beside the others on the
            CPU, and that change from step to step by what the routers choose; "auto": as many as
            fit; "off"; None: as many as fit where they are predicted to pay, with ``experts`` at
            "auto", else none.
        expert_cache_policy: which experts they hold, see ``experts.cache.CachePolicy``;
            ``expert_cache_swaps``: experts that are exchanged in each layer a step, at most.
        defer: experts of each token of an output, the least-weighted, that join one layer later
            (Expert Deferral); None: what rules say, else "off"; "auto": as few as are predicted to
            hide the GPU behind the CPU's experts, which is none where either is alone, at half of
            the longest sequence or at ``LONG`` tokens; "auto:N", "auto:NxM": at a context of N, of
            M sequences. The text is another one, and does not depend on neighbours, on what is
            cached or preempted, nor on where experts lie; pages of an output are not reused by
            prompts.
        dual_batch: whether decode steps of two sequences or more are two microbatches, so that a
            GPU computes the attention of one while the CPU computes the experts of the other;
            "auto": with experts on the CPU.
        kv_dtype: "bf16", or "fp8" (E4M3 with a scale per token and head): half the memory.
        threads: workers; None: one on each physical core.
        kernel: auto, amx, avx512, avx2 or generic.
        numa: "auto": weights in one slice on each NUMA node, read by its own cores, where there are
            several; "off": no; or how many nodes there must be.

    Raises:
        SettingError: a value out of its range, by name.
    """

    device: str = option(
        "cpu",
        "Where attention, dense layers and shared experts run; several GPUs share them as --gpus"
        " says. auto: what is predicted to be fastest.",
        "auto|cpu|cuda:0|cuda:0,cuda:1",
        eager=True,
    )
    gpus: str = option(
        "auto",
        "How several GPUs share a model: each has a part of the layers (pipeline), or of each layer"
        " (tensor); or the first one decodes, and prompts are streamed to all of them (dslp), to"
        " the others meanwhile (disaggregated), or as it pays (routed).",
        "|".join(GPUS),
        no_gpu=("auto",),
    )
    gpu_shares: str = option(
        "auto",
        "In which proportion GPUs that share a prompt (dslp, disaggregated, routed) have its"
        " experts; auto: by the rates of their links.",
        "N,M|auto",
        no_gpu=("auto",),
    )
    experts: str = option(
        "auto",
        "Where routed experts are with --device cuda:0; auto: on the GPU if all fit.",
        "auto|cpu|gpu",
        no_gpu=("auto",),
    )
    gpu_experts: int | str | Path | None = option(
        None,
        "Experts of each layer that a GPU computes too: N, what fits, or by a profile.",
        "N|auto|FILE",
        shown="none",
        no_gpu=(None, 0, "0"),
    )
    prefill: str = option(
        "auto",
        "With --device cuda:0, where the experts of prompts are computed that lie in main memory:"
        " there (cpu), on the GPU, to which they cross (stream), or some here and some there"
        " (split); auto: by measured rates.",
        "auto|cpu|split|stream",
        no_gpu=("auto", "cpu"),
        on_ref=True,
    )
    dense_gib: float | str = option(
        "auto",
        "GPU memory for the dense weights of layers; those of the others cross in every step."
        " auto: all that fit.",
        "GIB|auto",
        read=_gib,
        no_gpu=("auto",),
    )
    kv_gpu_gib: float | str = option(
        "auto",
        "GPU memory for keys and values; those of other layers lie in main memory and cross in"
        " every step. auto: all that fit.",
        "GIB|auto",
        read=_gib,
        no_gpu=("auto",),
    )
    kv_attention: str = option(
        "auto",
        "Where decode steps attend in layers whose keys and values lie in main memory: on the GPU,"
        " to which these cross, or on the CPU; auto: where a step took less time. Each rounds in"
        " its own way.",
        "auto|gpu|cpu",
        no_gpu=("auto",),
    )
    gpu_gib: float | None = option(
        None,
        "Memory of each GPU that is taken at most, as if it had no more.",
        "GIB",
        kind=float,
        shown="all that is free",
        no_gpu=(None,),
    )
    expert_cache: int | str | None = option(
        None,
        "Slots of each layer on the GPU for the experts that the routers choose most of late,"
        " besides those on the CPU: N, or what fits.",
        "N|auto|off",
        shown="what fits, if predicted to pay",
        read=_count,
        no_gpu=(None, OFF, 0),
        on_ref=True,
    )
    expert_cache_policy: str = option(
        "lfu",
        "What the slots keep: what was chosen most often, or last; fixed: as many swaps in each"
        " layer.",
        "lfu|lru|lfu-fixed|lru-fixed",
    )
    expert_cache_swaps: int = option(
        1,
        "Experts that a layer exchanges in a step, at most; on average where the policy is not"
        " fixed. 0: those that the prompt took stay.",
        "N",
        kind=int,
        least=0,
    )
    defer: int | str | None = option(
        None,
        "Experts of a written token, the least-weighted, whose output joins one layer later."
        " Another text, but the same beside any others; prompts reuse no cached pages of answers."
        " auto: as few as pay by the machine's rates, at half of the longest sequence, or at the"
        " context and batch that are named.",
        "N|auto|auto:CONTEXT|auto:CONTEXTxBATCH|off",
        shown="what rules say, else off",
        read=_defer,
    )
    dual_batch: bool | str = option(
        False,
        "Decode steps of several sequences in two microbatches: a GPU computes the attention of one"
        " while the CPU computes the experts of the other.",
        "auto|on|off",
        text=OFF,
        read=lambda text: MICROBATCHES[text],
        no_gpu=(False, "auto"),
        on_ref=True,
    )
    kv_dtype: str = option(
        "bf16", "Keys and values in the cache; fp8 halves its memory.", "bf16|fp8"
    )
    threads: int | None = option(
        None,
        "Worker threads.",
        "N",
        kind=int,
        shown="one on each physical core",
        least=1,
        eager=True,
    )
    kernel: str = option(
        "auto", "Expert kernel.", "|".join(names()), text=None, shown="PYKERNELS_KERNEL", eager=True
    )
    numa: str | int = option(
        AUTO,
        "Split the weights across NUMA nodes: where there are several, never, or across N.",
        "auto|off|N",
        eager=True,
    )

    def __post_init__(self) -> None:
        if self.device not in DEVICES and not self.on_gpu:
            raise SettingError(
                "device", self.device, "Give auto, cpu, ref or cuda:0", "is no device"
            )
        check_one_of("experts", self.experts, EXPERTS)
        check_one_of("prefill", self.prefill, PREFILL)
        check_one_of("kv_attention", self.kv_attention, ("auto", "gpu", "cpu"))
        check_one_of("gpus", self.gpus, GPUS)
        if self.on_gpu and "," not in self.device:
            why, hint = f"with {self.device} alone", 'Name the others too, as in "cuda:0,cuda:1"'
            self._check("gpus", ("auto",), why, hint)
            self._check("gpu_shares", ("auto",), why, hint)
        _ = self.shares
        check_one_of("dual_batch", self.dual_batch, tuple(MICROBATCHES.values()))
        if self.kv_dtype != "bf16":
            from ..kv_cache.layout import KV_DTYPES

            check_one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.dense_gib != "auto":
            check_number("dense_gib", self.dense_gib, "a number of GiB, or auto")
        if self.kv_gpu_gib != "auto":
            check_number("kv_gpu_gib", self.kv_gpu_gib, "a number of GiB, or auto")
        if self.gpu_gib is not None:
            check_number("gpu_gib", self.gpu_gib, "a number of GiB")
        if self.expert_cache not in (None, "auto", OFF):
            wanted = "a number of slots, auto or off"
            check_whole("expert_cache", self.expert_cache, 0, MOST_EXPERTS, wanted)
        check_whole("expert_cache_swaps", self.expert_cache_swaps, 0, MOST_EXPERTS)
        given = self.defer not in (None, OFF) and not str(self.defer).isdecimal()
        if given and _AUTO_DEFER.fullmatch(str(self.defer)) is None:
            hint = "Give a number of experts, off, auto, or auto:8192 or auto:8192x4 for a context"
            raise SettingError("defer", self.defer, hint + " and a batch")
        check_numa(self.numa)
        if self.expert_cache_policy != "lfu":
            _ = self.cache_policy
        if not self.slots:
            for name in ("expert_cache_policy", "expert_cache_swaps"):
                same = (getattr(type(self), name),)
                self._check(name, same, "without an expert cache", 'Add expert_cache="auto"')

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, or several."""
        return self.device.startswith("cuda")

    @property
    def shares(self) -> tuple[float, ...]:
        """The numbers of ``gpu_shares``, one for each GPU; none for "auto"."""
        if self.gpu_shares == "auto":
            return ()
        gpus, words = self.device.split(","), str(self.gpu_shares).split(",")
        try:
            found = [float(word) for word in words]
        except ValueError:
            found = []
        if len(found) != len(gpus) or not all(0 < each < math.inf for each in found):
            hint = f"Give a positive number for each GPU of {self.device}, or auto"
            raise SettingError("gpu_shares", self.gpu_shares, hint)
        if self.gpus in ("pipeline", "tensor"):
            hint = "Give gpus dslp, disaggregated or routed"
            raise SettingError("gpu_shares", self.gpu_shares, hint, f"with gpus {self.gpus}")
        return tuple(found)

    @property
    def deferred(self) -> int:
        """Experts of a token that are deferred; "auto" is none here: a plan says how many."""
        return int(self.defer) if str(self.defer).isdecimal() else 0  # type: ignore[arg-type]

    @property
    def defer_load(self) -> tuple[int, int] | None:
        """At which context, and for how many sequences, "auto" chooses; 0: nobody said; None: it is
        not "auto"."""
        found = _AUTO_DEFER.fullmatch(str(self.defer))
        return None if found is None else (int(found[1] or 0), int(found[2] or 0))

    @property
    def slots(self) -> int | str:
        """``expert_cache``, or 0 for none."""
        return 0 if self.expert_cache in (None, OFF) else self.expert_cache

    @property
    def cache_policy(self) -> CachePolicy:
        """What ``expert_cache_policy`` and ``expert_cache_swaps`` are."""
        from ..experts.cache import CachePolicy

        return CachePolicy(self.expert_cache_policy, self.expert_cache_swaps)

    @property
    def for_gpu(self) -> tuple[str, ...]:
        """The settings that are for a GPU, by name."""
        options = options_of(type(self)).items()
        return tuple(
            name
            for name, each in options
            if each.no_gpu is not None and not _is_one_of(getattr(self, name), each.no_gpu)
        )

    def check_device(self) -> ExecutionConfig:
        """Itself. Raises SettingError for a setting that is for a GPU, where there is none."""
        if self.device == "ref" and self.prefill == "split":
            hint = 'Give prefill="stream" or prefill="cpu"'
            raise SettingError("prefill", self.prefill, hint, "is for a GPU")
        for name in () if self.on_gpu or self.device == CHOSEN else self.for_gpu:
            if self.device != "ref" or not options_of(type(self))[name].on_ref:
                hint = 'Add device="cuda:0"'
                raise SettingError(name, getattr(self, name), hint, "without a GPU")
        return self

    def check_eager(self) -> ExecutionConfig:
        """Itself. Raises SettingError for a setting that Hugging Face's own forward has not."""
        for name, each in options_of(type(self)).items():
            if not each.eager:
                same = getattr(type(self), name), OFF, *(each.no_gpu or ())
                self._check(name, same, "is for the engine", "Leave out --eager and its kin")
        return self

    def _check(self, name: str, harmless: tuple[object, ...], why: str, hint: str) -> None:
        value = getattr(self, name)
        if not _is_one_of(value, harmless):
            raise SettingError(name, value, hint, why)


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(value is each or value == each for each in values)
