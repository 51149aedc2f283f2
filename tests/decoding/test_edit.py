"""Revision: changes that can be undone in any order, doubt, proposals, passes and budgets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.decoding_support import pages_left
from unspool import SettingsError, UnspoolError
from unspool.decoding.edit.edit import (
    ChangedText,
    Doubt,
    Edit,
    alike,
    document_score,
    propose_replacements,
    score_doubts,
    spelling_corrections,
    split_units,
)
from unspool.decoding.infill.fill import draft_settings

TEXT = "The scheduler plans rows, and the tree builder makes a step of them. It's done."


FACTS: dict[str, Any] = {"probability": 0.5, "gain": 1.0, "doubt": 1.0, "in_pass": 0}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changes_can_be_made_and_taken_back_in_any_order(data):
    text = data.draw(st.text("abcdef ", min_size=1, max_size=20))
    changed = ChangedText(text)
    for _ in range(data.draw(st.integers(1, 14))):
        if changed.changes and data.draw(st.booleans()):
            number = data.draw(st.integers(0, len(changed.changes) - 1))
            change = changed.changes[number]
            try:
                (changed.undo if change.applied else changed.apply)(number)
            except SettingsError as error:
                assert "overlaps change" in str(error) and change.above
        else:
            start = data.draw(st.integers(0, len(changed.text) - 1))
            end = data.draw(st.integers(start + 1, len(changed.text)))
            new = data.draw(st.text("XYZ", min_size=1, max_size=4))
            changed.propose(start, changed.text[start:end], new, **FACTS)
        for change in changed.changes:  # what is not covered stands where it says
            if not change.above:
                assert changed.text[change.start : change.end] == change.text
    while any(change.applied for change in changed.changes):
        open_ones = [c for c in changed.changes if c.applied and not c.above]
        assert open_ones
        changed.undo(data.draw(st.sampled_from(open_ones)).number)
    assert changed.text == text


def test_what_is_proposed_again_keeps_its_number():
    changed = ChangedText("one two three")
    first = changed.propose(4, "two", "2", **FACTS)
    assert changed.propose(4, "two", "2", **{**FACTS, "probability": 0.9}) is first
    assert first.probability == 0.9 and changed.changes == [first]
    changed.propose(0, "one", "1st", **FACTS)
    changed.apply(1)  # the same words, which stand elsewhere now
    assert changed.propose(4, "two", "2", **FACTS) is first
    assert changed.propose(4, "two", "both", **FACTS).number == 2
    changed.apply(0)
    assert changed.text == "1st 2 three"


def test_what_cannot_be_changed_is_told():
    changed = ChangedText("one two three")
    changed.propose(4, "two", "2", **FACTS)
    changed.propose(0, "one two", "1 and 2", **FACTS)
    changed.apply(0)
    with pytest.raises(SettingsError, match="already applied"):
        changed.apply(0)
    with pytest.raises(SettingsError, match="there is no change 7"):
        changed.undo(7)
    with pytest.raises(SettingsError, match="not applied"):
        changed.undo(1)
    assert changed.text == "one 2 three"


def test_doubt_of_each_token(worded):
    result, score = score_doubts(worded, TEXT)
    assert "".join(doubt.text for doubt in result) == TEXT
    assert all(TEXT[d.start : d.end] == d.text for d in result)
    surprises = [-(p.logprob or 0) for p in score.positions]
    assert len(surprises) == len(result) and result[-1].surprise == pytest.approx(surprises[-1])
    full = worded.score([0, *worded.tokenizer.encode(TEXT)])
    assert score.total == pytest.approx(full.total)


def test_words_and_signs_are_as_doubtful_as_their_worst_token():
    text = "It's a test, no?"
    levels = {"It's": 3.0, "a": 1.0, "test": 5.0, ",": 2.0, "no": 0.5, "?": 4.0}
    reported, at = [], 0
    for word, level in levels.items():
        start = text.index(word, at)
        reported.append(Doubt(0, text[at : start + len(word)], at, start + len(word), level))
        at = start + len(word)
    result = split_units(text, reported)
    assert [unit.text for unit in result] == ["test", "?", "It's", ",", "a", "no"]
    assert all(text[u.start : u.start + len(u.text)] == u.text for u in result)


def test_a_word_is_replaced_by_a_word(worded):
    result, _ = score_doubts(worded, TEXT)
    by_text = {unit.text: unit for unit in split_units(TEXT, result)}
    how = draft_settings(worded, {}, candidates=12, drafts=2)
    for word in ("tree", ","):
        ranked = propose_replacements(worded, TEXT, by_text[word], how, reach=None)
        texts = [item.texts[0] for item in ranked]
        assert word in texts and len({*texts}) == len(texts)
        assert all(text.strip() == text and " " not in text for text in texts)
        assert all(text[0].isalnum() == word.isalnum() for text in texts)
        for item in ranked[:3]:  # ranked by the exact score of the whole text
            start = by_text[word].start
            assert item.text == TEXT[:start] + item.texts[0] + TEXT[start + len(word) :]
            last = ranked[-1]
            gain = document_score(worded, item.text).total - document_score(worded, last.text).total
            assert item.score - last.score == pytest.approx(gain, abs=5e-3)


def test_a_shortlist_has_the_scores_of_the_whole_ranking(worded):
    doubts, _ = score_doubts(worded, TEXT)
    how = draft_settings(worded, {}, candidates=8, drafts=2)
    for unit in split_units(TEXT, doubts)[:2]:
        scores = {
            filled.texts: filled.score
            for filled in propose_replacements(worded, TEXT, unit, how, reach=6)
        }
        short = propose_replacements(worded, TEXT, unit, how, reach=6, shortlist=2)
        assert (unit.text,) in {filled.texts for filled in short}
        if len(short) <= 3:  # otherwise the current word is clearly the best
            best = {filled.texts: filled.score for filled in short}
            gaps = [best[texts] - best[(unit.text,)] for texts in best]
            expected = [scores[texts] - scores[(unit.text,)] for texts in best]
            assert gaps == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("teh", "the", True), ("hous", "house", True), ("housse", "house", True),
        ("hause", "house", True), ("Cat", "cat", True), ("a", "b", True), ("bc", "abc", True),
        ("cat", "dog", False), ("abcd", "dcba", False), ("cat", "cattle", False),
        ("abc", "cba", False), ("stone", "tones", False),
    ],
)  # fmt: skip
def test_words_that_are_one_slip_apart(first, second, expected):
    assert alike(first, second) is alike(second, first) is expected


def test_a_misspelled_word_is_looked_up(worded):
    tokenizer = worded.tokenizer
    assert spelling_corrections(tokenizer, "brnach", TEXT) == [
        "branch"
    ]  # a token of the vocabulary
    assert spelling_corrections(tokenizer, "shceduler", TEXT) == ["scheduler"]  # a word of the text
    assert spelling_corrections(tokenizer, "pge", TEXT) == ["page"]
    for other in ("branch", "12", ",", "It's"):  # spelled right, or no word of letters alone
        assert not spelling_corrections(tokenizer, other, TEXT)
    text = TEXT.replace("tree", "treee")
    unit = next(u for u in split_units(text, score_doubts(worded, text)[0]) if u.text == "treee")
    result = propose_replacements(
        worded, text, unit, draft_settings(worded, {}, candidates=4, drafts=2), reach=8
    )
    assert {item.texts[0] for item in result} == {"treee", "tree"}  # nothing else was meant


@pytest.mark.parametrize("word", ["treee", "rows"])
def test_trust_in_what_stands_there_lowers_the_others(worded, word):
    text = TEXT.replace("tree", "treee")
    unit = next(u for u in split_units(text, score_doubts(worded, text)[0]) if u.text == word)
    how = draft_settings(worded, {}, candidates=4, drafts=2)
    without, trusting = (
        {
            item.texts[0]: item
            for item in propose_replacements(worded, text, unit, how, reach=8, trust=trust)
        }
        for trust in (0.0, 40.0)
    )
    assert next(iter(trusting)) == word and {*without} == {*trusting} > {word}

    def odds(candidates, other):
        return math.log(candidates[other].probability / candidates[word].probability)

    for other in without:
        assert trusting[other].score == pytest.approx(without[other].score)
        lost = 40.0 - (math.log(20) if alike(word, other) else 0.0) if other != word else 0.0
        assert odds(without, other) - odds(trusting, other) == pytest.approx(lost, abs=1e-3)


def test_a_text_gets_likelier_with_every_change(worded):
    created = worded.edit(
        TEXT, threshold=0.5, trust=0, passes=2, places=4, candidates=6, reach=None
    )
    assert created.applied and created.passes <= 2
    assert created.after.total > created.before.total
    assert created.after.total == pytest.approx(document_score(worded, created.text).total)
    for change in created.applied:
        assert change.probability >= 0.5 and change.gain > 0
        assert dict(change.alternatives)[change.new] == pytest.approx(change.probability)
    remaining = "".join(piece for kind, piece in created.tracked() if kind != "added")
    now = "".join(piece for kind, piece in created.tracked() if kind != "removed")
    assert (remaining, now) == (TEXT, created.text)
    while created.applied:
        created.undo(next(c.number for c in created.applied if not c.above))
    assert created.text == TEXT and created.after.total == pytest.approx(created.before.total)
    assert pages_left(worded) == 0


def test_it_ends_when_nothing_changes_and_never_goes_back_and_forth(worded):
    options = {"threshold": 0.5, "trust": 0, "passes": 12, "places": 2, "candidates": 3}
    created = worded.edit(TEXT, **options)
    assert created.passes <= 12 and worded.edit(created.text, **options).passes <= 12
    assert all(change.gain > 0 for change in created.applied)


def test_below_the_threshold_changes_are_only_proposed(worded):
    created = worded.edit(TEXT, threshold=1.0, trust=0, passes=1, places=4, candidates=6)
    assert created.text == TEXT and created.passes == 1
    proposed = [change for change in created.changes if change.probability < 1]
    assert proposed
    created.apply(proposed[0].number)
    assert created.text != TEXT and proposed[0].new in created.text
    assert proposed[0] in created.applied
    created.undo(proposed[0].number)
    assert created.text == TEXT


def test_the_budget_ends_it(worded):
    options = {"threshold": 0.5, "trust": 0, "passes": 2, "places": 4, "candidates": 3}
    free = worded.edit(TEXT, **options)
    short = worded.edit(TEXT, budget=60, **options)
    none = worded.edit(TEXT, budget=0, **options)
    assert none.weighed == 0 and not none.changes
    assert 60 <= short.weighed < free.weighed


def test_it_can_be_shown(worded):
    created = Edit(worded, "one <two> three\nfour")
    created.propose(5, "two", "2", **FACTS)
    created.apply(0)
    assert str(created) == "one <2> three\nfour"
    assert list(created.tracked()) == [
        ("same", "one <"), ("removed", "two"), ("added", "2"), ("same", "> three\nfour")
    ]  # fmt: skip
    assert created.diff("a.txt").splitlines()[:2] == ["--- a.txt", "+++ a.txt (edited)"]
    assert "-one <two> three\n+one <2> three\n" in created.diff()
    displayed = created._repr_html_()
    assert "&lt;<del>two</del><ins>2</ins>&gt;" in displayed
    reported = created.to_dict()
    assert reported["changes"][0]["applied"] and math.isfinite(reported["perplexity_after"])
    assert "1 of 1 changes made" in repr(created)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("  ", {}, "nothing to edit"),
        (TEXT, {"threshold": 2}, "from 0 to 1"),
        (TEXT, {"trust": -1}, "trust must be a number >= 0"),
        (TEXT, {"passes": 0}, ">= 1"),
        (TEXT, {"budget": -1}, ">= 0"),
        (TEXT, {"doubt": "nobody"}, "causal, masked"),
        (TEXT, {"doubt": "masked"}, "twin="),
        ("word " * 2000, {}, "context"),
    ],
)
def test_what_cannot_be_is_refused(worded, text, options, words):
    with pytest.raises(UnspoolError, match=words):
        worded.edit(text, **options)
