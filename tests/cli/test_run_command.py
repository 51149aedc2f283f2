"""`unspool run`, `chat`, `score`, `tokenize`, `replay` and `models`, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unspool.cli.main import _exit_code
from unspool.decoding.search.beam import beam_search


def test_a_prompt_is_enough(unspool: Any):
    code, out, err = unspool("The scheduler", "--raw", "--regex", " page", "-t", "0")
    assert code == 0 and out == " page\n"
    assert re.search(r"tokens?, prompt \d+, .* tokens/s, .*seed \d+", err)


BRIEF = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("arguments", "stdin", "method", "prompt"),
    [
        (["Plan it"], None, "chat", "Plan it"),
        (["Plan it", "--raw"], None, "generate", "Plan it"),
        (["Hi", "--system", "Be brief."], None, "chat", BRIEF),
        (["--raw", "-q"], "The tree", "generate", "The tree"),
    ],
)
def test_instruct_models_answer_unless_raw(
    arguments: list[str], stdin: str | None, method: str, prompt: Any, unspool: Any, words: Any
):
    code, out, _ = unspool(*arguments, "-n", "6", "-t", "0", stdin=stdin)
    expected = getattr(words, method)(prompt, max_tokens=6, temperature=0)
    assert code == 0 and out.rstrip("\n") == expected.text.rstrip("\n")
    if method == "generate":
        assert list(expected.prompt) != words.chat_prompt(prompt).ids


def test_piped_text_follows_the_instruction(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, words_folder: Path
):
    """With a real pipe: without one, stdin is not read after an argument."""
    vocabulary = ("--ids", "--vocabulary", str(words_folder / "tokenizer.json"))
    reader, writer = os.pipe()
    os.write(writer, b"some notes")
    os.close(writer)
    monkeypatch.setattr("sys.stdin", os.fdopen(reader, encoding="utf-8"))
    assert _exit_code(["tokenize", "Summarize:", *vocabulary]) == 0
    piped = capfd.readouterr().out
    assert _exit_code(["tokenize", "Summarize:\n\nsome notes", *vocabulary]) == 0
    assert piped == capfd.readouterr().out != ""


def test_json_lines(unspool: Any):
    code, out, _ = unspool("Hi", "--json", "-n", "6", "--seed", "3", "--regex", "[a-z]{200}")
    lines = [json.loads(line) for line in out.splitlines()]
    steps, last = lines[:-1], lines[-1]["generation"]
    assert code == 0
    assert "".join(step["text"] for step in steps) == last["text"]
    assert [step["token"] for step in steps] == last["tokens"]
    assert steps[0]["candidates"] and steps[0]["stages"]
    assert last["seed"] == 3 and last["finish_reason"] == "length"


def test_same_seed_same_text(unspool: Any):
    arguments = ("Tell me", "-n", "8", "-t", "1.5", "--seed")
    first, second = (unspool(*arguments, "11")[1] for _ in range(2))
    assert first == second
    assert any(unspool(*arguments, str(seed))[1] != first for seed in range(12, 17))


def test_every_sampling_option_reaches_the_model(unspool: Any, words: Any):
    code, out, _ = unspool(
        "Once", "--raw", "-n", "6", "--seed", "2", "--temperature", "1.1", "--top-k", "20",
        "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2",
        "--dry-multiplier", "0.5", "--logit-bias", "204=-3", "--logit-bias", "28=2",
        "--stages", "temperature,top_k,top-p,min_p,repetition_penalty,dry,logit_bias",
    )  # fmt: skip
    expected = words.generate(
        "Once", max_tokens=6, seed=2, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01,
        repetition_penalty=1.2, dry_multiplier=0.5, logit_bias={204: -3.0, 28: 2.0},
        stages=("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "dry",
                "logit_bias"),
    )  # fmt: skip
    assert code == 0 and out.rstrip("\n") == expected.text.rstrip("\n")


def test_candidates_as_bars(unspool: Any):
    """The sampled token is always shown; the grammar allows only unlikely ones here."""
    code, out, _ = unspool("The", "--raw", "--regex", "Zyzzyva", "-n", "2", "--top", "3")
    rows = out.splitlines()
    marked = [row for row in rows if "▸" in row]
    assert code == 0 and len(marked) == 2 and "Z" in marked[0]
    assert "█" in out or "▏" in out
    ranks = [re.search(r"rank (\d+)", row) for row in rows if "model probability" in row]
    outside = [rank for rank in ranks if rank and int(rank[1]) > 3]
    assert len(outside) == sum("rank" in row for row in marked) == len(rows) - 8


def test_colours_only_on_a_terminal(unspool: Any, monkeypatch: pytest.MonkeyPatch):
    arguments = ("The tree", "--raw", "-n", "3", "-t", "0", "--probs")
    assert "\x1b[" not in unspool(*arguments)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in unspool(*arguments)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*4[0-9];", unspool(*arguments)[1]), "no background"


@pytest.mark.parametrize("system", ["STANDARD", "EIGHT_BIT", "TRUECOLOR"])
def test_colours_differ_in_every_terminal(system: str, monkeypatch: pytest.MonkeyPatch):
    from rich.color import ColorSystem

    from unspool.cli import output

    monkeypatch.setattr(output, "_has_16_colours", lambda: system == "STANDARD")
    scale = [output.probability_style(p).bgcolor for p in (0.9, 0.6, 0.3, 0.1, 0)]
    for colours in (scale, [output.piece_style(number).bgcolor for number in range(5)]):
        downgraded = [colour.downgrade(ColorSystem[system]) for colour in colours if colour]
        assert len({(c.number, c.triplet) for c in downgraded}) == 5


def test_several_texts(unspool: Any, words: Any):
    common = ("Once", "--raw", "-n", "4", "--seed", "3", "--regex", "[a-z]{400}")
    code, out, err = unspool(*common, "--samples", "3")
    expected = [
        words.generate("Once", max_tokens=4, seed=3, sample=n, regex="[a-z]{400}").text
        for n in range(3)
    ]
    assert code == 0 and out == "\n---\n".join(expected) + "\n"
    assert err.count("tokens/s") == 3
    assert unspool(*common)[1] == expected[0] + "\n", "one text needs no separator"
    code, out, _ = unspool(*common, "--best-of", "3")
    assert code == 0 and out.rstrip("\n") in expected
    code, out, _ = unspool("The tree is", "--raw", "-n", "3", "--beam", "3")
    best = beam_search(words, "The tree is", beams=3, max_tokens=3).best
    assert code == 0 and out.rstrip("\n") == best.text.rstrip("\n")


@pytest.mark.parametrize("method", ["--samples", "--best-of", "--beam"])
def test_json_of_several_texts(method: str, unspool: Any):
    code, out, _ = unspool("Once", "--raw", "-n", "3", method, "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    texts = [line for line in lines if "generation" in line]
    assert code == 0 and len(texts) == (2 if method == "--samples" else 1)
    if method == "--samples":
        assert [line["sample"] for line in texts] == [0, 1]
    for text in texts:
        steps = [line for line in lines if line["sample"] == text["sample"] and "token" in line]
        assert [step["token"] for step in steps] == text["generation"]["tokens"]
        assert all(step["candidates"] for step in steps)


def test_grammars(unspool: Any, tmp_path: Path):
    code, out, _ = unspool("Is it?", "--raw", "--choice", "yes", "--choice", "no", "-q")
    assert code == 0 and out.strip() in ("yes", "no")
    file = tmp_path / "seven.json"
    file.write_text('{"type": "integer", "minimum": 7, "maximum": 7}')
    for schema in (str(file), file.read_text()):
        code, out, err = unspool("A number:", "--raw", "--json-schema", schema, "-q")
        assert (code, out) == (0, "7\n"), err
    code, out, _ = unspool("Once", "--raw", "--samples", "2", "--regex", "[0-9]{3}", "-q")
    first, second = out.split("---")
    assert first.strip().isdigit() and second.strip().isdigit()


def test_guards_and_drafts(unspool: Any, words: Any):
    arguments = ("He said that she said that", "--raw", "-t", "0", "-n", "60")
    assert unspool(*arguments)[1] == unspool(*arguments, "--speculate", "lookup")[1]
    # Two words are possible, and the bias decides; without the first, the other.
    red, blue = words.tokenizer.encode("red")[0], words.tokenizer.encode("blue")[0]
    bias = ("--logit-bias", f"{red}=100", "--logit-bias", f"{blue}=50")
    arguments = ("A colour:", "--raw", "--regex", "red|blue", *bias)
    assert unspool(*arguments, "-q")[1].strip() == "red"
    code, out, err = unspool(*arguments, "--guard", "ban=red")
    assert code == 0 and out.strip() == "blue" and "rewound" in err


def test_trace_and_replay(unspool: Any, tmp_path: Path):
    file = tmp_path / "trace.json"
    regex = ("--regex", "[a-z]{200}")
    code, out, _ = unspool("Once", "--raw", "-n", "6", "--seed", "4", *regex, "--trace", str(file))
    assert code == 0 and file.exists()
    code, replayed, _ = unspool("replay", str(file))
    assert code == 0 and out.strip() in replayed


def test_score(unspool: Any, words: Any):
    code, out, _ = unspool("score", "The tree of the page", "--top", "2")
    expected = words.score("The tree of the page")
    assert code == 0 and f"perplexity {expected.perplexity:.3f}" in out
    positions = json.loads(unspool("score", "--json", "The tree of the page")[1])["positions"]
    assert positions[0]["logprob"] is None
    assert positions[1]["logprob"] == pytest.approx(expected.logprobs[1], abs=1e-4)


def test_a_single_token_has_no_perplexity():
    from unspool.engine.results import Score, TokenScore

    score = Score([TokenScore(5, "a", None, None, None)])
    assert "nan" not in repr(score) and "1 token," in repr(score)
    assert json.loads(json.dumps(score.to_dict(), allow_nan=False))["perplexity"] is None


def test_chat(unspool: Any, tmp_path: Path):
    file = tmp_path / "chat.json"
    lines = f"Name a row.\n/retry\nAnother.\n/undo\n/nonsense\n/save {file}\n/quit\nnever\n"
    code, _, err = unspool("chat", "-n", "12", "-t", "0", "--system", "Be brief.", stdin=lines)
    assert code == 0
    for message in ("removed: Another.", "no command /nonsense; /help", "prompt tokens from the"):
        assert message in err
    content = json.loads(file.read_text())
    assert [m["role"] for m in content["messages"]] == ["system", "user", "assistant"]
    assert content["messages"][1]["content"] == "Name a row." and content["ids"]
    code, _, err = unspool("chat", stdin="/undo\n/system Be kind.\n/save\n/help\n")
    assert code == 0
    for message in ("nothing to undo", "new conversation", "needs a file name", "/retry"):
        assert message in err


# -- the default model -----------------------------------------------------------------------------


@pytest.mark.real
def test_tokenize(bare_unspool: Any, words_folder: Path):
    code, out, _ = bare_unspool("tokenize", "unspooling 🌿")
    assert code == 0 and "unspooling 🌿" in out and "f0 9f" in out
    ids = bare_unspool("tokenize", "--ids", "unspooling")[1].split()
    assert ids == ["419", "2401", "751", "274"]
    _, merges, _ = bare_unspool("tokenize", "--merges", "unspooling")
    assert "u n s p o o l i n g" in merges and "un sp ool ing" in merges
    vocabulary = str(words_folder / "tokenizer.json")
    rows = json.loads(bare_unspool("tokenize", "--vocabulary", vocabulary, "--json", "a row")[1])
    assert "".join(row["text"] for row in rows) == "a row"


@pytest.mark.real
def test_models(bare_unspool: Any, default_model: Path):
    code, out, _ = bare_unspool("models", "info")
    assert code == 0
    for word in ("llama", "134,515,008", "5.74", "8,192", "byte-level BPE", "<|im_end|>"):
        assert word in out
    code, out, _ = bare_unspool("models", "list")
    assert code == 0 and "smollm2" in out.lower()
    code, out, _ = bare_unspool("models", "pull")
    assert code == 0 and Path(out.strip()) == default_model


# -- errors ----------------------------------------------------------------------------------------

BAD_OPTIONS = [
    (["-t", "-1"], "temperature must be >= 0, got -1"),
    (["--top-p", "2"], "top_p must be from 0 to 1, got 2"),
    (["--top-p", "much"], "--top-p"),
    (["--temperatur", "1"], "--temperature"),
    (["--guard", "foo"], "unknown guard 'foo'; there are loop"),
    (["--guard", "lop"], "did you mean 'loop'? There are loop"),
    (["--regex", "(("], "regex"),
    (["--json-schema", '{"type": 7}'], "schema"),
    (["--grammar", "start: nothing"], "grammar"),
    (["--choice", "a", "--regex", "b"], "only one of them"),
    (["--speculate", "magic"], "speculate is 'magic'"),
    (["--speculate", "eagle:/no/folder"], "/no/folder"),
    (["--stages", "top_q"], "unknown stage 'top_q'"),
    (["--logit-bias", "x=1"], "--logit-bias must be TOKEN_ID=AMOUNT"),
    (["--logit-bias", "1=nan"], "logit_bias"),
    (["--raw", "--system", "x"], "--system needs the chat template"),
    (["-n", "-5"], "max_tokens must be an integer >= 0, got -5"),
    (["--top", "-1"], "top must be an integer >= 0, got -1"),
    (["--samples", "0"], "--samples must be >= 1, got 0"),
    (["--samples", "2", "--beam", "2"], "exclude each other"),
    (["--beam", "2", "-t", "1"], "--temperature has no effect with --beam"),
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
def no_models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Searching for a model is recorded, and fails."""
    from unspool.errors import UnspoolError

    searches: list[Any] = []

    def find(*names: Any, **options: Any) -> None:
        searches.append(names)
        raise UnspoolError("a model was searched for")

    for module in ("unspool.loading", "unspool.model.hub.find"):  # the importing module first
        monkeypatch.setattr(f"{module}.find_model", find)
    return searches


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_options_are_checked_before_a_model_is_loaded(
    options: list[str], message: str, no_models: list[Any], bare_unspool: Any
):
    code, out, err = bare_unspool("run", "Hi", *options)
    assert code == 2 and out == "" and message in err and not no_models
    assert err.startswith("unspool: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", [["chat"], ["serve"], ["page", "--no-open"]])
