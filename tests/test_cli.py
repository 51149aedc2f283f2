"""The command line as a new user would use it, and as one who gets everything wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unspool.cli.main import _exit_code
from unspool.decoding.search.beam import beam_search

pytestmark = pytest.mark.real


@pytest.fixture
def unspool(lm: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run a command in this process, on the model that is loaded already."""
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: lm)

    def run(*arguments: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = _exit_code(arguments, piped=stdin is not None)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def real(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "unspool", *arguments], capture_output=True, text=True, **options
    )


def test_a_prompt_is_enough(unspool):
    code, out, err = unspool("The capital of Germany is", "--raw", "--regex", " Berlin", "-t", "0")
    assert code == 0
    assert out == " Berlin\n"
    assert "after 5 of prompt" in err and "tokens/s" in err and "seed" in err


def test_instruct_models_answer_unless_raw(unspool, lm):
    code, chat, _ = unspool("Say hello.", "-n", "5", "-t", "0")
    assert code == 0
    assert chat.rstrip("\n") == lm.chat("Say hello.", max_tokens=5, temperature=0).text.rstrip("\n")
    _, raw, _ = unspool("Say hello.", "-n", "5", "-t", "0", "--raw")
    plain = lm.generate("Say hello.", max_tokens=5, temperature=0)
    assert raw.rstrip("\n") == plain.text.rstrip("\n")
    assert list(plain.prompt) != lm.chat_prompt("Say hello.").ids


def test_the_system_message_is_heard(unspool, lm):
    _code, out, _ = unspool("Hi", "--system", "Talk like a pirate.", "-n", "8", "-t", "0")
    messages = [
        {"role": "system", "content": "Talk like a pirate."},
        {"role": "user", "content": "Hi"},
    ]
    assert out.strip() == lm.chat(messages, max_tokens=8, temperature=0).text.strip()


def test_stdin_is_the_prompt_or_its_end(unspool, lm):
    prompt = "The capital of Germany is"
    code, out, _ = unspool("--raw", "-n", "3", "-t", "0", "-q", stdin=prompt)
    assert code == 0
    assert out.rstrip("\n") == lm.generate(prompt, max_tokens=3, temperature=0).text.rstrip("\n")


def test_piped_text_follows_the_instruction():
    done = real("tokenize", "Summarize:", "--ids", input="some notes")
    alone = real("tokenize", "--ids", input="Summarize:\n\nsome notes")
    assert done.returncode == 0
    assert done.stdout == alone.stdout != ""


def test_json_lines(unspool):
    code, out, _err = unspool("Hi", "--json", "-n", "6", "--seed", "3", "--regex", "[a-z]{200}")
    lines = [json.loads(line) for line in out.splitlines()]
    steps, last = lines[:-1], lines[-1]["generation"]
    assert code == 0
    assert "".join(step["text"] for step in steps) == last["text"]
    assert [step["token"] for step in steps] == last["tokens"]
    assert steps[0]["candidates"] and steps[0]["stages"]
    assert last["seed"] == 3 and last["finish_reason"] == "length"


def test_same_seed_same_text(unspool):
    asked = ("Tell me", "-n", "8", "-t", "1.5", "--seed")
    one, two = (unspool(*asked, "11")[1] for _ in range(2))
    assert one == two
    assert any(unspool(*asked, str(seed))[1] != one for seed in range(12, 17))


def test_every_sampling_option_reaches_the_model(unspool, lm):
    code, out, _ = unspool(
        "Once", "--raw", "-n", "6", "--seed", "2", "--temperature", "1.1", "--top-k", "20",
        "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2",
        "--dry-multiplier", "0.5", "--logit-bias", "504=-3", "--logit-bias", "28=2",
        "--stages", "temperature,top_k,top-p,min_p,repetition_penalty,dry,logit_bias",
    )  # fmt: skip
    made = lm.generate(
        "Once", max_tokens=6, seed=2, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01,
        repetition_penalty=1.2, dry_multiplier=0.5, logit_bias={504: -3.0, 28: 2.0},
        stages=("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "dry",
                "logit_bias"),
    )  # fmt: skip
    assert code == 0
    assert out.rstrip("\n") == made.text.rstrip("\n")


