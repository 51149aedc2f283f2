"""Gaps filled by ranking, by masks and by FIM tokens: exact scores, borders of text, prompts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from helpers import assets
from helpers.decoding_support import pages_left
from helpers.word_model import FIM, save_worded
from unspool import SettingsError, UnspoolError, gap
from unspool.decoding.edit.edit import masked_surprise, score_doubts
from unspool.decoding.infill.causal import start_ids, text_ids, token_ends, tokens_within
from unspool.decoding.infill.fill import OtherFile, fim_prompt, fim_tokens, make_fim_request
from unspool.decoding.infill.masked import MaskedModel, WholeText, fill_by_masks
from unspool.decoding.infill.result import GappedText
from unspool.text.tokenizer.tokenizer import Tokenizer

LEFT, RIGHT = "The scheduler plans rows, and the ", " builder makes a step of them."
WORDS = st.text(
    st.sampled_from("abctehr sn.,'\n-é🌿_"), min_size=0, max_size=12
)  # merges, halves of characters, spaces at every border


def total(lm: Any, text: str, first: int) -> float:
    """Brute force: the log-probability of a whole text's tokens from a position on."""
    return math.fsum(p.logprob for p in lm.score(text_ids(lm, text)).positions[first:])


def test_scores_are_those_of_the_whole_texts(worded):
    result = worded.fill(LEFT, gap(1, 3), RIGHT, reach=None)
    assert result.by == "ranking" and len(result.candidates) > 3
    for item in result.candidates:
        first = len(text_ids(worded, item.text)) - len(item.steps)
        assert item.score == pytest.approx(total(worded, item.text, first), abs=1e-3)
    shared = {len(text_ids(worded, item.text)) - len(item.steps) for item in result.candidates}
    assert len(shared) == 1 and shared.pop() > 5  # the prefix side was not judged again
    scores = [item.score for item in result.candidates]
    assert scores == sorted(scores, reverse=True)
    assert math.fsum(item.probability for item in result.candidates) == pytest.approx(1)
    assert result.text == result.chosen.text == LEFT + result.texts[0] + RIGHT


def test_the_best_of_given_choices_is_that_of_brute_force(worded):
    choices = ["batch", "page", "token", "", "page and the token", "tree\n"]
    result = worded.fill(LEFT, gap, RIGHT, choices=choices, reach=None)
    expected = sorted(choices, key=lambda word: -total(worded, LEFT + word + RIGHT, 1))
    assert [item.texts[0] for item in result.candidates] == expected


def test_how_far_the_right_side_is_weighed(worded):
    choices = ["batch", "page"]
    near = worded.fill(LEFT, gap, RIGHT, choices=choices, reach=2)
    for item in near.candidates:
        displayed = "".join(step.text for step in item.steps)
        assert (LEFT + item.texts[0] + RIGHT).find(displayed) > 0 and not displayed.endswith(
            "them."
        )
        assert item.text.endswith(RIGHT)


def test_the_left_side_is_computed_once(worded):
    words = "the page of the tree is " * 12
    worded.engine.call(worded.engine.tree.index.clear)
    before = worded.engine.steps
    worded.fill(words, gap, " and so on", choices=["one", "two", "three"])
    used = worded.engine.call(lambda: worded.engine.tree.index.pages)
    assert used * worded.engine.tree.page_size < 2 * len(text_ids(worded, words))
    assert worded.engine.steps > before
    assert pages_left(worded) == 0


def test_several_gaps(worded):
    result = worded.fill(
        "The ", gap(1, 2), " of the ", gap(1), " is a page.", candidates=6, reach=None
    )
    for item in result.candidates:
        assert item.text == f"The {item.texts[0]} of the {item.texts[1]} is a page."
        first = len(text_ids(worded, item.text)) - len(item.steps)
        assert item.score == pytest.approx(total(worded, item.text, first), abs=1e-3)
        for text, steps in zip(item.texts, item.gap_steps, strict=True):
            assert "".join(step.text for step in steps) == text


