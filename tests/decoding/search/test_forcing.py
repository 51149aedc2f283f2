"""Budget forcing, token by token, against a loop that does the same by single greedy steps."""

from __future__ import annotations

import pytest

import unspool
from helpers.decoding_support import pages_left
from helpers.search_support import forget, metered
from helpers.word_model import save_worded
from unspool.decoding.search.think import think
from unspool.errors import SettingsError, UnspoolError

PROMPT = "A branch stands at a node."


def tags(lm, text):
    return lm.tokenizer.encode(text, specials=True)


def by_hand(lm, prompt, *, bias, least, most, answer, close, wait):
    """The tokens behind the prompt that budget forcing has to give."""
    opening = tags(lm, "<think>\n")
    tokens = list(opening)

    def greedy() -> int:
        step = lm.generate([*prompt, *tokens], max_tokens=1, temperature=0, logit_bias=bias)
        return step.tokens[0]

    def num_thinking() -> int:
        return len(tokens) - len(opening)

    token = -1
    while num_thinking() < most:
        token = greedy()
        if token in (close, *lm.end_ids):
            if num_thinking() >= least or num_thinking() + len(wait) > most:
                break
            tokens += wait
        else:
            tokens.append(token)
    tokens.append(close)
    if token != close or num_thinking() - 1 >= most:  # it was closed for the model: a blank line
        blank = tags(lm, "\n\n")
        tokens += blank
        answer -= len(blank)
    for _ in range(answer):
        tokens.append(greedy())
        if tokens[-1] in lm.end_ids:
            break
    return tokens


@pytest.mark.parametrize(  # how gladly the model closes, and how long it may think
    ("eager", "least", "most"),
    [(0.0, 0, 12), (0.0, 5, 30), (4.0, 8, 12), (6.0, 12, 12), (6.0, 5, 30), (30.0, 5, 12),
     (30.0, 0, 1)],
)  # fmt: skip
def test_token_by_token(worded_lm, eager, least, most):
    lm = worded_lm
    (close,), ids = tags(lm, "</think>"), lm.prompt_ids(PROMPT)
    bias = {close: eager, **{end: eager - 1.0 for end in lm.end_ids}}
    opening = len(tags(lm, "<think>\n"))
    forget(lm)
    with metered(lm) as meter:
        result = think(
            lm, PROMPT, policy="think", min_thinking=least, max_thinking=most, temperature=0,
            logit_bias=bias, budget=400, max_tokens=opening + most + 1 + 6,
        )  # fmt: skip
    tokens = result.best.tokens
    answer = opening + most + 1 + 6 - tokens.index(close) - 1
    expected = by_hand(
        lm, ids, bias=bias, least=least, most=most, answer=answer, close=close,
        wait=lm.tokenizer.encode("Wait"),
    )  # fmt: skip
    assert tokens == expected
    assert least <= tokens.index(close) - opening <= most
    assert meter.tokens == result.spent.total <= 400
    assert pages_left(lm) == 0


def test_a_tag_that_is_several_tokens(worded_lm):
    """A model that was not made to think has no token for the tag: it is text like any other."""
    lm = worded_lm
    result = think(
        lm, PROMPT, policy="think", tags=("(", ") so"), min_thinking=3, max_thinking=10,
        temperature=0, max_tokens=30, budget=200,
    )  # fmt: skip
    assert result.text.startswith("(\n") and ") so" in result.text
    assert len(lm.tokenizer.encode(") so")) > 1
    # A close tag right after the opening is rewound as often as needed.
    forced = {"regex": r"(?:\(\n)?(?: node| page|Wait|\) so)*"}
    again = think(
        lm, PROMPT, policy="think", tags=("(", ") so"), min_thinking=8, max_thinking=40, seed=2,
        temperature=1.0, max_tokens=60, budget=300, **forced,
    )  # fmt: skip
    inside = again.text.removeprefix("(\n").split(") so")[0]
    assert len(lm.tokenizer.encode(inside)) >= 8


def test_a_model_without_tags_thinks_in_words(tmp_path):
    lm = unspool.load(save_worded(tmp_path), memory=8 << 20)
    assert lm.thought_format is None
    result = think(
        lm, PROMPT, policy="think", max_thinking=6, temperature=0, max_tokens=80, budget=200,
        logit_bias={end: -50.0 for end in lm.end_ids},
    )  # fmt: skip
    assert result.text.startswith("Let me think about it step by step.")
    answer = result.text.split("\n\nSo the answer is")[1]
    assert answer  # plain words lead to an answer; an untrained tag does not
    lm.close()


def test_a_prompt_that_opens_the_tag_already(worded_lm):
    result = think(
        worded_lm, tags(worded_lm, PROMPT + "<think>\n"), policy="think", max_thinking=5,
        temperature=0, max_tokens=12, budget=100,
    )  # fmt: skip
    (opened,), (closed,) = tags(worded_lm, "<think>"), tags(worded_lm, "</think>")
    assert opened not in result.best.tokens and closed in result.best.tokens


def test_faults(worded_lm):
    for options, output in (
        ({"min_thinking": 500}, "min_thinking is 500, but"),
        ({"min_thinking": 9, "max_thinking": 8}, "min_thinking is 9, but only 8 tokens"),
        ({"wait": ""}, "wait must be"),
        ({"tags": ("<a>",)}, "the open tag and the close tag"),
    ):
        with pytest.raises(SettingsError, match=output):
            think(worded_lm, PROMPT, policy="think", budget=200, **options)
    for budget in range(1, 40, 8):
        try:
            assert think(worded_lm, PROMPT, policy="think", budget=budget).spent.total <= budget
        except UnspoolError as error:
            assert "budget" in str(error)
    assert pages_left(worded_lm) == 0
