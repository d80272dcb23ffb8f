"""The engine's side of a server in two processes: takes requests, tells what comes of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial

from runtime.engine.delivery import INTERVAL
from runtime.engine.requests.request import Event, Request

from ...llm import LLM
from ...text.detokenize import Detokenizer
from ..structured import GrammarConstraint, Vocabulary
from .channel import Channel
from .local import LocalModel, figures_of
from .messages import (
    Ask,
    AskHeld,
    Batch,
    Cancel,
    Meet,
    Observe,
    Ready,
    Reply,
    Routed,
    Submit,
    Told,
)
from .telling import Teller, failure_of


class Host:
    """Does what the other process asks for, in two threads beside the engine's.

    The engine's thread only puts its events into a queue. They are sent together, at most once each
    ``INTERVAL``.

    Args:
        started: called when clients can come.
    """

    def __init__(self, llm: LLM, channel: Channel, started: Callable[[], None]) -> None:
        self._llm, self._channel, self._started = llm, channel, started
        self._requests: dict[int, list[Request]] = {}
        self._open: dict[int, int] = {}
        self._teller = Teller()
        self._observed: dict[int, Future[None]] = {}
        self._events: deque[tuple[int, Event]] = deque()
        self._answers: deque[Told | Reply] = deque()
        self._news, self._ended = threading.Event(), False
        self._texts = ThreadPoolExecutor(1, "timelines")
        for run in (self._receive, self._send):
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True).start()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self._llm.tokenizer is not None, "grammars are made of a tokenizer"
        return Vocabulary(
            self._llm.tokenizer,
            self._llm.runner.vocab_size,
            self._llm.engine.eos_token_ids,
            trusted=True,  # the other process has tried the grammar
        )

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message:
                case Submit():
                    self._submit(message)
                case Cancel(key, output):
                    if (requests := self._requests.get(key)) is not None:
                        self._llm.engine.cancel(requests[output])
                case Ask(key):
                    self._answer(Reply(key, figures_of(self._llm)))
                case AskHeld(key, keys):
                    self._answer(Reply(key, self._llm.engine.held(keys)))
                case Meet(peers):
                    self._llm.engine.meet(peers)
                case Observe():
                    self._observe(message)
                case Ready():
                    self._started()
        for requests in list(self._requests.values()):  # nobody listens any more
            for request in requests:
                self._llm.engine.cancel(request)
        self._ended = True  # the other thread ends, too, and with it nobody has the model here
        self._news.set()

    def _submit(self, asked: Submit) -> None:
        key, params, tokenizer = asked.key, asked.params, self._llm.tokenizer
        detokenizer = None
        if tokenizer is not None:
            detokenizer = partial(Detokenizer, tokenizer, asked.special)
        try:
            constraint = None
            if asked.grammar is not None:
                constraint = GrammarConstraint(self._vocabulary, asked.grammar)
            self._open[key] = params.n
            sink = partial(self._put, key)
            params = replace(params, constraint=constraint)
            self._requests[key] = self._llm.engine.submit_to(
                sink, asked.prompt_ids, params, asked.name, detokenizer, asked.drawn
            )
            if key not in self._open:  # it has ended meanwhile
                self._requests.pop(key, None)
        except Exception as error:
            self._open.pop(key, None)
            self._answer(Told(key, 0, -1, None, "", "error", failure=failure_of(error)))

    def _observe(self, asked: Observe) -> None:
        key = asked.key
        if not asked.steps:
            if (running := self._observed.pop(key, None)) is not None:
                running.cancel()
            return
        try:
            done, make = LocalModel(self._llm).observe(asked.steps, asked.title)
        except Exception as error:
            self._answer(Reply(key, None, failure_of(error)))
            return
        self._observed[key] = done

        def told() -> None:
            self._observed.pop(key, None)
            if done.cancelled():
                return
            try:
                done.result()
                self._answer(Reply(key, make()))
            except Exception as error:
                self._answer(Reply(key, None, failure_of(error)))

        done.add_done_callback(lambda _: self._texts.submit(told))

    # What comes of it.

    def _put(self, key: int, event: Event) -> None:
        """Called by the engine's thread."""
        self._events.append((key, event))
        if not self._news.is_set():
            self._news.set()

    def _answer(self, answer: Told | Reply) -> None:
        self._answers.append(answer)
        self._news.set()

    def _send(self) -> None:
        sent = 0.0
        while True:
            self._news.wait()
            if (wait := sent + INTERVAL - time.monotonic()) > 0:
                time.sleep(wait)
            self._news.clear()
            sent = time.monotonic()
            healthy = self._llm.engine.healthy
            news: list[Told | Routed | Reply] = []
            while self._events:
                news += self._told(*self._events.popleft())
            while self._answers:
                news.append(self._answers.popleft())
            if self._ended or not self._channel.send(Batch(healthy, news)):
                return

    def _told(self, key: int, event: Event) -> list[Told | Routed]:
        if event[4] is not None:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
                self._requests.pop(key, None)  # which may not be there yet
        return self._teller.told(key, event)
