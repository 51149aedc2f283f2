"""Compose: an outline, its sections, the whole put together and gone over; and what that costs."""

from __future__ import annotations

import math
import re

import pytest

from helpers.decoding_support import pages_left
from helpers.search_support import forget, metered
from unspool.decoding.search.policies import WORD_COST, _title, doubtful_words, revise
from unspool.decoding.search.search import Search, run_moves
from unspool.decoding.search.think import think
from unspool.decoding.search.tree import TokenBudget
from unspool.errors import UnspoolError

PROMPT = "The pages of the tree."
# The tiny model writes nonsense; a grammar gives it lines, items and headings to write.
LINES = r"(?:\n?## [a-z .]+\n\n|Outline:\n(?:\d\. [a-z]{3,9}\n)+|[a-z]{2,9}[ .\n]|\n)*"
ASKED = {
    "policy": "compose", "sections": 2, "outline": 24, "seed": 3, "temperature": 1.0,
    "regex": LINES,
}  # fmt: skip


def test_an_outline_and_its_sections(worded_lm):
    forget(worded_lm)
    with metered(worded_lm) as meter:
        result = think(worded_lm, PROMPT, budget=600, edits=2, **ASKED)
    headings = re.findall(r"^## (.+)$", result.text, re.MULTILINE)
    assert 1 <= len(headings) <= 2 and result.text.startswith("## ")
    plan = next(
        node for node in result.tree.root.children
        if node.generation.text.startswith("Outline:\n1. ")
    )  # fmt: skip
    assert all(f". {heading}\n" in plan.generation.text for heading in headings)
    assert result.best.finish_reason == "stop"
    assert meter.tokens == result.spent.total <= 600
    # The winner is a text behind the prompt, as the model judges it.
    expected = worded_lm.score([*result.best.prompt, *result.best.tokens]).logprobs
    assert [step.logprob for step in result.best.steps] == pytest.approx(
        expected[len(result.best.prompt) :], abs=1e-3
    )
    assert pages_left(worded_lm) == 0


def test_no_budget_is_overrun(worded_lm):
    for budget, width in ((8, 1), (40, 3), (90, 1), (220, 3)):
        with metered(worded_lm) as meter:
            try:
                result = think(worded_lm, PROMPT, budget=budget, width=width, edits=1, **ASKED)
            except UnspoolError as error:
                assert "budget" in str(error) or "outline" in str(error)
            else:
                assert result.spent.total == meter.tokens
        assert meter.tokens <= budget
    assert pages_left(worded_lm) == 0


def test_a_heading_is_the_beginning_of_its_item():
    assert _title("**The importance of bees**:") == "The importance of bees"
    assert _title("Bees pollinate. They also make honey.") == "Bees pollinate"
    assert _title("Bees are clever, social insects that are found in all parts of the world") == (
        "Bees are clever"
    )
    long = _title("word " * 30)
    assert len(long) <= 60 and not long.endswith(" ")


def test_a_doubtful_word_is_replaced_where_another_fits_better(worded_lm):
    """Exactly where a look at all candidates says so, and never where it does not."""
    lm = worded_lm
    ids = lm.tokenizer.encode(" and the pages of the node are the tree. The page of the node is.")
    start = lm.prepare_generation(PROMPT, max_tokens=64, temperature=0)
    with metered(lm) as meter, Search(lm, start, None, TokenBudget()) as search:
        (node,) = run_moves(search.append([(search.root, ids)]))
        looked_at = sorted(doubtful_words(node.generation.steps)[:4], reverse=True)
        created = run_moves(revise(search, node, 4))
        assert meter.tokens == search.budget.spent.total
        assert search.budget.spent.judged <= 4 * WORD_COST
    assert looked_at
    tokens, prompt = list(ids), list(start.prompt)
    for place in looked_at:
        before = [*prompt, *tokens[:place]]
        others = [c.token for c in lm.choices(before, 24) if re.fullmatch(r" \w+", c.text)]
        words = [tokens[place], *[word for word in others if word != tokens[place]][:5]]
        behind = tokens[place + 1 : place + 16]
        totals = [math.fsum(lm.score([*before, w, *behind]).logprobs[len(before) :]) for w in words]
        best = max(range(len(words)), key=totals.__getitem__)
        if 1 / sum(math.exp(total - totals[best]) for total in totals) >= 0.9:
            tokens[place] = words[best]
    assert created.generation.tokens == tokens
