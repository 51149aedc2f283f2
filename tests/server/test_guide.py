"""The pages about the server are true: their examples run, their tables are complete."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unspool.train.routes import ControlRequest, StartRequest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README": ROOT / "README.md",
    "tutorial": DOCS / "tutorials" / "serve.md",
    "http-api": DOCS / "reference" / "http-api.md",
    "server-options": DOCS / "reference" / "server-options.md",
    "metrics": DOCS / "reference" / "metrics.md",
    **{
        name: DOCS / "how-to" / f"{name}.md"
        for name in (
            "use-openai-clients",
            "use-ollama-and-anthropic-clients",
            "use-llama-cpp-clients",
            "tools-and-structured-output-over-http",
            "logprobs-over-http",
            "reproduce-a-response",
            "embeddings",
            "rerank",
            "edit-text-over-http",
            "load-and-unload-models",
            "use-lora-adapters",
            "secure-a-server",
            "deploy",
            "monitor",
        )
    },
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
GUIDE = "\n".join(TEXTS[name] for name in TEXTS if name != "README")
ADDRESS, MODEL = "http://127.0.0.1:8000", "SmolLM2-135M-Instruct.Q4_1"
BETWEEN = "%%% the next block %%%"


@pytest.fixture
def tidy(server: Any) -> Iterator[None]:
    """Branches and sessions that an example leaves behind are gone afterwards."""

    def created() -> set[str]:
        paths = ("/v1/tree", "/v1/tree/sessions")
        return {
            f"{path}/{item['id']}"
            for path in paths
            for item in server.http.get(path).json()["data"]
        }

    before = created()
    yield
    for path in created() - before:
        server.http.delete(path)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def written_in(language: str, text: str = GUIDE) -> list[str]:
    return [block for name, block in blocks(text) if name == language]


def here(block: str, server: Any) -> str:
    """An example, asking the server of the tests."""
    return block.replace(ADDRESS, server.url).replace(MODEL, server.model)


def shaped(visible: Any, real: Any, place: str = "the answer") -> None:
    """What is shown is there, and of the same kind; the rest was left out. Numbers and words are
    the model's, and may differ a little from one processor to another."""
    if isinstance(visible, dict):
        assert isinstance(real, dict), place
        for key, value in visible.items():
            assert key in real, f"{place} has no {key!r}"
            shaped(value, real[key], f"{place}.{key}")
    elif isinstance(visible, list):
        assert isinstance(real, list) and len(real) >= len(visible), place
        for number, value in enumerate(visible):
            shaped(value, real[number], f"{place}[{number}]")
    elif isinstance(visible, (int, float)) and not isinstance(visible, bool):
        assert isinstance(real, (int, float)), place
    else:
        assert type(visible) is type(real), place


def with_curl(text: str) -> list[int]:
    """The numbers of the blocks that call curl."""
    return [
        n for n, (name, block) in enumerate(examples_in(text)) if "curl " in block * (name == "sh")
    ]


def examples_in(text: str) -> list[tuple[str, str]]:
    """The blocks of a page, and commands within its sentences."""
    return blocks(text) + [("sh", f"{line}\n") for line in re.findall(r"`(curl [^`]+)`", text)]


@pytest.mark.real
@pytest.mark.parametrize(
    "page", [name for name in TEXTS if with_curl(TEXTS[name]) and "lora" not in name]
)
def test_curl(page: str, server: Any, tidy: None):
    """One shell for a page, as its reader has; every answer has the shape shown below it."""
    run_curl(TEXTS[page], server)


def run_curl(text: str, server: Any) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("needs curl and bash")
    every, asking = examples_in(text), with_curl(text)
    script = ["set -eo pipefail", 'curl() { command curl -sS --max-time 30 "$@"; echo; }']
    for n in asking:
        script += [here(every[n][1], server), f"echo '{BETWEEN}'"]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stdout[-2000:] + done.stderr
    outputs = done.stdout.split(BETWEEN)
    for n, output in zip(asking, outputs, strict=False):
        # Streams are no lines of JSON.
        result = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        visible = every[n + 1] if n + 1 < len(every) else ("", "")
        expected = json.loads(visible[1]) if visible[0] == "json" else None
        if expected is not None and "error" in expected:
            assert result == [expected]
            continue
        assert not [answer for answer in result if answer.get("error")], output
        if expected is not None:
            shaped(expected, result[-1])


