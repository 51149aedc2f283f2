"""What people meet in their first minutes: words they bring along, mistakes, pipes, settings.

Each in a process of its own, as they would start it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.terminal import Terminal
from unspool.cli import hints

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "command-line.md"
COMMANDS = ("run", "chat", "replay", "fill", "edit", "explore", "tokenize", "score", "costs",
            "batch", "page", "serve", "models", "train")  # fmt: skip


def real(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unspool", *arguments],
        **{"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **options},
    )


def refused(*arguments: str, **options: Any) -> str:
    """The one line that a mistake gets."""
    done = real(*arguments, **options)
    assert done.returncode == 2 and done.stdout == "", (arguments, done)
    assert done.stderr.startswith("unspool: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# -- words -----------------------------------------------------------------------------------


def test_the_version():
    for arguments in (["--version"], ["--version", "chat"]):
        done = real(*arguments)
        assert (done.returncode, done.stdout) == (0, f"unspool {unspool.__version__}\n"), done


def test_help_in_words():
    assert real("help").stdout == real("--help").stdout
    assert "unspool models pull " in real("models", "help", "pull").stdout
    for words in (["serve"], ["models", "pull"]):
        done = real("help", *words)
        assert done.returncode == 0 and f"unspool {' '.join(words)} " in done.stdout
    assert "did you mean unspool chat?" in refused("help", "caht")
    assert "unspool --help lists the commands" in refused("help", "foo")
    assert "did you mean unspool train tune?" in refused("help", "tune")


def test_help_shows_brackets_as_they_are():
    assert "unspool[ray]" in real("serve", "--help").stdout


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
def test_a_word_meant_as_a_command(words: list[str], advice: str):
    told = refused(*words)
    assert advice in told and f"unspool run {words[0]}" in told


def test_every_hint_leads_somewhere():
    """No hint for what is a command, and none that names a command which is none."""
    from unspool.cli.train import group

    assert not {*hints.ELSEWHERE, *hints.NOT_HERE, *hints.GROUPED} & {*COMMANDS}
    assert {*group.COMMANDS} <= {*hints.GROUPED}
    for advice in hints.ELSEWHERE.values():
        word = advice.split()[1]
        assert word in COMMANDS or word.startswith(('"', "--")), advice


@pytest.mark.parametrize(
    "word", ["hello", "summarize", "Why?", "translate", "2+2=", "and/or", "list?", "data", "plan"]
)
def test_other_words_are_prompts(word: str):
    assert hints.hint(word, COMMANDS) is None and hints.model_hint(word) is None


def test_a_number_agrees_with_its_noun():
    from unspool.errors import count

    assert [count(n, "token") for n in (0, 1, 2, 2000)] == [
        "0 tokens", "1 token", "2 tokens", "2,000 tokens",
    ]  # fmt: skip


def test_a_single_token_has_no_perplexity():
    from unspool.engine.results import Score, TokenScore

    score = Score([TokenScore(5, "a", None, None, None)])
    assert "nan" not in repr(score) and "1 token," in repr(score)
    assert json.loads(json.dumps(score.to_dict(), allow_nan=False))["perplexity"] is None


@pytest.mark.parametrize("system", ["STANDARD", "EIGHT_BIT", "TRUECOLOR"])
def test_tints_differ_in_every_terminal(system: str, monkeypatch: pytest.MonkeyPatch):
    from rich.color import ColorSystem

    from unspool.cli import show

    monkeypatch.setattr(show, "_has_16_colours", lambda: system == "STANDARD")
    chances = [show.chance_style(least).bgcolor for least in (0.9, 0.6, 0.3, 0.1, 0)]
    for colours in (chances, [show.piece_style(number).bgcolor for number in range(5)]):
        shown = [colour.downgrade(ColorSystem[system]) for colour in colours if colour]
        assert len({(c.number, c.triplet) for c in shown}) == 5


# -- output that cannot be written ----------------------------------------------------------------


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{shlex.quote(sys.executable)} -m unspool"
    return subprocess.run(
        command.replace("unspool", program, 1), shell=True, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["--help", "models list", "tokenize --vocabulary bytes Hi"])
def test_a_full_disk_is_one_line(command: str):
    done = shell(f"unspool {command} > /dev/full")
    assert done.returncode in (2, 74), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("unspool: ")
    if done.returncode == 74:
        assert "standard output cannot be written: No space left" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_remarks_that_cannot_be_written_are_lost():
    assert shell("unspool models list 2> /dev/full").returncode == 0
    assert shell("unspool -t -3 Hi 2> /dev/full").returncode == 2
    assert shell("unspool -t -3 Hi 2>&-").returncode == 2


@pytest.mark.parametrize("command", ["--help", "models catalogue"])
def test_a_reader_that_leaves_early_is_no_error(command: str):
    program = [sys.executable, "-m", "unspool", *command.split()]
    read, write = os.pipe()
    os.close(read)  # before anything is written
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams_are_no_error(closed: str):
    done = shell(f"unspool models list {closed}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.real
def test_run_makes_a_prompt_of_every_word():
    done = real("run", "caht", "--regex", "[a-z]{3}", "-q")
    assert done.returncode == 0 and len(done.stdout.strip()) == 3


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:1b", "Qwen/Qwen3-0.6B", "hf.co/a/b:Q4_0",
                                  "./model.gguf", "qwen3-0.6b"])  # fmt: skip
def test_a_model_where_a_prompt_should_be(name: str):
    assert f"unspool -m {name}" in refused("run", name)
    assert f'unspool -m {name} "hello"' in refused("run", name, "hello")


def test_quotes_that_were_forgotten():
    assert '"Why do leaves fall"' in refused("Why", "do", "leaves", "fall", "-n", "3")
    assert '"The cat sat"' in refused("score", "The", "cat", "sat")


@pytest.mark.parametrize(("option", "here"), [("--temp", "--temperature"), ("-p", "the prompt"),
                                              ("--num-predict", "--max-tokens")])  # fmt: skip
def test_options_as_others_name_them(option: str, here: str):
    assert here in refused("run", "Hi", option, "1")


# -- before a model is loaded ------------------------------------------------------------------

BAD = [
    (["-t", "-1"], "temperature must be >= 0, got -1"),
    (["--top-p", "2"], "top_p must be from 0 to 1, got 2"),
    (["--guard", "foo"], "unknown guard 'foo'; there are loop"),
    (["--guard", "lop"], "did you mean 'loop'? There are loop"),
    (["--regex", "(("], "regex"),
    (["--json-schema", '{"type": 7}'], "schema"),
    (["--grammar", "start: nothing"], "grammar"),
    (["--choice", "a", "--regex", "b"], "only one of them"),
    (["--speculate", "magic"], "speculate is 'magic'"),
    (["--speculate", "head:/no/folder"], "/no/folder"),
    (["--stages", "top_q"], "top_q"),
    (["--logit-bias", "1=nan"], "logit_bias"),
    (["-n", "-5"], "max_tokens must be an integer >= 0, got -5"),
    (["--top", "-1"], "top must be an integer >= 0, got -1"),
    (["--samples", "0"], "--samples is 0"),
    (["--beam", "2", "-t", "1"], "--temperature has no meaning for --beam"),
    (["--samples", "2", "--trace", "x.json"], "--trace saves one text"),
    (["--trace", "/no/folder/x.json"], "there is no folder /no/folder"),
    (["--trace", "/"], "/ is a folder"),
    (["--quantize", "3"], "quantize must be one of 4, 8, got 3"),
    (["--context", "0"], "context must be"),
    (["--json-schema", "person.json"], "there is no file 'person.json' in "),
    (["--json-schema", "/no/person.json"], "there is no file '/no/person.json'"),
    (["--grammar", "json.lark"], "there is no file 'json.lark'"),
]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Looking for a model is noted, and fails."""
    from unspool.errors import UnspoolError

    looked: list[Any] = []

    def find(*given: Any, **named: Any) -> None:
        looked.append(given)
        raise UnspoolError("no model was to be looked for")

    for module in ("unspool.loading", "unspool.model.hub.find"):  # the one that imports goes first
        monkeypatch.setattr(f"{module}.find_model", find)
    return looked


