"""Two microbatches: the tokens of one batch, and a CPU that has one microbatch's experts beside the
other's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model
from pykernels.errors import PykernelsError
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.engine import Engine, SamplingParams
from runtime.passes import defer, dual_batch, offload, skip
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.planning.config import ExecutionConfig
from runtime.planning.lowerable import Pass
from runtime.program import Node
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs
from runtime.runner.microbatch_inputs import MicrobatchInputs

from ..model import tiny
from ..runners import ref_runner

LENGTHS = (3, 17, 41, 9, 25)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture
def llm(tmp_path: Path):
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=4)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, kernel="generic") as made:
        yield made


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("deferred", [0, 1])
def test_tokens_are_those_of_one_lane(family: str, deferred: int, tmp_path: Path) -> None:
    """Of batches that shrink from five sequences to one, with penalties and draws of their own."""
    tiny.make(tmp_path, family, num_hidden_layers=3)
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, presence_penalty=0.5, max_tokens=4 + 2 * i, ignore_eos=True
        )
        for i in range(len(LENGTHS))
    ]
    found = []
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        for microbatches in (False, True):
            sizes: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 5}
            sizes |= {"passes": [offload] if microbatches else [], "deferred": deferred}
            runner = ref_runner(
                llm.runner.model, 64, 12, **sizes, pool=llm.pool, dual_batch=microbatches
            )
            engine = Engine(runner, threaded=False)
            found.append([result.token_ids for result in engine.generate(prompts(), params)])
    assert found[0] == found[1]


def _decode_step(llm: model.LLM, kind: type, passes: list[Pass]) -> Any:
    """A step of five sequences of one token, each with a page of its own; three are sampled."""
    lowered, on_cpu = llm.runner.model, kind is CpuExecutable
    program = lowered.lower(StepSizes(6, 6, 6, 6, 1))
    program = program if on_cpu else on_ref(program)
    for rewrite in passes:
        program = rewrite(program)
    whole = allocate_inputs(lowered.lower(StepSizes(6, 6, 6, 6, 1))) | {
        "tokens": torch.tensor([5, 6, 7, 8, 9, 0]),
        "slot_mapping": 64 * torch.arange(6),
        "sequences": torch.arange(6),
        "page_rows": torch.arange(6),
        "page_table": torch.arange(6)[:, None],
        "query_starts": torch.arange(6),
        "query_lengths": torch.ones(6, dtype=torch.int64),
        "lengths": torch.ones(6, dtype=torch.int64),
        "logits_indices": torch.tensor([0, 2, 4, 0, 0, 0]),
    }
    microbatches = MicrobatchInputs(whole)
    microbatches.send(5)
    caches = {name: part.zeros() for name, part in lowered.caches(6).items()}
    if not on_cpu:
        caches = {name: pages.float() for name, pages in caches.items()}
    step = kind(
        program if on_cpu else Compiled.of(program),
        llm.runner.weights,
        inputs=whole | microbatches.tensors,
        caches=caches,
        pool=llm.pool,
        kernel="generic",
    )
    step.sizes[:3] = torch.tensor([5, 5, 3])
    step.sizes[3:5] = torch.tensor([3, 2])[: len(step.sizes) - 3]
    return step


def _logits(step: Any) -> torch.Tensor:
    step.run()
    return step.outputs["logits"][:3]


def test_lanes_are_halves_of_the_step_on_every_device(llm: model.LLM) -> None:
    truth = _logits(_decode_step(llm, RefExecutable, []))
    assert (_logits(_decode_step(llm, RefExecutable, [dual_batch])) - truth).norm() < 1e-4
    plain = _logits(_decode_step(llm, CpuExecutable, []))
    assert torch.equal(_logits(_decode_step(llm, CpuExecutable, [dual_batch])), plain)


def test_one_lane_is_on_the_cpu_while_the_other_attends(llm: model.LLM) -> None:
    """Microbatch A's experts begin when microbatch B has attended, and microbatch B's when A has in
    the next layer: were one to wait for the other, they would be waited for in vain."""
    step = _decode_step(llm, RefExecutable, [offload, dual_batch])
    after = {"A.layer1.experts": "B.layer1.attention", "B.layer1.experts": "A.layer2.attention"}
    attended = {name: np.zeros(1, np.int64) for name in after.values()}
    for job in step.cpu.jobs.jobs:
        if job.name in after:
            job.wait_for = attended[after[job.name]].ctypes.data
    execute = step.execute

    def noted(node: Node) -> None:
        execute(node)
        if node.name in attended:
            attended[node.name][0] = 1

    step.execute = noted
    found, truth = _logits(step), _logits(_decode_step(llm, RefExecutable, []))
    assert (found - truth).norm() < 0.02 * truth.norm()  # experts in bfloat16


def test_what_has_no_lanes(llm: model.LLM) -> None:
    one = llm.runner.model.lower()
    assert dual_batch(one) is one
    two = dual_batch(llm.runner.model.lower(StepSizes(2, 2, 2, 1, 1)))
    for rewrite in (lambda p: defer(p, 1), lambda p: skip(p, 1), offload):
        with pytest.raises(PykernelsError, match="before dual_batch"):
            rewrite(two)
    with pytest.raises(PykernelsError, match="Apply it once"):
        dual_batch(two)
    with pytest.raises(PykernelsError, match="dual_batch='both'"):
        ExecutionConfig(dual_batch="both")
    with pytest.raises(PykernelsError, match="dual_batch=True without a GPU"):
        model.load_engine(model.EMBEDDED, dual_batch=True)