def test_candidates_as_bars(unspool):
    only = ("--regex", " Berlin is large", "-n", "1", "-t", "0")
    code, out, _ = unspool("The capital of Germany is", "--raw", *only, "--top", "3")
    assert code == 0
    assert "▸ ␣Berlin" in out and "█" in out
    assert len(out.splitlines()) == 4


def test_plain_when_piped_and_coloured_on_a_terminal(unspool, monkeypatch):
    _, plain, _ = unspool("The sky is", "--raw", "-n", "3", "-t", "0", "--probs")
    assert "\x1b[" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, coloured, _ = unspool("The sky is", "--raw", "-n", "3", "-t", "0", "--probs")
    assert "\x1b[" in coloured


def test_several_texts(unspool, lm):
    code, out, err = unspool("Once", "--raw", "-n", "4", "--seed", "3", "--samples", "3")
    expected = [lm.generate("Once", max_tokens=4, seed=3, sample=n).text for n in range(3)]
    assert code == 0
    assert [line for line in out.split("\n") if line] == [
        t for t in "\n---\n".join(expected).split("\n") if t
    ]
    assert err.count("tokens/s") == 3
    code, out, _ = unspool("Once", "--raw", "-n", "4", "--seed", "3", "--best-of", "3")
    assert code == 0 and out.rstrip("\n") in [t.rstrip("\n") for t in expected]
    code, out, _ = unspool("The capital of Germany is", "--raw", "-n", "3", "--beam", "3")
    found = beam_search(lm, "The capital of Germany is", beams=3, max_tokens=3)
    assert code == 0 and out.rstrip("\n") == found.best.text.rstrip("\n")


def test_grammars_guards_and_drafts(unspool, lm, tmp_path):
    code, out, _ = unspool("Is it?", "--raw", "--choice", "yes", "--choice", "no", "-q")
    assert code == 0 and out.strip() in ("yes", "no")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "maxItems": 2}')
    code, out, _ = unspool("Numbers:", "--raw", "--json-schema", str(schema), "-q", "-t", "0")
    assert code == 0 and isinstance(json.loads(out), list)
    code, out, _ = unspool("Number:", "--raw", "--regex", "[0-9]{3}", "-q")
    assert code == 0 and out.strip().isdigit()
    words = ("He said that she said that", "--raw", "-t", "0", "-n", "60")
    plain, drafted = unspool(*words)[1], unspool(*words, "--speculate", "lookup")[1]
    assert plain == drafted
    # Two words are possible and one of them is always picked; without it, the other.
    (red,), (blue,) = lm.tokenizer.encode("red"), lm.tokenizer.encode("blue")
    bias = ("--logit-bias", f"{red}=100", "--logit-bias", f"{blue}=50")
    words = ("A colour:", "--raw", "--regex", "red|blue", *bias)
    assert unspool(*words, "-q")[1].strip() == "red"
    code, out, err = unspool(*words, "--guard", "ban=red")
    assert code == 0 and out.strip() == "blue" and "rewound" in err


def test_trace_and_replay(unspool, tmp_path):
    saved = tmp_path / "trace.json"
    code, out, _ = unspool("Once", "--raw", "-n", "6", "--seed", "4", "--trace", str(saved))
    assert code == 0 and saved.exists()
    code, replayed, _ = unspool("replay", str(saved))
    assert code == 0
    assert out.strip() in replayed


def test_tokenize(unspool):
    code, out, _ = unspool("tokenize", "unspooling 🌿")
    assert code == 0
    assert "unspooling 🌿" in out and "f0 9f" in out
    assert unspool("tokenize", "--ids", "unspooling")[1].split() == ["419", "2401", "751", "274"]
    rows = json.loads(unspool("tokenize", "--json", "unspooling")[1])
    assert [row["text"] for row in rows] == ["un", "sp", "ool", "ing"]
    _, merges, _ = unspool("tokenize", "--merges", "unspooling")
    assert "u n s p o o l i n g" in merges and "un sp ool ing" in merges


def test_score(unspool, lm):
    code, out, _ = unspool("score", "The cat sat on the mat", "--top", "2")
    expected = lm.score("The cat sat on the mat")
    assert code == 0
    assert f"perplexity {expected.perplexity:.3f}" in out
    found = json.loads(unspool("score", "--json", "The cat sat")[1])
    assert found["positions"][0]["logprob"] is None
    assert found["positions"][1]["logprob"] == pytest.approx(expected.logprobs[1], abs=1e-4)


