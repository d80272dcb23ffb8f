"""A recorded step: every task once, on lanes that do one thing at a time; its trace, its picture,
its figures."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import model
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from runtime.passes import defer, offload
from runtime.profiling.engine_speed import EngineTimer
from runtime.runner.paged_runner import PagedRunner
from runtime.tracing import usage as used
from runtime.tracing.gpu import gpu_spans, kineto_events
from runtime.tracing.perfetto import write_trace
from runtime.tracing.plot import draw
from runtime.tracing.recorder import Recorder
from runtime.tracing.timeline import ENGINE, STREAM, WAIT, WORKER, Lane, Span, Step, Timeline
from runtime.workers.job import Job, Jobs
from runtime.workers.pool import WorkerPool
from runtime.workers.trace import WorkerTrace

from ..model import tiny
from ..runners import cpu_runner, ref_runner


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder, "deepseek_v3")
    with model.load_engine(folder, max_model_len=64, max_num_seqs=1) as llm:
        yield llm


def recorded(runner: PagedRunner) -> Timeline:
    """A prompt and two decode steps."""
    timer = EngineTimer(runner, overlap=False)
    recorder = Recorder(runner, "tiny")
    timer.prefill(5, recorder)
    timer.decode(1, 5, 2, recorder)
    return recorder.timeline()


def tasks_of(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.op != WAIT]


def test_every_task_of_a_step_is_one_span_of_one_worker(llm: model.LLM) -> None:
    runner = cpu_runner(llm.runner.model, llm.pool, 64, max_num_seqs=1)
    timeline = recorded(runner)
    assert [step.kind for step in timeline.steps] == ["prefill", "decode", "decode"]
    last = timeline.steps[-1]
    inside = [s for s in timeline.spans if last.begin <= s.begin and s.end <= last.end]
    found = Counter(
        (s.name, s.detail)
        for s in inside
        if s.lane.kind == WORKER and s.detail not in ("", "setup")
    )
    jobs = runner.steps[0].jobs.jobs  # type: ignore[attr-defined]
    assert found == Counter((job.name, job.describe(i)) for job in jobs for i in range(job.tasks))
    nodes = {node.name: node for node in runner.steps[0].program.nodes}
    for span in tasks_of(inside):
        if span.name in nodes:
            assert span.layer == nodes[span.name].layer
            assert span.op.split()[0] == nodes[span.name].op
    for lane in timeline.lanes:
        if lane.kind == WORKER:
            spans = [span for span in timeline.spans if span.lane == lane]
            assert all(a.end <= b.begin for a, b in pairwise(tasks_of(spans)))
    engine = [s for s in inside if s.lane.kind == ENGINE]
    assert [s.name for s in engine] == ["schedule", "inputs", "run", "jobs", "deliver"]
    assert engine[2].begin <= engine[3].begin and engine[3].end <= engine[2].end


def test_nothing_is_recorded_when_it_is_off(llm: model.LLM) -> None:
    runner = cpu_runner(llm.runner.model, llm.pool, 64, max_num_seqs=1)
    timer = EngineTimer(runner)
    recorder = Recorder(runner)
    with recorder:
        with pytest.raises(PykernelsError, match="another recorder is on"):
            Recorder(runner).__enter__()
    timer.decode(1, 5, 2)
    assert llm.pool.tracing is None and recorder.timeline().spans == ()


@task("traced-nothing")
def nothing(record: int, index: int, worker: int) -> int:
    return 0


def test_more_tasks_than_there_is_room_for_are_an_error() -> None:
    with WorkerPool(1) as pool:
        pool._trace = WorkerTrace(1, capacity=8)
        trace = pool.trace(True)
        assert trace is not None
        for count, names in ((8, 8), (9, None)):
            pool.run(Jobs([Job("nothing", nothing.address, 0, tasks=count, after=0)]))
            trace.calls()
            if names:
                spans = trace.take()
                assert [span.task for span in spans] == list(range(names))
                assert all(span.job is not None and span.begin <= span.end for span in spans)
            else:
                with pytest.raises(PykernelsError, match="ran 9 tasks, and 8 can be traced"):
                    trace.take()


@pytest.fixture(scope="module")
def hybrid(llm: model.LLM) -> Timeline:
    """Experts on the workers beside a stream, some of them deferred."""
    passes = [partial(defer, N=1), offload]
    runner = ref_runner(llm.runner.model, 64, max_num_seqs=1, passes=passes, pool=llm.pool)
    return recorded(runner)


def test_a_stream_and_the_workers_are_on_one_clock(hybrid: Timeline) -> None:
    last = hybrid.steps[-1]
    spans = hybrid.within([last])
    experts = [s for s in tasks_of(spans) if s.lane.kind == WORKER]
    assert {s.op for s in experts} == {"moe_ffn routed", "moe_ffn deferred"}
    stream = [s for s in spans if s.lane == Lane(STREAM, "ref", 0, "ref stream")]
    assert all(a.end <= b.begin for a, b in pairwise(stream))
    norms = [s for s in stream if s.op == "rms_norm"]
    for layer, reader in ((1, 2), (2, None)):  # experts come behind their router, a norm behind
        routed = [s for s in experts if (s.layer, s.op) == (layer, "moe_ffn routed")]
        router = next(s for s in stream if s.op == "router" and s.layer == layer)
        norm = next(s for s in norms if s.layer == reader)
        assert router.end <= min(s.begin for s in routed)
        assert max(s.end for s in routed) <= norm.begin


PHASES = {"X", "M"}
METADATA = {"process_name", "thread_name", "process_sort_index", "thread_sort_index"}


def test_the_trace_is_in_the_trace_event_format(hybrid: Timeline, tmp_path: Path) -> None:
    write_trace(hybrid, tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in METADATA
        else:
            assert event["dur"] >= 0 and event["cat"]
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads) <= set(named)
    assert {"engine", "steps", "ref stream"} <= set(named.values())
    for spans in threads.values():  # "X" events of a thread lie within each other, or apart
        open_until: list[float] = []
        for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            end = span["ts"] + span["dur"]
            while open_until and open_until[-1] <= span["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
    steps = [e for e in events if e.get("cat") == "step"]
    assert [e["name"] for e in steps] == ["prefill", "decode", "decode"]


def test_the_picture_is_drawn(hybrid: Timeline, tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw(hybrid, tmp_path / "step.png")
    picture = imread(tmp_path / "step.png")
    assert picture.shape[1] > 1500 and len({tuple(p) for p in picture[::7, ::7].reshape(-1, 4)}) > 9
    with pytest.raises(PykernelsError, match="cannot be drawn"):
        draw(hybrid, tmp_path / "step.unknown")
    with pytest.raises(PykernelsError, match="no step was recorded"):
        draw(Timeline((), ()), tmp_path / "none.png")


def spans_at(lane: Lane, pairs: list[tuple[int, int]], op: str) -> list[Span]:
    return [Span(lane, op, op, begin, end) for begin, end in pairs]


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_the_nanoseconds(seed: int) -> None:
    """Counted one by one, on lanes of random spans with random waits."""
    rng = random.Random(seed)
    workers = [Lane(WORKER, "cpu", i, f"worker {i}") for i in range(2)]
    stream = Lane(STREAM, "cuda:0", 7, "cuda:0 stream 7")
    busy: dict[Lane, set[int]] = {}
    spans: list[Span] = []
    for lane in (*workers, stream):
        cuts = sorted(rng.sample(range(100), 8))
        runs = list(zip(cuts[::2], cuts[1::2], strict=True))
        waits = sorted(rng.sample(range(100), 4)) if lane.kind == WORKER else []
        gaps = list(zip(waits[::2], waits[1::2], strict=True))
        spans += spans_at(lane, runs, "linear") + spans_at(lane, gaps, WAIT)
        idle = {t for a, b in gaps for t in range(a, b)}
        busy[lane] = {t for a, b in runs for t in range(a, b)} - idle
    window = range(10, 90)
    timeline = Timeline((Step("decode", 10, 90, 1, 1),), tuple(spans))
    found = used.usage(timeline, "decode")
    assert found is not None and used.usage(timeline, "prefill") is None
    cpu, gpu = busy[workers[0]] | busy[workers[1]], busy[stream]

    def share(ns: set[int]) -> Any:
        return pytest.approx(len(ns & set(window)) / 80)

    assert found.cpu == share(cpu) and found.streams == {"cuda:0": share(gpu)}
    assert found.both == share(cpu & gpu) and found.neither == share(set(window) - cpu - gpu)
    mean = sum(len(busy[w] & set(window)) for w in workers) / 160
    assert found.workers == pytest.approx(mean)
    times = {op.where: (op.us, op.lane_us) for op in found.ops}
    assert times["cuda:0"][0] == pytest.approx(len(gpu & set(window)) / 1e3)
    assert times["CPU"] == (
        pytest.approx(len(cpu & set(window)) / 1e3),
        pytest.approx(160 * mean / 1e3),
    )


def kineto(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    """An event as Kineto writes it: microseconds from the base on."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur} | {
        "args": args
    }


