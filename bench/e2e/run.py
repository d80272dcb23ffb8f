"""A whole run: every model in every format, ours and the peers in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness.budget import NO_BAR, Budget
from bench.harness.machine import describe_machine
from bench.harness.quiet import LIMIT, Watch
from bench.harness.session import UnderWay
from bench.harness.timing.rows import reason
from bench.peers.client import PeerMissing
from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import FAMILIES, model_file
from bench.peers.llama_settings import CPU_ONLY, ON_THE_GPU, Offload
from bench.peers.llama_tools import ToolMissing, find, source_of
from bench.tables.e2e import Row
from pykernels.errors import PykernelsError
from pykernels.target import Target
from runtime.planning.config import ExecutionConfig

from .ours import Ours
from .places import places
from .players import Player, Transformers, llama_players
from .rows import named, rows_of
from .settings import Settings
from .turns import Turns


class E2ERun:
    """See ``harness.session.Run``."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings.check(), target
        self.bar = NO_BAR
        self._budget, self._late = Budget(settings.minutes), False
        self._left = [f"{arch} {fmt}" for arch in settings.archs for fmt in settings.formats]
        self._watch = Watch(0.0)

    def rows(self) -> Iterator[list[Row]]:
        """The rows of each model and format, while it is under way those of its turns so far."""
        self._machine = describe_machine(self.target, self.settings.device)
        self._start = time.monotonic()
        for arch in self.settings.archs:
            for fmt in self.settings.formats:
                name, rows = f"{arch} {fmt}", list[Row]()
                with self._watch.over(name):
                    for rows in self._model(arch, fmt):
                        yield UnderWay(rows)
                self._left.remove(name)
                yield rows

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
            "why": self._budget.why if self._late else "",
        }

    @property
    def turns(self) -> int:
        """Turns of a model in one format, if all of its peers are there."""
        s = self.settings
        peers = 2 * len(self._offloads) * ("llama.cpp" in s.peers) + ("transformers" in s.peers)
        return s.rounds * (len(places(s.device)) + peers)

    @property
    def _offloads(self) -> Sequence[Offload]:
        return (CPU_ONLY,) if self.settings.device == "cpu" else ON_THE_GPU

    def _model(self, arch: str, fmt: str) -> Iterator[list[Row]]:
        """The rows of one after each turn, a failure of ours as rows that say so."""
        s, name = self.settings, f"{arch} {fmt}"
        file = None
        whys: dict[str, str] = {}
        try:
            self.bar.say(f"{name}: GGUF file")
            players, file = self._peers(arch, fmt, whys)
            self.bar.say(f"{name}: random weights")
            execution = ExecutionConfig(threads=s.threads, kernel=s.kernel)
            ours = Ours.random(s.shape(arch), fmt, execution)
            try:
                yield from self._turns(arch, fmt, ours, players, whys)
            finally:
                ours.close()
        except PykernelsError as error:
            why = {"why": reason(error)}
            cases = product(s.cases, places(s.device))
            yield [named(s, arch, fmt, case, place.name) | why for case, place in cases]
        finally:
            if file is not None and not s.keep:
                file.unlink(missing_ok=True)

    def _turns(
        self, arch: str, fmt: str, ours: Ours, players: list[Player], whys: dict[str, str]
    ) -> Iterator[list[Row]]:
        s, name = self.settings, f"{arch} {fmt}"
        turns = Turns(name, ours, places(s.device), players, whys, s, self._budget, self.bar)
        try:
            for _ in turns.play():
                self._late = self._late or turns.late
                yield rows_of(arch, fmt, turns, self._budget.why if turns.late else "")
        finally:
            turns.close()

    def _peers(self, arch: str, fmt: str, whys: dict[str, str]) -> tuple[list[Player], Path | None]:
        """The peers that can play, and the file of some; the others are put into ``whys``."""
        s = self.settings
        players: list[Player] = []
        file: Path | None = None
        for offload in self._offloads if "llama.cpp" in s.peers else ():
            try:
                find("llama-bench", offload.tools)
                file = file or self._file(arch, fmt)
                players += llama_players(file, s.threads, offload)
            except (PeerMissing, ToolMissing) as error:
                whys[offload.name] = str(error)
            except (OSError, PykernelsError) as error:
                whys[offload.name] = f"its file cannot be made: {reason(error)}"
        once = "bf16" if "bf16" in s.formats else s.formats[0]
        if "transformers" in s.peers and fmt == once:
            players.append(Transformers(s.shape(arch), s.threads))
        return players, file

    def _file(self, arch: str, fmt: str) -> Path:
        """The GGUF file. Raises PeerMissing where llama.cpp has no such model."""
        s = self.settings
        config = s.shape(arch).config()
        if config.model_type not in FAMILIES:
            raise PeerMissing(f"no GGUF file of {arch} is written here")
        if fmt not in TYPES:
            raise PeerMissing(f"it has no format like {fmt}")
        kinds = getattr(config, "layer_types", ["attention"])
        if not any("attention" in kind and kind != "linear_attention" for kind in kinds):
            raise PeerMissing(f"it runs no model without attention: {s.layers} layers have none")
        numbers = {"l": s.layers, "e": s.experts, "v": s.vocab}
        name = "-".join([arch, *(f"{key}{n}" for key, n in numbers.items() if n)])
        return model_file(config, fmt, s.folder, name)