def test_models(unspool, default_model):
    code, out, _ = unspool("models", "info")
    assert code == 0
    for words in ("llama", "134,515,008", "5.74", "8,192", "byte-level BPE", "<|im_end|>"):
        assert words in out
    code, out, _ = unspool("models", "list")
    assert code == 0 and "smollm2" in out.lower()
    code, out, _ = unspool("models", "pull")
    assert code == 0 and Path(out.strip()) == default_model


def test_chat(unspool, tmp_path):
    saved = tmp_path / "talk.json"
    code, _out, err = unspool(
        "chat", "-n", "12", "-t", "0", "--system", "Be brief.",
        stdin=f"Name a colour.\n/retry\nAnother.\n/undo\n/nonsense\n/save {saved}\n/quit\nnever\n",
    )  # fmt: skip
    assert code == 0
    assert "taken back: Another." in err
    assert "no command /nonsense; /help" in err
    assert "prompt tokens not read again" in err
    content = json.loads(saved.read_text())
    assert [m["role"] for m in content["messages"]] == ["system", "user", "assistant"]
    assert content["messages"][1]["content"] == "Name a colour."
    assert content["ids"]
    code, _, err = unspool("chat", stdin="/undo\n/system Be kind.\n/save\n/help\n")
    assert code == 0
    assert "nothing to undo" in err and "a new conversation" in err
    assert "say where" in err and "/retry" in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["Hi", "-t", "-1"], None, "temperature must be >= 0, got -1"),
        (["Hi", "--top-p", "1.5"], None, "top_p must be from 0 to 1, got 1.5"),
        (["Hi", "--top-p", "much"], None, "--top-p"),
        (["Hi", "--stages", "top_q"], None, "unknown stage 'top_q'"),
        (["Hi", "--temperatur", "1"], None, "--temperature"),
        (["Hi", "--logit-bias", "x=1"], None, "TOKEN_ID=AMOUNT"),
        (["Hi", "--raw", "--system", "x"], None, "--system needs the chat template"),
        (["Hi", "-n", "-5"], None, "max_tokens must be an integer >= 0, got -5"),
        ([""], None, "prompt is empty"),
        ([], "", "prompt is empty"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["tokenize", "x", "--vocabulary", "klingon"], None, "klingon"),
        (["tokenize", "x", "--vocabulary", "gpt2", "-m", "y"], None, "not both"),
        (["models", "info", "/no/such/model.gguf"], None, "/no/such/model.gguf"),
        (["models", "burn"], None, "burn"),
        (["Hi", "--samples", "2", "--beam", "2"], None, "exclude each other"),
        (["Hi", "--samples", "0"], None, "--samples is 0"),
        (["Hi", "--samples", "2", "--trace", "x.json"], None, "--trace saves one text"),
        (["Hi", "--json-schema", '{"type": 7}'], None, "schema"),
        (["Hi", "--regex", "(("], None, "regex"),
        (["Hi", "--guard", "lop"], None, "did you mean 'loop'"),
        (["Hi", "--speculate", "magic"], None, "specul"),
        (["replay", "/no/such/trace.json"], None, "/no/such/trace.json"),
        (["explore", "Hi"], None, "needs a terminal"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(unspool, arguments, stdin, words):
    code, out, err = unspool(*arguments, stdin=stdin)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.startswith("unspool: ") and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04", None])
def test_bad_files_are_one_line_and_exit_2(content: bytes | None, tmp_path: Path):
    file = tmp_path / "bad.gguf"
    if content is not None:
        file.write_bytes(content)
    done = real("Hi", "-m", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_has_examples():
    for command in ([], ["run"], ["chat"], ["tokenize"], ["score"], ["models"], ["models", "info"]):
        done = real(*command, "--help")
        assert done.returncode == 0
        assert "Example" in done.stdout, command


def test_ctrl_c_leaves_what_was_written():
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "Tell me a long story.", "-n", "2000",
         "--regex", "[a-z ]{9000}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = b""
    while len(first) < 4:  # wait until it writes
        first += os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).strip().replace(b" ", b"").isalpha()
    assert b"Traceback" not in err
    assert b"finish: interrupted" in err


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m unspool 'Tell me a story.' -n 30 | head -c 1",
        shell=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert len(done.stdout) == 1
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr
