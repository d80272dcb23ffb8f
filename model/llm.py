"""`load_engine`: from a checkpoint folder to an engine that serves it, in one call.

llm = model.load_engine(model.EMBEDDED)
print(llm.generate("def quicksort(xs):", max_tokens=64).text)
for piece in llm.stream("class Stack:"):
    print(piece, end="")
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.devices.cpu import precompile
from runtime.engine import Engine, EngineConfig, RequestHandle, Result, SamplingParams
from runtime.engine.scheduling.config import STEP_TOKENS, check_whole
from runtime.experts.cache import CacheStats
from runtime.extend import checked
from runtime.kv_cache.layout import PAGE, check_kv_dtype
from runtime.machine.topology import Topology
from runtime.make import make_plan, make_runner
from runtime.passes.layers import check_topk, moe_layers
from runtime.planning.execution import largest_step
from runtime.planning.lowerable import Pass
from runtime.planning.options import PlanOptions
from runtime.planning.placement import CPU, Placement, place
from runtime.program import Program
from runtime.program.sizes import StepSizes
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.matrix import packer
from runtime.workers.numa import nodes_to_use
from runtime.workers.pool import WorkerPool, make_pool
from runtime.workers.threads import threads_here

from .architectures.decoder import Decoder, check_heads
from .architectures.families import check_lowered
from .checkpoint import memory
from .checkpoint.config import read_config
from .checkpoint.progress import Callback, compiling, reporting
from .hub import local
from .modules.moe import FusedMoE, deferred_by_rules, stay_on_cpu
from .opened import engine_device, open_weights
from .pinning.choose import Wanted, parse
from .pretrained import has_tokenizer, load_tokenizer, read_generation_config
from .rules import Rules
from .text.detokenize import Detokenizer
from .text.prompt import encode, encode_chat
from .text.settings import engine_settings, note_of

CONTEXT = 8192
"""Default ``max_model_len``, if the model has as many positions."""

DEVICES = ("cpu", "ref")

Prompt = str | Sequence[int]
Defer = int | str
"""A number of experts, "auto" or "off"."""


class LLM:
    """A model that an engine serves, with its tokenizer: text in, text out.

    Where a request's settings are given as keywords, those that are not given are the ones of the
    checkpoint's generation_config.json: penalties, stop strings, suppressed tokens, temperature and
    so on. A ``SamplingParams`` is taken as it is, and so is what ``engine`` itself is given.

    Attributes:
        engine: for token ids, handles and asyncio; ``runner``: the model on its device.
        settings: of the generation config.
    """

    def __init__(
        self,
        runner: PagedRunner,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        eos: Sequence[int],
        pool: WorkerPool,
        kernel: str = "auto",
        generation: GenerationConfig | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.pool, self.kernel = pool, kernel
        self.settings = engine_settings(generation, eos, runner.vocab_size, tokenizer is not None)
        self._told = False
        detokenizer = None if tokenizer is None else partial(Detokenizer, tokenizer)
        self.engine = Engine(runner, eos_token_ids=eos, detokenizer=detokenizer, config=engine)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output: what the context and the KV cache hold."""
        # The last token is drawn but never computed: it needs no place in the cache.
        places = self.runner.num_pages * self.runner.page_size + 1
        return min(self.runner.max_model_len, places)

    @property
    def gpu_experts(self) -> Mapping[int, Sequence[int]]:
        """By layer, the experts that a GPU has beside all of them on the CPU."""
        placement = getattr(self.runner, "placement", Placement())
        return placement.cached

    @property
    def expert_cache(self) -> CacheStats | None:
        """Hits and swaps of the experts that a GPU has in slots; None: it has no slots."""
        return self.runner.slots.stats if self.runner.slots is not None else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text that is to be continued, see ``text.prompt.encode``; ids stay."""
        if not isinstance(prompt, str):
            return list(prompt)
        return encode(self, self._tokenizer(), prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the tokenizer's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.

        Raises:
            PykernelsError: there is no tokenizer, or the template refuses the conversation.
        """
        return encode_chat(self, self._tokenizer(), messages)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> RequestHandle:
        """Queues a prompt; the handle gives chunks, or the result.

        Args:
            params: or its fields as ``settings``.

        Raises:
            PykernelsError: this engine can never serve it.
        """
        return self.engine.submit(*self._request(prompt, params, settings))

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Result:
        """The continuation of one prompt; ``engine.generate`` takes many. Ctrl-C cancels it."""
        handle = self.submit(prompt, params, **settings)
        try:
            return handle.result()
        finally:
            if not handle.finished:
                handle.cancel()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Iterator[str]:
        """The continuation as it is generated; a consumer that stops iterating cancels it."""
        for chunk in self.engine.stream(*self._request(prompt, params, settings)):
            yield chunk.text

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        ids = self.encode(prompt)
        if params is None:
            return ids, self.settings.params(len(ids), self.longest, **settings)
        if settings:
            raise PykernelsError(
                f"params and {', '.join(settings)} were given", "Give one or the other"
            )
        if not self._told and (left_out := self.settings.left_out(params)):
            self._told = True
            named = ", ".join(f"{name}={str(value)[:40]}" for name, value in left_out.items())
            warnings.warn(
                f"a SamplingParams is taken as it is, without the {named} of the generation"
                " config; settings that are given as keywords keep it",
                stacklevel=3,
            )
        return ids, params

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise PykernelsError("This model has no tokenizer", "Give token ids")
        return self.tokenizer

    def close(self) -> None:
        """Ends the engine and its workers."""
        self.engine.close()
        self.runner.close()
        self.pool.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_engine(
    path: str | Path,
    rules: Rules = None,
    threads: int | None = None,
    kernel: str = "auto",
    defer: Defer | None = None,
    passes: Sequence[Pass] = (),
    device: str = "cpu",
    experts: str = "auto",
    gpu_experts: Wanted = None,
    at_least: int = 0,
    progress: bool | Callback | None = None,
    engine: EngineConfig | None = None,
    **settings: Any,
) -> LLM:
    """Loads a checkpoint for the engine: every matrix packed in the format that it is stored in.

    Args:
        path: folder with config.json, safetensors and their index; a GGUF file, or its folder; a
            packed cache, which is mapped and shared with other processes; or a name on the hub, see
            ``hub.local``.
        rules: as in ``from_pretrained``; None for a packed cache: those that it was made with.
        threads: workers; None: one on each physical core.
        kernel: auto, amx, avx512, avx2 or generic.
        defer: experts of each token of an output, the least-weighted, that join one layer later
            (Expert Deferral); None: what rules say, else "off"; "auto": as many as keep the CPU
            busy, which is none where it is alone. The text is another one, and does not depend on
            neighbours, on what is cached or preempted, nor on where experts lie; pages of an output
            are not reused by prompts.
        passes: of one's own, ``Program -> Program``, in this order: they rewrite
            the programs of decode steps (``runtime.extend`` registers ops for them).
        device: "cpu"; "cuda:0": attention, dense layers and shared experts on that GPU;
            "cuda:0,cuda:1": the layers dealt over these GPUs, in order, by size or as rules say; or
            "ref": the reference ops in float32, exact and slow, the cache too.
        experts: where routed experts are beside a GPU: "cpu", "gpu", or "auto": on the GPU if all
            fit.
        gpu_experts: experts of each layer that the GPU has besides, where the others are on the
            CPU: a number (the first ones), "auto": as many as fit, or a file of `pykernels profile
            experts`: the most used of all layers, as many as fit.
        at_least: tokens of the longest sequence, where ``max_model_len`` is not given.
        progress: as in ``from_pretrained``.
        engine: sizes and scheduling; ``settings``: fields of ``EngineConfig`` that differ from it
            (max_model_len, max_num_seqs, max_num_batched_tokens, kv_tokens, kv_dtype ...).

    Raises:
        PykernelsError: a model that the engine cannot run, fewer than two immediate experts, a
            setting out of its range, no such device, more experts than fit there, or what
            ``from_pretrained`` raises.
    """
    folder, deferred, asked = local(path), _deferred(defer), parse(gpu_experts)
    if device not in DEVICES and not device.startswith("cuda"):
        raise PykernelsError(f"no device {device!r}", f"Use {', '.join(DEVICES)} or cuda:0")
    config = read_config(folder)
    device = engine_device(device, rules, config.model_type)
    on_gpu = None
    if device.startswith("cuda"):
        from runtime.devices.gpus import check_device, free_bytes, gpus_of

        check_device(device)
        gpus = gpus_of(device)
        device, on_gpu = ",".join(gpus), sum(free_bytes(gpus).values())
    elif experts != "auto":
        raise PykernelsError(f"experts={experts!r} without a GPU", 'Add device="cuda:0"')
    if asked and on_gpu is None:
        raise PykernelsError("gpu_experts without a GPU", 'Add device="cuda:0"')
    chosen = _chosen(engine, settings)
    check_kv_dtype(chosen.kv_dtype)  # refused before anything is read
    if chosen.dual_batch is True and device == "cpu":
        raise PykernelsError("dual_batch without a GPU", 'Add device="cuda:0"')
    if chosen.prefill in ("split", "stream") and device == "cpu":
        raise PykernelsError(f'prefill="{chosen.prefill}" without a GPU', 'Add device="cuda:0"')
    if chosen.dense_gib != "auto" and not device.startswith("cuda"):
        raise PykernelsError("dense_gib without a GPU", 'Add device="cuda:0"')
    cache = 0 if chosen.expert_cache == "off" else chosen.expert_cache
    if cache and device == "cpu":
        raise PykernelsError("expert_cache without a GPU", 'Add device="cuda:0"')
    threads_here(threads, True, Topology.detect())
    sliced = len(nodes_to_use(Topology.detect(), chosen.numa, threads)) > 1
    check_lowered(config)
    positions = config.max_position_embeddings
    if chosen.max_model_len is not None:
        check_whole("max_model_len", chosen.max_model_len, 1, positions)
    budget = chosen.max_num_batched_tokens or STEP_TOKENS
    longest = chosen.max_model_len or min(max(CONTEXT, at_least), positions)
    with open_weights(folder, config, rules, kernel, chosen.kv_dtype, device, sliced) as weights:
        model = weights.model
        if defer is None:
            deferred = deferred_by_rules(model)
        if on_gpu is not None and experts == "auto" and stay_on_cpu(model):
            experts = "cpu"
        if deferred:
            blocks = [block for block in model.modules() if isinstance(block, FusedMoE)]
            check_topk(config.model_type, [block.shape.topk for block in blocks], deferred)
        if device == "cpu":  # first, because a second process compiles in parallel
            decoder = weights.decoder
            check_heads(decoder.head_sizes)
            precompile.begin(decoder.head_sizes, decoder.expansions(budget))
        token, placement = weights.decoder.token_bytes, Placement()
        needed, smaller = weights.needed(placement), weights.smaller(placement)
        states = weights.decoder.state_bytes * chosen.state_slots
        if not states and (chosen.snapshots, chosen.snapshot_tokens) != (None, None):
            raise PykernelsError(
                f"snapshots of states, and {config.model_type} has no layer with a state",
                "Leave out snapshots and snapshot_tokens",
            )
        pages = memory.cache_pages(chosen, longest, token, needed, smaller, on_gpu, states)
        if on_gpu is not None:
            from .pinning.beside import place_beside

            seqs, rows = chosen.max_num_seqs, chosen.num_logits or 0
            table_pages, rows = -(-longest // PAGE), min(budget, max(rows, seqs))
            largest = StepSizes(budget, seqs, rows, pages, table_pages)
            where = experts, *weights.placed, cache, chosen.prefill, chosen.dense_gib
            placement = place_beside(asked, weights.decoder, device, largest, *where)
            needed, smaller = weights.needed(placement), weights.smaller(placement)
            needed += sum(placement.staged.values())
            memory.check_engine(needed, 0, 0, 0, smaller)
        generation = read_generation_config(folder)
        eos = _eos(config, generation)
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        # Before the weights are read: a value out of range is an error.
        defaults = engine_settings(generation, eos, config.vocab_size, tokenizer is not None)
        if defaults.not_done:
            warnings.warn(note_of(defaults.not_done), stacklevel=2)
        pool = make_pool(threads, numa=chosen.numa)
        try:
            rewrites = [checked(each) for each in passes]
            given = chosen.max_num_batched_tokens
            sizes = largest_step(
                longest,
                pages,
                given,
                chosen.max_num_seqs,
                chosen.num_logits,
                chosen.state_slots,
            )
            options = PlanOptions(
                experts,
                None if defer == "auto" and on_gpu is not None else deferred,
                chosen.dual_batch,
                chosen.prefill,
                placement if on_gpu is not None else None,
                chosen.cache_policy,
                kernel,
                rewrites,
            )
            with reporting(progress) as report:
                decoder = weights.readable(packer(pool), report, pool.memory)
                if device == "ref" and cache:
                    from .pinning.beside import slots_of

                    slots = slots_of(decoder, cache)
                    options = replace(options, placement=Placement(device, device, slots=slots))
                plan = make_plan(decoder, device, longest, sizes, options)
                runner = make_runner(decoder, plan, device, pool)
                runner.load()
            with compiling(progress):
                return LLM(runner, config, tokenizer, eos, pool, kernel, generation, chosen)
        except BaseException:
            pool.close()
            raise


def _chosen(engine: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    """The engine's settings, those given by name in place of ``engine``'s."""
    names = {field.name for field in fields(EngineConfig)}
    for name in settings:
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f"Did you mean {close[0]}?" if close else f"Use {', '.join(sorted(names))}"
            raise PykernelsError(f"load_engine has no setting {name!r}", hint)
    return replace(engine or EngineConfig(), **settings)


def _deferred(defer: Defer | None) -> int:
    """Experts of a token that are deferred, as asked for. "auto" is none where no GPU is beside the
    CPU, else what the runner finds."""
    if defer in (None, "off", "auto"):
        return 0
    if not str(defer).isdecimal():
        raise PykernelsError(f"{defer!r} experts deferred", "Give a number, auto or off")
    return int(defer)


def placed_program(
    path: Path, rules: Rules, device: str, experts: str, tokens: int, slots: int = 0
) -> Program:
    """The program of a step of at most so many tokens, its nodes where they would run.

    Args:
        experts: where routed experts are beside a GPU: "cpu" or "gpu".
        slots: of each layer for experts on the device besides.

    Raises:
        PykernelsError: as ``load_engine``.
    """
    config = read_config(path)
    device = engine_device(device, rules, config.model_type)
    with open_weights(path, config, rules, device=device) as weights:
        program = weights.decoder.lower(StepSizes(tokens, tokens, tokens, 1, 1))
        if device == CPU:
            if experts == "gpu":
                raise PykernelsError("experts on a GPU without one", "Add --device cuda:0")
            return program
        from runtime.devices.cuda.memory.weights import gpu_bytes
        from runtime.devices.gpus import gpus_of
        from runtime.planning.gpu.plan import several_refused

        gpus = gpus_of(device)
        if slots and len(gpus) > 1:
            raise PykernelsError(*several_refused("an expert cache"))
        caches = {name: part.nbytes for name, part in weights.decoder.caches(1).items()}
        same = dict.fromkeys(gpus, 1 << 40)  # bytes: GPUs that need not be there
        room = {layer.experts.layer or 0: slots for layer in moe_layers(program) if slots}
        placed, by_layer = weights.placed
        found = place(program, experts, same, gpu_bytes, placed, caches, by_layer)
        placed_on = replace(found, slots=room)
        return placed_on.fill(placed_on.place(program))


def meta_decoder(path: Path, rules: Rules = None) -> Decoder:
    """A checkpoint's decoder, to look at its programs: no weight is read.

    Raises:
        PykernelsError: as ``load_engine``.
    """
    with open_weights(path, read_config(path), rules) as weights:
        return weights.decoder


def _eos(config: PretrainedConfig, generation: Any) -> list[int]:
    """The end-of-sequence tokens."""
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
