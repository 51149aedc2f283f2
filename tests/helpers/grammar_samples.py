"""A small made-up vocabulary, and walks through grammars over it."""

from __future__ import annotations

import random

import numpy as np

from unspool.sampling import Grammar, GrammarSpec, GrammarState, GrammarVocabulary

PIECES = [
    "ab", "abc", "bc", "bcd", "true", "false", '{"', '":', '", "', " is", "12", "é", "日本", "a",
]  # fmt: skip
END, STOP, TOOL, NOTHING = 0, 1, 2, 3
TOKENS = [b"<|end|>", b"<|stop|>", b"<|tool|>", b""]
TOKENS += [bytes([b]) for b in range(256) if b not in (4, 6)] + [p.encode() for p in PIECES]
SMALL = GrammarVocabulary(TOKENS, [END, STOP], control_ids=[END, STOP, TOOL])
ID = {data: token for token, data in reversed(list(enumerate(TOKENS)))}


def start(spec: GrammarSpec, vocabulary: GrammarVocabulary = SMALL) -> GrammarState:
    return Grammar.compile(spec, vocabulary).start()


def allowed(state: GrammarState) -> list[int]:
    return [int(token) for token in np.flatnonzero(state.mask())]


def ids(text: str) -> list[int]:
    return [ID[bytes([b])] for b in text.encode()]


def walk(state: GrammarState, seed: int, longest: int = 400) -> list[int]:
    """Random allowed tokens until the end; longer ones rather than single bytes, to get there."""
    choose = random.Random(seed)
    tokens: list[int] = []
    vocabulary = state.grammar.vocabulary
    for _ in range(longest):
        open_ = allowed(state)
        assert open_, "no dead end"
        ends = [token for token in open_ if token in vocabulary.end_ids]
        token = choose.choice(ends if ends and choose.random() < 0.3 else open_)
        state.advance(token)
        if token in vocabulary.end_ids:
            return tokens
        tokens.append(token)
    assert longest < 400, "the grammar lets the text end"
    return tokens


def text_of(tokens: list[int], vocabulary: GrammarVocabulary = SMALL) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()
