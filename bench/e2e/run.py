"""A whole run: every model in every format, ours and the peers in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.harness.machine import describe_cpu
from bench.harness.quiet import LIMIT, Watch
from bench.harness.rows import reason
from bench.peers.client import PeerMissing
from bench.peers.gguf_model import FAMILIES, TYPES, model_file
from bench.peers.llama_bench import VERSION
from bench.peers.llama_tools import ToolMissing, find
from model.architectures.named import ARCHS
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.target import Target
from runtime.profiling.engine_speed import decode_speed

from .ours import Ours, Shape, roof
from .players import Case, Engines, LlamaCpp, Player, Rates, Transformers
from .table import Row

LLAMA_CPP, TRANSFORMERS = "llama.cpp", "transformers bf16"
PEERS = ("llama.cpp", "transformers")
Step = Callable[[str, int, int], None]
"""Called before each part: its name, turns done, turns in all."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        layers: of each model; ``experts``, ``vocab``: in place of its own, None: as they are.
        prompts, tokens: of a prefill; decode steps.
        batches, contexts: every pair is a decode.
        rounds: turns of each engine.
        keep: leave the GGUF files in ``folder``.
    """

    archs: tuple[str, ...]
    formats: tuple[str, ...]
    layers: int
    experts: int | None
    vocab: int | None
    threads: int
    kernel: str
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...]
    quick: bool
    keep: bool
    folder: Path

    def check(self) -> Settings:
        """Itself. Raises PykernelsError for what there is not."""
        for what, names, known in (
            ("architecture", self.archs, tuple(ARCHS)),
            ("peer", self.peers, PEERS),
        ):
            for name in names:
                if name not in known:
                    raise PykernelsError(f"there is no {what} {name!r}", f"Use {', '.join(known)}")
        for fmt in self.formats:
            get_format(fmt)
        numbers = (self.layers, self.prompt, self.tokens, self.rounds, *self.batches)
        if min((*numbers, *self.contexts)) < 1:
            raise PykernelsError("a number below 1", "Give counts from 1 on")
        return self

    @property
    def cases(self) -> list[Case]:
        """In the order in which they are timed."""
        decodes = [
            Case("decode", self.tokens, batch, context)
            for batch in self.batches
            for context in self.contexts
        ]
        return [Case("prefill", self.prompt), *decodes]

    def shape(self, arch: str) -> Shape:
        """The shape of one of ``archs``."""
        return Shape(arch, self.layers, self.experts, self.vocab)


class E2ERun:
    """See ``harness.session.Run``."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings.check(), target
        self.step: Step = lambda *_: None
        self._done = 0
        self._all = len(settings.archs) * len(settings.formats) * (settings.rounds + 1)
        self._left = [f"{arch} {fmt}" for arch in settings.archs for fmt in settings.formats]
        self._watch = Watch(0.0)

    def rows(self) -> Iterator[list[Row]]:
        """Those of each model and format."""
        self._machine, self._start = describe_cpu(self.target), time.monotonic()
        for arch in self.settings.archs:
            for fmt in self.settings.formats:
                name = f"{arch} {fmt}"
                part = partial(self._model, arch, fmt)
                found = self._watch.run(name, part, tries=1)
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
        peers = VERSION if "llama.cpp" in s.peers else {}
        return {
            "machine": {**machine, "versions": machine["versions"] | peers},
            "headline": f"{machine['name']}, {s.threads} of {machine['cores']} cores: whole models",
            "settings": settings,
            "quick": s.quick,
            "part": ("e2e",),
            "notes": notes,
            "missing": "",
        }

    def _model(self, arch: str, fmt: str) -> list[Row]:
        """The rows of one, a failure of ours as rows that say so."""
        s = self.settings
        cases, file = s.cases, None
        whys: dict[str, str] = {}
        self.step(f"{arch} {fmt}: weights", self._done, self._all)
        try:
            players, file = self._peers(arch, fmt, whys)
            ours = Ours.random(s.shape(arch), fmt, s.threads, s.kernel)
            try:
                engines = Engines(ours, cases, s.kernel)
            except BaseException:
                ours.close()
                raise
            try:
                return self._turns(arch, fmt, engines, players, whys)
            finally:
                engines.close()
        except PykernelsError as error:
            return [{**self._head(arch, fmt, case), "why": reason(error)} for case in cases]
        finally:
            if file is not None and not s.keep:
                file.unlink(missing_ok=True)

    def _peers(
        self, arch: str, fmt: str, whys: dict[str, str]
    ) -> tuple[dict[str, Player], Path | None]:
        """Those that can play, and the file of one; the others are put into ``whys``."""
        s = self.settings
        players: dict[str, Player] = {}
        file: Path | None = None
        if "llama.cpp" in s.peers:
            config = s.shape(arch).config()
            try:
                find("llama-bench")
                if config.model_type not in FAMILIES:
                    raise PeerMissing(f"no GGUF file of {arch} is written here")
                if fmt not in TYPES:
                    raise PeerMissing(f"it has no format like {fmt}")
                numbers = {"l": s.layers, "e": s.experts, "v": s.vocab}
                name = "-".join([arch, *(f"{key}{n}" for key, n in numbers.items() if n)])
                file = model_file(config, fmt, s.folder, name)
                players[LLAMA_CPP] = LlamaCpp(file, s.threads)
            except (PeerMissing, ToolMissing) as error:
                whys[LLAMA_CPP] = str(error)
            except (OSError, PykernelsError) as error:
                whys[LLAMA_CPP] = f"its file cannot be made: {reason(error)}"
        once = "bf16" if "bf16" in s.formats else s.formats[0]
        if "transformers" in s.peers and fmt == once:
            players[TRANSFORMERS] = Transformers(s.shape(arch), s.threads)
        return players, file

    def _turns(
        self, arch: str, fmt: str, ours: Engines, players: dict[str, Player], whys: dict[str, str]
    ) -> list[Row]:
        """``rounds`` times a turn of each; a peer that fails drops out with its reason."""
        s = self.settings
        cases = s.cases
        mine: list[Rates] = []
        theirs: dict[str, list[Rates]] = {name: [] for name in players}
        roofs = [roof(s.threads)]
        for number in range(s.rounds):
            self._done += 1
            self.step(f"{arch} {fmt}: round {number + 1}", self._done, self._all)
            mine.append(ours.turn(cases))
            for name, player in players.items():
                if name in whys:
                    continue
                try:
                    theirs[name].append(player.turn(cases))
                except PeerMissing as error:
                    whys[name] = str(error)
            roofs.append(roof(s.threads))
        self._done += 1
        rows = []
        for case in cases:
            row = self._head(arch, fmt, case) | {
                "kernel": ours.ours.backend(s.kernel),
                "tok_s": round(median(rates[case] for rates in mine), 2),
            }
            if case.op == "decode":
                row |= self._decode(ours, case, mean(roofs))
            for name in players:
                if name not in whys:
                    row |= against(name, [r[case] for r in mine], [r[case] for r in theirs[name]])
            rows.append(row | {f"why_{name}": why for name, why in whys.items()})
        return rows

    def _decode(self, ours: Engines, case: Case, roof_gbps: float) -> Row:
        """The figures of a step; ``tok_s`` stands for ``decode_tok_s``."""
        program = ours.timer(case).runner.decode_steps[0].program
        found = decode_speed(ours.steps[case], program, case.batch, ours.ours.layers, roof_gbps)
        return {key: value for key, value in asdict(found).items() if key != "decode_tok_s"}

    def _head(self, arch: str, fmt: str, case: Case) -> Row:
        s = self.settings
        return {
            "op": f"e2e {case.op}",
            "name": "pykernels",
            "model": arch,
            "format": fmt,
            "layers": s.layers,
            "threads": s.threads,
            "tokens": case.tokens,
            "batch": case.batch,
            "context": case.context,
        }


def against(name: str, mine: list[float], theirs: list[float]) -> Row:
    """A peer's columns: its tokens a second, and how many times faster ours is, by rounds."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {f"tok_s_{name}": round(median(theirs), 2), f"x_{name}": round(median(ratios), 3)}
