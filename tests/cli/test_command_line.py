"""The first minutes of a new user: words from other programs, help, pipes, environment."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import unspool as package
from unspool.cli import hints
from unspool.cli.main import _COMMANDS, app_with
from unspool.errors import UnspoolError, count
from unspool.features import FEATURES, load
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import ListeningSocket, bind_socket

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "command-line.md"
# Pages whose `sh` blocks are commands that any model can run.
PAGES = [
    DOCUMENT,
    *(
        ROOT / "docs" / "how-to" / f"{name}.md"
        for name in (
            "get-logprobs",
            "guards",
            "samples-and-beam",
            "save-and-replay",
            "structured-output",
            "texts-longer-than-the-context",
            "tokenize-text",
        )
    ),
]


@pytest.fixture
def refuse(bare_unspool: Any) -> Any:
    """Run a command that fails with one line, and return it."""

    def run(*arguments: str) -> str:
        code, out, err = bare_unspool(*arguments)
        assert (code, out) == (2, ""), (arguments, err)
        assert err.startswith("unspool: ") and err.count("\n") == 1, err
        return str(err)

    return run


# -- words -----------------------------------------------------------------------------------------


def test_help_as_a_word_and_the_version(bare_unspool: Any, refuse: Any):
    for arguments in (["--version"], ["--version", "chat"]):
        assert bare_unspool(*arguments)[:2] == (0, f"unspool {package.__version__}\n")
    assert bare_unspool("help") == bare_unspool("--help")
    for words in (["models", "help", "pull"], ["help", "models", "pull"], ["help", "serve"]):
        code, out, _ = bare_unspool(*words)
        name = " ".join(word for word in words if word != "help")
        assert code == 0 and f"unspool {name} " in out
    assert "unspool[ray]" in bare_unspool("help", "serve")[1], "brackets are shown"
    assert "did you mean unspool chat?" in refuse("help", "caht")
    assert "unspool --help lists the commands" in refuse("help", "foo")
    assert "did you mean unspool train tune?" in refuse("help", "tune")


def test_every_command_has_help_with_examples():
    def check(command: Any, name: str) -> None:
        for child in getattr(command, "commands", {}).values():
            check(child, f"{name} {child.name}")
        assert "Example" in f"{command.help}{command.epilog}", name
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                assert option.help and option.help.endswith("."), (name, option.name)

    check(typer.main.get_command(app_with()), "unspool")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["caht"], "unspool chat?"),
        (["Serv", "--port", "9"], "unspool serve?"),
        (["tokenise", "a text"], "unspool tokenize?"),
        (["version"], "unspool --version?"),
        (["generate", "a text"], 'unspool "your prompt"?'),
        (["finetune"], "unspool train tune"),
        (["tune", "--data", "chats.jsonl"], "unspool train tune?"),
        (["export", "runs/poet"], "unspool train export?"),
        (["scaling"], "unspool train scaling?"),
        (["data", "books/"], "unspool train data?"),
        (["plan", "qwen3-0.6b"], "unspool models plan MODEL?"),
    ],
)
def test_a_word_meant_as_a_command(words: list[str], advice: str, refuse: Any):
    message = refuse(*words)
    assert advice in message and f"unspool run {words[0]}" in message


def test_hints_name_existing_commands():
    assert not {*hints.ALIASES, *hints.MISSING, *hints.GROUPED} & {*_COMMANDS}
    for advice in hints.ALIASES.values():
        word = advice.split()[1]
        assert word in _COMMANDS or word.startswith(('"', "--")), advice


@pytest.mark.parametrize(
    "word", ["hello", "summarize", "Why?", "translate", "2+2=", "and/or", "list?", "data", "plan"]
)
def test_other_words_are_prompts(word: str):
    assert hints.command_hint(word, _COMMANDS) is None and hints.model_hint(word) is None


def test_run_makes_a_prompt_of_every_word(unspool: Any):
    code, out, _ = unspool("run", "caht", "--regex", "[a-z]{3}", "-q")
    assert code == 0 and len(out.strip()) == 3


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:1b", "Qwen/Qwen3-0.6B", "hf.co/a/b:Q4_0",
                                  "./model.gguf", "qwen3-0.6b"])  # fmt: skip
def test_a_model_where_a_prompt_should_be(name: str, refuse: Any):
    assert f"unspool -m {name}" in refuse("run", name)
    assert f'unspool -m {name} "hello"' in refuse("run", name, "hello")


def test_missing_quotes(refuse: Any):
    assert '"Why do leaves fall"' in refuse("Why", "do", "leaves", "fall", "-n", "3")
    assert '"The cat sat"' in refuse("score", "The", "cat", "sat")


@pytest.mark.parametrize(("option", "here"), [("--temp", "--temperature"), ("-p", "the prompt"),
                                              ("--num-predict", "--max-tokens")])  # fmt: skip
def test_options_of_other_programs(option: str, here: str, refuse: Any):
    assert here in refuse("run", "Hi", option, "1")


def test_a_number_agrees_with_its_noun():
    numbers = ["0 tokens", "1 token", "2 tokens", "2,000 tokens"]
    assert [count(n, "token") for n in (0, 1, 2, 2000)] == numbers


# -- features --------------------------------------------------------------------------------------


def test_registered_subcommands_are_those_of_the_group():
    groups = [command for command in _COMMANDS.values() if command.subcommands]
    assert {"train", "models"} <= {command.name for command in groups}
    for command in groups:
        group: Any = typer.main.get_command(load(command.target))
        assert {*group.commands} == {*command.subcommands}
        assert not command.default or command.default in command.subcommands
    for feature in FEATURES:
        for handler in feature.options:
            assert callable(load(handler.target))


def test_help_and_run_import_no_feature():
    code = """
