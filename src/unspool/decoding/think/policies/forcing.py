"""Budget forcing (Muennighoff et al. 2025): control how long a model reasons.

If the model closes its reasoning too early, "Wait" replaces the close tag and it continues; at the
maximum the close tag is appended. Then it answers. The tags are the model's own (`text/thoughts`);
a model without tags reasons in plain text.
"""

from __future__ import annotations

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.policies.pieces import tokens_before
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int
from unspool.errors import SettingsError

# Start and end of the reasoning of a model without tags.
_PLAIN_TAGS = ("Let me think about it step by step.", "\n\nSo the answer is")


def forcing(
    search: Search,
    *,
    min_thinking: int = 0,
    max_thinking: int | None = None,
    wait: str = "Wait",
    tags: tuple[str, str] | None = None,
) -> Moves[None]:
    """Reason for `min_thinking` to `max_thinking` tokens; the default maximum is three quarters of
    the remaining tokens."""
    thinking = _ReasoningSpan(search, tags)
    min_tokens = check_int("min_thinking", min_thinking, least=0)
    waits = search.lm.tokenizer.encode(wait)
    if not waits:
        raise SettingsError(
            "wait must be a word that makes the model continue to reason; it is empty"
        )
    node = yield from thinking.open()
    thinking_start = len(node.generation.steps)
    room = max(
        0, min(search.remaining(node), search.affordable_tokens(node)) - len(thinking.closing) - 1
    )
    max_tokens = (
        room * 3 // 4
        if max_thinking is None
        else min(room, check_int("max_thinking", max_thinking))
    )
    if min_tokens > max_tokens:
        raise SettingsError(
            f"min_thinking is {min_tokens}, but only {max_tokens} tokens of reasoning fit; give a "
            "larger budget, max_tokens or max_thinking"
        )
    while True:
        node = yield from thinking.extend(node, thinking_start + max_tokens)
        length = thinking.length(node)
        if (
            length is None
            or length - thinking_start >= min_tokens
            or length - thinking_start + len(waits) > max_tokens
        ):
            break
        node = yield from search.rewind(node, length)
        (node,) = yield from search.append([(node, waits)])
    node = yield from thinking.close(node)
    texts = (yield from search.sample([node])) or [node]
    yield from search.score(texts)
    yield from search.select_best(texts)


class _ReasoningSpan:
    """Start and end of the reasoning in a text.

    Uses the caller's tags, else the model's own; else plain words, since a model that was not
    trained with tags often stops after one without an answer.
    """

    def __init__(self, search: Search, tags: tuple[str, str] | None) -> None:
        self._search, self._start = search, 0  # number of tokens before the reasoning
        lm, format = search.lm, search.lm.thought_format
        encode = lm.tokenizer.encode
        if tags is not None or format is None:
            opening, self._close = _check_tags(tags) if tags is not None else _PLAIN_TAGS
            line = "\n" if tags is not None else ""
            self._opening = encode(f"{opening}{line}", specials=True)
            self._after_close = encode("\n\n" if tags is not None else "")
            self._is_open = _prompt_end(search).rstrip().endswith(opening.rstrip())
            mark = self._close
        else:
            prompt = search.root.generation.prompt
            thinking = lm.thinking(prompt)
            self._opening, self._after_close = (
                list(format.opening_ids),
                list(format.after_close_ids),
            )
            self._is_open = thinking is not None and thinking.start.state == "inside"
            self._close, mark = format.close, format.closing.partition(format.close)[0]
            mark += format.close
        # A single token in reasoning models, several in others.
        self._ends = encode(self._close, specials=True)
        self.closing = [*encode(mark, specials=True), *self._after_close]

    def open(self) -> Moves[SearchNode]:
        """Append the open tag, unless the chat template has written it already."""
        if self._is_open:
            return self._search.root
        (node,) = yield from self._search.append([(self._search.root, self._opening)])
        self._start = len(node.generation.steps)
        return node

    def extend(self, node: SearchNode, max_length: int) -> Moves[SearchNode]:
        """Continue until the close tag, or until the text has `max_length` tokens."""
        tokens = max_length - len(node.generation.steps)
        if tokens <= 0:
            return node
        ends = self._ends if len(self._ends) == 1 else [self._close]
        texts = yield from self._search.sample([node], 1, tokens, until=ends)
        return texts[0] if texts else node

    def length(self, node: SearchNode) -> int | None:
        """Number of tokens up to the close tag or end token; None if the model wrote neither."""
        tokens = node.generation.tokens
        if len(self._ends) == 1:
            closed = bool(tokens) and tokens[-1] == self._ends[0]
            return len(tokens) - 1 if closed or node.finished else None
        return tokens_before(node, self._close, self._start)

    def close(self, node: SearchNode) -> Moves[SearchNode]:
        """Close the reasoning, so that the answer can follow.

        An appended tag is followed by what the model itself would write: a blank line, or the
        header of its answer.
        """
        search, length = self._search, self.length(node)
        if length is not None and not node.finished:
            return node
        if length is not None:
            node = yield from search.rewind(node, length)
        (node,) = yield from search.append([(node, self.closing)])
        return node


def _check_tags(tags: tuple[str, str]) -> tuple[str, str]:
    if len(tags) != 2 or not all(isinstance(tag, str) and tag for tag in tags):
        raise SettingsError(f"tags must be the open tag and the close tag, got {tags!r}")
    return tags


def _prompt_end(search: Search) -> str:
    """The last tokens of the prompt, as text."""
    return "".join(search.lm.readable_all(search.root.generation.prompt[-16:]))
