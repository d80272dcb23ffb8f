"""A request in the engine: its chunks as events of a message, its figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType

from pykernels.errors import PykernelsError
from runtime.engine import (
    AsyncRequestHandle,
    Chunk,
    Completion,
    FinishReason,
    SamplingParams,
    TokenLogprob,
)

from ..http.errors import LOG, ApiError
from ..parsers import Event, Reasoning, StreamParser, ToolCallEnd, ToolCallStart
from .metrics import Metrics


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """One output's new text and tokens.

    Attributes:
        output: which of the request's ``n``.
        text: as the model wrote it.
        events: what a parser makes of the text.
        token_ids, logprobs: of the new tokens.
        finish_reason: of the last piece of each output.
    """

    output: int
    text: str
    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Usage:
    """Tokens of a request, or of several."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.reasoning_tokens += other.reasoning_tokens


@dataclass(slots=True, eq=False)
class Generation:
    """Iterate for pieces, inside ``async with``: whoever leaves that early cancels the request.

    Attributes:
        parsers: one an output; none: there are no events.
        one_call: an output ends with its first tool call.
        took: told how many seconds each output was in the batch.
        called: outputs that hold a tool call.
        completion_tokens: drawn so far, of all outputs.
    """

    handle: AsyncRequestHandle
    params: SamplingParams
    parsers: Sequence[StreamParser]
    prompt_tokens: int
    metrics: Metrics
    took: Callable[[float], None]
    one_call: bool = False
    called: set[int] = field(default_factory=set)
    completion_tokens: int = 0
    _closed: set[int] = field(default_factory=set)
    _failure: ApiError | None = None
    _waiting: asyncio.Task[object] | None = None
    _reasoning_tokens: int = 0

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends it before the engine's next step."""
        if not self.handle.finished:
            self.handle.cancel()

    def fail(self, error: ApiError) -> None:
        """Ends it, and raises the error in whoever iterates, even where no step comes any more."""
        self._failure = error
        self.cancel()
        if self._waiting is not None:
            self._waiting.cancel()

    async def __aiter__(self) -> AsyncGenerator[OutputDelta, None]:
        watch = self.metrics.watch()
        async for chunk in self._chunks():
            watch.chunk(chunk.output, len(chunk.token_ids))
            events, reason = self._events(chunk), chunk.finish_reason
            if chunk.output in self._closed and reason is not None:
                reason = "stop"
            self.completion_tokens += len(chunk.token_ids)
            if events and isinstance(events[-1], Reasoning):
                self._reasoning_tokens += len(chunk.token_ids)
            yield OutputDelta(
                chunk.output,
                chunk.text,
                events,
                chunk.token_ids,
                chunk.logprobs,
                reason,
            )
        for completion in await self.completions():
            stats = completion.stats
            if stats.time_to_first_token is not None:
                waited = stats.time_to_first_token - stats.queue_seconds
                self.took(waited + stats.decode_seconds)

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """Raises ApiError where the engine fails: the request is not to blame."""
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        except PykernelsError as error:
            LOG.error("%s", error.cause, exc_info=error.__cause__)
            raise ApiError(500, f"{error.cause}.") from error

    async def _next(self) -> Chunk | None:
        """The next chunk; None behind the last. Raises the error of ``fail``."""
        if self._failure is None:
            self._waiting = asyncio.current_task()
            try:
                chunk = await anext(self.handle, None)
            except asyncio.CancelledError:
                if self._failure is None or self._waiting is None:
                    raise
                self._waiting.uncancel()
            finally:
                self._waiting = None
            if self._failure is None:
                return chunk
        raise self._failure

    def _events(self, chunk: Chunk) -> list[Event]:
        if not self.parsers or chunk.output in self._closed:
            return []
        parser = self.parsers[chunk.output]
        events = parser.feed(chunk.text) if chunk.text else []
        if chunk.finish_reason is not None:
            events = [*events, *parser.close()]
        for i, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                self.called.add(chunk.output)
            elif self.one_call and isinstance(event, ToolCallEnd):
                self._closed.add(chunk.output)
                if chunk.finish_reason is None:
                    self.handle.cancel(chunk.output)
                return events[: i + 1]
        return events

    def prompt_logprobs(self, output: int) -> Sequence[TokenLogprob]:
        """The prompt's logprobs from ``logprob_start`` on, all there with the first piece."""
        return self.handle.requests[output].prompt_logprobs

    async def completions(self) -> Sequence[Completion]:
        """The engine's own results, once all pieces were seen."""
        return (await self.handle.result()).completions

    async def usage(self) -> Usage:
        """Once all pieces were seen."""
        first = (await self.completions())[0].stats
        return Usage(
            self.prompt_tokens,
            first.cached_tokens,
            self.completion_tokens,
            self._reasoning_tokens,
        )


async def merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Pieces of several requests as they come, each with the index of its request. Leaving it
    early cancels all."""
    async with AsyncExitStack() as stack:
        for one in generations:
            await stack.enter_async_context(one)
        if len(generations) == 1:
            async for output_delta in generations[0]:
                yield 0, output_delta
            return
        queue: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue()

        async def carry(index: int) -> None:
            try:
                async for output_delta in generations[index]:
                    queue.put_nowait((index, output_delta))
            except Exception as error:  # raised again in whoever iterates
                queue.put_nowait(error)
            queue.put_nowait(None)

        tasks = [asyncio.create_task(carry(i)) for i in range(len(generations))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