@pytest.mark.real
@pytest.mark.parametrize(
    "page",
    [name for name in TEXTS if written_in("python", TEXTS[name]) and "lora" not in name],
)
def test_python(page: str, server: Any, capsys: pytest.CaptureFixture[str]):
    """All blocks of a page in one process, as its reader runs them."""
    names: dict[str, Any] = {}
    for block in written_in("python", TEXTS[page]):
        is_for_a_server = page != "README" or ADDRESS in block
        if "langchain" not in block and is_for_a_server:
            exec(compile(here(block, server), "an example", "exec"), names)
    assert len(capsys.readouterr().out) > 20


def test_adapters(tmp_path: Path):
    """The page on LoRA runs with two adapters."""
    from helpers.adapter_support import random_adapter
    from helpers.running_server import default_entry, running
    from helpers.word_model import save_worded
    from unspool.model.adapters import write_adapter
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.server.runtime.registry import AdapterFolder

    folder = save_worded(tmp_path / "model")
    config = open_checkpoint(folder).config
    for number, name in enumerate(("poet", "clerk")):
        adapter = random_adapter(config, 4, seed=number, only=("attention.v",))
        write_adapter(adapter, tmp_path / "adapters" / name, config)
    entry = default_entry(folder, "worded", memory=16 << 20, threads=1)
    with running([entry], adapters=AdapterFolder(tmp_path / "adapters")) as server:
        run_curl(TEXTS["use-lora-adapters"], server)


