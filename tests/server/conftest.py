"""Servers on real sockets: one of the embedded model for all tests, and scripted ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx2
import numpy as np
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import model
from model.llm import LLM
from model.server.app import create_app
from model.server.backend.channel import Channel, pair
from model.server.backend.host import Host
from model.server.backend.interface import ServedModel
from model.server.backend.local import LocalModel, facts_of
from model.server.backend.remote import RemoteModel
from model.server.http.settings import ServerSettings
from model.server.loading import bound_socket
from model.server.run import server_of
from runtime.engine import EngineConfig, SequenceSampling, StepBatch

from ..engine.fake_runner import FakeRunner

if TYPE_CHECKING:
    import anthropic

NAME = "tested"


@dataclass
class Running:
    """A server that runs, and clients of it."""

    url: str
    llm: LLM
    key: str = "none"
    server: uvicorn.Server | None = None

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def anthropic(self) -> anthropic.Anthropic:
        import anthropic  # 2 s, for the worker that needs it

        return anthropic.Anthropic(base_url=self.url, api_key=self.key, max_retries=0)

    def http(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=600)

    def idle(self) -> bool:
        """Whether the engine soon has nothing to do, and no page that is lost."""

        def idle() -> bool:
            stats = self.llm.engine.stats
            free = stats.free_pages + stats.cached_pages
            left = stats.running + stats.waiting
            return left == 0 and free == self.llm.runner.num_pages

        return soon(idle)

    def inside(self) -> float:
        """Outputs that have entered and not left."""
        with self.http() as http:
            lines = http.get("/metrics").raise_for_status().text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("pykernels_inside"))


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a minute."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def running(llm: LLM, remote: bool = False, **settings: object) -> Iterator[Running]:
    """A server in a thread of this process; ``remote``: it talks to the engine as one in a process
    of its own does."""
    given = {"names": (NAME,), "port": 0, **settings}
    chosen = ServerSettings(**given)  # type: ignore[arg-type]
    with bound_socket(chosen) as bound:
        served: ServedModel = LocalModel(llm)
        if remote:
            ours, theirs = pair()
            Host(llm, ours, lambda: None)
            served = RemoteModel(
                Channel(theirs.detach()), facts_of(llm), llm.tokenizer, lambda: None
            )
        with listening(create_app(served, chosen), chosen, bound) as server:
            port = bound.getsockname()[1]
            yield Running(f"http://127.0.0.1:{port}", llm, chosen.api_key or "none", server)


@contextmanager
def listening(
    app: FastAPI, settings: ServerSettings, bound: socket.socket
) -> Iterator[uvicorn.Server]:
    """Serves an application in a thread of this process."""
    started = threading.Event()
    server = server_of(app, settings, started.set)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The embedded model, with a disk behind its pages."""
    sizes = {"max_num_seqs": 8, "threads": 1, "kv_disk": tmp_path_factory.mktemp("kv")}
    with (
        model.load_engine(model.EMBEDDED, kernel="generic", **sizes) as llm,
        running(llm, remote=True) as server,
    ):
        yield server


TEMPLATE = """\
{%- if tools %}{{ '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools>' }}\
{% endif %}{% for m in messages %}{{ '[' + m.role + ']' }}\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\
{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, \
'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
"""A chat template in Hermes' format."""


@dataclass
class Scripted(FakeRunner):
    """Draws what a script says: the texts in the order in which requests come."""

    vocab_size: int = 258
    num_pages: int = 4096
    max_model_len: int = 8192
    max_num_batched_tokens: int = 512
    decode_steps = ()
    pool = expert_slots = None
    weight_bytes: int = 0
    texts: list[list[int]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """While it is set, steps wait."""
    _of_seed: dict[int, list[int]] = field(default_factory=dict)

    def close(self) -> None:
        """There is nothing to free."""

    def read_bytes(self, tokens: int) -> tuple[int, int]:
        return 100 + 10 * tokens, 10 * tokens

    def step(self, batch: StepBatch):  # type: ignore[no-untyped-def]
        while self.held.is_set():
            time.sleep(0.001)
        return super().step(batch)

    def _draw(self, history: np.ndarray, batch: StepBatch, s: int, how: SequenceSampling) -> int:
        seed, draws = int(batch.seeds[s]), int(batch.draws[s])
        if draws == 0:
            self._of_seed[seed] = self.texts.pop(0)
        script = self._of_seed[seed]
        return script[draws] if draws < len(script) else 1


Script = Callable[..., Running]


@pytest.fixture
def scripted() -> Iterator[Script]:
    """`scripted(texts, **settings)`: a server whose model writes these texts, one a request."""
    stack: list[object] = []

    def start(texts: Sequence[str], max_num_seqs: int = 8, **settings: object) -> Running:
        tokenizer = byte_tokenizer()
        runner = Scripted(max_num_seqs=max_num_seqs)
        runner.texts = [ids_of(tokenizer, text) for text in texts]
        config = EngineConfig(max_num_seqs=max_num_seqs, ageing_seconds=1)
        pool = type("Pool", (), {"close": lambda self: None})()
        llm = LLM(runner, DeepseekV3Config(), tokenizer, [1], pool, engine=config)  # type: ignore
        manager = running(llm, **settings)
        server = manager.__enter__()
        stack.extend([llm, manager])
        return server

    yield start
    while stack:
        stack.pop().__exit__(None, None, None)  # type: ignore[attr-defined]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, behind two special ones."""
    vocabulary = {"<s>": 0, "</s>": 1}
    vocabulary |= {letter: 2 + i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, 1]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
