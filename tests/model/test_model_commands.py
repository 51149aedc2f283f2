"""The commands for models as people type them, with a hub and stores on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_stores import LIBRARY, add_ollama

from helpers.hub_server import hub_process
from helpers.tiny_gguf import write_tiny
from unspool.cli.main import _exit_code
from unspool.model.hub.locate import locate

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
Session = Callable[..., list[Done]]
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    write_tiny(root / "Qwen" / "Qwen3-0.6B-GGUF" / "Qwen3-0.6B-Q8_0.gguf", file_type=7)
    for kind, number in {"Q4_K_M": 15, "Q8_0": 7, "IQ4_XS": 30}.items():
        write_tiny(root / "org" / "many-GGUF" / f"many-{kind}.gguf", file_type=number)
    with hub_process(root) as address:
        yield address, root


@pytest.fixture
def environment(hub: tuple[str, Path], tmp_path: Path) -> dict[str, str]:
    home = tmp_path
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "UNSPOOL_", "XDG_"))
    }
    return {
        **inherited, "PYTHONPATH": str(SOURCE), "HOME": str(home),
        "UNSPOOL_CACHE": str(home / "own"),
        "HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub[0], "HF_HUB_DISABLE_XET": "1",
        "OLLAMA_MODELS": str(home / "ollama"), "LLAMA_CACHE": str(home / "llama.cpp"),
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


# Commands one after the other: importing takes longer than any of them. A process of their own,
# because the hub's library reads its settings when it is imported.
_COMMANDS = """
import contextlib, io, json, sys
from unspool.cli.main import _exit_code
results = []
for arguments in json.loads(sys.argv[1]):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "oe")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _exit_code(arguments)
    results.append([code, *(file.buffer.getvalue().decode() for file in (out, err))])
print(json.dumps(results))
"""


@pytest.fixture
def unspool(environment: dict[str, str]) -> Session:
    def run(*commands: Sequence[str]) -> list[Done]:
        child = subprocess.run(
            [sys.executable, "-c", _COMMANDS, json.dumps(commands)], env=environment,
            capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        rows = json.loads(child.stdout.splitlines()[-1])
        return [Done(words, *row) for words, row in zip(commands, rows, strict=True)]

    return run


@pytest.fixture
def command(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The same in this process, for commands that do not use the hub's library."""
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            code = _exit_code(list(arguments))
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output.out, output.err)

    return run


def test_a_short_name_is_fetched_once_said_and_removed(
    unspool: Session, hub: tuple[str, Path]
) -> None:
    write = ("--raw", "hello", "-n", "3", "-t", "0", "-q", "--seed", "1")
    first, again, by_repository, listed, unsure, removed, missing = unspool(
        ("-m", "qwen3:0.6b", *write), ("-m", "qwen3-0", *write),
        ("-m", "Qwen/Qwen3-0.6B-GGUF:Q8_0", "--offline", *write),
        ("list",), ("rm", "qwen3-0.6b"), ("rm", "qwen3-0.6b", "--yes"),
        ("-m", "qwen3-0.6b", "--offline", *write),
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert "qwen3-0.6b: Qwen/Qwen3-0.6B-GGUF, Q8_0, 0 MB, needs about" in first.stderr
    assert again.stdout == first.stdout, "the same model by the beginning of its name"
    assert (hub[1] / "asked.log").read_text().count("GET /Qwen/Qwen3-0.6B-GGUF/resolve/") == 1
    assert by_repository.stdout == first.stdout
    assert "Qwen/Qwen3-0.6B-GGUF:Q8_0" in listed.stdout and "huggingface" in listed.stdout
    assert "--yes" in unsure.stderr
    assert removed.returncode == 0 and "removed Qwen/Qwen3-0.6B-GGUF" in removed.stdout
    assert missing.returncode == 2 and "not in the cache" in missing.stderr


def test_the_best_file_is_pulled_and_said(unspool: Session) -> None:
    page = "https://huggingface.co/org/many-GGUF/blob/main/many-Q4_K_M.gguf"
    pulled, selection, by_page, details, wrong = unspool(
        ("pull", "hf.co/org/many-GGUF"), ("models", "pull", "hf.co/org/many-GGUF:q4_k_m"),
        ("pull", page), ("show", "org/many-GGUF:Q4_K_M", "--offline"),
        ("pull", "org/many-GGUF:Q2_K"),
    )  # fmt: skip
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip()).name == "many-Q8_0.gguf"
    assert "org/many-GGUF: Q8_0 of its 3 GGUF files" in pulled.stderr
    assert Path(selection.stdout.strip()).name == "many-Q4_K_M.gguf"
    assert by_page.stdout == selection.stdout
    assert details.returncode == 0, details.stderr
    assert selection.stdout in details.stdout, "the path is not truncated"
    assert wrong.returncode == 2 and "no GGUF file of kind Q2_K" in wrong.stderr