@pytest.mark.parametrize("options", [["--quantize", "3"], ["-t", "-1"], ["--port", "70000"]])
def test_other_commands_check_first_too(
    command: list[str], options: list[str], no_models: list[Any], bare_unspool: Any
):
    code, _, err = bare_unspool(*command, *options)
    assert code == 2 and not no_models  # an option that the command does not have is refused too
    assert options[1] in err or options[0] in err


def test_a_grammar_may_name_special_tokens(no_models: list[Any], bare_unspool: Any):
    assert bare_unspool("run", "Hi", "--grammar", "start: <|im_end|>")[0] == 2
    assert no_models, "only the model knows its tokens"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([""], None, "prompt is empty"),
        ([], "", "prompt is empty"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["tokenize", "x", "--vocabulary", "klingon"], None, "klingon"),
        (["tokenize", "x", "--vocabulary", "gpt2", "-m", "y"], None, "not both"),
        (["models", "info", "/no/such/model.gguf"], None, "/no/such/model.gguf"),
        (["models", "burn"], None, "burn"),
        (["replay", "/no/such/trace.json"], None, "/no/such/trace.json"),
        (["explore", "Hi"], None, "needs a terminal"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    bare_unspool: Any, arguments: list[str], stdin: Any, message: str
):
    code, out, err = bare_unspool(*arguments, stdin=stdin)
    assert code == 2 and out == "" and message in err
    assert err.startswith("unspool: ") and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04", None])
def test_bad_files_are_one_line_and_exit_2(
    content: bytes | None, tmp_path: Path, bare_unspool: Any
):
    file = tmp_path / "bad.gguf"
    if content is not None:
        file.write_bytes(content)
    code, _, err = bare_unspool("Hi", "-m", str(file))
    assert code == 2 and str(file) in err and len(err.strip().splitlines()) == 1


# -- child processes -------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_written(long_words_folder: Path, words: Any):
    letter = words.tokenizer.encode("x")[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "Tell me a long story.", "-n", "60000",
         "--logit-bias", f"{letter}=100", "-m", str(long_words_folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = b""
    while len(first) < 4:  # wait until it generates
        first += os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and {*(first + out).strip()} == {ord("x")}
    assert b"Traceback" not in err and b"finish: interrupted" in err


def test_a_reader_that_closes_the_pipe_is_no_error(words_folder: Path):
    command = f"{sys.executable} -m unspool 'Tell me a story.' -n 30 -m {words_folder} | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert len(result.stdout) == 1
    assert b"Traceback" not in result.stderr and b"BrokenPipe" not in result.stderr