@pytest.mark.parametrize(("options", "words"), BAD, ids=lambda value: str(value)[:40])
def test_settings_are_checked_first(options: Any, words: str, nowhere: list[Any], capfd: Any):
    from unspool.cli.main import _exit_code

    assert _exit_code(["run", "Hi", *options]) == 2
    assert words in capfd.readouterr().err and not nowhere


@pytest.mark.parametrize("command", [["chat"], ["serve"], ["page", "--no-open"]])
@pytest.mark.parametrize("options", [["--quantize", "3"], ["-t", "-1"], ["--port", "70000"]])
def test_other_commands_check_first_too(
    command: list[str], options: list[str], nowhere: list[Any], capfd: Any
):
    from unspool.cli.main import _exit_code

    assert _exit_code([*command, *options]) == 2  # one that is unknown there is refused as well
    assert options[1] in (told := capfd.readouterr().err) or options[0] in told
    assert not nowhere


def test_a_grammar_may_name_the_models_own_tokens(nowhere: list[Any]):
    from unspool.cli.main import _exit_code

    assert _exit_code(["run", "Hi", "--grammar", "start: <|im_end|>"]) == 2
    assert nowhere, "only the model can tell"


@pytest.mark.real
def test_a_schema_in_a_file_or_as_it_is(tmp_path: Path):
    schema = '{"type": "integer", "minimum": 7, "maximum": 7}'
    (tmp_path / "seven.json").write_text(schema)
    for given in (schema, "seven.json"):
        done = real("A number:", "--raw", "--json-schema", given, "-q", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


# -- a server's address --------------------------------------------------------------------------


def test_a_host_or_a_port_that_cannot_be():
    for host in ("no.such.host.invalid", "192.0.2.1", "é..x"):
        told = refused("serve", "--host", host)
        assert f"host {host!r}" in told and "--host may be" in told and "--port" not in told
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in ("serve", "page"):
            told = refused(command, "--port", port)
            assert (
                f"port {port} of 127.0.0.1 is already in use" in told
                and "choose another with --port" in told
            )


def test_a_port_that_is_not_for_everyone(monkeypatch: pytest.MonkeyPatch):
    from unspool.errors import UnspoolError
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import ListeningSocket, bind_socket

    def bind(self: Any, address: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ListeningSocket, "bind", bind)
    with pytest.raises(UnspoolError, match="no permission to listen on port 80"):
        bind_socket(ServerSettings(port=80))


# -- pipes -----------------------------------------------------------------------------------


@pytest.mark.real
def test_texts_in_a_pipe_can_be_told_apart():
    asked = ("Once", "--raw", "-n", "4", "--seed", "3", "--regex", "[a-z]{400}")
    lines = real(*asked, "--json", "--samples", "3").stdout.splitlines()
    single = [json.loads(line) for line in lines if '"generation"' in line]
    assert [line["sample"] for line in single] == [0, 1, 2]
    texts = [line["generation"]["text"] for line in single]
    assert real(*asked, "--samples", "3", "-q").stdout.split("\n---\n") == [
        *texts[:-1],
        texts[-1] + "\n",
    ]
    assert real(*asked).stdout == texts[0] + "\n", "one text needs no separator"


@pytest.mark.real
@pytest.mark.parametrize("way", ["--samples", "--best-of", "--beam"])
def test_json_of_several_texts(way: str):
    done = real("Once", "--raw", "-n", "3", way, "2", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    wholes = [line for line in lines if "generation" in line]
    assert len(wholes) == (2 if way == "--samples" else 1)
    for whole in wholes:
        steps = [line for line in lines if line["sample"] == whole["sample"] and "token" in line]
        assert [step["token"] for step in steps] == whole["generation"]["tokens"]
        assert all(step["candidates"] for step in steps)


@pytest.mark.real
def test_a_grammar_holds_for_all_texts():
    done = real("Once", "--raw", "--samples", "2", "--regex", "[0-9]{3}", "-q")
    one, two = done.stdout.split("---")
    assert one.strip().isdigit() and two.strip().isdigit()


@pytest.mark.real
def test_the_chosen_token_is_always_shown():
    """Here one that the model finds unlikely: the grammar allows no other."""
    done = real("The capital of Germany is", "--raw", "--regex", "Zyzzyva", "-n", "2", "--top", "3")
    marked = [line for line in done.stdout.splitlines() if "▸" in line]
    assert len(marked) == 2 and "Z" in marked[0] and re.search(r"rank \d+", marked[0])
    assert len(done.stdout.splitlines()[:5]) == 5


@pytest.mark.real
def test_no_colours_where_they_are_not_wanted():
    with Terminal("The sky is", "--raw", "-n", "3", "--probs", NO_COLOR="1") as screen:
        assert screen.ended() == 0
        assert not re.search(r"\x1b\[[0-9;]*4[0-9];", screen.raw), "no background"


# -- messages --------------------------------------------------------------------------------


def test_no_words_are_glued_together():
    """Strings written over two lines, the one without a space at its end nor the other before."""
    import io
    import tokenize

    string = re.compile(r"([a-zA-Z]*)(\"\"\"|'''|\"|')(.*)\2", re.DOTALL)
    glued = []
    for file in (ROOT / "src").rglob("*.py"):
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type in (tokenize.NL, tokenize.COMMENT):
                continue
            found = string.fullmatch(token.string) if token.type == tokenize.STRING else None
            text = found[3] if found and "r" not in found[1].lower() else ""
            if re.search(r"(?<!\\)[\w,;:.!?)'’}]$", before) and re.match(r"[\w('{]", text):
                glued.append(f"{file.name}:{token.start[0]}: {before[-20:]!r} {text[:20]!r}")
            before = text
    assert not glued


def test_no_words_are_glued_together_on_the_page():
    """Where a line of a template ends, its space is dropped: "set" and "<code>" would touch."""
    tag = r"(?:a|b|code|em|i|kbd|small|strong)"
    glue = re.compile(rf"[\w,;:.!?)][ \t]*\n\s*<{tag}[ >]|</{tag}>[ \t]*\n\s*\w")
    for file in (ROOT / "src" / "unspool" / "page" / "code").rglob("*.js"):
        found = glue.search(file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found and found[0]!r}"


# -- the environment -------------------------------------------------------------------------


def variables_read() -> set[str]:
    """The names of all environment variables that the sources ask for."""
    found = set()
    for file in (ROOT / "src").rglob("*"):
        if file.suffix not in (".py", ".cpp", ".h"):
            continue
        text = file.read_text(encoding="utf-8")
        asked = re.findall(r"(?:environ(?:\.get|\.pop)?[(\[]|getenv\()\s*([\w.\"']+)", text)
        asked += re.findall(r"\boverride_variable(?:: str)? ?= ?(\"\w+\")", text)  # of packages
        for name in asked:
            if name.endswith(".override_variable"):
                continue
            if name[0] not in "\"'":  # a constant
                (name,) = re.findall(rf"^{name} = (\"\w+\")", text, re.MULTILINE)
            found.add(name.strip("\"'"))
    found |= set(re.findall(r"env = \"(\w+)\"", (ROOT / "pyproject.toml").read_text()))
    return found


def test_every_environment_variable_is_documented():
    section = DOCUMENT.read_text(encoding="utf-8").split("## Environment variables")[1]
    own, others = section.split("What the libraries below read")
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", own, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert variables_read() == documented
    assert {"HF_ENDPOINT", "HF_TOKEN", "NO_COLOR"} <= set(re.findall(r"`(\w+)`", others))
    shown = real("--help", env={**os.environ, "COLUMNS": "300"}).stdout
    assert "docs/command-line.md" in shown
    at_run_time = {name for name in documented if name.startswith("UNSPOOL_")} - {"UNSPOOL_STRICT"}
    assert all(name in shown for name in at_run_time)


@pytest.mark.real
def test_the_documents_commands_run(tmp_path: Path):
    stub = tmp_path / "unspool"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -m unspool "$@"\n')
    stub.chmod(0o755)
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line]
    assert len(commands) >= 8
    began = time.monotonic()
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
    assert time.monotonic() - began < 240
