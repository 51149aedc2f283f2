"""Budget forcing (Muennighoff et al. 2025): how long a model thinks is decided here.

A model that closes its thinking too early gets "Wait" in the place of the close tag, and goes on;
one that does not come to an end has the tag written for it. Then it answers. The tags are the
model's own (`text/thoughts`); one that has none thinks in words.
"""

from __future__ import annotations

from unspool.decoding.search_tree import Node
from unspool.decoding.think.policies.pieces import tokens_before
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole
from unspool.errors import SettingsError

# What begins and ends the thinking of a model without tags.
_WORDS = ("Let me think about it step by step.", "\n\nSo the answer is")


def forcing(
    search: Search,
    *,
    min_thinking: int = 0,
    max_thinking: int | None = None,
    wait: str = "Wait",
    tags: tuple[str, str] | None = None,
) -> Moves[None]:
    """At least and at most so many tokens of thinking; by default at most three quarters of what
    there is room for."""
    thinking = _Thinking(search, tags)
    least = whole("min_thinking", min_thinking, least=0)
    waits = search.lm.tokenizer.encode(wait)
    if not waits:
        raise SettingsError("wait is empty; give a word that makes the model think again")
    node = yield from thinking.open()
    begun = len(node.generation.steps)
    room = max(0, min(search.left(node), search.affordable(node)) - len(thinking.closing) - 1)
    most = room * 3 // 4 if max_thinking is None else min(room, whole("max_thinking", max_thinking))
    if least > most:
        raise SettingsError(
            f"min_thinking is {least}, and {most} tokens of thinking are all that fit; give a "
            "larger budget, max_tokens or max_thinking"
        )
    while True:
        node = yield from thinking.go_on(node, begun + most)
        length = thinking.length(node)
        if length is None or length - begun >= least or length - begun + len(waits) > most:
            break
        node = yield from search.rewound(node, length)
        (node,) = yield from search.put([(node, waits)])
    node = yield from thinking.close(node)
    texts = (yield from search.sample([node])) or [node]
    yield from search.judge(texts)
    yield from search.win(texts)


class _Thinking:
    """Where the thinking of a text begins and ends.

    By the model's own marks, where it has some; by tags that the caller gives; else in words, for
    a model that was never taught any tags often ends behind one, without an answer.
    """

    def __init__(self, search: Search, tags: tuple[str, str] | None) -> None:
        self._search, self._begun = search, 0  # tokens of the text that come before the thinking
        lm, format = search.lm, search.lm.thought_format
        encode = lm.tokenizer.encode
        if tags is not None or format is None:
            opening, self._close = _checked(tags) if tags is not None else _WORDS
            line = "\n" if tags is not None else ""
            self._opening = encode(f"{opening}{line}", specials=True)
            self._behind = encode("\n\n" if tags is not None else "")
            self._is_open = _written(search).rstrip().endswith(opening.rstrip())
            mark = self._close
        else:
            prompt = search.root.generation.prompt
            thinking = lm.thinking(prompt)
            self._opening, self._behind = list(format.opening_ids), list(format.behind_ids)
            self._is_open = thinking is not None and thinking.start.place == "inside"
            self._close, mark = format.close, format.closing.partition(format.close)[0]
            mark += format.close
        # A token of its own in models that were made to think, and text in others.
        self._ends = encode(self._close, specials=True)
        self.closing = [*encode(mark, specials=True), *self._behind]

    def open(self) -> Moves[Node]:
        """The text from which on the model thinks: many templates write the open tag already."""
        if self._is_open:
            return self._search.root
        (node,) = yield from self._search.put([(self._search.root, self._opening)])
        self._begun = len(node.generation.steps)
        return node

    def go_on(self, node: Node, most: int) -> Moves[Node]:
        """Think until the close tag, or until the text has so many tokens."""
        tokens = most - len(node.generation.steps)
        if tokens <= 0:
            return node
        ends = self._ends if len(self._ends) == 1 else [self._close]
        texts = yield from self._search.sample([node], 1, tokens, until=ends)
        return texts[0] if texts else node

    def length(self, node: Node) -> int | None:
        """How many tokens the text has up to the end that the model put to its thinking, by the
        close tag or by an end token; None if it put none."""
        tokens = node.generation.tokens
        if len(self._ends) == 1:
            closed = bool(tokens) and tokens[-1] == self._ends[0]
            return len(tokens) - 1 if closed or node.finished else None
        return tokens_before(node, self._close, self._begun)

    def close(self, node: Node) -> Moves[Node]:
        """The text with its thinking closed, to be gone on with by an answer.

        Behind a tag that is put there stands what the model would see behind its own: a blank
        line, or the header of its answer.
        """
        search, length = self._search, self.length(node)
        if length is not None and not node.finished:
            return node
        if length is not None:
            node = yield from search.rewound(node, length)
        (node,) = yield from search.put([(node, self.closing)])
        return node


def _checked(tags: tuple[str, str]) -> tuple[str, str]:
    if len(tags) != 2 or not all(isinstance(tag, str) and tag for tag in tags):
        raise SettingsError(f"tags are {tags!r}; give the open tag and the close tag")
    return tags


def _written(search: Search) -> str:
    """How the prompt ends."""
    return "".join(search.lm.readable_all(search.root.generation.prompt[-16:]))