@settings(max_examples=25, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_texts_are_put_together_exactly(worded, prefix, inside, suffix):
    """However the vocabulary cuts it: the text is prefix + gap + suffix, and so are its steps."""
    try:
        result = worded.fill(prefix, gap, suffix, choices=[inside, "tree"], reach=None)
    except UnspoolError as error:
        assert "adjacent" in str(error)
        return
    for item in result.candidates:
        assert item.text == prefix + item.texts[0] + suffix
        assert "".join(step.text for step in item.gap_steps[0]) == item.texts[0]
        first = len(text_ids(worded, item.text)) - len(item.steps) + (not suffix)
        judged = item.steps[:-1] if not suffix else item.steps
        scored = math.fsum(step.logprob for step in judged)
        assert scored == pytest.approx(total(worded, item.text, first), abs=2e-3)


@settings(max_examples=10, deadline=None)
@given(WORDS, WORDS)
def test_drafts_continue_the_text_across_the_border(worded, prefix, suffix):
    result = worded.fill(prefix, gap(0, 3), suffix, candidates=5, drafts=2)
    texts = [item.texts[0] for item in result.candidates]
    assert len({*texts}) == len(texts)
    for item in result.candidates:
        assert item.text == prefix + item.texts[0] + suffix
        ids = text_ids(worded, item.text)
        inside = len(prefix.encode()), len((prefix + item.texts[0]).encode())
        assert len(tokens_within(token_ends(worded, ids, item.text), *inside)) <= 3


@given(WORDS)
def test_where_tokens_end(worded, text):
    ids = text_ids(worded, text)
    ends = token_ends(worded, ids, text)
    assert ends[-1] == len(text.encode())
    pieces = [text.encode()[a:b] for a, b in itertools.pairwise([0, *ends])]
    assert pieces == [worded.engine.token_bytes(token) for token in ids]


def test_a_token_that_reaches_over_the_border_counts(worded):
    text = "and the page"
    ids = text_ids(worded, text)
    ends = token_ends(worded, ids, text)
    spaced = tokens_within(ends, 3, 4)  # the space alone belongs to the next token
    assert len(spaced) == 1 and worded.engine.token_bytes(ids[spaced.start]).startswith(b" ")
    assert len(tokens_within(ends, 3, 3)) == 0
    assert start_ids(worded) == ids[:1]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_gap_of_known_length_has_so_many_tokens(worded, length):
    result = worded.fill(LEFT, gap(length), RIGHT, candidates=8)
    assert {len(item.gap_steps[0]) for item in result.candidates} == {length}


def test_same_seed_same_candidates(worded):
    def sample_texts(seed: int) -> list[str]:
        options = {"temperature": 1.5, "seed": seed, "top_k": 0}
        result = worded.fill(LEFT, gap(3, 6), RIGHT, candidates=6, **options)
        return [item.texts[0] for item in result.candidates]

    assert sample_texts(1) == sample_texts(1) != sample_texts(2)


def test_steps_tell_candidates(worded):
    item = worded.fill(LEFT, gap(1), RIGHT, candidates=3, top=4).chosen
    assert all(len(step.candidates) == 4 and step.rank is not None for step in item.steps)
    assert item.gap_steps[0][0].candidates


def test_marks_in_one_text(worded):
    item = worded.fill("The ___ of the tree", choices=["page"])
    assert item.text == "The page of the tree"
    parts = GappedText.parse(["a", gap(2), "b", "c", gap])
    assert parts.texts == ("a", "bc", "") and [g.most for g in parts.gaps] == [2, 16]
    assert parts.filled(["1", "2"]) == "a1bc2"
    assert repr(gap) == "gap" and repr(gap(2)) == "gap(2)" and repr(gap(1, 3)) == "gap(1, 3)"


def test_results_can_be_chosen_and_shown(worded):
    result = worded.fill(LEFT, gap, RIGHT, choices=["<page>", "tree"])
    other = result.choose(1)
    assert other.text == result.candidates[1].text != result.text == str(result)
    assert "&lt;page&gt;" in result._repr_html_() and "<page>" not in result._repr_html_()
    assert result.to_dict()["candidates"][0]["texts"] == list(result.texts)
    assert "Filling by ranking" in repr(result)
    with pytest.raises(SettingsError, match="from 0 to 1"):
        result.choose(2)


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        (["no gap here"], {}, "three underscores"),
        (["a", "b"], {}, "nothing to fill"),
        ([gap, gap], {}, "adjacent"),
        (["a", 3, gap], {}, "a text or a gap"),
        (["a", gap, "b"], {"by": "magic"}, "masked, fim"),
        (["a", gap, "b"], {"by": "fim"}, "no FIM tokens"),
        (["a", gap, "b"], {"by": "masked"}, "no mask token"),
        (["a", gap, "b"], {"regex": "x+"}, "regex cannot be used"),
        (["a", gap, "b"], {"max_tokens": 3}, "not with max_tokens"),
        (["a", gap, "b"], {"candidates": 0}, ">= 1"),
        (["a", gap, "b"], {"temprature": 1}, "temperature"),
        (["a", gap, "b"], {"choices": []}, "at least one"),
        (["a ___ b ___"], {"choices": ["x"]}, "one gap"),
        (["word " * 2000, gap, "b"], {}, "context"),
    ],
)
def test_what_cannot_be_is_refused(worded, parts, options, words):
    with pytest.raises(UnspoolError, match=words):
        worded.fill(*parts, **options)
    assert pages_left(worded) == 0


