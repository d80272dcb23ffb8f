"""A whole run: every model in every format, ours and the peers in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.harness.machine import describe_machine
from bench.harness.quiet import LIMIT, Watch
from bench.harness.timing.rows import reason
from bench.peers.client import PeerMissing
from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import FAMILIES, model_file
from bench.peers.llama_bench import CPU_ONLY, ON_THE_GPU, Offload
from bench.peers.llama_tools import ToolMissing, find, source_of
from bench.tables.e2e import Row
from pykernels.errors import PykernelsError
from pykernels.target import Target
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import decode_speed

from .ours import Ours, roof
from .places import places
from .players import Case, Engines, Player, Rates, Transformers, llama_players
from .settings import Settings

TRANSFORMERS = "transformers bf16"
Step = Callable[[str, int, int], None]
"""Called before each part: its name, turns done, turns in all."""


class E2ERun:
    """See ``harness.session.Run``."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings.check(), target
        self.step: Step = lambda *_: None
        self._done = 0
        self._all = len(settings.archs) * len(settings.formats) * (settings.rounds + 1)
        self._left = [f"{arch} {fmt}" for arch in settings.archs for fmt in settings.formats]
        self._watch = Watch(0.0)
        self._under_way: list[Row] = []

    def rows(self) -> Iterator[list[Row]]:
        """The rows of each model and format; of one that is ended early those of its rounds."""
        self._machine = describe_machine(self.target, self.settings.device)
        self._start = time.monotonic()
        for arch in self.settings.archs:
            for fmt in self.settings.formats:
                name = f"{arch} {fmt}"
                part = partial(self._model, arch, fmt)
                self._under_way = []
                try:
                    found = self._watch.run(name, part, tries=1)
                except BaseException:
                    yield self._under_way
                    raise
                self._left.remove(name)
                yield found

    def head(self) -> dict[str, Any]:
        """See ``harness.session``."""
        s, machine = self.settings, self._machine
        minutes = round((time.monotonic() - self._start) / 60, 1)
        notes = [f"Not measured: {', '.join(self._left)}."] if self._left else []
        if disturbed := self._watch.disturbed:
            parts = ", ".join(f"{name} ({share:.0%})" for name, share in disturbed)
            notes.append(f"Disturbed: others used more than {LIMIT:.0%} of the CPU during {parts}.")
        settings = {**asdict(s), "folder": "", "minutes_taken": minutes}
        peers = {}
        if "llama.cpp" in s.peers and (source := source_of(self._offloads[0].tools)):
            peers = {"llama.cpp": f"of {source}"}
        return {
            "machine": {**machine, "versions": machine["versions"] | peers},
            "headline": f"{machine['name']}, {s.threads} of {machine['cores']} cores: whole models",
            "settings": settings,
            "quick": s.quick,
            "part": ("e2e",),
            "notes": notes,
            "missing": self._left,
            "why": "",
        }

    @property
    def _offloads(self) -> Sequence[Offload]:
        return (CPU_ONLY,) if self.settings.device == "cpu" else ON_THE_GPU

    def _model(self, arch: str, fmt: str) -> list[Row]:
        """The rows of one, a failure of ours as rows that say so."""
        s = self.settings
        file = None
        whys: dict[str, str] = {}
        self.step(f"{arch} {fmt}: weights", self._done, self._all)
        try:
            players, file = self._peers(arch, fmt, whys)
            execution = ExecutionConfig(threads=s.threads, kernel=s.kernel)
            ours = Ours.random(s.shape(arch), fmt, execution)
            try:
                return self._rows(arch, fmt, ours, players, whys)
            finally:
                ours.close()
        except PykernelsError as error:
            if self._under_way:
                ended = {"why_further rounds": reason(error)}
                return [row | ended for row in self._under_way]
            why = {"why": reason(error)}
            return [
                self._head(arch, fmt, case, place.name) | why
                for case in s.cases
                for place in places(s.device)
            ]
        finally:
            if file is not None and not s.keep:
                file.unlink(missing_ok=True)

    def _peers(
        self, arch: str, fmt: str, whys: dict[str, str]
    ) -> tuple[dict[str, Player], Path | None]:
        """The peers that can play, and the file of some; the others are put into ``whys``."""
        s = self.settings
        players: dict[str, Player] = {}
        file: Path | None = None
        for offload in self._offloads if "llama.cpp" in s.peers else ():
            try:
                find("llama-bench", offload.tools)
                file = file or self._file(arch, fmt)
                players |= llama_players(file, s.threads, offload)
            except (PeerMissing, ToolMissing) as error:
                whys[offload.name] = str(error)
            except (OSError, PykernelsError) as error:
                whys[offload.name] = f"its file cannot be made: {reason(error)}"
        once = "bf16" if "bf16" in s.formats else s.formats[0]
        if "transformers" in s.peers and fmt == once:
            players[TRANSFORMERS] = Transformers(s.shape(arch), s.threads)
        return players, file

    def _file(self, arch: str, fmt: str) -> Path:
        """The GGUF file. Raises PeerMissing where llama.cpp has no such model."""
        s = self.settings
        config = s.shape(arch).config()
        if config.model_type not in FAMILIES:
            raise PeerMissing(f"no GGUF file of {arch} is written here")
        if fmt not in TYPES:
            raise PeerMissing(f"it has no format like {fmt}")
        numbers = {"l": s.layers, "e": s.experts, "v": s.vocab}
        name = "-".join([arch, *(f"{key}{n}" for key, n in numbers.items() if n)])
        return model_file(config, fmt, s.folder, name)

    def _rows(
        self,
        arch: str,
        fmt: str,
        ours: Ours,
        players: dict[str, Player],
        whys: dict[str, str],
    ) -> list[Row]:
        """The rows of every case in every place; where ours cannot run, they say why."""
        s = self.settings
        engines: dict[str, Engines] = {}
        failed: dict[str, str] = {}
        try:
            for place in places(s.device):
                self.step(f"{arch} {fmt}: {place.name or 'compiling'}", self._done, self._all)
                try:
                    execution = ExecutionConfig(kernel=s.kernel, **place.options)
                    make = partial(ours.timer, execution=execution)
                    engines[place.name] = Engines(make, s.cases)
                except PykernelsError as error:
                    failed[place.name] = reason(error)
            cases = [*product(s.cases, places(s.device))]
            heads = [(case, at.name, self._head(arch, fmt, case, at.name)) for case, at in cases]
            for mine, theirs, roof_gbps in self._turns(f"{arch} {fmt}", engines, players, whys):
                rows = list[Row]()
                for case, name, row in heads:
                    if name in failed:
                        rows.append(row | {"why": failed[name]})
                        continue
                    rates = [turn[case] for turn in mine[name]]
                    row = row | {"kernel": ours.backend(s.kernel), "rounds": len(rates)}
                    row["tok_s"] = round(median(rates), 2)
                    if case.op == "decode":
                        row |= self._decode(engines[name], case, ours.layers, roof_gbps)
                    rows.append(row | _peers_of(case, rates, theirs, players, whys))
                self._under_way = rows
            return self._under_way
        finally:
            for engine in engines.values():
                engine.close()

    def _turns(
        self,
        name: str,
        engines: dict[str, Engines],
        players: dict[str, Player],
        whys: dict[str, str],
    ) -> Iterator[tuple[dict[str, list[Rates]], dict[str, list[Rates]], float]]:
        """``rounds`` times a turn of each, and the read roof between them: after each, all turns
        so far. A peer that fails drops out with its reason."""
        s = self.settings
        mine: dict[str, list[Rates]] = {place: [] for place in engines}
        theirs: dict[str, list[Rates]] = {player: [] for player in players}
        roofs = [roof(s.threads)]
        for number in range(s.rounds if engines else 0):
            self._done += 1
            self.step(f"{name}: round {number + 1}", self._done, self._all)
            for place, engine in engines.items():
                mine[place].append(engine.turn(s.cases))
            for player, peer in players.items():
                if player in whys:
                    continue
                try:
                    theirs[player].append(peer.turn(s.cases))
                except PeerMissing as error:
                    whys[player] = str(error)
            roofs.append(roof(s.threads))
            yield mine, theirs, mean(roofs)
        if not engines:
            yield mine, theirs, mean(roofs)
        self._done += 1

    def _decode(self, engines: Engines, case: Case, layers: int, roof_gbps: float) -> Row:
        """The figures of a step; ``tok_s`` stands for ``decode_tok_s``."""
        runner = engines.timer(case).runner
        program = runner.decode_steps[0].program
        figures = decode_speed(engines.steps[case], program, case.batch, layers, roof_gbps)
        row = {key: value for key, value in asdict(figures).items() if key != "decode_tok_s"}
        return row | {"deferred": runner.deferred}

    def _head(self, arch: str, fmt: str, case: Case, place: str) -> Row:
        s = self.settings
        return {
            "op": f"e2e {case.op}",
            "name": "pykernels",
            "place": place,
            "model": arch,
            "format": fmt,
            "layers": s.layers,
            "threads": s.threads,
            "tokens": case.tokens,
            "batch": case.batch,
            "context": case.context,
        }


def _peers_of(
    case: Case,
    mine: list[float],
    theirs: dict[str, list[Rates]],
    players: dict[str, Player],
    whys: dict[str, str],
) -> Row:
    """The columns of all peers that play this case, or why one has none."""
    row: Row = {}
    for name, turns in theirs.items():
        if name not in whys and case in turns[0]:
            row |= against(name, mine, [turn[case] for turn in turns])
            row |= {f"settings_{name}": players[name].settings.get(case, "")}
    return row | {f"why_{name}": why for name, why in whys.items()}


def against(name: str, mine: list[float], theirs: list[float]) -> Row:
    """A peer's columns: its tokens a second, and how many times faster ours is, by rounds."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {f"tok_s_{name}": round(median(theirs), 2), f"x_{name}": round(median(ratios), 3)}
