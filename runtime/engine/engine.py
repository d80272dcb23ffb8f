"""The engine: one thread owns requests, cache and runner; all others talk to it through queues."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import TracebackType

from pykernels.errors import PykernelsError

from ..kv_cache import BlockManager
from ..kv_cache.prefix import Held
from ..kv_tiers.transfer.endpoint import Peer
from ..kv_tiers.transfer.handover import Handover
from ..runner.batch import DeviceLost, Runner
from ..runner.sampling_params import SamplingParams
from ..workers.fork import refuse_in_child
from .core import Core, MakeTiers
from .delivery import LoopBridge
from .loop import Loop
from .observation import Observation, Observer
from .pace import DecodePace
from .requests.drafters import MakeDrafter
from .requests.handle import AsyncRequestHandle, RequestHandle
from .requests.intake import Intake
from .requests.outputs import Chunk, EngineStats, Result
from .requests.request import Event, Request, Sink
from .requests.text import MakeDetokenizer
from .scheduling.config import EngineConfig

_DRAIN_POLL_SECONDS = 0.01


class EngineBusy(PykernelsError):
    """The queue is full (``max_waiting``): try again later."""


class Engine:
    """Serves many requests at once on one runner (continuous batching).

    Its thread starts with the first request, sleeps when there is none and ends with ``close``
    (or the ``with`` block, or the process), or when nobody has the engine any more, nor a handle or
    a stream of it that has not ended: what runs then is cancelled. ``submit``, ``generate``,
    ``stream``, ``cancel`` and ``stats`` may be called from any thread.

    Args:
        runner: the model on its device; the engine does not close it.
        eos_token_ids: tokens that end an output unless ``ignore_eos``.
        detokenizer: makes one ``Detokenizer`` an output; None: chunks have no text.
        config: how requests share the runner; its sizes are the runner's own.
        threaded: False: no thread; the caller owns the engine, and ``step`` or waiting for a
            chunk or a result drives it.
        clock: seconds, for tests.
        drafter: makes one ``Drafter`` an output; None: as ``config`` says. What is drawn is the
            same.
        tiers: makes what is behind the pages of the runner, once it is bound (``kv_tiers``).

    Attributes:
        eos_token_ids: as given.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Collection[int] = (),
        detokenizer: MakeDetokenizer | None = None,
        config: EngineConfig | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        drafter: MakeDrafter | None = None,
        tiers: MakeTiers | None = None,
    ) -> None:
        self.threaded, self._pid = threaded, os.getpid()
        self.config = config or EngineConfig()
        self.eos_token_ids = frozenset(eos_token_ids)
        self._loop = Loop()
        self._core = Core(runner, self.config, clock, self._loop.has_news, drafter, tiers)
        self._intake = Intake(runner, eos_token_ids, self.config.ageing_seconds, clock)
        self._detokenizer = detokenizer
        self._bridges: dict[asyncio.AbstractEventLoop, LoopBridge] = {}
        self._owner = threading.Lock()
        self._draining = False
        weakref.finalize(self, self._loop.stop).atexit = False  # then ``Loop.end`` waits, too

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
    ) -> RequestHandle:
        """Queue a prompt; ``params.n`` outputs come back through the handle.

        Args:
            prompt_ids: at least one token id.
            params: None: drawn at temperature 1, to the end of the context.
            name: for error messages; None: a number.

        Raises:
            EngineBusy: ``max_waiting`` requests are waiting.
            PykernelsError: this engine can never serve it, is closed, drains, has failed, or is the
                parent process's.
        """
        handle = self._handle(prompt_ids, params, name, streamed=True)
        self._enter(handle.requests)
        return handle

    def asubmit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
        detokenizer: MakeDetokenizer | None = None,
        drawn: Sequence[int] = (),
    ) -> AsyncRequestHandle:
        """``submit`` for the running event loop: the handle is awaited in it.

        Args:
            detokenizer: in place of the engine's.
            drawn: see ``Intake.requests``.
        """
        if not self.threaded:
            raise PykernelsError(
                "An engine without a thread cannot serve an event loop",
                "Make it with threaded=True",
            )
        self._refuse_in_child()
        queue: asyncio.Queue[Event] = asyncio.Queue()
        bridge = self._bridge(asyncio.get_running_loop())
        sink = partial(bridge.put, queue)
        detokenizer = detokenizer or self._detokenizer
        requests = self._intake.requests(prompt_ids, params, sink, True, name, detokenizer, drawn)
        handle = AsyncRequestHandle(requests, self.cancel, detokenizer, queue)
        self._enter(requests)
        return handle

    def submit_to(
        self,
        sink: Sink,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        name: str | None = None,
        detokenizer: MakeDetokenizer | None = None,
        drawn: Sequence[int] = (),
    ) -> list[Request]:
        """``submit`` for a consumer that takes the events themselves, in the engine's thread.

        Args:
            sink: called with each event; it must not wait.
            detokenizer: in place of the engine's.
            drawn: see ``Intake.requests``.
        """
        self._refuse_in_child()
        detokenizer = detokenizer or self._detokenizer
        requests = self._intake.requests(prompt_ids, params, sink, True, name, detokenizer, drawn)
        self._enter(requests)
        return requests

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """All prompts to their ends, in one go. Ctrl-C, or a failure of one, cancels the rest.

        Args:
            prompts: token ids of each.
            params: for all, or one a prompt.

        Raises:
            PykernelsError: as ``submit`` and ``RequestHandle.result`` do.
        """
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise PykernelsError(
                f"There are {len(prompts)} prompts and {len(each)} params",
                "Give one SamplingParams for all, or one a prompt",
            )
        handles = [
            self._handle(prompt, one, None, streamed=False)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        try:
            for handle in handles:
                self._enter(handle.requests)
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def stream(
        self, prompt_ids: Iterable[int], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Chunks of one prompt; whoever stops listening, by Ctrl-C too, cancels it."""
        handle = self.submit(prompt_ids, params)
        try:
            yield from handle
        finally:
            if not handle.finished:
                handle.cancel()

    async def astream(
        self, prompt_ids: Iterable[int], params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """``stream`` for an event loop."""
        handle = self.asubmit(prompt_ids, params)
        try:
            async for chunk in handle:
                yield chunk
        finally:
            if not handle.finished:
                handle.cancel()

    def step(self) -> bool:
        """Without a thread: do what was asked for, and one step; False if there is no work.

        With ``EngineConfig.overlap`` the step behind it runs already when this returns.

        Raises:
            PykernelsError: the engine has a thread, or another one is in ``step``.
        """
        self._refuse_in_child()
        if self.threaded or not self._owner.acquire(blocking=False):
            raise PykernelsError(
                "Another thread owns this engine", "Make it with threaded=False and step it in one"
            )
        try:
            self._loop.obey()
            return self._core.step()
        except DeviceLost as failure:
            self._loop.error = failure
            self._core.end_all(failure)
            return False
        finally:
            self._owner.release()

    def observe(self, observer: Observer, steps: int) -> Future[None]:
        """The next steps that have work run inside of an observer; from any thread.

        Args:
            steps: that it sees; between two of them runs one that it does not.

        Returns:
            What ends behind the last of them, or with the observer's error: ``PykernelsError`` if
            steps are observed already, or the engine is closed. Cancelled, it observes no more.
        """
        self._refuse_in_child()
        observation = Observation(observer, steps)
        with self._loop.gate:
            if self._loop.closed:
                raise PykernelsError("The engine is closed", "Make a new one")
            self._ask(partial(self._core.observe, observation))
        observation.done.add_done_callback(partial(self._unobserve, observation))
        return observation.done

    def _unobserve(self, observation: Observation, done: Future[None]) -> None:
        if done.cancelled():
            self._ask(partial(self._core.unobserve, observation))

    @property
    def stats(self) -> EngineStats:
        """Counts up to now, a copy."""
        scheduler = self._core.scheduler
        return replace(
            self._core.stats,
            decode_steps=self._core.stats.decode_steps.copy(),
            prompt_steps=self._core.stats.prompt_steps.copy(),
            waiting=len(scheduler.waiting),
            running=len(scheduler.prefilling) + len(scheduler.decoding),
            free_pages=len(scheduler.manager.pool),
            cached_pages=scheduler.manager.tree.idle,
            kv_levels={} if (tiers := scheduler.tiers) is None else tiers.figures(),
        )

    @property
    def pace(self) -> DecodePace | None:
        """How fast its first decode steps were; None until there were enough of them."""
        return self._core.pace.found

    @property
    def decisions(self) -> Sequence[str]:
        """Which prompts go which way, where there are several, and pages likewise, a line each."""
        scheduler = self._core.scheduler
        stream, shares = scheduler.prefill_stream, self.handover
        return [each.described for each in (stream, shares) if each is not None]

    @property
    def kv_model(self) -> str:
        """What tells its pages from those of another model; "": nothing is behind them."""
        tiers = self._core.scheduler.tiers
        return "" if tiers is None else tiers.fingerprint.hex()

    @property
    def handover(self) -> Handover | None:
        """By which ways its pages go to other engines; None: by none."""
        tiers = self._core.scheduler.tiers
        return None if tiers is None else tiers.handover

    def meet(self, peers: Sequence[Peer]) -> None:
        """There are these engines, whose memory it may read, the best to ask first; from any
        thread."""
        if (shares := self.handover) is not None and shares.transfer is not None:
            shares.transfer.meet(peers)

    @property
    def cache(self) -> BlockManager:
        """What sequences have of the cache; for the thread that drives the engine alone."""
        return self._core.scheduler.manager

    def held(self, keys: Sequence[bytes]) -> Held:
        """What it has of a prompt with these keys of its full pages; from any thread."""
        scheduler = self._core.scheduler
        if scheduler.tiers is None:
            return Held(scheduler.manager.cached(keys))
        return scheduler.tiers.held(keys)

    @property
    def healthy(self) -> bool:
        """Whether it takes requests: not closed, not failed, not draining."""
        return not (self._loop.closed or self._draining or self._loop.error)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits for those that it has; ``close`` may follow.

        Args:
            timeout: seconds; None: without end.

        Returns:
            Whether all have ended.
        """
        with self._loop.gate:
            self._draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while (self._core.busy or not self._loop.inbox.empty()) and not self._loop.closed:
            if end is not None and time.monotonic() >= end:
                return False
            if not self.threaded:
                self.step()
            else:
                time.sleep(_DRAIN_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Cancel what is not finished, after the step under way; idempotent. In a forked child
        there is nothing to end."""
        if os.getpid() != self._pid:
            return
        with self._loop.gate:
            self._loop.closed = True
        if self._loop.thread is None:
            self._loop.finish(self._core, None)
        else:
            self._core.runner.give_up_next()
            self._loop.end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _handle(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None,
        name: str | None,
        streamed: bool,
    ) -> RequestHandle:
        self._refuse_in_child()
        queue: SimpleQueue[Event] = SimpleQueue()
        detokenizer = self._detokenizer
        requests = self._intake.requests(prompt_ids, params, queue.put, streamed, name, detokenizer)
        receive = partial(self._receive if self.threaded else self._drive, queue)
        return RequestHandle(requests, self.cancel, detokenizer, receive)

    def _enter(self, requests: Sequence[Request]) -> None:
        with self._loop.gate:
            if self._loop.error:
                raise PykernelsError(
                    f"The engine has failed: {self._loop.error.cause}", "Load the model again"
                )
            if self._loop.closed:
                raise PykernelsError("The engine is closed", "Make a new one")
            if self._draining:
                raise PykernelsError("The engine drains: it takes no new requests", "Make another")
            limit = self.config.max_waiting
            waiting = len(self._core.scheduler.waiting) + self._loop.inbox.qsize()
            if limit is not None and waiting + len(requests) > limit + self._free_seats():
                raise EngineBusy(f"{waiting} requests are waiting, {limit} may", "Try again later")
            for request in requests:
                self._ask(partial(self._core.add, request))
            if self.threaded and self._loop.thread is None:
                self._loop.start(self._core)

    def _free_seats(self) -> int:
        """Requests that could run at once beside those that do."""
        scheduler = self._core.scheduler
        running = len(scheduler.prefilling) + len(scheduler.decoding)
        return max(0, scheduler.capacity - running)

    def _ask(self, call: Callable[[], None]) -> None:
        """Has the engine's thread call it before the next step begins."""
        self._loop.inbox.put(call)
        self._core.runner.give_up_next()

    def cancel(self, request: Request) -> None:
        """Ends one output before the next step; what was generated stays. From any thread."""
        if os.getpid() != self._pid:  # the parent's engine runs it, whatever its child wants
            return
        with self._loop.gate:
            if not self._loop.closed:  # else it ends anyway
                self._ask(partial(self._core.cancel, request))

    def _receive(self, queue: SimpleQueue[Event]) -> Event:
        self._refuse_in_child()
        return queue.get()

    def _drive(self, queue: SimpleQueue[Event]) -> Event:
        while queue.empty():
            self.step()
        return queue.get()

    def _bridge(self, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        with self._loop.gate:
            self._bridges = {k: v for k, v in self._bridges.items() if not k.is_closed()}
            return self._bridges.setdefault(loop, LoopBridge(loop))

    def _refuse_in_child(self) -> None:
        refuse_in_child(self._pid, "this engine")
