"""A router and its nodes, each kind of which is killed while clients are answered: every answer is
to be that of one server, and to come once."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx2

from bench.harness.keeping.provenance import provenance
from pykernels.errors import PykernelsError
from runtime.planning.option import check_whole

from .fleet import NODES, Fleet, Process, free_ports, serve_command

_CLIENTS = 6
_PROMPTS, _TOKENS, _FEWEST = 48, 96, 24
_SURE = 0.05
"""Lead in log-probability that a token must have, or an answer ends before it: rounding, which is
another one in another batch, may decide what is closer."""
_PAUSE_SECONDS = 0.5
"""Of a client behind an answer, on average: nodes that start need the cores, too."""
_HANGS_SECONDS = 180.0
"""Without its end, a request hangs."""
_AGAIN_SECONDS = 0.2
_TAKEN_SECONDS = 120.0
"""For a router to take a node back, once that takes requests."""
_EACH = ("--kernel", "generic", "--threads", "1", "--kv-tokens", "6144", "--max-batch", "8")
"""With so few pages most of a prompt comes from another node, or a store."""


@dataclass
class Kills:
    """What happened while one kind of process was killed, or two.

    Attributes:
        sent: requests; ``right``: answered with the text of one server, once.
        rounded: with the text that one server writes where it goes on behind the first of these
            tokens: they are rounded in another way as a prompt than as an answer, and the least
            rounding may let a router choose other experts.
        wrong: with another text; ``twice``: with more than one end, or more behind that text.
        lost: with an error, or a stream that broke off; ``hung``: not at all.
        again: of these, sent once more by their client, for the router itself was killed.
        kills: of these processes; ``taken``: how often one was given requests again; ``seconds``:
            that each took to start and be taken.
        told: lines in the nodes' logs that say that a store has failed.
        moved: pages that nodes have had from others or a disk, since each began.
    """

    kind: str
    sent: int = 0
    right: int = 0
    rounded: int = 0
    wrong: int = 0
    twice: int = 0
    lost: int = 0
    hung: int = 0
    again: int = 0
    kills: int = 0
    taken: int = 0
    told: int = 0
    moved: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        bad = self.wrong + self.twice + self.lost + self.hung
        return not bad and self.taken == self.kills and self.right + self.rounded == self.sent > 0


def kinds_of(way: str) -> list[str]:
    """Processes that there are where pages go by a way."""
    return ["decode", "prefill", "router", *(["master"] if way == "store" else [])]


def run(
    times: int, way: str, kinds: Sequence[str], seed: int, model: Sequence[str], save: Path | None
) -> tuple[str, bool]:
    """A line of what happened, and whether that is as it should be.

    Raises:
        PykernelsError: there are no such processes, or one does not start.
    """
    check_whole("kill_nodes", times, 1, 10_000)
    if missing := set(kinds) - set(kinds_of(way)):
        raise PykernelsError(f"there is no {missing.pop()} with --way {way}", "Give --way store")
    draw = random.Random(seed)
    rows: list[Kills] = []

    def keep() -> None:
        if save is not None:
            found = {"way": way, "clients": _CLIENTS, "kinds": [asdict(row) for row in rows]}
            save.write_text(json.dumps(provenance() | found, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="pykernels-nodes-") as name:
        folder = Path(name)
        expected = _alone(draw, folder, model)
        with Fleet(way, folder, model, _EACH) as fleet:
            for some in _at_once(kinds):
                before = _told(fleet)
                row = Kills(" and ".join(some))
                rows.append(row)
                asyncio.run(_Load(fleet, expected, draw, row, keep).killed(some, times))
                row.told, row.moved = _told(fleet) - before, fleet.moved
                keep()
                print(_line(row), flush=True)
    sent, right = sum(row.sent for row in rows), sum(row.right + row.rounded for row in rows)
    told = f"{way}: {sum(row.kills for row in rows)} kills, {right} of {sent} requests right"
    return told, all(row.good for row in rows)


def _at_once(kinds: Sequence[str]) -> list[list[str]]:
    """Kinds that are killed at the same time: nodes, while the others stay."""
    nodes = [kind for kind in kinds if kind in NODES.values()]
    others = [[kind] for kind in kinds if kind not in nodes]
    return [each for each in (nodes, *others) if each]


def _line(row: Kills) -> str:
    longest = f", at most {max(row.seconds):.0f} s later" if row.seconds else ""
    return (
        f"{row.kind}: {row.kills} kills, {row.taken} taken back{longest}; {row.sent} requests:"
        f" {row.right} right, {row.rounded} rounded, {row.wrong} wrong, {row.twice} twice,"
        f" {row.lost} lost, {row.hung} hung, {row.again} asked again; {row.moved} pages moved;"
        f" {row.told} lines about a store"
        f"{f'; {row.errors[:3]}' if row.errors else ''}"
    )


def _told(fleet: Fleet) -> int:
    nodes = fleet.of("prefill") + fleet.of("decode")
    return sum(node.warnings("blocks of the KV cache in mooncake://") for node in nodes)


def _prompt(draw: random.Random) -> str:
    """Makes a prompt of five to ten pages."""
    lines = draw.randint(25, 50)
    numbers = (draw.randrange(1000) for _ in range(lines))
    return "".join(f"def f{i}(x):\n    return x + {i}\n" for i in numbers)


def _alone(draw: random.Random, folder: Path, model: Sequence[str]) -> list[_Expected]:
    """Prompts, and what one server answers to them for sure."""
    (port,) = free_ports(1)
    command = serve_command(port, [*model, *_EACH])
    server = Process("server", "server", command, port, folder / "server.log")
    found: list[_Expected] = []
    try:
        server.wait()
        with httpx2.Client(timeout=_HANGS_SECONDS, trust_env=False) as http:
            while len(found) < _PROMPTS:
                prompt = _prompt(draw)
                body = _body(prompt, _TOKENS) | {"logprobs": 2}
                answer = http.post(f"{server.url}/v1/completions", json=body).raise_for_status()
                told = answer.json()["choices"][0]["logprobs"]
                leads = [abs(one - other) for one, other in map(_pair, told["top_logprobs"])]
                sure = next((i for i, lead in enumerate(leads) if lead < _SURE), _TOKENS)
                if sure >= _FEWEST:
                    found.append(_Expected(prompt, "".join(told["tokens"][:sure]), sure))
        return found
    finally:
        server.kill()


def _pair(top: dict[str, float]) -> tuple[float, float]:
    """The two likeliest; they may have one text."""
    values = sorted(top.values(), reverse=True)
    return values[0], values[1] if len(values) > 1 else values[0]


def _body(prompt: str | Sequence[int], tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class _Expected:
    """A prompt, and the text of so many tokens that follow it."""

    prompt: str
    text: str
    tokens: int


def _goes_on(url: str, asked: _Expected, text: str) -> bool:
    """Whether a server writes this text behind the first tokens of the one that was expected."""
    with httpx2.Client(base_url=url, timeout=_HANGS_SECONDS, trust_env=False) as http:
        prompt, whole = (
            http.post("/tokenize", json={"prompt": each}).json()["tokens"]
            for each in (asked.prompt, asked.prompt + asked.text)
        )
        for cut in range(len(prompt) + 1, len(whole)):
            body = _body(whole[:cut], len(prompt) + asked.tokens - cut)
            rest = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            if asked.text[: len(text) - len(rest)] + rest == text:
                return True
    return False


class _Wrong(ValueError):
    """A server says that it cannot answer."""


class _Load:
    """Clients of a router, and who kills its nodes meanwhile.

    Args:
        row: counts what happens; ``keep``: called behind each kill.
    """

    def __init__(
        self,
        fleet: Fleet,
        expected: Sequence[_Expected],
        draw: random.Random,
        row: Kills,
        keep: Callable[[], None],
    ) -> None:
        self._fleet, self._expected, self._draw = fleet, expected, draw
        self._row, self._keep, self._ended = row, keep, False
        self._others: list[tuple[_Expected, str]] = []

    async def killed(self, kinds: Sequence[str], times: int) -> None:
        """Kills the processes of each kind in turns, so many times in all; kinds at once."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:
            clients = [asyncio.create_task(self._client(http)) for _ in range(_CLIENTS)]
            await asyncio.gather(*(self._kill_each(kind, times) for kind in kinds))
            self._ended = True
            await asyncio.gather(*clients)
        for asked_for, text in self._others:
            rounded = _goes_on(self._fleet.of("decode")[0].url, asked_for, text)
            self._row.rounded += rounded
            self._row.wrong += not rounded
            if not rounded:
                self._row.errors.append(f"{text!r} and not {asked_for.text!r}")

    async def _kill_each(self, kind: str, times: int) -> None:
        victims = self._fleet.of(kind)
        for i in range(times):
            await self._kill(victims[i % len(victims)])
            self._keep()

    async def _kill(self, victim: Process) -> None:
        answered = self._row.sent + _CLIENTS  # the others' caches are of use again
        while self._row.sent < answered:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._draw.uniform(0.0, 1.0))
        await asyncio.to_thread(victim.kill)
        self._row.kills += 1
        began = time.monotonic()
        victim.start()
        await asyncio.to_thread(victim.wait)
        names = [victim.name] if victim.role in ("prefill", "decode") else []
        end = time.monotonic() + _TAKEN_SECONDS
        while not all([await asyncio.to_thread(self._fleet.is_taken, name) for name in names]):
            if time.monotonic() > end:
                return
            await asyncio.sleep(0.1)
        self._row.taken += 1
        self._row.seconds.append(round(time.monotonic() - began, 1))

    async def _client(self, http: httpx2.AsyncClient) -> None:
        while not self._ended:
            await self._one(http, self._draw.choice(self._expected))
            await asyncio.sleep(self._draw.expovariate(1 / _PAUSE_SECONDS))

    async def _one(self, http: httpx2.AsyncClient, asked_for: _Expected) -> None:
        """One request, which its client sends once more where the router has gone."""
        row, wanted = self._row, asked_for.text
        row.sent += 1
        asked = 0
        while True:
            asked += 1
            try:
                async with asyncio.timeout(_HANGS_SECONDS):
                    text, ends = await self._answer(http, asked_for)
            except TimeoutError:
                row.hung += 1
            except (httpx2.HTTPError, httpx2.StreamError, ValueError, KeyError) as error:
                if row.kind == "router" and not isinstance(error, (_Wrong, KeyError)):
                    row.again += asked == 1
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                row.lost += 1
                row.errors.append(f"{type(error).__name__}: {error}")
            else:
                if ends > 1 or (text != wanted and text.startswith(wanted)):
                    row.twice += 1
                elif text != wanted:
                    self._others.append((asked_for, text))
                else:
                    row.right += 1
            return

    async def _answer(self, http: httpx2.AsyncClient, asked: _Expected) -> tuple[str, int]:
        """An answer's text, and how often it has ended. Raises what went wrong."""
        text, ends, whole = "", 0, False
        url = f"{self._fleet.router.url}/v1/completions"
        body = _body(asked.prompt, asked.tokens) | {"stream": True}
        async with http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                kind = ValueError if answer.status_code == 503 else _Wrong
                raise kind(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    whole = True
                elif line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    if "error" in told:
                        raise _Wrong(str(told["error"]))
                    for choice in told["choices"]:
                        text += choice["text"]
                        ends += choice["finish_reason"] is not None
        if not whole:
            raise ValueError("the stream has broken off")
        return text, ends