import sys
from unspool.cli.main import _exit_code
assert _exit_code(["run", "Hi", "-t", "-1"]) == 2
print(*(name for name in sys.modules if name.startswith("unspool.cli")), "rich" in sys.modules)
_exit_code(["--help"])
features = {"train", "costing", "costs", "scale"}
print(*(name for name in sys.modules if name.split(".")[0] == "torch"))
print(*(name for name in sys.modules if {*name.split(".")[1:2]} & features))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    names = ("main", "hints", "run", "options", "output", "interrupt")
    modules = {"unspool.cli", *(f"unspool.cli.{name}" for name in names)}
    assert {*lines[0].split()} == {*modules, "False"}, "another command or rich was imported"
    assert lines[-2:] == ["", ""], lines[-2:]


# -- output that cannot be written, in child processes ---------------------------------------------


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{shlex.quote(sys.executable)} -m unspool"
    return subprocess.run(
        command.replace("unspool", program, 1), shell=True, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_dev_full
@pytest.mark.parametrize("command", ["--help", "models catalogue"])
def test_a_full_disk_is_one_line(command: str):
    result = shell(f"unspool {command} > /dev/full")
    assert result.returncode == 74, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "unspool: standard output cannot be written: No space left" in result.stderr


@needs_dev_full
def test_remarks_that_cannot_be_written_are_lost():
    assert shell("unspool models catalogue 2> /dev/full").returncode == 0
    assert shell("unspool -t -3 Hi 2> /dev/full").returncode == 2


def test_a_pipe_closed_early_is_no_error():
    program = [sys.executable, "-m", "unspool", "models", "catalogue"]
    reader, writer = os.pipe()
    os.close(reader)  # before anything is written
    with os.fdopen(writer, "wb") as output:
        result = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams_are_no_error(closed: str):
    result = shell(f"unspool models catalogue {closed}")
    assert (result.returncode, result.stderr) == (0, "")


# -- the address of a server -----------------------------------------------------------------------


def test_a_bad_host_or_port(refuse: Any):
    for host in ("no.such.host.invalid", "192.0.2.1", "é..x"):
        message = refuse("serve", "--host", host)
        assert f"host {host!r}" in message and "--host may be" in message
        assert "--port" not in message
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        for command in ("serve", "page"):
            message = refuse(command, "--port", port)
            assert f"port {port} of 127.0.0.1 is already in use" in message
            assert "choose another with --port" in message


def test_a_model_that_cannot_be_loaded(refuse: Any, tmp_path: Path):
    """Of `serve` the same is tested with a process."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(range(64)))
    message = refuse("page", "--port", "0", "--no-open", "--model", str(file))
    assert "broken.gguf: not a usable GGUF file" in message


def test_a_privileged_port(monkeypatch: pytest.MonkeyPatch):
    def bind(self: Any, address: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ListeningSocket, "bind", bind)
    with pytest.raises(UnspoolError, match="no permission to listen on port 80"):
        bind_socket(ServerSettings(port=80))


# -- messages --------------------------------------------------------------------------------------

# A string that ends without a space, and its continuation on the next line.
_GLUED = re.compile(r"(?<!\\)[\w,;:.!?)'’}]\"\n\s*f?\"(?=[\w('{])")
# A template drops the space at a line end: "set" and "<code>" would touch.
_TAG = r"(?:a|b|code|em|i|kbd|small|strong)"
_GLUED_ON_THE_PAGE = re.compile(rf"[\w,;:.!?)][ \t]*\n\s*<{_TAG}[ >]|</{_TAG}>[ \t]*\n\s*\w")


def test_no_words_are_glued_together():
    assert _GLUED.search('raise Error(\n    "a word"\n    f"{and} another"\n)')
    for pattern, ending in ((_GLUED, "py"), (_GLUED_ON_THE_PAGE, "js")):
        for file in (ROOT / "src").rglob(f"*.{ending}"):
            match = pattern.search(file.read_text(encoding="utf-8"))
            assert not match, f"{file.name}: {match and match[0]!r}"


# -- documentation ---------------------------------------------------------------------------------


def environment_variables() -> set[str]:
    """The names of all environment variables that the sources read."""
    names = set()
    for file in (ROOT / "src").rglob("*"):
        if file.suffix not in (".py", ".cpp", ".h"):
            continue
        text = file.read_text(encoding="utf-8")
        reads = re.findall(r"(?:environ(?:\.get|\.pop)?[(\[]|getenv\()\s*([\w.\"']+)", text)
        reads += re.findall(r"\boverride_variable(?:: str)? ?= ?(\"\w+\")", text)  # of packages
        for name in reads:
            if name.endswith(".override_variable"):
                continue
            if name[0] not in "\"'":  # a constant
                (name,) = re.findall(rf"^{name} = (\"\w+\")", text, re.MULTILINE)
            names.add(name.strip("\"'"))
    return names | set(re.findall(r"env = \"(\w+)\"", (ROOT / "pyproject.toml").read_text()))


def test_every_environment_variable_is_documented(
    bare_unspool: Any, monkeypatch: pytest.MonkeyPatch
):
    section = DOCUMENT.read_text(encoding="utf-8").split("## Environment variables")[1]
    own_section, others = section.split("### Variables of the libraries below")
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", own_section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert environment_variables() == documented
    assert {"HF_ENDPOINT", "HF_TOKEN", "NO_COLOR"} <= set(re.findall(r"`(\w+)`", others))
    monkeypatch.setenv("COLUMNS", "300")
    text = bare_unspool("--help")[1]
    assert "docs/reference/command-line.md" in text
    at_run_time = {name for name in documented if name.startswith("UNSPOOL_")} - {
        "UNSPOOL_STRICT",
        "UNSPOOL_KERNELS",
    }
    assert all(name in text for name in at_run_time)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_pages_run(
    page: Path,
    tmp_path: Path,
    words_folder: Path,
    bare_unspool: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """In this process; what is before a pipe is run by a shell."""
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(words_folder))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines
    for line in lines:
        before, _, command = line.rpartition("unspool ")
        if not before and not line.startswith("unspool "):
            subprocess.run(line, shell=True, check=True)
            continue
        stdin = None
        if before:
            stdin = subprocess.check_output(before.rstrip("| "), shell=True, text=True)
        arguments, _, target = command.partition(" > ")
        code, out, err = bare_unspool(*shlex.split(arguments), stdin=stdin)
        assert code == 0, (line, err)
        if target:
            Path(target).write_text(out)
