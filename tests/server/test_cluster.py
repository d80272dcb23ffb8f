"""Servers of several processes as one: answers are those of one server, whatever becomes of a
node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

import model
from model.cli.app import app
from model.server.app import create_app
from model.server.cluster.addresses import Address, addresses
from model.server.cluster.node import Node
from model.server.cluster.protocol import VERSION, NodeFacts
from model.server.cluster.start import check_ways, cluster_of
from model.server.http.settings import ServerSettings
from model.server.loading import bound_socket
from pykernels.errors import PykernelsError
from runtime.kv_tiers.transfer.endpoint import Peer

from ..mooncake import master
from .conftest import Running, listening, running

__all__ = ["master"]

ROOT = Path(__file__).parents[2]
PROMPT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(30))
"""Some six pages."""
SIZES: dict[str, Any] = {"kernel": "generic", "threads": 1}
ENDLESS = {"ignore_eos": True}
P = ["--prefill-node", "http://10.0.0.1:80"]
D = ["--decode-node", "http://10.0.0.2:80"]
SAMPLED = {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}


@dataclass
class Cluster:
    """A router and its nodes: one is a process of its own, others are in this one."""

    router: str
    process: subprocess.Popen[bytes]
    others: dict[str, Running]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.router}/v1", api_key="none", max_retries=0)

    def figure(self, name: str, of: str) -> float:
        """A sum of figures of the router with these labels."""
        lines = httpx2.get(f"{self.router}/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(name) and of in line
        )


@contextmanager
def nodes(log: Path, own: str, others: Mapping[str, str], **sizes: Any) -> Iterator[Cluster]:
    """A router, a node of the role ``own`` that can be killed, and others by name."""
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sizes.items()]
    command = [sys.executable, "-m", "model.cli.main", "serve", "--role", own, "--port", "0"]
    with log.open("wb") as out, ExitStack() as stack:
        process = subprocess.Popen([*command, *chain(*options)], cwd=ROOT, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.kill)
        running_nodes = {}
        for name, role in others.items():
            llm = stack.enter_context(model.load_engine(model.EMBEDDED, kv_shared=True, **sizes))
            running_nodes[name] = stack.enter_context(running(llm, remote=True, role=role))
        given = {"prefill": list[str](), "decode": list[str]()}
        given[own].append(f"killed={url_of(log, process)}")
        for name, role in others.items():
            given[role].append(f"{name}={running_nodes[name].url}")
        settings = ServerSettings(port=0, role="router", names=("embedded",))
        bound = stack.enter_context(bound_socket(settings))
        found = cluster_of(Path(model.EMBEDDED), addresses(**given), settings, print)
        stack.enter_context(listening(create_app(found, settings), settings, bound))
        yield Cluster(f"http://127.0.0.1:{bound.getsockname()[1]}", process, running_nodes)


def url_of(log: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 180
    while "is served at" not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return log.read_text().split("is served at ")[1].split()[0].removesuffix("/v1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node that reads prompts, and two that write answers."""
    folder = tmp_path_factory.mktemp("cluster")
    others = {"p": "prefill", "d": "decode"}
    with nodes(folder / "log", "decode", others, kv_disk=folder / "kv", **SIZES) as found:
        yield found


def text_of(client: openai.OpenAI, name: str, **given: Any) -> tuple[str, Any]:
    answer = client.completions.create(model=name, prompt=PROMPT, **given)
    return "".join(choice.text for choice in answer.choices), answer.usage


