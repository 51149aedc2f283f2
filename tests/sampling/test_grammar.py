"""Grammars: every token picked from a mask satisfies them, and all methods agree."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammar_samples import (
    END,
    ID,
    NOTHING,
    SMALL,
    STOP,
    TOKENS,
    TOOL,
    allowed,
    ids,
    start,
    text_of,
    walk,
)
from helpers.sampling_support import neutral, random_logits
from unspool.errors import SettingsError
from unspool.sampling import (
    Chain,
    Grammar,
    GrammarSpec,
    GrammarVocabulary,
    NoCandidateError,
    RowInput,
    SamplingSettings,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "日本"]}, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEXES = [
    r"[A-Z][a-z]{1,8} (is|was) \d{1,3}\.",
    r"(ab|bc)*d?",
    r"é{2,4}|日本+",
    r'"[^"\n]{0,9}"',
    r"a/b\\c{2}",
    "",
]


def is_person(text: str) -> bool:
    parsed = json.loads(text)
    return (
        set(parsed) - {"ok"} == {"name", "age", "tags"}
        and isinstance(parsed["name"], str)
        and len(parsed["name"]) <= 12
        and type(parsed["age"]) is int
        and 0 <= parsed["age"] <= 150
        and len(parsed["tags"]) <= 3
        and all(tag in ("a", "b", "日本") for tag in parsed["tags"])
        and (parsed.get("ok") is None or type(parsed["ok"]) is bool)
    )


@pytest.mark.parametrize("pattern", REGEXES)
def test_random_walks_match_the_regex(pattern: str) -> None:
    for seed in range(25):
        state = start(GrammarSpec.regex(pattern))
        tokens = walk(state, seed)
        assert len(state) == len(tokens) + 1 and re.fullmatch(pattern, text_of(tokens))


def test_random_walks_satisfy_the_schema() -> None:
    for seed in range(25):
        state = start(GrammarSpec.json_schema(PERSON))
        assert is_person(text_of(walk(state, seed)))


def test_any_json_object() -> None:
    state = start(GrammarSpec.json())
    assert state.num_accepted([*ids('{"x": [1, {"y": null}], "é": "\\n"}'), END]) == 36
    assert start(GrammarSpec.json()).num_accepted(ids("[1]")) == 0
    assert start(GrammarSpec.json()).num_accepted(ids('{"x":    1}')) < 9  # blanks come to an end


def test_a_choice_gives_one_of_its_texts() -> None:
    texts = ["yes", "no", "a/b", 'x"y', "日本", "$^.*", "a", "ab", "", "\n", "a"]
    texts_seen = {text_of(walk(start(GrammarSpec.choice(texts)), seed)) for seed in range(200)}
    assert texts_seen <= set(texts) and len(texts_seen) > 7
    for text in texts:
        assert (
            start(GrammarSpec.choice(texts)).num_accepted([*ids(text), END]) == len(ids(text)) + 1
        )


def test_lark_and_gbnf() -> None:
    nested = 'start: "(" start ")" | "x"'
    for spec in (GrammarSpec.lark(nested), GrammarSpec.gbnf('root ::= "(" root ")" | "x"')):
        assert start(spec).num_accepted([*ids("((x))"), STOP]) == 6
        assert start(spec).num_accepted([*ids("((x)"), STOP]) == 4
    gbnf = 'root ::= ("caf\\u00e9" | "\\x41b" | [\\u00e8-\\u00ea]) ws # tail\nws ::= [ \\t]{1,2}'
    for text, fits in (("café ", 6), ("Ab\t ", 4), ("é ", 3), ("è   ", 4)):
        assert start(GrammarSpec.gbnf(gbnf)).num_accepted(ids(text)) == fits
    assert start(GrammarSpec.gbnf('root ::= "\\U0001F600"')).num_accepted(ids("😀")) == 4


class PydanticLike:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return PERSON


def test_schemas_come_in_several_shapes() -> None:
    specs = [GrammarSpec.json_schema(s) for s in (PERSON, json.dumps(PERSON), PydanticLike)]
    assert specs[0] == specs[1] == specs[2]
    assert Grammar.compile(specs[0], SMALL) is Grammar.compile(specs[2], SMALL)
    assert start(GrammarSpec.json_schema(True)).num_accepted(ids("3")) == 1


def test_end_tokens_are_allowed_exactly_where_the_text_may_end() -> None:
    state = start(GrammarSpec.regex("ab(cd)?"))
    for token, complete, must in ((b"ab", True, False), (b"c", False, False), (b"d", True, True)):
        assert not state.must_end
        state.advance(ID[token])
        assert (state.is_complete, state.must_end) == (complete, must)
        assert state.mask()[END] == state.mask()[STOP] == complete
    state.advance(STOP)
    assert allowed(state) == [] and state.is_complete and state.must_end and not state.is_dead_end
    with pytest.raises(SettingsError):
        state.advance(END)
    state.rewind(1)
    assert allowed(state) == [END, STOP]


def test_without_end_tokens_the_state_still_tells() -> None:
    state = start(GrammarSpec.regex("a"), GrammarVocabulary(TOKENS, []))
    state.advance(ID[b"a"])
    assert state.must_end and not state.mask().any()


def test_control_tokens_are_no_text() -> None:
    assert start(GrammarSpec.regex(r"<\|tool\|>")).num_accepted([TOOL]) == 0
    assert start(GrammarSpec.regex(r"<\|end\|>")).num_accepted([END]) == 0
    state = start(GrammarSpec.regex(r"[\s\S]*"))
    assert not state.mask()[[TOOL, NOTHING]].any()
    state = start(GrammarSpec.lark('start: "a" <|tool|> "b"'))
    assert state.num_accepted([ID[b"a"], TOOL, ID[b"b"], END]) == 4


def test_every_token_with_the_same_bytes_is_allowed() -> None:
    twins = [token for token, data in enumerate(TOKENS) if data == b"a"]
    assert len(twins) == 2 and start(GrammarSpec.regex("ab|ac")).mask()[twins].all()


def test_a_dead_end_is_seen_and_can_be_rewound() -> None:
    state = start(GrammarSpec.regex("a(x\x04|y)"))  # the vocabulary cannot spell \x04
    state.advance(ID[b"a"])
    before = state.mask()
    state.advance(ID[b"x"])
    assert state.is_dead_end and not state.mask().any()
    with pytest.raises(NoCandidateError, match="grammar"):
        Chain(neutral()).pick_one(np.zeros(len(TOKENS)), RowInput(allowed=state.mask()))
    assert state.copy().is_dead_end
    state.rewind(1)
    assert (state.mask() == before).all() and state.num_accepted([*ids("y"), END]) == 2


def test_a_token_that_does_not_fit_changes_nothing() -> None:
    state = start(GrammarSpec.regex("(ab)+"))
    state.advance(ID[b"a"])
    for token in (ID[b"c"], END, TOOL, NOTHING, -1, len(TOKENS), 10**12):
        assert state.num_accepted([token]) == 0
        with pytest.raises(SettingsError, match="does not allow token") as error:
            state.advance(token)
        assert "\n" not in str(error.value) and len(state) == 1
    state.advance(ID[b"b"])
    assert state.is_complete
    with pytest.raises(ValueError):
        state.rewind(3)


SPECS = [
    GrammarSpec.json_schema(PERSON),
    *(GrammarSpec.regex(pattern) for pattern in REGEXES),
    GrammarSpec.choice(["abc", "abcd", "日本"]),
    GrammarSpec.lark('start: "a" start "b" | "c"'),
]


@given(
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_rewind_and_copy_equal_a_fresh_state(spec: GrammarSpec, seed: int, cuts: list[int]) -> None:
    state = start(spec)
    tokens_taken = walk(state, seed, longest=25)
    if len(state) > len(tokens_taken):
        state.rewind(1)
        state.advance(END)
        tokens_taken.append(END)
    for cut in cuts:
        cut = min(cut, len(tokens_taken))
        fork = state.copy()
        state.rewind(cut)
        tokens_taken = tokens_taken[: len(tokens_taken) - cut]
        fresh = start(spec)
        for token in tokens_taken:
            fresh.advance(token)
        assert (
            fresh.mask() == state.mask()
        ).all() and fresh.forced_tokens() == state.forced_tokens()
        assert fresh.is_complete == state.is_complete and len(fresh) == len(state)
        assert len(fork) == len(tokens_taken) + cut  # a fork stays where it was
        if len(tokens_taken) and tokens_taken[-1] != END and allowed(state):
            token = random.Random(seed).choice(allowed(state))
            state.advance(token)
            tokens_taken.append(token)


@given(
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 10**6),
    draft=st.lists(st.integers(-2, len(TOKENS) + 2), max_size=6),
    good=st.integers(0, 12),
)
@settings(max_examples=50, deadline=None)
def test_accepts_equals_step_by_step_and_the_masks(
    spec: GrammarSpec, seed: int, draft: list[int], good: int
) -> None:
    draft = walk(start(spec), seed, longest=good) + draft
    state = start(spec)
    before = state.mask()
    count = state.num_accepted(draft)
    assert (state.mask() == before).all() and len(state) == 0
    for number, token in enumerate(draft):
        in_mask = 0 <= token < len(TOKENS) and bool(state.mask()[token])
        assert in_mask == (number < count)
        if not in_mask:
            break
        state.advance(token)


def test_forced_tokens_are_the_only_text() -> None:
    state = start(GrammarSpec.regex("abcd(true|false)x"))
    assert state.forced_tokens() == [ID[b"abc"], ID[b"d"]]
    for token in state.forced_tokens():
        state.advance(token)
    assert state.forced_tokens() == []
    state.advance(ID[b"t"])
    assert text_of(state.forced_tokens()) == "ruex"
    assert start(GrammarSpec.regex("ab(cd)?")).forced_tokens() == []  # ab might be the start of abc
    assert start(GrammarSpec.regex("(ab)?")).forced_tokens() == []
    spelled = GrammarVocabulary(TOKENS, [END], encode=lambda text: [ID[b"ab"], ID[b"c"], ID[b"d"]])
    assert start(GrammarSpec.regex("abcd(true|false)"), spelled).forced_tokens() == [
        ID[b"ab"], ID[b"c"], ID[b"d"],
    ]  # fmt: skip
    wrong = GrammarVocabulary(TOKENS, [END], encode=lambda text: [ID[b" "], ID[b"ab"]])
    assert text_of(start(GrammarSpec.regex("abcd(x|y)"), wrong).forced_tokens()) == "abcd"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("greedy", [True, False])
def test_rows_with_and_without_a_grammar_share_a_batch(kind: str, greedy: bool) -> None:
    wide = len(TOKENS) + 20  # a head with padding behind the vocabulary
    logits: Any = random_logits(3, 4, wide)
    logits[:, len(TOKENS) :] += 30
    logits = torch.from_numpy(logits) if kind == "torch" else logits
    how = SamplingSettings(temperature=0) if greedy else neutral(seed=4, temperature=2.0)
    state = start(GrammarSpec.regex("[a-z]{9}"))
    mask = state.mask()
    inputs = [RowInput(), RowInput(allowed=mask), RowInput(forbidden=[5]), RowInput(allowed=mask)]
    together = Chain([how] * 4).pick(logits, inputs, top=3, explain=True)
    for row, pick in enumerate(together):
        alone = Chain(how).pick(logits[row : row + 1], [inputs[row]], top=3, explain=True)[0]
        assert alone == pick
        names = [stage.name for stage in pick.stages]
        assert ("grammar" in names) == (row in (1, 3)) and ("forbidden" in names) == (row == 2)
    for row in (1, 3):
        assert mask[together[row].token]
        report = together[row].stages[0]
        assert report.kept == mask.sum() and report.removed == wide - mask.sum()
        assert 0.9 < report.removed_mass <= 1.0


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["numpy", "torch"]))
@settings(max_examples=10, deadline=None)
def test_a_whole_text_through_the_chain(seed: int, kind: str) -> None:
    for how in (SamplingSettings(seed=seed), neutral(seed=seed, temperature=3.0)):
        state = start(GrammarSpec.regex(REGEXES[0]))
        tokens: list[int] = []
        while not state.must_end:
            logits: Any = random_logits(seed + len(tokens), 1, len(TOKENS) + 3)
            logits = torch.from_numpy(logits) if kind == "torch" else logits
            token = Chain(how).pick_one(logits, RowInput(tokens, allowed=state.mask())).token
            state.advance(token)
            if token in SMALL.end_ids:
                break
            tokens.append(token)
        assert re.fullmatch(REGEXES[0], text_of(tokens))


def test_few_allowed_of_a_wide_vocabulary_are_put_in_order_rightly() -> None:
    logits = random_logits(0, 1, 20_000)
    mask = np.zeros(20_000, bool)
    mask[[7, 300, 19_999]] = True
    pick = Chain(neutral(top_k=40)).pick_one(logits, RowInput(allowed=mask), explain=True)
    assert pick.stages[0].kept == pick.stages[1].kept == 3
    top_tokens = [token for token, _ in pick.stages[1].top]
    assert (
        top_tokens == sorted(top_tokens, key=lambda token: -logits[0, token])
        and len(top_tokens) == 3
    )


@pytest.fixture(scope="module")
def real(default_model: Path) -> GrammarVocabulary:
    from unspool.model.files.gguf import GGUFFile
    from unspool.text.tokenizer.tokenizer import Tokenizer

    return GrammarVocabulary.from_tokenizer(Tokenizer.from_gguf(GGUFFile(default_model).metadata))


@pytest.mark.real
def test_real_walks_satisfy_schema_regex_and_choice(real: GrammarVocabulary) -> None:
    for seed in range(3):
        assert is_person(text_of(walk(start(GrammarSpec.json_schema(PERSON), real), seed), real))
        for pattern in REGEXES:
            tokens = walk(start(GrammarSpec.regex(pattern), real), seed)
            assert re.fullmatch(pattern, text_of(tokens, real))
        choices = ["Berlin", "Bern", "São Paulo", "日本"]
        assert text_of(walk(start(GrammarSpec.choice(choices), real), seed), real) in choices


@pytest.mark.real
def test_real_drafts_masks_and_forced_agree(real: GrammarVocabulary) -> None:
    assert real.encode is not None
    draft = [*real.encode('{"name": "Ada", "age": 36, "tags": ["a", "b"]}'), real.end_ids[0]]
    state = start(GrammarSpec.json_schema(PERSON), real)
    assert state.num_accepted(draft) == len(draft)
    assert state.num_accepted([*draft[:3], 49_000, *draft[3:]]) == 3
    for token in draft:
        forced = state.forced_tokens()
        assert state.num_accepted(forced) == len(forced)
        assert state.mask()[token]
        state.advance(token)
    state.rewind(len(draft))
    assert (state.mask() == start(GrammarSpec.json_schema(PERSON), real).mask()).all()
    capital = start(GrammarSpec.regex("The capital of Germany is (Berlin|Bonn)"), real)
    assert capital.forced_tokens() == real.encode("The capital of Germany is")
    assert not state.mask()[list(range(17))].any()  # control tokens