def test_lists(command: Run, tmp_path: Path) -> None:
    home = tmp_path
    assert "no others yet" in command("models", "list").stdout
    add_ollama(home / "ollama", f"{LIBRARY}/tiny/1b", write_tiny(home / "t.gguf"))
    mamba = write_tiny(home / "m.gguf", architecture="mamba")
    add_ollama(home / "ollama", f"{LIBRARY}/mamba/1b", mamba)
    write_tiny(home / "llama.cpp" / "own.gguf")
    rows = command("ls").stdout.splitlines()
    assert rows[0].split() == ["name", "size", "kind", "source", "fits"]
    assert [row.split()[0] for row in rows[1:] if "shipped" not in row] == [
        "ollama/tiny:1b", "llama.cpp/own", "ollama/mamba:1b",
    ]  # fmt: skip
    assert "yes" in rows[1] and "cannot be opened: GGUF files of architecture 'mamba'" in rows[-1]
    output = json.loads(command("list", "--json").stdout)
    assert output[0]["source"] == "ollama" and output[0]["fits"] and output[-1]["problem"]
    everything = command("models", "list", "--all").stdout
    assert "ollama/tiny:1b" in everything and "qwen3-0.6b" in everything
    entries = json.loads(command("models", "catalogue", "--json").stdout)
    assert all({"name", "repository", "licence", "use", "needs", "fits"} <= set(k) for k in entries)
    used = command("-m", "tiny:1b", "--raw", "hi", "-n", "2", "-q", "--offline")
    assert used.returncode == 0 and used.stdout
    # In Ollama's store files are called by their checksums.
    assert locate("ollama/tiny:1b", offline=True).name == "tiny:1b"
    refused = command("rm", "ollama/tiny:1b", "--yes")
    assert refused.returncode == 2 and "is in the store of ollama" in refused.stderr
    assert "ollama rm tiny:1b" in refused.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal")
def test_removing_asks(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_path = write_tiny(tmp_path / "own" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    for answer, stays in ((b"n\n", True), (b"y\n", False)):
        leader, follower = os.openpty()
        monkeypatch.setattr("sys.stdin", os.fdopen(follower))
        os.write(leader, answer)
        done = command("rm", "default")
        os.close(leader)
        assert "remove default (0 MB)?" in done.stdout + done.stderr
        assert own_path.exists() == stays


class OllamaLike(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        model = {"name": "tiny", "model": "tiny", "size": 98_362_432, "size_vram": 0,
                 "expires_at": "2026-11-15T21:00:00.5Z"}  # fmt: skip
        is_authorized = self.path == "/api/ps" and self.headers.get("Authorization") == "Bearer key"
        kept_model = {**model, "name": "kept", "expires_at": "2311-11-15T21:00:00Z"}
        body = json.dumps({"models": [model, kept_model]}).encode()
        self.send_response(200 if is_authorized else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_ps(command: Run) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OllamaLike)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        loaded = command("ps", "--url", address, env={"UNSPOOL_API_KEY": "key"})
        assert loaded.stdout.split() == [
            "name", "size", "until", "tiny", "98", "MB", "2026-11-15", "21:00:00",
            "kept", "98", "MB", "forever",
        ]  # fmt: skip
        output = command(
            "ps", "--url", f"http://{address}/", "--json", env={"UNSPOOL_API_KEY": "key"}
        )
        assert json.loads(output.stdout)[0]["name"] == "tiny"
        assert "UNSPOOL_API_KEY" in command("ps", "--url", address).stderr
    finally:
        server.shutdown()
        server.server_close()
    nobody = command("ps", "--url", address)
    assert nobody.returncode == 2 and "start one with unspool serve" in nobody.stderr


def test_the_shell_completes_names(
    command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "llama.cpp" / "qwen-own.gguf")

    def completed(line: str) -> list[str]:
        words = {"_UNSPOOL_COMPLETE": "complete_bash", "COMP_WORDS": line,
                 "COMP_CWORD": str(len(line.split()) - 1)}  # fmt: skip
        with pytest.raises(SystemExit):
            command(env=words)
        return capsys.readouterr().out.split()

    assert completed("unspool run -m qwen3-0") == ["qwen3-0.6b"]
    assert completed("unspool run -m llama.c") == ["llama.cpp/qwen-own"]
    assert completed("unspool pull gpt") == ["gpt2", "gpt-oss-20b"]
