"""`load_engine`: from a checkpoint folder to an engine that serves it, in one call.

llm = model.load_engine(model.EMBEDDED)
print(llm.generate("def quicksort(xs):", max_tokens=64).text)
for text in llm.stream("class Stack:"):
    print(text, end="")
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.devices.cpu import precompile
from runtime.devices.sim.machine import Machine
from runtime.engine import EngineConfig
from runtime.engine.scheduling.config import CONTEXT, STEP_TOKENS
from runtime.engine.scheduling.draft_limits import AUTO, DRAFTERS
from runtime.engine.scheduling.drafts import check_taken_back, why_none
from runtime.extend import checked
from runtime.kv_cache.layout import PAGE
from runtime.kv_tiers.behind import KvBehind
from runtime.kv_tiers.blocks.directory import prepared
from runtime.kv_tiers.blocks.master import check_store
from runtime.kv_tiers.transfer.endpoint import check_transfer
from runtime.machine.topology import Topology
from runtime.make_runner import make_plan, make_runner
from runtime.passes.defer import cannot_join
from runtime.passes.layers import check_topk
from runtime.planning.config import CHOSEN, ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.planning.lowerable import Pass
from runtime.planning.option import SettingError, check_whole
from runtime.planning.placement import CPU, Placement
from runtime.planning.residency import Filled
from runtime.profiling.this_machine import this_machine
from runtime.program.sizes import StepSizes
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.matrix import packer
from runtime.workers.numa import nodes_to_use
from runtime.workers.pool import WorkerPool, make_pool
from runtime.workers.threads import threads_here

from .architectures.decoder import check_heads
from .architectures.families import check_lowered
from .checkpoint import memory
from .checkpoint.config import read_config
from .checkpoint.identity import identity
from .checkpoint.progress import Callback, compiling, reporting
from .embedded import PATH
from .hub import local
from .llm import LLM
from .modules.moe import FusedMoE, deferred_by_rules, stay_on_cpu
from .opened import Opened, engine_device, open_weights
from .pinning.choose import parse
from .pinning.place import placement_of
from .pinning.windows import cost_of, described
from .pretrained import has_tokenizer, load_tokenizer, read_generation_config
from .rules import Rules
from .text.settings import engine_settings, note_of


def load_engine(
    path: str | Path,
    rules: Rules = None,
    *,
    passes: Sequence[Pass] = (),
    at_least: int = 0,
    progress: bool | Callback | None = None,
    execution: ExecutionConfig | None = None,
    engine: EngineConfig | None = None,
    **settings: Any,
) -> LLM:
    """Loads a checkpoint for the engine: every matrix packed in the format that it is stored in.

    Args:
        path: folder with config.json, safetensors and their index; a GGUF file, or its folder; a
            packed cache, which is mapped and shared with other processes; or a name on the hub, see
            ``hub.local``.
        rules: as in ``from_pretrained``; None for a packed cache: those that it was made with.
        passes: of one's own, in this order, for decode steps (see ``runtime.extend``).
        at_least: tokens of the longest sequence, where ``max_model_len`` is not given.
        progress: as in ``from_pretrained``.
        execution: on which devices, and how; None: on those that are predicted to be fastest
            (``planner.choose``), unless ``settings`` say. ``engine``: sizes and scheduling.
        settings: fields of ``ExecutionConfig`` (device, experts, defer, threads, kernel, kv_dtype
            ...) and of ``EngineConfig`` (max_model_len, max_num_seqs, kv_tokens ...) that differ.

    Raises:
        PykernelsError: a model that the engine cannot run, a setting out of its range, no such
            device, more experts than fit there, or what ``from_pretrained`` raises.
    """
    execution = execution or ExecutionConfig(device=CHOSEN)
    execution, engine = _given(execution, engine or EngineConfig(), settings)
    folder = local(path)
    config = read_config(folder)
    execution = on_device(execution, rules, config.model_type)
    check_lowered(config)
    longest = _longest(engine, config, at_least)
    with _opened(folder, config, rules, execution) as weights:
        execution = _by_rules(execution, weights, config.model_type)
        execution, why = chosen_for(execution, engine, weights, config)
        engine.check_ways(execution)
        if engine.draft is None and execution.device != CPU:
            engine = replace(engine, draft="off")
        disk_bytes = _check_behind(execution, engine, passes)
        _begin_compiling(execution, engine, weights)
        placement, sizes = _fitted(execution, engine, weights, longest)
        generation, tokenizer, eos = texts_of(folder, config)
        pool = make_pool(execution.threads, numa=execution.numa)
        try:
            with reporting(progress) as report:
                decoder = weights.readable(packer(pool), report, pool.memory)
                own = [checked(each) for each in passes]
                plan = make_plan(execution, decoder, longest, sizes, placement, own, this_machine)
                said = described(engine, decoder, plan.sizes)
                plan = replace(plan, decisions=(*said, *plan.decisions))
                runner = make_runner(plan, execution.device, decoder, pool)
                if engine.draft in DRAFTERS:
                    check_taken_back(runner)
                runner.load()
            with compiling(progress):
                kernel, runner = execution.kernel, runner.finished()
                behind = _behind(engine, disk_bytes, folder, config, weights)
                engine, drafts = with_drafts(engine, runner, pool)
                llm = LLM(runner, config, tokenizer, eos, pool, kernel, generation, engine, behind)
                llm.chosen, llm.drafts = why, drafts
                return llm
        except BaseException:
            pool.close()
            raise


def _check_behind(execution: ExecutionConfig, engine: EngineConfig, passes: Sequence[Pass]) -> int:
    """Bytes of the directory behind the KV cache.

    Raises:
        PykernelsError: it cannot be had, or what is in it would have no name; main memory behind
            main memory.
    """
    if engine.kv_ram_gib and execution.device == CPU:
        hint = "Give kv_tokens for a larger cache"
        raise SettingError("kv_ram_gib", engine.kv_ram_gib, hint, "without a GPU")
    check_shared(engine)
    if engine.kv_disk is None and engine.kv_store is None and not engine.transfer_host:
        return 0
    if passes:
        raise PykernelsError(
            "kv_disk, kv_store or kv_transfer with passes of one's own: they may change keys and"
            " values, and no name of a block says how",
            "Leave out one of them",
        )
    if engine.kv_store is not None:
        check_store(engine.kv_store)
    if engine.transfer_host:
        check_transfer(engine.transfer_host)
    return 0 if engine.kv_disk is None else prepared(engine.kv_disk, _bytes(engine.kv_disk_gib))


def check_shared(engine: EngineConfig) -> None:
    """Raises SettingError where other engines are to read memory, and it is not known how."""
    if engine.transfer_host and not engine.kv_shared:
        hint = "Give --role prefill or decode; in Python kv_shared=True"
        raise SettingError("kv_transfer", engine.kv_transfer, hint, "of a server that is no node")
    if engine.transfer_host and engine.kv_store is not None:
        hint = "Leave out one of them"
        raise SettingError("kv_transfer", engine.kv_transfer, hint, "beside kv_store")
    if engine.kv_transfer_gib == 0:
        hint = "Give more, or off as kv_transfer"
        raise SettingError("kv_transfer_gib", engine.kv_transfer_gib, hint, "for other nodes")
    if engine.kv_transfer_gib is not None and not engine.transfer_host:
        hint = "Leave it out, or give an address as kv_transfer"
        raise SettingError("kv_transfer_gib", engine.kv_transfer_gib, hint, "without kv_transfer")


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _behind(
    engine: EngineConfig, limit: int, folder: Path, config: PretrainedConfig, weights: Opened
) -> KvBehind | None:
    """The levels behind the KV cache of the model in ``folder``; None: there are none."""
    ram, root, store = _bytes(engine.kv_ram_gib) or 0, engine.kv_disk, engine.kv_store or ""
    host = engine.transfer_host
    if root is None and not ram and not store and not host:
        return None
    known = identity(config, weights.files) if root is not None or store or host else b""
    lent = _bytes(engine.kv_store_gib + engine.transfer_gib) or 0
    name = "embedded" if folder.resolve() == PATH else folder.resolve().name
    return KvBehind(ram, root, limit, name, known, store, lent, engine.kv_shared, host)


def chosen_for(
    execution: ExecutionConfig,
    engine: EngineConfig,
    weights: Opened,
    config: PretrainedConfig,
    machine: Machine | None = None,
) -> tuple[ExecutionConfig, str]:
    """The configuration with what it leaves open chosen by what is predicted, and why; ``weights``
    follow rules on that device.

    Args:
        machine: None: this one.
    """
    if execution.device != CHOSEN and (not execution.on_gpu or any(weights.placed)):
        return execution, ""
    from .planner.choose import chosen_by_plan, is_open
    from .planner.settings import Case, Wanted
    from .planner.subject import Subject

    if not is_open(execution):
        return execution, ""
    machine = machine or this_machine(execution.threads)
    subject = Subject(weights.decoder.name, "its headers", config, weights.decoder, "")
    wanted = replace(Wanted().within(subject.positions), engine=engine)
    found = chosen_by_plan(Case(subject, machine, execution, wanted))
    if found.execution.device != execution.device:
        weights.follow(found.execution.device)
    return found.execution, found.why


def with_drafts(
    engine: EngineConfig, runner: PagedRunner, pool: WorkerPool
) -> tuple[EngineConfig, str]:
    """The configuration with ``draft`` settled that is "auto" or None, and why in a line; "": it
    was not asked for, and is off.

    It is off where drafts are predicted not to pay; where nothing is predicted, steps tell if it
    was asked for. Else no step has more tokens than such of which each is computed as if it were
    alone, so that no bit of a text depends on what was predicted and measured."""
    if engine.draft is None:
        return _unasked(engine, runner, pool)
    if engine.draft != AUTO:
        return engine, ""
    from .planner.forecast import forecast_of

    off = replace(engine, draft="off")
    if why := why_none(engine, runner):
        return off, f"drafts: off: {why}"
    forecast = forecast_of(runner.model, runner.plan, pool)
    if forecast is None:
        return engine, "drafts: checked by what steps have taken, since nothing is predicted here"
    found = forecast.drafts(engine.draft_tokens)
    return (replace(engine, draft_times=found.times) if found.pays else off), found.line


def _unasked(
    engine: EngineConfig, runner: PagedRunner, pool: WorkerPool
) -> tuple[EngineConfig, str]:
    """``with_drafts`` where ``draft`` is left open."""
    from .planner.forecast import forecast_of

    off, known = replace(engine, draft="off"), runner.batch_invariance
    drafts = min(engine.draft_tokens, known.tokens - 1)
    if drafts < 1:
        return off, ""
    engine = replace(engine, draft=AUTO, draft_tokens=drafts, draft_step_tokens=known.tokens)
    if (
        why_none(engine, runner)
        or (forecast := forecast_of(runner.model, runner.plan, pool)) is None
    ):
        return off, ""
    found = forecast.drafts(drafts)
    if not found.pays:
        return off, ""
    said = (
        f"drafts: up to {found.best[1]:.2f} x decode where text repeats itself, and every text is"
    )
    return (
        replace(engine, draft_times=found.times),
        f"{said} the same bits as with --draft off: {found.cost}",
    )


def _given(
    execution: ExecutionConfig, engine: EngineConfig, settings: dict[str, Any]
) -> tuple[ExecutionConfig, EngineConfig]:
    """Both, with the settings that are given by name."""
    names = [{each.name for each in fields(config)} for config in (execution, engine)]
    for name in settings:
        if name not in (known := names[0] | names[1]):
            close = get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]}?" if close else f"Use {', '.join(sorted(known))}"
            raise PykernelsError(f"load_engine has no setting {name!r}", hint)
    own, others = ({n: v for n, v in settings.items() if n in some} for some in names)
    execution, engine = replace(execution, **own), replace(engine, **others)
    if engine.draft in (None, "off") and engine.draft_tokens != EngineConfig.draft_tokens:
        hint = 'Add draft="ngram"'
        raise SettingError("draft_tokens", engine.draft_tokens, hint, "without drafts")
    if engine.draft in DRAFTERS and execution.prefill == "stream":
        raise PykernelsError(
            f"draft={engine.draft!r} and prefill='stream': drafts are checked as prompts are read,"
            " and each such step would bring all experts to the GPU",
            "Leave prefill at auto, or draft at off",
        )
    return execution, engine


def on_device(execution: ExecutionConfig, rules: Rules, model_type: str) -> ExecutionConfig:
    """The configuration with the device that it, or rules, name; without a GPU the CPU where they
    leave it open.

    Raises:
        PykernelsError: there is no such GPU, or a setting is for one and there is none; no such
            profile; more threads than cores.
    """
    execution = replace(execution, device=engine_device(execution.device, rules, model_type))
    parse(execution.gpu_experts)  # a file that is no profile: before anything is read
    threads_here(execution.threads, True, Topology.detect())
    if execution.device == CHOSEN:
        from runtime.devices.gpus import usable_gpus

        if usable_gpus():
            return execution
        execution = replace(execution, device=CPU)
    if execution.on_gpu:
        from runtime.devices.gpus import check_device, gpus_of

        check_device(execution.device)
        execution = replace(execution, device=",".join(gpus_of(execution.device)))
    return execution.check_device()


def _longest(engine: EngineConfig, config: PretrainedConfig, at_least: int) -> int:
    """Positions of a sequence."""
    positions = config.max_position_embeddings
    if engine.max_model_len is None:
        return min(max(CONTEXT, at_least), positions)
    check_whole("max_model_len", engine.max_model_len, 1, positions)
    return engine.max_model_len


def _opened(
    folder: Path, config: PretrainedConfig, rules: Rules, execution: ExecutionConfig
) -> Any:
    nodes = nodes_to_use(Topology.detect(), execution.numa, execution.threads)
    how = execution.kernel, execution.kv_dtype, execution.device
    return open_weights(folder, config, rules, *how, sliced=len(nodes) > 1)


def _by_rules(execution: ExecutionConfig, weights: Opened, model_type: str) -> ExecutionConfig:
    """The configuration with what rules say of experts, where it leaves that open.

    Raises:
        PykernelsError: fewer than two experts of a token would be immediate, or none can be
            deferred.
    """
    model = weights.model
    if execution.defer is None:
        execution = replace(execution, defer=deferred_by_rules(model))
    if weights.decoder.norms_experts:
        if execution.deferred:
            raise cannot_join(model_type)
        execution = replace(execution, defer=0)  # whatever would pay
    may_leave = execution.on_gpu or execution.device == CHOSEN
    if may_leave and execution.experts == "auto" and stay_on_cpu(model):
        execution = replace(execution, experts="cpu")
    if execution.deferred:
        blocks = [block for block in model.modules() if isinstance(block, FusedMoE)]
        check_topk(model_type, [block.shape.topk for block in blocks], execution.deferred)
    return execution


def _begin_compiling(execution: ExecutionConfig, engine: EngineConfig, weights: Opened) -> None:
    """Lets another process compile the CPU's kernels of attention, in parallel to all that follows.
    Raises PykernelsError for heads that they do not take."""
    if execution.device != "cpu":
        return
    decoder = weights.decoder
    check_heads(decoder.head_sizes)
    budget = engine.max_num_batched_tokens or STEP_TOKENS
    precompile.begin(decoder.head_sizes, decoder.expansions(budget))


def _fitted(
    execution: ExecutionConfig, engine: EngineConfig, weights: Opened, longest: int
) -> tuple[Placement, StepSizes]:
    """Where weights go, and the sizes for which there is memory then.

    Raises:
        PykernelsError: weights and cache need more than is free.
    """
    free = None
    if execution.on_gpu:
        from runtime.devices.gpus import free_bytes, gpus_of

        free = sum(free_bytes(gpus_of(execution.device), execution.gpu_gib).values())
    cost, placement = cost_of(execution, engine, weights.decoder), Placement()
    needed, smaller = weights.needed(placement), weights.smaller(placement)
    states = weights.decoder.state_bytes * engine.state_slots
    if not states and (engine.snapshots, engine.snapshot_tokens) != (None, None):
        raise PykernelsError(
            f"snapshots of states, and {weights.decoder.name} has no layer with a state",
            "Leave out snapshots and snapshot_tokens",
        )
    pages = memory.cache_pages(engine, longest, cost, needed, smaller, free, states)
    given = engine.max_num_batched_tokens
    most = engine.max_num_seqs, engine.num_logits, engine.state_slots, cost.pool(pages)
    largest = largest_step(longest, pages, given or STEP_TOKENS, *most)
    placement = placement_of(execution, weights.decoder, largest, *weights.placed)
    if placement.kv_in_main and largest.window_pages:
        most = (*most[:-1], 0)  # pages that cross are those of all layers
        largest = largest_step(longest, pages, given or STEP_TOKENS, *most)
        placement = placement_of(execution, weights.decoder, largest, *weights.placed)
    if execution.on_gpu:
        needed, smaller = weights.needed(placement), weights.smaller(placement)
        needed += sum(each.nbytes for each in placement.filled(Filled.EACH_STEP).values())
        memory.check_engine(needed, 0, 0, 0, smaller)
        specs = weights.decoder.cache_specs
        row = sum(specs[layer].token_bytes for layer in placement.kv_in_main)
        memory.check_cache(row, pages, len(placement.kv_in_main), needed)
        needed += row * pages * PAGE
    behind = engine.kv_ram_gib + engine.kv_store_gib + engine.transfer_gib
    memory.check_behind(_bytes(behind) or 0, needed)
    return placement, largest_step(longest, pages, given, *most)


def texts_of(
    folder: Path, config: PretrainedConfig
) -> tuple[GenerationConfig | None, PreTrainedTokenizerBase | None, list[int]]:
    """The generation config, the tokenizer and the end tokens.

    Before the weights are read: a value out of range is an error.
    """
    generation = read_generation_config(folder)
    eos = _eos(config, generation)
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    defaults = engine_settings(generation, eos, config.vocab_size, tokenizer is not None)
    if defaults.not_done:
        warnings.warn(note_of(defaults.not_done), stacklevel=3)
    return generation, tokenizer, eos


def _eos(config: PretrainedConfig, generation: Any) -> list[int]:
    """The end-of-sequence tokens."""
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