@pytest.mark.parametrize("length", [(3, 1), (0,), (-1, 2), (1, 10_000), ("2",), (True,)])
def test_a_gap_that_cannot_be(length):
    with pytest.raises(SettingsError):
        gap(*length)


TEXT = "The scheduler plans rows, and the batch builder makes a step of them."


class Knows:
    """A masked model that has one text by heart, and finds any other token unlikely."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.mask_id = tokenizer, len(tokenizer)
        self.ids = tokenizer.encode(text)

    def logits(self, row: Sequence[int]) -> np.ndarray[Any, Any]:
        """Sure where the row is as long as the text; unsure where it is not."""
        result = np.zeros((len(row), self.mask_id + 1), np.float32)
        if len(row) == len(self.ids):
            result[np.arange(len(row)), self.ids] = 12.0
        return result


@pytest.mark.parametrize(
    "inside", ["batch", "batch builder", "scheduler plans rows", "The", "them", "step of them."]
)
@pytest.mark.parametrize("spaced", [False, True])
def test_the_right_length_and_words_are_found(worded, inside: str, spaced: bool):
    prefix, right = TEXT.split(inside, 1)
    if spaced and prefix.endswith(" "):
        prefix, inside = prefix[:-1], " " + inside  # the gap may begin with the space, too
    knows = Knows(worded.tokenizer, TEXT)
    assert isinstance(knows, MaskedModel)
    result = fill_by_masks(knows, GappedText.parse([prefix, gap, right]), candidates=5, top=2)
    best = result[0]
    assert (best.texts, best.text) == ((inside,), TEXT)
    assert best.score == pytest.approx(0, abs=0.01)
    assert "".join(step.text for step in best.gap_steps[0]) == inside
    assert all(step.rank == 0 and len(step.candidates) == 2 for step in best.steps)
    assert [item.score for item in result] == sorted((item.score for item in result), reverse=True)


def test_several_gaps_at_once(worded):
    parts = GappedText(
        ("The ", " plans rows, and the ", " builder makes a step of them."), (gap(1, 3), gap(1, 2))
    )
    best = fill_by_masks(Knows(worded.tokenizer, TEXT), parts, candidates=3)[0]
    assert best.text == TEXT and best.texts[1] == "batch"


def test_a_twin_proposes_and_the_causal_model_ranks(worded):
    prefix, right = TEXT.split("batch")
    knows = Knows(worded.tokenizer, TEXT)
    result = worded.fill(prefix, gap(1, 2), right, twin=knows, candidates=60, reach=None)
    texts = [item.texts[0] for item in result.candidates]
    assert result.by == "ranking" and "batch" in texts
    alone = worded.fill(prefix, gap, right, choices=sorted(texts), candidates=60, reach=None)
    assert [item.texts[0] for item in alone.candidates] == texts


def test_doubt_of_a_planted_word(worded):
    """The masked model knows better than the surprise of a random one."""
    knows = Knows(worded.tokenizer, TEXT)
    ids = worded.tokenizer.encode(TEXT)
    place = len(ids) // 2
    wrong = [*ids[:place], worded.tokenizer.encode(" tree")[0], *ids[place + 1 :]]
    text = worded.tokenizer.decode(wrong)
    if worded.tokenizer.encode(text) == wrong:
        _, surprise = masked_surprise(knows, text)
        assert int(np.argmax(surprise)) == place
    result, score = score_doubts(worded, text, by="masked", twin=knows)
    worst = max(result, key=lambda doubt: doubt.surprise)
    at = len(worded.tokenizer.decode(ids[:place]))
    assert worst.start <= at + 1 < worst.end + 1 and math.isfinite(score.perplexity)
    pair, _ = score_doubts(worded, text, by="both", twin=knows)
    causal, _ = score_doubts(worded, text, by="causal")
    for item, two, mean in zip(result, causal, pair, strict=True):
        assert mean.surprise == pytest.approx((item.surprise + two.surprise) / 2)


class SeesAll:
    """A session that is said to look both ways: what a masked checkpoint will be."""

    def __init__(self, lm: Any, **facts: Any) -> None:
        self._lm, self.config = lm, dataclasses.replace(lm.config, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)


@pytest.mark.parametrize("shifted", [False, True])
def test_every_place_sees_the_whole_row(worded, shifted: bool):
    from transformers import AutoModelForCausalLM

    model = WholeText(SeesAll(worded, sight="whole", mask_id=3, shifted=shifted))  # type: ignore[arg-type]
    row = worded.tokenizer.encode(TEXT)
    oracle = AutoModelForCausalLM.from_pretrained(worded.path, attn_implementation="eager").eval()
    visited = torch.zeros(1, 1, len(row), len(row))
    with torch.no_grad():
        expected = oracle(torch.tensor([row]), attention_mask=visited).logits[0].numpy()
    if shifted:
        expected = expected[[0, *range(len(row) - 1)]]
    assert np.asarray(model.logits(row)) == pytest.approx(expected, abs=2e-3)
    assert pages_left(worded) == 0


def test_a_model_without_a_mask_token_is_refused(worded):
    with pytest.raises(SettingsError, match="no mask token"):
        WholeText(worded)
    with pytest.raises(SettingsError, match="no mask token"):
        worded.edit(TEXT, twin=worded)


def test_a_masked_model_fills_by_itself(tmp_path):
    lm = unspool.load(save_worded(tmp_path), backend="torch", memory=16 << 20)
    for name, value in {"sight": "whole", "mask_id": 3}.items():
        object.__setattr__(lm.config, name, value)
    result = lm.fill("The scheduler plans", gap(1, 3), ", and the tree", candidates=6, top=3)
    assert result.by == "masked" and len(result.candidates) == 6
    for item in result.candidates:
        assert item.text == f"The scheduler plans{item.texts[0]}, and the tree"
        assert item.score == pytest.approx(
            sum(step.logprob for step in item.steps) / len(item.steps), abs=1e-6
        )
        assert all(step.token != 3 for step in item.steps)
    with pytest.raises(SettingsError, match="give this one as its twin"):
        lm.edit(TEXT)
    lm.close()


CODE_LEFT, CODE_RIGHT = "def area(page):\n    return ", "\n\nprint(area(3))\n"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_worded(tmp_path_factory.mktemp("coder"), FIM)
    return unspool.load(folder, backend="torch", memory=16 << 20)


@pytest.mark.parametrize(
    ("family", "texts"),
    [
        ("qwen", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
        ("deepseek", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
        ("mistral", None),
    ],
)
def test_tokens_are_found_by_their_texts(family: str, texts: tuple[str, ...] | None):
    tokenizer = Tokenizer.from_file(assets.tokenizer_json_folder() / family)
    result = fim_tokens(tokenizer)
    if texts is None:
        assert result is None
        return
    assert result is not None
    ids = [result.prefix, result.suffix, result.middle]
    assert [tokenizer.token_text(token) for token in ids] == list(texts)
    assert {*ids, *tokenizer.end_ids} <= result.ends


def test_the_prompt_has_prefix_suffix_middle(coder):
    tokens, tokenizer = fim_tokens(coder.tokenizer), coder.tokenizer
    ids = fim_prompt(tokenizer, tokens, CODE_LEFT, CODE_RIGHT)
    text = f"<|fim_prefix|>{CODE_LEFT}<|fim_suffix|>{CODE_RIGHT}<|fim_middle|>"
    assert ids == tokenizer.encode(text, specials=True)
    ids = fim_prompt(tokenizer, tokens, CODE_LEFT, CODE_RIGHT, [OtherFile("a.py", "x = 1\n")])
    before = "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"
    assert tokenizer.decode(ids) == before + text
    hidden = fim_prompt(tokenizer, tokens, "<|fim_middle|>", "")  # in a text it is no control token
    assert hidden.count(tokens.middle) == 1


def test_the_middle_ends_where_the_model_says_so(coder):
    tokens = fim_tokens(coder.tokenizer)
    prompt = fim_prompt(coder.tokenizer, tokens, CODE_LEFT, CODE_RIGHT)
    for end in ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"):
        bias = {coder.tokenizer.token_id(end): 100.0}
        draft = make_fim_request(coder, tokens, prompt, {"max_tokens": 5, "logit_bias": bias})
        written = draft.resume()
        assert (written.text, written.finish_reason) == ("", "stop"), end


def test_candidates_come_with_their_scores(coder):
    result = coder.fill(CODE_LEFT, gap(1, 6), CODE_RIGHT, drafts=4)
    assert result.by == "fim" and 1 < len(result.candidates) <= 4
    prompt = fim_prompt(coder.tokenizer, fim_tokens(coder.tokenizer), CODE_LEFT, CODE_RIGHT)
    for item in result.candidates:
        assert item.text == CODE_LEFT + item.texts[0] + CODE_RIGHT
        assert "".join(step.text for step in item.gap_steps[0]) == item.texts[0]
        written = [step.token for step in item.steps]
        scored = coder.score([*prompt, *written]).logprobs[len(prompt) :]
        assert item.score == pytest.approx(sum(scored), abs=1e-3)
    greedy = coder.generate(prompt, max_tokens=6, temperature=0).text
    assert greedy in [item.texts[0] for item in result.candidates]
    for item in result.candidates:
        assert item.is_cut == (len(item.gap_steps[0]) == 6 == len(item.steps))
        assert item.to_dict()["cut"] == item.is_cut
    assert pages_left(coder) == 0


def test_several_gaps_and_ranking_all_the_same(coder):
    result = coder.fill("a = ", gap(1, 3), "\nb = ", gap(1, 3), "\n", drafts=2)
    for item in result.candidates:
        assert item.text == f"a = {item.texts[0]}\nb = {item.texts[1]}\n"
    assert coder.fill(CODE_LEFT, gap, CODE_RIGHT, choices=["page", "3"]).by == "ranking"