def test_answers_are_those_of_one_server(cluster: Cluster, served: Running) -> None:
    """The decode node computes no page of the prompt: it has them of the prefill node."""
    asked = [{"max_tokens": 24, "temperature": 0}, {"max_tokens": 24, "n": 3, **SAMPLED}]
    for given in asked:
        text, usage = text_of(cluster.client(), "embedded", **given)
        alone, of_one = text_of(served.openai(), "tested", **given)
        assert text == alone
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            of_one.prompt_tokens,
            of_one.completion_tokens,
        )
    pages = usage.prompt_tokens // 64
    assert cluster.figure("pykernels_kv_level_blocks_total", 'what="read"') >= pages
    assert cluster.figure("pykernels_node_requests_total", '"prefill"') == 1
    figures = httpx2.get(f"{cluster.router}/v1/pykernels/figures").json()
    assert figures["kv_levels"]["p disk"]["written"] == pages
    assert figures["decode_steps"] and [node["up"] for node in figures["nodes"]] == [True] * 3


def test_a_form_is_kept(cluster: Cluster, served: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"name": "a", "strict": True, "schema": schema | {"additionalProperties": False}}
    given: dict[str, Any] = {
        "messages": [{"role": "user", "content": "add"}],
        "response_format": {"type": "json_schema", "json_schema": form},
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
    }
    choices = [
        client.chat.completions.create(model=model, **given).choices[0].model_dump()
        for client, model in ((cluster.client(), "embedded"), (served.openai(), "tested"))
    ]
    assert choices[0] == choices[1]
    assert json.loads(choices[0]["message"]["content"])["a"] in (1, 2)


def test_a_decode_node_is_killed(cluster: Cluster, served: Running) -> None:
    """The other one goes on with both answers, behind the tokens that were sent."""
    given: dict[str, Any] = {"temperature": 0, "n": 2, "max_tokens": 200, "extra_body": ENDLESS}
    alone, _ = text_of(served.openai(), "tested", **given)
    stream = cluster.client().completions.create(
        model="embedded", prompt=PROMPT, stream=True, **given
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        if all(texts) and cluster.process.poll() is None:
            assert cluster.figure("pykernels_node_outputs", '"killed"') == 2
            cluster.process.kill()
            cluster.process.wait()
    assert "".join(texts) == alone
    assert cluster.figure("pykernels_node_lost_total", '"killed"') == 1


def test_a_prefill_node_has_ended(cluster: Cluster, served: Running) -> None:
    """A node that writes answers reads the prompt itself."""
    server = cluster.others["p"].server
    assert server is not None
    server.should_exit = True
    asked: dict[str, Any] = {"prompt": "# " + PROMPT, "max_tokens": 8, "temperature": 0}
    answer = cluster.client().completions.create(model="embedded", **asked)
    alone = served.openai().completions.create(model="tested", **asked)
    assert answer.choices[0].text == alone.choices[0].text


def test_pages_go_from_memory_to_memory(served: Running, tmp_path: Path) -> None:
    """Without a store: the decode node has the pages of the prefill node, and computes those that
    were in the memory of one that is killed."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    sizes = {"kv_transfer": "127.0.0.1", "kv_transfer_gib": 0.05, **SIZES}
    with nodes(tmp_path / "log", "prefill", {"d": "decode"}, **sizes) as cluster:
        asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        for prompt in (PROMPT, "# " + PROMPT, "# " + PROMPT + PROMPT):
            texts = [
                each.completions.create(model=model, prompt=prompt, **asked).choices[0].text
                for each, model in ((cluster.client(), "embedded"), (served.openai(), "tested"))
            ]
            assert texts[0] == texts[1]
            read = cluster.figure("pykernels_kv_level_blocks_total", 'level="d peers",what="read"')
            assert read == 6
            cluster.process.kill()
            cluster.process.wait()


def test_pages_go_by_mooncake(
    master: tuple[str, subprocess.Popen[bytes]], served: Running, tmp_path: Path
) -> None:
    """What a node that is killed has lent to the store is a miss, and so is a master's end."""
    url, process = master
    sizes = {"kv_store": url, "kv_store_gib": 0.25, **SIZES}
    with nodes(tmp_path / "log", "prefill", {"d": "decode"}, **sizes) as cluster:
        asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}

        def is_one_servers(client: openai.OpenAI, prompt: str) -> bool:
            texts = [
                each.completions.create(model=model, prompt=prompt, **asked).choices[0].text
                for each, model in ((client, "embedded"), (served.openai(), "tested"))
            ]
            return texts[0] == texts[1]

        assert is_one_servers(cluster.client(), PROMPT)
        read = cluster.figure("pykernels_kv_level_blocks_total", 'level="d store",what="read"')
        assert read >= 5
        reader = openai.OpenAI(
            base_url=f"{url_of(tmp_path / 'log', cluster.process)}/v1", api_key="none"
        )
        assert is_one_servers(reader, "# " + PROMPT)
        cluster.process.kill()
        assert is_one_servers(cluster.client(), "# " + PROMPT)
        process.kill()
        process.wait()
        assert is_one_servers(cluster.client(), "## " + PROMPT)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--role", "router"], "--role router without a prefill node"),
        (["--role", "router", *P], "--role router without a decode node"),
        (["--role", "prefill", "--kv-transfer", "off"],
         "--role prefill without anything that the nodes share"),
        (["--role", "decode", "--kv-transfer", "203.0.113.7"],
         "203.0.113.7 is no address of this machine"),
        (["--kv-transfer", "127.0.0.1"], "kv-transfer 127.0.0.1 of a server that is no node"),
        (["--role", "cook"], "--role cook"),
        ([*P], "--prefill-node of a server that is no router"),
        (["--role", "router", *P, *D, *D], "2 nodes have the name 10.0.0.2:80"),
        (["--role", "router", *P, "--decode-node", "a=http://x:1", "--decode-node", "a=http://y:1"],
         "2 nodes have the name a"),
        (["--role", "router", *P, "--decode-node", "10.0.0.2:80"],
         "--decode-node 10.0.0.2:80 is no address of a node"),
        (["--role", "router", *P, *D, "--max-batch", "4"], "--max-batch 4 of a router"),
        (["--role", "router", *P, *D, "--rules", __file__], "--rules of a router"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["serve", *given])
    assert result.exit_code and told in result.stderr, result.stderr


