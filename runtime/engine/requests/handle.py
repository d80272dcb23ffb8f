"""What ``submit`` gives back: the chunks of a request as they come, its result, and cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from .outputs import Chunk, Completion, Result
from .request import Event, Request, State, failed
from .text import MakeDetokenizer, TextStream


class Handle:
    """The ``n`` outputs of one submitted prompt, for one consumer.

    Text is made here, in the consumer's thread, unless stop strings make the engine look at it.
    The engine lives as long as this, until the outputs have ended.

    Args:
        requests: one an output.
        cancel: asks the engine to end a request.
        detokenizer: makes text of tokens; None: there is no text.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cancel: Callable[[Request], None],
        detokenizer: MakeDetokenizer | None,
    ) -> None:
        self.name = requests[0].name
        self.requests, self._cancel = requests, cancel
        self._open = len(requests)
        self._result: Result | None = None
        self._texts = [
            r.text or (TextStream(detokenizer()) if detokenizer else None) for r in requests
        ]

    @property
    def finished(self) -> bool:
        """Whether the last chunks of all outputs were seen."""
        return self._open == 0

    def cancel(self, output: int | None = None) -> None:
        """End all outputs, or one of them, before the next step; what was generated stays. From any
        thread."""
        for request in self.requests if output is None else (self.requests[output],):
            self._cancel(request)

    def _chunk(self, event: Event) -> Chunk:
        """The chunk of an event. Raises the error of an output that failed, and ends the rest."""
        request, token, logprob, text, reason = event
        if reason is not None:
            self._open -= 1
            if self.finished:
                self._let_go()
        if reason == "error":
            self.cancel()
            assert request.error is not None
            raise failed(request.name, request.error)
        tokens = () if token < 0 else (token,)
        stream = self._texts[request.index]
        if request.text is None and request.streamed and stream is not None:
            if tokens and reason != "stop":  # an end token has no text
                text = stream.push(token)[0]
            if reason is not None:
                text += stream.finish()[0]
        return Chunk(request.index, tokens, text, () if logprob is None else (logprob,), reason)

    def _let_go(self) -> None:
        """Forgets the engine: who keeps a handle for its result keeps no model."""
        self._cancel = _nothing

    def _collect(self) -> Result:
        """The result, once all outputs have ended."""
        if self._result is None:
            first = self.requests[0]
            prompt = tuple(first.tokens[: first.prompt_size])
            outputs = tuple(self._completion(request) for request in self.requests)
            self._result = Result(self.name, prompt, outputs)
        return self._result

    def _completion(self, request: Request) -> Completion:
        assert request.state is State.FINISHED and request.reason is not None
        if request.error is not None:
            raise failed(request.name, request.error)
        stream = self._texts[request.index]
        if request.text is None and not request.streamed and stream is not None:
            for token in request.output[: -1 if request.reason == "stop" else None]:
                stream.push(token)
            stream.finish()
        return Completion(
            request.index,
            request.output,
            "" if stream is None else stream.text,
            tuple(request.logprobs),
            tuple(request.prompt_logprobs),
            request.reason,
            request.stats(),
            None if request.routing is None else request.routing.since(0),
        )


class RequestHandle(Handle):
    """Iterate for chunks, or ask for the ``result``.

    Args:
        receive: waits for the next event.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cancel: Callable[[Request], None],
        detokenizer: MakeDetokenizer | None,
        receive: Callable[[], Event],
    ) -> None:
        super().__init__(requests, cancel, detokenizer)
        self._receive = receive

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self.finished:
            raise StopIteration
        return self._chunk(self._receive())

    def _let_go(self) -> None:
        super()._let_go()
        del self._receive

    def result(self) -> Result:
        """Wait for the end of all outputs.

        Raises:
            PykernelsError: a step of the request failed; its cause is the error.
        """
        for _ in self:
            pass
        return self._collect()


class AsyncRequestHandle(Handle):
    """A request's handle in an event loop: ``async for`` chunk, or ``await handle.result()``.

    Tokens of one output that have come by the time they are asked for are one chunk.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cancel: Callable[[Request], None],
        detokenizer: MakeDetokenizer | None,
        queue: asyncio.Queue[Event],
    ) -> None:
        super().__init__(requests, cancel, detokenizer)
        self._queue = queue

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self.finished:
            raise StopAsyncIteration
        queue = self._queue
        chunk = self._chunk(queue.get_nowait() if queue.qsize() else await queue.get())
        if chunk.finish_reason is None and len(self.requests) == 1 and queue.qsize():
            return self._joined(chunk)
        return chunk

    def _joined(self, first: Chunk) -> Chunk:
        """A chunk and those that came with it, as one."""
        chunks = [first]
        while chunks[-1].finish_reason is None and self._queue.qsize():
            event = self._queue.get_nowait()
            if event[4] == "error":  # what came before it is seen before
                self._queue.put_nowait(event)
                break
            chunks.append(self._chunk(event))
        return Chunk(
            first.output,
            tuple(token for chunk in chunks for token in chunk.token_ids),
            "".join(chunk.text for chunk in chunks),
            tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            chunks[-1].finish_reason,
        )

    async def events(self) -> AsyncIterator[Event]:
        """The events in place of chunks, for a consumer that makes their text itself."""
        while not self.finished:
            event = await self._queue.get()
            if event[4] is not None:
                self._open -= 1
                if self.finished:
                    self._let_go()
            yield event

    async def result(self) -> Result:
        """Waits for the result; see ``RequestHandle.result``."""
        async for _ in self:
            pass
        return self._collect()


def _nothing(request: Request) -> None:
    """There is nothing to cancel any more."""
