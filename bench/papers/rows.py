"""Committed runs of whole models as rows of one form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

RESULTS = Path(__file__).resolve().parent.parent / "results"
MACHINES = {
    "amd-epyc-znver2-2-cores": "zen2-2-cores",
    "intel-xeon-processor-with-amx-2-cores": "xeon-amx-2-cores",
    "intel-xeon-processor-emeraldrapids-16-cores": "h200-16-cores",  # its CPU alone
    "nvidia-h100-with-16-emeraldrapids-cores": "h100-16-cores",
    "nvidia-h200-with-16-emeraldrapids-cores": "h200-16-cores",
    "2-nvidia-h200-with-32-emeraldrapids-cores": "h200-x2-32-cores",
}
"""By folder of results, its machine in bench/machines."""
PLACES = {
    "CPU alone": ("cpu", "cpu", 0),
    "experts on the CPU": ("cuda:0", "cpu", 0),
    "experts on the CPU, deferral": ("cuda:0", "cpu", -1),
    "GPU alone": ("cuda:0", "gpu", 0),
}
"""By place of ``bench e2e``: device, experts, deferred (-1: as the row says)."""
ACTUAL = "2026-11-26"
"""From this day on rows count the experts that were read; before, those of an even choice."""
WAYS = "2026-11-28"
"""From this day on prompts with a GPU go the way that takes the least time."""
SHARED = {"dslp": "cpu", "tensor": "gpu"}
"""Benches of several GPUs beside one, by name, with where experts are."""
UNSTEADY = 1.5
"""Rows whose 90th percentile is so many times the 10th are shown and not counted: somebody else was
on the machine."""
APART = 1.25
"""Likewise of rows of two or three rounds, and of two rows of a day that timed the same: so many
times as long as the fastest one."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        machine: its name in bench/machines; ``file``: of results.
        kind: "decode", in us a step, or "prompt", in tokens a second.
        vocab: in place of the shape's own; 0: that.
        nbytes: that the CPU read in a step, as the run counted them; 0: nobody did.
        way: of a prompt's experts with a GPU; "": the fastest.
        spread: 90th over 10th percentile; ``apart``: slowest over fastest of two or three rounds.
        kv_dtype: of the cache; ``most``: tokens of the longest context that the engine has room
            for; 0: this one.
        roof_gbps: 1e9 bytes a second that plain loops read of main memory in the same run; 0:
            nobody timed them.
        gpus: how several GPUs share the model, see ``ExecutionConfig.gpus``.
        steps: in which a prompt was read; 0: nobody counted them.
        kv_gpu_gib, kv_attention, gpu_gib: as of ``ExecutionConfig``.
    """

    machine: str
    file: str
    date: str
    kind: str
    arch: str
    fmt: str
    layers: int
    vocab: int
    threads: int
    device: str
    experts: str
    deferred: int
    lanes: int
    slots: int
    batch: int
    context: int
    measured: float
    nbytes: int = 0
    way: str = ""
    spread: float = 1.0
    kv_dtype: str = "bf16"
    most: int = 0
    roof_gbps: float = 0.0
    gpus: str = "auto"
    steps: int = 0
    apart: float = 1.0
    kv_gpu_gib: float | Literal["auto"] = "auto"
    kv_attention: str = "auto"
    gpu_gib: float | None = None

    @property
    def several(self) -> bool:
        """Whether several GPUs have a part in it."""
        return "," in self.device

    @property
    def place(self) -> str:
        """Where it ran, in words."""
        if self.device == "cpu":
            return "CPU"
        gpus = f"{self.device.count(',') + 1} GPUs" if self.several else "GPU"
        gpus += f", {self.gpus}" if self.gpus != "auto" else ""
        if self.experts == "gpu":
            return gpus
        more = f", {self.deferred} deferred" if self.deferred else ""
        more += f", {self.slots} slots" if self.slots else ""
        more += ", two microbatches" if self.lanes > 1 else ""
        more += f", {self.way}" if self.way else ""
        if self.kv_gpu_gib != "auto":
            more += f", {self.kv_gpu_gib:g} GiB of keys and values there"
            more += ", attention on CPU" if self.kv_attention == "cpu" else ""
        more += f", {self.gpu_gib:g} GiB of it" if self.gpu_gib else ""
        return f"{gpus}, experts on CPU{more}"


def committed() -> Iterator[Row]:
    """Every row of a whole model of ours."""
    for folder, machine in MACHINES.items():
        for file in sorted((RESULTS / folder).glob("*.json")):
            data = json.loads(file.read_text())
            name = f"{folder}/{file.name}"
            date = file.name[:10]
            if "e2e" in file.name and "rows" in data:
                yield from _of_run(machine, name, date, data)
            elif "e2e" in file.name:
                yield from _single(machine, name, date, data)
            elif "prefill" in file.name:
                yield from _ways(machine, name, date, data)
            elif data.get("bench") == "contexts":
                yield from of_contexts(machine, name, date, data)
            elif data.get("bench") in SHARED:
                yield from _shared(machine, name, date, data)


def _of_run(machine: str, name: str, date: str, data: Mapping[str, Any]) -> Iterator[Row]:
    vocab = data["settings"].get("vocab") or 0
    roofs = [row["roof_gbps"] for row in data["rows"] if row.get("roof_gbps")]
    roof = median(roofs) if roofs else 0.0
    for row in data["rows"]:
        if "why" in row:
            continue  # it was not measured
        device, experts, deferred = PLACES[row.get("place", "CPU alone")]
        kind = "decode" if row["op"] == "e2e decode" else "prompt"
        if kind == "prompt" and device != "cpu" and experts == "cpu" and date < WAYS:
            continue
        yield Row(
            machine,
            name,
            date,
            kind,
            row["model"],
            row["format"],
            row["layers"],
            vocab,
            row["threads"],
            device,
            experts,
            row.get("deferred", 0) if deferred else 0,
            1,
            0,
            row["batch"],
            row["context"] if kind == "decode" else row["tokens"],
            row["us_per_step"] if kind == "decode" else row["tok_s"],
            row.get("bytes_per_step", 0),
            spread=row["us_p90"] / row["us_p10"] if kind == "decode" else 1.0,
            roof_gbps=roof,
        )


def _single(machine: str, name: str, date: str, data: Mapping[str, Any]) -> Iterator[Row]:
    device = data.get("device") or "cpu"
    experts = "cpu" if data.get("expert_device") in (None, "auto", "cpu") else "gpu"
    told = 32000 if (data["model"], data["layers"]) == ("qwen3-30b", 24) else 0
    common: dict[str, Any] = {
        "machine": machine,
        "file": name,
        "date": date,
        "arch": data["model"],
        "fmt": data["format"],
        "layers": data["layers"],
        "vocab": int(_option(data, "--vocab", told)),
        "threads": data["threads"],
        "device": device,
        "experts": experts,
        "roof_gbps": data["roof_gbps"],
        "gpus": data.get("gpus", "pipeline" if "," in device else "auto"),
    }
    spread = data["us_p90"] / data["us_p10"]
    yield Row(
        **common,
        kind="decode",
        deferred=data.get("deferred") or 0,
        lanes=data.get("lanes") or 1,
        slots=int(data.get("gpu_experts") or 0),
        batch=data["batch"],
        context=data["context"],
        measured=data["us_per_step"],
        nbytes=data["bytes_per_step"],
        spread=spread,
        **_kv(data),
    )
    if device == "cpu" or experts == "gpu":
        yield Row(
            **common,
            kind="prompt",
            deferred=0,
            lanes=1,
            slots=0,
            batch=1,
            context=data["prompt"],
            measured=data["prefill_tok_s"],
        )


def _kv(data: Mapping[str, Any]) -> dict[str, Any]:
    """What decides where keys and values lie, and where decode steps attend to them."""
    given = {"kv_gpu_gib": data.get("kv_gpu_gib", "auto"), "gpu_gib": data.get("gpu_gib") or None}
    return {**given, "kv_attention": _option(data, "--kv-attention", "auto")}


def _option(data: Mapping[str, Any], name: str, default: Any) -> Any:
    """An option of a run that only its command names."""
    words = str(data.get("command", "")).split()
    return words[words.index(name) + 1] if name in words else default


def of_contexts(machine: str, name: str, date: str, data: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of ``pykernels bench contexts`` that were measured."""
    for row in data["rows"]:
        if "why" in row:
            continue
        yield Row(
            machine,
            name,
            date,
            "decode",
            data["model"],
            data["format"],
            data["layers"],
            data["vocab"],
            data["threads"],
            data["device"],
            row["experts"],
            row["deferred"],
            row["lanes"],
            0,
            row["batch"],
            row["context"] + row["steps"] // 2,
            row["us_per_step"],
            row["bytes_per_step"],
            spread=row["us_p90"] / row["us_p10"],
            kv_dtype=data["kv_dtype"],
            roof_gbps=row["roof_gbps"],
            most=max(other["context"] for other in data["rows"]) + row["steps"],
            **_kv(data),
        )


