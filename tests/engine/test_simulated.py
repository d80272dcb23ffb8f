"""Simulated steps against what follows from a machine's rates by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from model.llm import meta_decoder
from model.planner.machine_file import parse_machine, read_machine
from pykernels.errors import PykernelsError
from runtime.devices.sim.cost import Load
from runtime.devices.sim.deferral import with_deferral
from runtime.devices.sim.drafts import times_as_long
from runtime.devices.sim.machine import Kernel, Machine
from runtime.devices.sim.routing import Routing
from runtime.devices.sim.step import simulate
from runtime.passes.layers import moe_layers
from runtime.passes.shard import sent_bytes, stripe
from runtime.passes.stream_weights import StreamRing
from runtime.planning.compile import Compiled, compile
from runtime.planning.execution import ExecutionPlan, Phase
from runtime.planning.placement import Placement
from runtime.planning.streaming import Streaming
from runtime.planning.work import cache_bytes, expert_bytes, weight_bytes
from runtime.program import Program
from runtime.program.sizes import StepSizes

from ..model import tiny

TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
FAST = {"default": {"tflops": 1e6}}
MACHINE = {
    "name": "bytes alone",
    "cpu": {
        "cores": 4,
        "memory_gib": 8,
        "read_gbps": 1.0,
        "experts_share": 0.5,
        "linear_share": 0.5,
        "job_us": 0,
        "attention_tflops": 1e6,
        "latent_attention_tflops": 1e6,
        "kernels": FAST,
    },
    "gpu": {
        "name": "of no time",
        "memory_gib": 8,
        "read_gbps": 1e9,
        "launch_us": 0,
        "hop_us": 0,
        "link_gbps": 0.25,
        "attention_tflops": 1e6,
        "kernels": FAST,
    },
    "engine": {"step_us": 0, "prompt_us": 0},
}


@pytest.fixture
def machine() -> Machine:
    return parse_machine(MACHINE, Path("machine.yaml"))


def decoding(folder: Path, placement: Placement, deferred: int = 0, **config: object) -> Compiled:
    tiny.make(folder, "qwen3_moe", num_hidden_layers=3, **config)
    plan = ExecutionPlan(StepSizes(1, 1, 1), placement, deferred=deferred)
    return compile(meta_decoder(folder), plan, Phase.DECODE)


def nbytes(program: Program, name: str) -> int:
    return math.prod(program.shape(name)) * program.buffers[name].dtype.itemsize


def test_a_step_takes_as_long_as_reading_its_bytes(tmp_path: Path, machine: Machine) -> None:
    compiled = decoding(tmp_path, Placement())
    step = simulate(compiled, machine, Load())
    assert step.seconds == pytest.approx(weight_bytes(compiled.program) / 0.5e9, rel=1e-3)
    assert step.bound == "main memory"


def test_a_gpu_of_no_time_leaves_the_experts_of_the_cpu(tmp_path: Path, machine: Machine) -> None:
    beside = Placement("cuda:0", "cpu")
    compiled = decoding(tmp_path, beside)
    read = weight_bytes(compiled.program, device="cpu") / 0.5e9
    program = compiled.program
    experts = [node for node in program.nodes if node.device == "cpu"]
    sent = sum(nbytes(program, name) for node in experts for name in (*node.reads, *node.writes))
    taken = read + sent / 0.25e9  # activations there and back over the link
    assert simulate(compiled, machine, Load()).seconds == pytest.approx(taken, rel=1e-3)
    # Deferred experts are read later, and no others: nothing is gained where the GPU takes no time.
    deferring = simulate(decoding(tmp_path, beside, 1), machine, Load())
    assert read < deferring.seconds < 1.001 * taken


def test_a_long_context_adds_the_bytes_of_its_keys(tmp_path: Path, machine: Machine) -> None:
    """Of each sequence, in layers without a window; a window's layers read no more than that."""
    window = {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0}
    compiled = decoding(tmp_path, Placement("cuda:0", "cuda:0"), layer_types=TYPES, **window)
    gpu = replace(machine.gpu, read_gbps=1.0, attention_share=0.5)  # type: ignore[type-var]
    slow = replace(machine, gpu=gpu)
    times = [simulate(compiled, slow, Load(2, n, 2)).seconds for n in (256, 4096)]
    key = 2 * 2 * 16 * 2  # keys and values, heads, numbers, bytes
    added = 2 * (4096 - 256) * key  # sequences
    assert times[1] - times[0] == pytest.approx(added / 0.5e9, rel=1e-3)


