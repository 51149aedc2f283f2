"""Diffusion with masked: stop strings, grammars, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unspool as package
from unspool.cli.run import draw_pass
from unspool.decoding.diffusion.result import MASK
from unspool.errors import SettingsError

PROMPT = "The sea is"


def load_masked(folder: Path, **config: Any) -> Any:
    """The tiny model as a masked model: attention and prediction as `config` says."""
    lm = package.load(folder, backend="native", memory=8 << 20)
    for name, value in {"mask_id": 2, **config}.items():
        object.__setattr__(lm.config, name, value)
    return lm


@pytest.fixture(scope="module")
def masked(words_folder: Path) -> Any:
    return load_masked(words_folder, sight="whole")


@pytest.fixture(scope="module")
def shifted(words_folder: Path) -> Any:
    return load_masked(words_folder, sight="causal", block=4, shifted=True)


@pytest.fixture
def model(masked: Any) -> Any:
    return masked


@pytest.fixture
def command(unspool: Any) -> Any:
    return lambda *arguments: unspool(PROMPT, "--raw", *arguments)


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(masked: Any):
    inputs: dict[str, Any] = {"max_tokens": 20, "order": "left", "threshold": 1.0, "end": False}
    inputs["logit_bias"] = {
        n: -100.0 for n in range(masked.tokenizer.vocab_size) if not masked.readable(n).isalpha()
    }
    free = masked.diffuse(PROMPT, **inputs)
    stop = free.text[6:9]
    ended = masked.diffuse(PROMPT, stop=stop, **inputs)
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.finish_reason == "stop" and len(ended.passes) < len(free.passes)
    assert "".join(step.text for step in ended.steps) == ended.text


@pytest.mark.parametrize("name", ["masked", "shifted"])
def test_a_grammar_holds_from_left_to_right(name: str, request: pytest.FixtureRequest):
    lm = request.getfixturevalue(name)
    inputs: dict[str, Any] = {"order": "left", "max_tokens": 24, "block": 4, "threshold": 0.02}
    result = lm.diffuse(PROMPT, regex="(cat|dog) [0-9]{3}", **inputs)
    assert result.text[:4] in ("cat ", "dog ") and len(result.text) == 7
    assert result.finish_reason == "stop"
    assert lm.diffuse(PROMPT, choice=["yes", "no"], **inputs).text in ("yes", "no")


def test_a_grammar_on_a_whole_canvas_is_refused(masked: Any):
    with pytest.raises(SettingsError, match="from left to right"):
        masked.diffuse(PROMPT, regex="[a-z]+")
    with pytest.raises(SettingsError, match="remask or edit"):
        masked.diffuse(PROMPT, regex="[a-z]+", order="left", edit=0.5)


def test_the_text_alone_into_a_pipe(command: Any, masked: Any):
    code, out, err = command("--diffuse", "-n", "12", "--threshold", "0.1", "--seed", "3")
    assert code == 0
    expected = masked.diffuse(PROMPT, max_tokens=12, threshold=0.1, seed=3)
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert f"{len(expected.passes)} passes" in err and "seed 3" in err


def test_a_line_for_each_pass_as_json(command: Any):
    code, out, _ = command("--diffuse", "-n", "6", "--k", "2", "--order", "fixed", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(lines) == 4
    assert [line["number"] for line in lines[:3]] == [0, 1, 2]
    assert sum(place["change"] == "set" for place in lines[0]["places"]) == 2
    assert lines[3]["diffusion"]["passes"] == 3


def test_a_screen_shows_masked_places_as_they_fill(masked: Any):
    passes = list(masked.stream_diffusion(PROMPT, max_tokens=6, k=2, order="fixed", remask=0.9))
    first, last = draw_pass(masked, passes[0]), draw_pass(masked, passes[-1])
    assert first.plain.count(MASK) == 4 and "pass 1: 2 set, 4 masked" in first.plain
    assert MASK not in last.plain
    assert any("remasked" in draw_pass(masked, item).plain for item in passes)


def test_a_screen_is_drawn_pass_by_pass(command: Any, masked: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = command("--diffuse", "-n", "6", "--k", "2", "--order", "fixed", "--probs")
    assert code == 0 and "pass 1: 2 set, 4 masked" in out and "▒" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block", "4"], "add --diffuse"),
        (["--diffuse", "--samples", "3"], "generates one text"),
        (["--diffuse", "--guard", "loop"], "--guard has no effect with --diffuse"),
        (["--diffuse", "--speculate", "lookup"], "--speculate has no effect"),
        (["--diffuse", "--order", "up"], "one of threshold"),
        (["--diffuse", "--threshold", "7"], "from 0 to 1"),
        (["--diffuse", "-n", "1000"], "context holds 512"),
        (["--diffuse", "-n", "8", "--regex", "[a-z]+"], "order='left'"),
        (["--diffuse", "--twin", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(command: Any, arguments: list[str], message: str):
    code, _, err = command(*arguments)
    assert code == 2 and message in err and len(err.splitlines()) == 1