def _ways(machine: str, name: str, date: str, data: Mapping[str, Any]) -> Iterator[Row]:
    for row in data["rows"]:
        if row["way"] not in ("cpu", "stream", "split"):
            continue  # a peer's, or one of these by another name
        if row["way"] == "split" and row["tokens"] > 1024:
            continue  # its share was made for fewer tokens: the engine streams so many
        yield Row(
            machine,
            name,
            date,
            "prompt",
            data["model"],
            data["format"],
            data["layers"],
            32000,
            data["threads"],
            "cuda:0",
            "cpu",
            0,
            1,
            0,
            1,
            row["tokens"],
            row["tok_s"],
            way=row["way"],
            steps=row.get("streamed_steps", 0),
        )


def _shared(machine: str, name: str, date: str, data: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of `pykernels bench dslp` and `tensor`, medians of rounds."""
    bench, devices = data["bench"], data["device"].split(",")
    for row in data["rows"]:
        words = row["way"].split(", ")[1:]
        if "why" in row or row["gpus"] < 1 or words not in ([], ["tensor"], ["pipeline"]):
            continue  # it failed, or is of what no plan can ask for
        several, kind = row["gpus"] > 1, row.get("op", "prompt")
        how = (words or [bench])[0] if several else "auto"
        batch, context = row.get("batch", 1), row.get("tokens", data.get("context", 0))
        step_us = 1e6 * row["seconds"] / data["steps"] if kind == "decode" else 0.0
        yield Row(
            machine,
            name,
            date,
            kind,
            data["model"],
            data["format"],
            row.get("layers", data["layers"]),
            32000,
            data["threads"],
            ",".join(devices[: row["gpus"]]),
            SHARED[bench],
            0,
            1,
            0,
            batch,
            context + data["steps"] // 2 if kind == "decode" else context,
            step_us or row["tok_s"],
            way="stream" if bench == "dslp" else "",
            apart=row["seconds_most"] / row["seconds_least"],
            kv_dtype=data["kv_dtype"],
            gpus=how,
            steps=row.get("steps", 0),
        )