def test_latents_in_fp8_are_decoded_before_heads_multiply_them(
    tmp_path: Path, machine: Machine
) -> None:
    tiny.make(tmp_path, "deepseek_v3")
    model = replace(meta_decoder(tmp_path), kv_dtype="fp8")
    plan = ExecutionPlan(StepSizes(1, 1, 1), Placement("cuda:0", "cuda:0"))
    compiled = compile(model, plan, Phase.DECODE)
    times = []
    for gnumbers in (None, 1e-3):
        gpu = replace(machine.gpu, fp8_latents_gnumbers_s=gnumbers)  # type: ignore[type-var]
        times.append(simulate(compiled, replace(machine, gpu=gpu), Load(1, 1000)).seconds)
    numbers = 1000 * 32 * len(model.layers)  # kv_lora_rank
    assert times[1] - times[0] == pytest.approx(numbers / 1e6, rel=1e-3)


def expanding(folder: Path, device: str) -> Compiled:
    """A prompt of 256 tokens, whose latents are expanded."""
    tiny.make(folder, "deepseek_v3")
    plan = ExecutionPlan(StepSizes(256, 1, 1), Placement(device, device))
    return compile(meta_decoder(folder), plan, Phase.PROMPT, 256)


def test_a_prompts_latents_are_expanded_once_for_all_its_tokens(
    tmp_path: Path, machine: Machine
) -> None:
    """By products of each key's latent with the matrices of all heads, as many heads at a time as
    there are cores."""
    compiled = expanding(tmp_path, "cpu")
    node = next(node for node in compiled.program.nodes if node.op == "attention_expanded")
    heads, _, nope = compiled.program.weight(node, "uk").shape
    _, dv, latent = compiled.program.weight(node, "uv").shape
    layers = sum(node.op == "attention_expanded" for node in compiled.program.nodes)
    flops = 2 * 256 * heads * latent * (nope + dv) * layers
    for cores, times in ((heads, 1.0), (2 * heads, 2.0)):
        cpu = replace(machine.cpu, cores=cores, latent_attention_tflops=1e-3)
        slow = simulate(compiled, replace(machine, cpu=cpu), Load(256, 128)).seconds
        cpu = replace(cpu, latent_attention_tflops=1e6)
        quick = simulate(compiled, replace(machine, cpu=cpu), Load(256, 128)).seconds
        assert slow - quick == pytest.approx(times * flops / 1e9, rel=1e-3)


def test_steps_without_a_graph_wait_for_their_launches(tmp_path: Path, machine: Machine) -> None:
    """Latents are expanded by how long sequences are, so that the host launches each kernel; a step
    of decode has a graph."""
    gpu = replace(machine.gpu, uncaptured_us=100)  # type: ignore[type-var]
    slow, compiled = replace(machine, gpu=gpu), expanding(tmp_path, "cuda:0")
    kernels = sum(node.op != "per_head_linear" for node in compiled.program.nodes)
    assert simulate(compiled, slow, Load(256, 128)).seconds > kernels * 100e-6
    assert simulate(compiled, machine, Load(256, 128)).seconds < 100e-6
    plan = ExecutionPlan(StepSizes(1, 1, 1), Placement("cuda:0", "cuda:0"))
    decode = compile(meta_decoder(tmp_path), plan, Phase.DECODE)
    assert simulate(decode, slow, Load()).seconds < 100e-6


def test_deferral_hides_the_gpu_behind_the_cpu(tmp_path: Path, machine: Machine) -> None:
    assert machine.gpu is not None
    beside = Placement("cuda:0", "cpu")
    compiled = decoding(tmp_path, beside)
    read = weight_bytes(compiled.program, device="cpu") / 0.5e9
    slow = replace(machine.gpu, launch_us=1e6 * read / 100)
    machine = replace(machine, gpu=slow)
    plain = simulate(compiled, machine, Load()).seconds
    deferring = simulate(decoding(tmp_path, beside, 1), machine, Load()).seconds
    assert read < deferring < plain


@pytest.mark.parametrize(
    ("experts_long", "sequences", "wanted"),
    [(0.01, 1, 0), (0.5, 1, 1), (2.5, 1, 3), (5.5, 1, 6), (2.5, 64, 0)],
)
def test_as_many_are_deferred_as_hide_the_gpu(
    tmp_path: Path, machine: Machine, experts_long: float, sequences: int, wanted: int
) -> None:
    """SOSP'25 4.2: as few of 8 experts as take as long as what is between two layers, here reading
    a context; two stay. 64 sequences read all experts, deferred or not: none would hide it."""
    tiny.make(tmp_path, "qwen3_moe", num_experts=32, num_experts_per_tok=8, num_hidden_layers=4)
    model, context = meta_decoder(tmp_path), 4096
    plan = ExecutionPlan(
        StepSizes(sequences, sequences, sequences),
        Placement("cuda:0", "cpu"),
        chooses_deferral=True,
    )
    program = model.lower()
    experts = next(node for node in program.nodes if node.op == "moe_ffn")
    seconds = experts_long * program.weight(experts, "experts").bytes_per_expert / 0.5e9
    read = context * 2 * 2 * 16 * 2  # keys and values, heads, numbers, bytes
    gpu = replace(  # type: ignore[type-var]
        machine.gpu, read_gbps=read / seconds / 1e9, attention_share=1.0, linear_share=1.0
    )
    assert gpu is not None
    kernels = {"default": Kernel(1e6)}
    there = replace(machine, gpu=replace(gpu, kernels=kernels))
    # What the GPU reads besides takes no time beside such a context.
    found = with_deferral(plan, model, there, Load(sequences, context, sequences))
    assert found.deferred == wanted and not found.is_open
    assert found.decisions[-1].startswith(f"defer: {wanted or 'no'} expert")