def facts(ways: tuple[str, ...], session: str) -> NodeFacts:
    peer = Peer(session, "00", 4096, 1, 0) if session else None
    sizes = (1024, 1024, 100, 8, 16, 64, 1)
    return NodeFacts(VERSION, "prefill", True, "m", "k", *sizes, (), (), ways, peer)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ((("transfer tcp",), "10.0.0.1:1"), (("store",), ""),
         "the nodes p and d have no way in common .*p has transfer tcp, d has store"),
        ((("transfer tcp", "disk"), "10.0.0.1:1"), (("disk",), ""), None),
        ((("transfer tcp",), "127.0.0.1:1"), (("transfer tcp",), "10.0.0.2:1"),
         "p offers its pages at 127.0.0.1:1, which only its own machine reaches, and d is on"),
    ],
)  # fmt: skip
def test_nodes_have_a_way(one: Any, other: Any, told: str | None) -> None:
    pair = [
        Node(Address(role, name, "http://x:1"), facts(*given))
        for role, name, given in (("prefill", "p", one), ("decode", "d", other))
    ]
    said: list[object] = []
    if told is None:
        check_ways(pair, said.append)
        assert said == ["pages go by disk: p to d"]
    else:
        with pytest.raises(PykernelsError, match=told):
            check_ways(pair, said.append)


def test_a_request_waits_for_a_decode_node(cluster: Cluster) -> None:
    """None is left: what watches over the router is told so, and a client is not turned away."""
    server = cluster.others["d"].server
    assert server is not None
    server.should_exit = True
    health = f"{cluster.router}/health"
    while (answer := httpx2.get(health)).status_code == 200:
        time.sleep(0.05)
    assert (answer.status_code, answer.json()) == (503, {"status": "no decode node is up"})
    with pytest.raises(openai.APITimeoutError):
        cluster.client().completions.create(model="embedded", prompt="#", timeout=0.5)
