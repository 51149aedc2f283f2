"""`unspool mcp`: its tools, called by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.running_server import in_event_loop

mcp = pytest.importorskip("mcp")

TOOLS = ["chat", "continue_branch", "generate", "look", "score", "tokenize"]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(small_lm: Any) -> Any:
    from unspool.mcp_server import build_server

    return build_server(small_lm)


async def call(client: Any, name: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return dict(result.structured_content)


async def error_of(client: Any, name: str, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error
    return str(result.content[0].text)


@in_event_loop
async def test_tools_are_described(server: Any) -> None:
    async with mcp.Client(server) as client:
        tools = (await client.list_tools()).tools
    assert sorted(tool.name for tool in tools) == TOOLS
    assert all(tool.description for tool in tools)
    generate = next(tool for tool in tools if tool.name == "generate")
    assert generate.input_schema["required"] == ["prompt"]
    assert "most likely" in generate.input_schema["properties"]["temperature"]["description"]


@in_event_loop
async def test_generate_and_continue_a_branch(server: Any, small_lm: Any) -> None:
    async with mcp.Client(server) as client:
        result = await call(client, "generate", prompt="The sky is", max_tokens=6, seed=1, top=3)
        expected = small_lm.generate("The sky is", max_tokens=6, seed=1)
        assert result["text"] == expected.text and result["seed"] == 1
        assert [item["token"] for item in result["tokens"]] == expected.tokens
        assert len(result["tokens"][0]["candidates"]) == 3
        # Another token at 2: the first two stay, the rest is written anew.
        token = result["tokens"][2]["candidates"][-1]["token"]
        other = await call(client, "continue_branch", branch=result["branch"], at=2, token=token)
        reference = expected.rewind(2).choose(token).resume()
        assert [item["token"] for item in other["tokens"]] == reference.tokens
        assert other["branch"] != result["branch"] and other["reused_tokens"] > 0
        # The old branch is still there, and grows at its end.
        longer = await call(client, "continue_branch", branch=result["branch"], max_tokens=3)
        assert [item["token"] for item in longer["tokens"]][:6] == expected.tokens
        assert len(longer["tokens"]) == 9


@in_event_loop
async def test_chat(server: Any, small_lm: Any) -> None:
    async with mcp.Client(server) as client:
        result = await call(client, "chat", message="Hi", system="Be kind.", max_tokens=5, seed=2)
    expected = small_lm.chat("Hi", system="Be kind.", max_tokens=5, seed=2)
    assert result["text"] == expected.answer
    assert result["logprob"] == pytest.approx(expected.logprob)


@in_event_loop
async def test_score_and_tokenize(server: Any, small_lm: Any) -> None:
    async with mcp.Client(server) as client:
        scored = await call(client, "score", text="The cat sat", top=2)
        pieces = await call(client, "tokenize", text="The cat sat")
    reference = small_lm.score("The cat sat")
    assert scored["perplexity"] == pytest.approx(reference.perplexity)
    assert [item["logprob"] for item in scored["tokens"]] == reference.logprobs
    assert pieces["tokens"] == reference.tokens and "".join(pieces["pieces"]) == "The cat sat"


@in_event_loop
async def test_look(server: Any, small_lm: Any) -> None:
    async with mcp.Client(server) as client:
        result = await call(client, "generate", prompt="The sky is", max_tokens=4, seed=1)
        inside = await call(client, "look", branch=result["branch"], index=3, top=4)
        assert inside["token"] == result["tokens"][3]["token"]
        assert len(inside["candidates"]) == 4
        lens = inside["logit_lens"]
        assert len(lens) == small_lm.config.layers + 1
        assert lens[-1]["probability"] == pytest.approx(
            2.718281828 ** result["tokens"][3]["logprob"], rel=1e-3
        )
        weights = [item["weight"] for item in inside["attention"]]
        assert weights == sorted(weights, reverse=True) and 0 < sum(weights) <= 1.001
        message = await error_of(client, "look", branch=result["branch"], index=9)
        assert "from 0 to 3" in message


@in_event_loop
async def test_errors_name_the_cause(server: Any) -> None:
    async with mcp.Client(server) as client:
        assert "no such branch" in await error_of(client, "continue_branch", branch="b999")
        assert "empty" in await error_of(client, "generate", prompt="")
        assert "max_tokens" in await error_of(client, "generate", prompt="a", max_tokens=0)


def test_old_branches_are_forgotten() -> None:
    from unspool.errors import SettingsError
    from unspool.mcp_server import BranchStore

    store: Any = BranchStore(capacity=2)
    names = [store.add(object()) for _ in range(3)]
    assert store.get(names[2]) is not None
    with pytest.raises(SettingsError, match="b2, b3"):
        store.get(names[0])


@in_event_loop
async def test_over_standard_input(small_default: Path) -> None:
    """As a desktop client starts it."""
    arguments = ["-m", "unspool", "mcp", "-m", str(small_default), "--threads", "1"]
    parameters = mcp.StdioServerParameters(command=sys.executable, args=arguments)
    async with mcp.Client(mcp.stdio_client(parameters)) as client:
        result = await call(client, "tokenize", text="Hello")
        assert result["count"] >= 1
        written = await call(client, "generate", prompt="Hello", max_tokens=3, seed=1)
        assert len(written["tokens"]) <= 3


@in_event_loop
async def test_over_http(small_default: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = ["-m", str(small_default), "--threads", "1"]
    command = [sys.executable, "-m", "unspool", "mcp", "--http", "--port", str(port), *model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            await asyncio.sleep(0.05)
        async with mcp.Client(f"http://127.0.0.1:{port}/mcp") as client:
            assert (await call(client, "tokenize", text="Hello"))["count"] >= 1
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=20)
    assert output == b""  # nothing but the protocol may be on standard output


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unspool.cli.main import _exit_code

    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in [name for name in sys.modules if name.startswith(("mcp.", "unspool.mcp_server"))]:
        monkeypatch.delitem(sys.modules, name)
    assert _exit_code(["mcp"]) == 2
    assert "pip install 'unspool[mcp]'" in capsys.readouterr().err


def test_the_page_about_mcp(
    small_lm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its example runs, its configurations are JSON, and its table has every tool."""
    page = Path(__file__).parent.parent / "docs" / "how-to" / "use-from-mcp-clients.md"
    text = page.read_text(encoding="utf-8")
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: small_lm)
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, page.name, "exec"), {})
    assert "green" in capsys.readouterr().out
    for configuration in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        (servers,) = json.loads(configuration).values()
        assert servers["unspool"]["args"][0] == "mcp"
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == TOOLS