@pytest.mark.parametrize("contended", [None, 0.5])
def test_streamed_experts_take_the_links_time(
    tmp_path: Path, machine: Machine, contended: float | None
) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    model = meta_decoder(tmp_path)
    sizes, beside = StepSizes(64, 1, 1), Placement("cuda:0", "cpu")
    plan = ExecutionPlan(sizes, beside, streaming=Streaming(StreamRing(2, 3), 64))
    compiled = compile(model, plan, Phase.STREAMED, 64)
    nbytes = sum(spec.nbytes for spec in model.lower().weights.values() if spec.kind == "experts")
    step = simulate(compiled, machine, Load(64, 32))
    assert step.bound == "the link"
    assert step.seconds == pytest.approx(nbytes / 0.25e9, rel=0.02)


def test_the_cpu_and_the_link_share_main_memory(tmp_path: Path, machine: Machine) -> None:
    """Split prompts read experts on both ways at once: with memory for one of them, both wait."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    plan = ExecutionPlan(
        StepSizes(64, 1, 1), Placement("cuda:0", "cpu"), streaming=Streaming(StreamRing(2, 3), 64)
    )
    compiled = compile(meta_decoder(tmp_path), plan, Phase.SPLIT, 64, share=1 / 3)
    alone = simulate(compiled, machine, Load(64, 32)).seconds
    cpu = replace(machine.cpu, contended_gbps=0.5)
    shared = simulate(compiled, replace(machine, cpu=cpu), Load(64, 32)).seconds
    assert alone * 1.05 < shared < alone * 1.6


@pytest.mark.parametrize(("contended", "over_one"), [(None, 0.5), (0.25, 1.0)])
def test_each_gpu_streams_its_own_experts(
    tmp_path: Path, machine: Machine, contended: float | None, over_one: float
) -> None:
    """Two links bring a layer's experts in half the time, unless main memory is one link's."""
    assert machine.gpu is not None
    gpu = replace(machine.gpu, count=2, peer_gbps=1e9, peer_us=0)
    machine = replace(machine, cpu=replace(machine.cpu, contended_gbps=contended), gpu=gpu)
    load = Load(64, 32)
    one, two = (simulate(dslp(tmp_path, gpus), machine, load).seconds for gpus in (1, 2))
    assert two / one == pytest.approx(over_one, rel=0.05)


def test_gpus_wait_for_what_collectives_send(tmp_path: Path, machine: Machine) -> None:
    """A slower peer link costs the bytes that the other rank's collectives send over it."""
    assert machine.gpu is not None
    compiled, took = dslp(tmp_path, 2), list[float]()
    for rate in (0.5, 0.25):
        gpu = replace(machine.gpu, count=2, peer_us=0, peer_gbps=rate)
        ran = simulate(compiled, replace(machine, gpu=gpu), Load(64, 32)).ran
        took.append(sum(each.cost.seconds for each in ran if each.lane[0] == "cuda:0"))
    program = meta_decoder(tmp_path).lower(StepSizes(64, 1, 1))
    sent = sent_bytes(stripe(program, 2, attention="gather")[0])
    assert took[1] - took[0] == pytest.approx(sum(sent.values()) / 0.5e9, rel=1e-3)