def test_kinetos_events_are_spans_of_streams_and_copies() -> None:
    graph = {"device": 0, "context": 1, "stream": 7, "correlation": 43, "graph node id": 8589934592}
    trace = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1764000000000000000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0.0, "args": {}},
            {"ph": "s", "id": 43, "cat": "ac2g", "name": "ac2g", "pid": 9, "tid": 9, "ts": 1.0},
            kineto("cuda_runtime", "cudaGraphLaunch", 1.0, 4.5, correlation=43),
            kineto("cuda_runtime", "cudaEventSynchronize", 6.0, 20.0),
            kineto("kernel", "_rms_norm", 10.25, 1.5, **graph),
            kineto("kernel", "gemv", 12.0, 3.0, **graph),
            kineto("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 15.5, 2.0, bytes=4096, **graph),
            kineto("kernel", "_rms_norm", 30.0, 1.0, **graph),
            kineto("gpu_user_annotation", "step", 10.0, 30.0, stream=7),
        ],
    }
    spans = gpu_spans(kineto_events(trace), offset_ns=1764000000000000000 - 5000)
    found = [(s.lane.name, s.name.split()[0], s.begin, s.end) for s in spans]
    assert found == [
        ("CUDA calls", "cudaGraphLaunch", 6000, 10500),
        ("CUDA calls", "cudaEventSynchronize", 11000, 31000),
        ("cuda:0 stream 7", "_rms_norm", 15250, 16750),
        ("cuda:0 stream 7", "gemv", 17000, 20000),
        ("cuda:0 copies to the host", "Memcpy", 20500, 22500),
        ("cuda:0 stream 7", "_rms_norm", 35000, 36000),
    ]
    assert [s.op for s in spans[:2]] == ["launch", WAIT] and spans[4].detail == "4096 bytes"
