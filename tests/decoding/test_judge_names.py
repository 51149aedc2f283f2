"""Verifiers by name, and verifiers in a search that fail without stopping it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers import tiny
from helpers.decoding_support import pages_left
from helpers.word_model import save_chatty
from unspool.decoding.search.checkers import CheckerLimits, FileVerifier, PatternVerifier
from unspool.decoding.search.think import VERIFIER_NAMES, VerifierSpec, make_verifier
from unspool.decoding.search.verifiers import FunctionVerifier, LogprobVerifier, Verdict
from unspool.errors import SettingsError, UnspoolError

USUAL: dict[str, Any] = {"n": 4, "max_tokens": 10, "budget": 400, "seed": 3}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = save_chatty(tmp_path_factory.mktemp("chatty"))
    with unspool.load(folder, backend="torch", memory=16 << 20) as lm:
        yield lm


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("logprob", ("logprob", "", None)),
        ("regex:a:b+", ("regex", "a:b+", None)),
        ("ask", ("ask", "", None)),
        ("vote:(\\d+)+x", ("vote", "(\\d+)+x", None)),
        ("vote+reward:a/b", ("vote", "", VerifierSpec("reward", "a/b"))),
    ],
)
def test_names_are_taken_apart(name: str, parts: tuple[str, str, Any]):
    assert VerifierSpec.parse(name) == VerifierSpec(*parts)


@pytest.mark.parametrize(
    "name", ["", "magic", "regex", "regex:", "python:", "tests", "reward", "logprob:x", "vote+",
             "vote+vote", "vote+magic", ":", "Regex:a"]
)  # fmt: skip
def test_names_that_are_none(name: str):
    with pytest.raises(SettingsError):
        VerifierSpec.parse(name)


def test_what_a_name_needs():
    needed = {"reward:m": "m", "ask:m": "m", "ask": None, "vote+process:m": "m", "vote:m": None}
    assert {name: VerifierSpec.parse(name).model for name in needed} == needed
    code = {"python:f.py": True, "vote+tests:f.py": True, "regex:python:": False}
    assert {name: VerifierSpec.parse(name).runs_code for name in code} == code


def test_every_name_can_be_made(chatty: Any, tmp_path: Path):
    import transformers

    shape = {**tiny._SHAPE, "vocab_size": 512, "eos_token_id": 0, "num_labels": 1}
    config = transformers.LlamaConfig(**shape)
    tiny.filled(transformers.LlamaForSequenceClassification(config)).save_pretrained(tmp_path)
    file = tmp_path / "file.py"
    file.write_text("def check(text):\n    return 1\n")
    for name in VERIFIER_NAMES:
        filled = name.replace("FILE.py", str(file)).replace("FUNCTION", "check")
        filled = filled.replace("JUDGE", "logprob").replace("PATTERN", "a")
        if name != "ask:MODEL":  # the reward model here has no words to be asked in
            assert make_verifier(chatty, filled.replace("MODEL", str(tmp_path)))
    request: list[str] = []
    make_verifier(chatty, "ask:other", load=lambda other: request.append(other) or chatty)
    assert request == ["other"]


# -- in a search -------------------------------------------------------------------------------


def test_a_judge_that_misbehaves_fails_branches_in_words(chatty: Any):
    ways = iter(["fine", "raises", "hangs", "nonsense"])
    release = threading.Event()

    def judge(text: Any) -> Any:
        way = next(ways)
        if way == "raises":
            raise ValueError("no such thing")
        if way == "hangs":
            release.wait(60)
        return "good" if way == "nonsense" else 1.0

    result = chatty.think("The tree", judge=FunctionVerifier(judge, seconds=1), **USUAL)
    release.set()
    reported = {node.number: (node.score, node.why) for node in result.tree.root.children}
    assert [score for score, _ in reported.values()] == [1.0, None, None, None]
    whys = [why for _, why in reported.values()]
    assert "no such thing" in whys[1] and "within 1 s" in whys[2] and "'good'" in whys[3]
    assert result.score == 1.0 and result.tree.leaf.number == 1
    assert pages_left(chatty) == 0


def test_a_checker_that_hangs_does_not_hang_the_search(chatty: Any, tmp_path: Path):
    file = tmp_path / "hangs.py"
    file.write_text(
        "import time\nasked = []\n"
        "def check(text):\n    asked.append(text)\n    time.sleep(600 * (len(asked) == 2))\n"
        "    return len(text)\n"
    )
    judge = FileVerifier(chatty, file, limits=CheckerLimits(seconds=1))
    result = chatty.think("The tree", judge=judge, **{**USUAL, "n": 3})
    scores = [node.score for node in result.tree.root.children]
    assert scores[1] is None and None not in (scores[0], scores[2])
    assert result.score == max(score for score in scores if score is not None)


def test_if_all_fail_there_is_a_clear_error(chatty: Any):
    with pytest.raises(UnspoolError, match=r"4 texts.*nothing to see"):
        chatty.think("The tree", judge=lambda text: Verdict(None, "nothing to see"), **USUAL)
    with pytest.raises(UnspoolError, match="matches never there"):
        chatty.think("The tree", judge="vote:never there", **USUAL)
    assert pages_left(chatty) == 0


def test_what_judges_read_is_counted_and_bounded(chatty: Any):
    prompt = chatty.chat_prompt("Plan the rows of the tree").ids
    free = chatty.think(prompt, judge="ask", **{**USUAL, "budget": None})
    assert free.spent.judged > 0
    for budget in (free.spent.total, free.spent.total - 1, free.spent.total * 2 // 3):
        result = chatty.think(prompt, judge="ask", **{**USUAL, "budget": budget})
        assert result.spent.total <= budget
    twice = chatty.think(prompt, judge="ask", **{**USUAL, "budget": None})
    assert [node.score for node in twice.tree.root.walk()] == pytest.approx(
        [node.score for node in free.tree.root.walk()]
    )


@pytest.mark.parametrize("judge", ["regex:e", "vote:(\\w)", "vote+ask", "vote+regex:e"])
def test_a_winner_has_the_best_score(chatty: Any, judge: str):
    result = chatty.think("The tree", judge=judge, **USUAL)
    scores = [node.score for node in result.tree.root.children if node.score is not None]
    assert result.score == max(scores)
    if judge.startswith("vote"):
        assert result.answers and sum(result.answers.values()) <= 1.0001


def test_a_pattern_for_whole_texts_is_refused_where_pieces_are_judged(chatty: Any):
    assert LogprobVerifier().partial and not PatternVerifier(chatty, "a").partial
    with pytest.raises(SettingsError, match=r"unfinished|not finished|partial|whole"):
        chatty.think("The tree", policy="beam", judge="regex:e", budget=400, max_tokens=10)
