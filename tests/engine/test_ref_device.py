"""The ref device: transformers' own tokens, and experts that really run beside the stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import model
from pykernels.errors import PykernelsError
from runtime.devices.ref.step import RefExecutable
from runtime.engine import Engine, SamplingParams
from runtime.passes import defer, offload
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Node
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs
from runtime.workers.job import TaskError
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import ref_runner

LENGTHS = (3, 17, 41)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize(
    ("family", "prefill"),
    [("deepseek_v3", "cpu"), ("gpt_oss", "stream")],
)
def test_tokens_of_ragged_batches_are_transformers(
    family: str, prefill: str, tmp_path: Path
) -> None:
    made = tiny.make(tmp_path, family)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        runner = ref_runner(
            llm.runner.model, 64, max_num_batched_tokens=16, max_num_seqs=4, prefill=prefill
        )
        engine = Engine(runner, threaded=False)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = engine.generate(prompts(), params)
    streamed = [
        any(node.op == "load_experts" for node in steps[0].program.nodes)
        for steps in (runner.steps, runner.decode_steps)
    ]
    assert streamed == [prefill == "stream", False]
    for prompt, result in zip(prompts(), found, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(made.reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(result.token_ids) == ids[len(prompt) :]


def _ref_step(
    llm: model.LLM, passes: list, reuse: bool = True, pool: WorkerPool | None = None
) -> RefExecutable:
    lowered = llm.runner.model
    program = on_ref(lowered.lower(StepSizes(4, 1, 4, 1, 1)))
    for rewrite in passes:
        program = rewrite(program)
    inputs = allocate_inputs(program) | {
        "tokens": torch.tensor([5, 6, 7, 8]),
        "positions": torch.arange(4),
        "slot_mapping": torch.arange(4),
        "logits_indices": torch.arange(4),
    }
    caches = {name: part.zeros().float() for name, part in lowered.caches(1).items()}
    given = inputs, caches, pool or llm.pool
    step = RefExecutable(Compiled.of(program), llm.runner.weights, *given, "generic", reuse=reuse)
    step.sizes[:] = torch.tensor([4, 1, 4])
    return step


@pytest.fixture
def llm(tmp_path: Path):
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=4)
    with model.load_engine(tmp_path, max_model_len=64, threads=1) as made:
        yield made


def test_deferred_experts_run_beside_the_next_attention(llm: model.LLM) -> None:
    """Deferred experts that do not begin before the next layer's attention is done would be waited
    for in vain, were the stream to stop at them."""
    plain = _ref_step(llm, [lambda p: defer(p, 1)])
    plain.run()
    step = _ref_step(llm, [lambda p: defer(p, 1), offload])
    attended = np.zeros(1, np.int64)
    assert step.cpu is not None
    job = next(job for job in step.cpu.jobs.jobs if job.name == "layer1.experts.deferred")
    job.wait_for = attended.ctypes.data
    execute = step.execute

    def noted(node: Node) -> None:
        execute(node)
        if node.name == "layer2.attention":
            attended[0] = 1

    step.execute = noted  # type: ignore[method-assign]
    step.run()
    a, b = plain.outputs["logits"], step.outputs["logits"]
    assert (a - b).norm() < 0.02 * a.norm()  # experts in bfloat16


@pytest.mark.parametrize("passes", [[], [lambda p: defer(p, 1), offload]], ids=["here", "both"])
def test_planned_memory_is_as_good_as_fresh_memory(llm: model.LLM, passes: list) -> None:
    planned, fresh = (_ref_step(llm, passes, reuse) for reuse in (True, False))
    for token in (5, 9):  # the second step finds what the first one has left
        for step in (planned, fresh):
            step.inputs["tokens"][0] = token
            step.run()
        assert torch.equal(planned.outputs["logits"], fresh.outputs["logits"])
    assert planned.memory.nbytes < fresh.memory.nbytes / 2


@pytest.mark.parametrize("threads", [1, 2])
def test_two_steps_that_are_launched_share_the_workers(llm: model.LLM, threads: int) -> None:
    """The second one's jobs are published when the first one's have ended, whoever asks first."""
    with WorkerPool(threads) as pool:
        steps = [_ref_step(llm, [offload], pool=pool) for _ in range(2)]
        steps[1].inputs["tokens"][:] = torch.tensor([9, 3, 2, 60])
        truth = []
        for step in steps:
            step.run()
            truth.append(step.outputs["logits"].clone())
        for order in (steps, steps[::-1]):
            for step in steps:
                step.outputs["logits"].zero_()
                step.launch()
            for step in order:
                step.result()
            for step, logits in zip(steps, truth, strict=True):
                assert torch.equal(step.outputs["logits"], logits)


def test_a_failure_on_either_side_ends_the_step(llm: model.LLM) -> None:
    step = _ref_step(llm, [offload])
    step.run()
    truth = step.outputs["logits"].clone()

    def fail(node: Node) -> None:
        raise ValueError("broken")

    step.submit = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        step.run()
    del step.submit  # type: ignore[attr-defined]
    step.run()
    assert torch.equal(step.outputs["logits"], truth)

    assert step.cpu is not None
    never, job = np.zeros(1, np.int64), step.cpu.jobs.jobs[0]
    flag, job.wait_for = job.wait_for, never.ctypes.data
    llm.pool.limit_steps(0.05)
    with pytest.raises(TaskError, match="in time"):
        step.run()
    llm.pool.limit_steps(60)
    job.wait_for = flag
    step.run()
    assert torch.equal(step.outputs["logits"], truth)


def test_load_engine_on_ref_and_too_many_deferred(tmp_path: Path) -> None:
    made = tiny.make(tmp_path, "qwen3_moe")
    with pytest.raises(PykernelsError, match="a token has 3, and 2 of them must stay. Use 0 to 1"):
        model.load_engine(tmp_path, defer=2, device="ref")  # of 3: before a weight is read
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        ids = [5, 9, 4]
        found = llm.generate(ids, temperature=0, max_tokens=4, ignore_eos=True).token_ids
        with torch.no_grad():
            for _ in range(4):
                ids.append(int(made.reference(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(found) == ids[3:]


def test_a_share_of_the_experts_is_not_streamed_on_ref() -> None:
    with pytest.raises(PykernelsError, match=r"prefill='split' is for a GPU\. Give prefill="):
        model.load_engine(model.EMBEDDED, device="ref", prefill="split")