@pytest.mark.slow  # its import alone takes seconds; test_python sends the same requests
@pytest.mark.real
def test_langchain(server: Any, lm: Any, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("langchain_openai")
    (block,) = [block for block in written_in("python") if "langchain" in block]
    exec(compile(here(block, server), "an example", "exec"), {})
    assert capsys.readouterr().out.rstrip().endswith(str(lm.config.width))


@pytest.mark.real
@pytest.mark.parametrize("number", range(len(written_in("js"))))
def test_javascript(number: int, server: Any, tmp_path: Path):
    """What needs no package is run; what does is read."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    block = written_in("js")[number]
    file = tmp_path / "example.mjs"
    file.write_text(here(block, server))
    command = ["node", "--check", str(file)] if "import " in block else ["node", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "import " not in block:
        assert len(done.stdout) > 40


def test_pages_are_complete():
    """Every page about the server that the documentation has is tested here."""
    assert all(len(text) > 400 for text in TEXTS.values())
    assert len(written_in("python", GUIDE)) >= 8 and len(written_in("js", GUIDE)) == 2
    kinds = {"sh", "json", "python", "js", "ini", "yaml", "nginx", "caddy"}
    assert {name for name, _ in blocks(GUIDE)} == kinds


def test_commands_have_known_options():
    """Lines that start a server have only options that exist."""
    import typer.main

    from unspool.cli.main import app_with

    serve: Any = typer.main.get_command(app_with()).commands["serve"]  # type: ignore[attr-defined]
    known_names = {name for option in serve.params for name in option.opts}
    lines = re.findall(r"unspool serve(?: [^\n`]*)?", GUIDE.replace("\\\n", " "))
    assert len(lines) > 10
    for line in lines:
        assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known_names, line


def test_other_languages():
    assert all(isinstance(json.loads(block), dict) for block in written_in("json"))
    for block in written_in("ini"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read_string(block)
        assert "serve" in unit["Service"]["ExecStart"]
    yaml = pytest.importorskip("yaml")
    assert all(yaml.safe_load(block) for block in written_in("yaml"))


def rows(page: str, head: str) -> list[str]:
    """The first cells of the first table of a page that starts with these words."""
    table = TEXTS[page].split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [line.split("|")[1] for line in table]


def test_every_option_is_in_the_table():
    import typer.main

    from unspool.cli.main import app_with

    root: Any = typer.main.get_command(app_with())
    listed = {name for option in root.commands["serve"].params for name in option.opts}
    reply = set(re.findall(r"--[a-z-]+", " ".join(rows("server-options", "| option |"))))
    assert reply == {name for name in listed if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"(?<![\w-])--(?:max|api|model|log|unload)-[a-z]+", GUIDE)) <= reply


@pytest.mark.real
def test_every_endpoint_is_in_the_table(server: Any, document: dict[str, Any]):
    reply = re.findall(r"`(/[^`]+)`", " ".join(rows("http-api", "| endpoint |")))
    for path in reply:
        assert path in document["paths"] or server.http.get(path).status_code != 404, path
    for path in document["paths"]:
        assert any(path == listed or path.startswith(listed + "/") for listed in reply), path


@pytest.mark.real
def test_every_metric_is_named(server: Any):
    text = server.http.get("/metrics").text
    there = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    listed = set(re.findall(r"^\| `(unspool_[a-z_]+)`", TEXTS["metrics"], re.MULTILINE))
    server_metrics = {name for name in listed if not name.startswith("unspool_gateway_")}
    assert server_metrics == {name for name in there if not name.endswith("_created")}
    used = set(re.findall(r"unspool_[a-z_]+", TEXTS["monitor"]))
    assert {name.removesuffix("_bucket") for name in used} <= server_metrics


def test_every_metric_of_a_gateway_is_named():
    from unspool.scale.replicas.gateway import GatewayMetrics

    text = GatewayMetrics(lambda: {"a": 1}).text().decode()
    there = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    listed = set(re.findall(r"`(unspool_gateway_[a-z_]+)`", TEXTS["metrics"]))
    assert listed == {name for name in there if not name.endswith("_created")}


@pytest.mark.real
def test_the_page_asks_nobody_else(server: Any):
    answer = server.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"?(?:https?:)?//", answer.text)
    assert len(answer.content) < 17_500
    assert server.http.get("/redoc").status_code == 404


@pytest.mark.real
def test_the_examples_of_the_page_work(server, tidy, document, examples):
    branch = server.http.post("/v1/tree", json=examples["/v1/tree"]).json()["id"]
    session = server.http.post("/v1/tree/sessions", json={}).json()["id"]
    methods = [(path, method) for path, result in document["paths"].items() for method in result
               if "requestBody" in result[method]]  # fmt: skip
    assert {path for path, _ in methods} == examples.keys()
    methods.sort(key=lambda item: "resume" not in item[0])  # others need steps
    # Would train, measure for a while, or need a model with a mask or a folder of slots: these have
    # their own tests.
    elsewhere = ("/v1/runs", "/v1/costs", "/v1/diffuse", "/slots")
    for path, method in methods:
        if not path.startswith(elsewhere):
            few: dict[str, Any] = {name: 3 for name in examples[path] if "max_" in name}
            few |= {"options": {"num_predict": 3}} if "options" in examples[path] else {}
            url = path.replace("{identity}", branch).replace("{session_id}", session)
            answer = server.http.request(method, url, json=examples[path] | few)
            assert answer.status_code == 200, answer.text


def test_what_the_guide_to_training_says_of_runs(document, examples):
    page = (ROOT / "docs/reference/training-files.md").read_text(encoding="utf-8")
    section = page.partition("## Runs over HTTP")[2].partition("\n## ")[0]
    started = re.search(r"start one: `({.*?})`", section)
    assert started and "@" in json.loads(re.search(r"-d '({.*?})'", section)[1])["model"]
    for body in (json.loads(started[1]), examples["/v1/runs"]):
        StartRequest(**body)
    ControlRequest(**examples["/v1/runs/{name}/control"])
    listed = {
        (method, path.replace("NAME", "{name}"))
        for method, path in re.findall(r"\| `(GET|POST) (/v1/runs\S*)`", section)
    }
    paths = document["paths"]
    there = {
        (m.upper(), path) for path in paths if path.startswith("/v1/runs") for m in paths[path]
    }
    assert listed == there