def test_drafts_read_a_sequences_cache_once(tmp_path: Path, machine: Machine) -> None:
    """Three drafts cost what three more sequences do, but for the keys and values of these."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    compiled = compile(meta_decoder(tmp_path), ExecutionPlan(StepSizes(4, 4, 4)), Phase.PROMPT, 4)
    drafted = simulate(compiled, machine, Load(4, 512, 1, drafts=3)).seconds
    alone = simulate(compiled, machine, Load(4, 512, 4)).seconds
    assert alone - drafted == pytest.approx(3 * cache_bytes(compiled.program, 512) / 0.5e9)


def test_checking_drafts_reads_the_experts_of_all_tokens(tmp_path: Path, machine: Machine) -> None:
    """As many different ones as tokens that choose at random take, counted."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    decoder, draw = meta_decoder(tmp_path), np.random.default_rng(3)
    program = decoder.lower()
    every, experts = weight_bytes(program), expert_bytes(program)
    layer = moe_layers(program)[0]
    E, topk = program.weight(layer.experts, "experts").shape[0], layer.topk
    plan = ExecutionPlan(StepSizes(8, 1, 8))
    times = times_as_long(plan, decoder, machine, Load(1, 1), 3)
    for drafts, found in enumerate(times, 1):
        taken = [
            len({*np.concatenate([draw.permutation(E)[:topk] for _ in range(1 + drafts)])})
            for _ in range(4000)
        ]
        expected = 1 + experts / every * (np.mean(taken) / topk - 1)
        assert found == pytest.approx(expected, rel=0.01)


def dslp(folder: Path, gpus: int) -> Compiled:
    """A prompt of 64 tokens, streamed to so many GPUs."""
    tiny.make(folder, "qwen3_moe", num_hidden_layers=3)
    streaming = Streaming(StreamRing(2, 3), 64)
    over = tuple(f"cuda:{i}" for i in range(gpus)) if gpus > 1 else ()
    plan = ExecutionPlan(
        StepSizes(64, 1, 1), Placement("cuda:0", "cpu"), streaming=streaming, stream_over=over
    )
    return compile(meta_decoder(folder), plan, Phase.STREAMED, 64)


def test_the_fullest_part_of_uneven_experts_has_more() -> None:
    assert Routing().fullest(128, 8, 2) == pytest.approx(0.5)
    rng, each = np.random.default_rng(0), np.array(Routing(1.5).taken(128, 8))
    halves = [each[rng.permutation(128)[:64]].sum() / 8 for _ in range(4000)]
    drawn = np.mean([max(half, 1 - half) for half in halves])
    assert Routing(1.5).fullest(128, 8, 2) == pytest.approx(drawn, rel=0.05)


def test_even_routing_takes_as_many_experts_as_independent_draws() -> None:
    assert Routing().distinct(128, 8, 8) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 8))
    uneven = Routing(1.2)
    assert sum(uneven.taken(128, 8)) == pytest.approx(8)
    assert max(uneven.taken(128, 8)) <= 1
    assert uneven.distinct(128, 8, 1) == pytest.approx(8)
    assert uneven.distinct(128, 8, 8) < Routing().distinct(128, 8, 8)
    assert uneven.share(128, 8, 0, 13) > 13 / 128
    assert uneven.share(128, 8, 0, 13) + uneven.share(128, 8, 13) == pytest.approx(1)
    rows = uneven.rows(128, 8, 8)
    assert sum(chance for chance, _ in rows) == pytest.approx(uneven.distinct(128, 8, 8))
    assert sum(chance * count for chance, count in rows) == pytest.approx(8 * 8)
    draw = np.random.default_rng(4)
    counts = [
        np.bincount(draw.permuted(np.tile(np.arange(128), (3, 1)), axis=1)[:, :8].ravel())
        for _ in range(2000)
    ]  # of each expert, three tokens that choose at random
    alone = np.mean([(count == 1).sum() for count in counts])
    of_three = Routing().rows(128, 8, 3)
    assert sum(chance for chance, count in of_three if count == 1) == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize(
    ("part", "key", "value", "cause", "hint"),
    [
        ("cpu", "read_gib_s", 40, "cpu.read_gib_s is no key", "read_gbps"),
        ("gpu", "hop_ms", 1, "gpu.hop_ms is no key", "hop_us"),
        ("cpu", "cores", 0, "cpu.cores is 0", "over 0"),
        ("cpu", "kernels", {"q4_k": {"tflops": 1}}, "has no 'default'", "Add default"),
    ],
)
def test_a_wrong_machine_is_one_line(
    tmp_path: Path, part: str, key: str, value: object, cause: str, hint: str
) -> None:
    data = {**MACHINE, part: {**MACHINE[part], key: value}}  # type: ignore[dict-item]
    (file := tmp_path / "machine.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(PykernelsError) as error:
        read_machine(file)
    assert cause in error.value.cause and hint in str(error.value.hint)
    assert "\n" not in error.value.cause


def test_sockets_that_read_each_others_memory_are_slower(machine: Machine) -> None:
    two = replace(machine, cpu=replace(machine.cpu, sockets=2, cross_gbps=0.25))
    # Half of what a socket reads comes at 0.5 GB/s, half at 0.25.
    assert two.interleaved().cpu.read_gbps == pytest.approx(2 / (0.5 / 0.5 + 0.5 / 0.25))
    assert machine.interleaved() is machine
