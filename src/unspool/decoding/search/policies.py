"""Search policies: best-of, vote, beam, DVTS, restarts, MCTS, budget forcing, revision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from unspool.decoding.branches import check_int
from unspool.decoding.edit.edit import causal_surprise
from unspool.decoding.infill.causal import score_rows
from unspool.decoding.search.search import Moves, Search
from unspool.decoding.search.tree import SearchNode
from unspool.decoding.search.verifiers import Extract, VoteVerifier, final_answer
from unspool.engine.results import Score, Step, TokenScore
from unspool.errors import SettingsError, UnspoolError

# -- Pieces by which some policies extend texts: a sentence, line, paragraph or number of tokens

_ENDS = {"sentence": (".", "!", "?", "\n"), "line": ("\n",), "paragraph": ("\n\n",), "tokens": ()}


class Pieces:
    """Extends texts piece by piece."""

    def __init__(self, search: Search, step: str, tokens: int) -> None:
        if step not in _ENDS:
            raise SettingsError(f"step must be one of {', '.join(_ENDS)}, got {step!r}")
        self._search, self._until, self._tokens = search, _ENDS[step], check_int("tokens", tokens)
        self._half = (search.budget.remaining - len(search.root.generation.prompt)) // 2

    def grow(
        self, nodes: Sequence[SearchNode], width: int, *, distinct: bool = True
    ) -> Moves[list[SearchNode]]:
        """Continue each text by one piece, `width` times. Keeps back enough budget (at most half of
        it) to finish one text, so that the search ends with a complete text."""
        search = self._search
        spare = min(max(map(search.cost_to_finish, nodes)), self._half)
        return search.sample(
            nodes, width, self._tokens, until=self._until, distinct=distinct, reserve=spare
        )

    def finish(self, nodes: Sequence[SearchNode]) -> Moves[list[SearchNode]]:
        """Finish texts with the remaining budget, best first; the others stay unfinished."""
        search = self._search
        ranked = search.rank([node for node in nodes if search.remaining(node)])
        texts = yield from search.sample(ranked or [n for n in nodes if n is search.root][:1])
        yield from search.score(texts)
        extended = {text.parent for text in texts if text.score is not None}
        return [node for node in [*nodes, *texts] if node.parent and node not in extended]


def check_partial(search: Search, policy: str) -> None:
    """Raise `SettingsError` if the verifier cannot score unfinished texts."""
    if not search.scores_partial:
        raise SettingsError(
            f"the policy {policy} scores unfinished texts, and this judge only scores finished "
            "ones; use best-of, vote or mcts, which finish every text"
        )


def tokens_before(node: SearchNode, marker: str, since: int) -> int | None:
    """Number of tokens that end before the first `marker`, or before the end token. Only searches
    after the first `since` tokens. None if the text has neither."""
    pieces = [step.bytes for step in node.generation.steps[since:]]
    marker_pos = b"".join(pieces).find(marker.encode())
    if marker_pos < 0:
        return since + len(pieces) - 1 if node.finished else None
    length, num_bytes = 0, 0
    while num_bytes + len(pieces[length]) <= marker_pos:
        num_bytes += len(pieces[length])
        length += 1
    return since + length


# -- Best of n: sample n texts, score them, keep the best


def best_of(search: Search, *, n: int = 8) -> Moves[None]:
    """Sample up to `n` texts, as many as the budget allows."""
    texts = yield from search.sample([search.root], check_int("n", n))
    yield from search.score(texts)
    yield from search.select_best(texts)


# -- Majority vote over n texts (self-consistency; Wang et al. 2022). If the caller named a
# verifier, its scores weigh the votes


def vote(search: Search, *, n: int = 8, extract: Extract | None = None) -> Moves[None]:
    """Vote over up to `n` texts. `extract` finds a text's answer: a pattern, whose last match
    counts, or a function of the text. Default: a boxed answer, the text after "answer is", or the
    last number."""
    verifier = search.requested_verifier
    if isinstance(verifier, VoteVerifier):
        if extract is not None:
            raise SettingsError(
                "extract and the verifier's own pattern exclude each other; give only one"
            )
        search.use_verifier(verifier)
    else:
        search.use_verifier(VoteVerifier(final_answer if extract is None else extract, verifier))
    texts = yield from search.sample([search.root], check_int("n", n))
    # A text cut short by the budget has no answer yet.
    complete = [node for node in texts if not search.remaining(node)] or texts
    yield from search.score(complete)
    yield from search.select_best(complete)


# -- Step-wise beam search (Snell et al. 2024): extend texts piece by piece and keep the best
# after each piece


def beam(
    search: Search, *, keep: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """Keep `keep` texts after each piece and continue each `width` times. A piece is a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    check_partial(search, "beam")
    pieces, keep, width = (
        Pieces(search, step, tokens),
        check_int("keep", keep),
        check_int("width", width),
    )
    level, ended, grown = [search.root], list[SearchNode](), list[SearchNode]()
    while level and len(ended) < keep:
        # The first level has one parent, so widen it to the size of later levels.
        grown = yield from pieces.grow(level, width if level[0].parent else width * keep)
        yield from search.score(grown)
        survivors = search.rank(grown)[:keep]
        yield from search.prune([node for node in grown if node not in survivors])
        if not survivors:  # the budget is spent, or nothing could be scored
            ended += yield from pieces.finish(level if level[0].parent or not grown else [])
            break
        ended += [node for node in survivors if not search.remaining(node)]
        level = [node for node in survivors if search.remaining(node)]
    yield from search.select_best(ended or grown)


# -- Diverse verifier tree search (Beeching et al. 2024): independent greedy subtrees


def dvts(
    search: Search, *, subtrees: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """Run `subtrees` subtrees, each continuing its text `width` times by one piece: a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    check_partial(search, "dvts")
    pieces, width = Pieces(search, step, tokens), check_int("width", width)
    active = [search.root] * check_int("subtrees", subtrees)  # current text of each subtree
    ended, stuck, grown = list[SearchNode](), list[SearchNode](), list[SearchNode]()
    while active:
        # Keep duplicates: merging equal texts would join the subtrees.
        grown = yield from pieces.grow(active, width, distinct=False)
        yield from search.score(grown)
        survivors: list[SearchNode] = []
        for number, text in enumerate(active):
            children = grown[number * width : (number + 1) * width]
            best = search.rank(children)[:1]
            survivors += best
            if not best and (text.parent or not children):
                stuck.append(text)  # nothing could be scored, or the budget ran out
        yield from search.prune([node for node in grown if node not in survivors])
        ended += [node for node in survivors if not search.remaining(node)]
        active = [node for node in survivors if search.remaining(node)]
    ended += yield from pieces.finish(stuck)
    yield from search.select_best(ended or grown)


# -- Early restarts: sample several openings, keep the best and only finish that one


def restarts(search: Search, *, k: int = 8, tokens: int = 24, keep: int = 1) -> Moves[None]:
    """Sample `k` openings of `tokens` tokens and finish the best `keep` of them."""
    check_partial(search, "restarts")
    pieces, keep = Pieces(search, "tokens", tokens), check_int("keep", keep)
    openings = yield from pieces.grow([search.root], check_int("k", k))
    yield from search.score(openings)
    survivors = search.rank(openings)[:keep]
    yield from search.prune([node for node in openings if node not in survivors])
    texts = yield from pieces.finish(survivors if openings else [search.root])
    yield from search.select_best(texts or openings)


# -- Monte Carlo tree search over pieces of text


RULES = ("uct", "puct")


@dataclass(eq=False, slots=True)
class MctsNode:
    """Statistics of one node of the tree."""

    node: SearchNode
    parent: MctsNode | None = None
    prior: float = 1.0  # share of the probability among its siblings
    visits: int = 0
    total: float = 0.0  # sum of scores
    children: list[MctsNode] = field(default_factory=list)
    closed: bool = False  # fully explored

    def ancestors(self) -> Iterator[MctsNode]:
        """Iterate over this node and its ancestors."""
        current: MctsNode | None = self
        while current is not None:
            yield current
            current = current.parent

    def add(self, nodes: Sequence[SearchNode]) -> list[MctsNode]:
        """Add children and recompute the priors of all children."""
        added = [MctsNode(node, self) for node in nodes]
        self.children += added
        self.closed = False
        total = math.fsum(map(_likelihood, self.children)) or 1.0
        for child in self.children:
            child.prior = _likelihood(child) / total
        return added

    def add_score(self, score: float) -> None:
        """Add the score of a complete text to this node and its ancestors."""
        for current in self.ancestors():
            current.visits += 1
            current.total += score

    def close(self) -> None:
        """Mark as fully explored, and ancestors whose children all are."""
        self.closed = True
        for current in self.ancestors():
            if current.children and all(child.closed for child in current.children):
                current.closed = True


@dataclass(slots=True)
class SelectionRule:
    """The selection rule."""

    rule: str
    explore: float
    lowest: float = math.inf  # lowest score so far
    highest: float = -math.inf

    def observe(self, score: float) -> None:
        self.lowest, self.highest = min(self.lowest, score), max(self.highest, score)

    def bound(self, child: MctsNode) -> float:
        """Upper confidence bound of a child."""
        assert child.parent is not None
        if not child.visits:
            return math.inf
        spread = self.highest - self.lowest
        mean = child.total / child.visits
        value = (mean - self.lowest) / spread if spread > 0 else 0.5
        parent_visits = child.parent.visits
        if self.rule == "uct":
            return value + self.explore * math.sqrt(math.log(parent_visits) / child.visits)
        return value + self.explore * child.prior * math.sqrt(parent_visits) / (1 + child.visits)

    def descend(self, root: MctsNode) -> MctsNode:
        """Select the leaf with the highest bounds from the root down."""
        current = root
        while current.children:
            open_children = [child for child in current.children if not child.closed]
            current = max(open_children, key=self.bound)  # ties: the first
        return current


def mcts(
    search: Search,
    *,
    width: int = 4,
    step: str = "line",
    tokens: int = 32,
    rule: str = "puct",
    explore: float = 1.4,
    rounds: int = 1000,
) -> Moves[None]:
    """Run up to `rounds` rounds, as many as the budget allows, each with `width` pieces: a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    if rule not in RULES:
        raise SettingsError(f"rule must be {' or '.join(RULES)}, got {rule!r}")
    if not isinstance(explore, int | float) or not 0 <= explore < math.inf:
        raise SettingsError(f"explore must be a number >= 0, got {explore!r}")
    pieces, bounds, root = (
        Pieces(search, step, tokens),
        SelectionRule(rule, explore),
        MctsNode(search.root),
    )
    complete_texts: list[SearchNode] = []
    for _ in range(check_int("rounds", rounds)):
        # Where everything is explored, sample new openings.
        leaf = root if root.closed else bounds.descend(root)
        written = search.budget.spent.written
        grown = yield from pieces.grow([leaf.node], check_int("width", width))
        if not grown and (leaf is root or search.budget.spent.written == written):
            break  # no new text, or the budget is spent
        if not grown:
            leaf.close()
            continue
        children = leaf.add(grown)
        unfinished = [node for node in grown if search.remaining(node)]
        rollouts = yield from search.sample(unfinished)
        finished_texts = {node: node for node in grown if not search.remaining(node)}
        finished_texts |= {rollout.parent: rollout for rollout in rollouts if rollout.parent}
        yield from search.score(list(finished_texts.values()))
        complete_texts += finished_texts.values()
        for child in children:
            text = finished_texts.get(child.node)
            if text is not None and text.score is not None:
                bounds.observe(text.score)
                child.add_score(text.score)
            if text is None or text.score is None or text is child.node:
                child.close()  # no budget left, not scored, or already complete
    yield from search.select_best(complete_texts)


def _likelihood(current: MctsNode) -> float:
    """Mean token probability of a piece, so that short pieces have no advantage."""
    steps = current.node.steps
    return math.exp(math.fsum(step.logprob for step in steps) / len(steps))


# -- Budget forcing (Muennighoff et al. 2025): control how long a model reasons


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


# -- Revise a finished text: replace doubtful words where another fits both sides better


_WORD = re.compile(r" \w+")
_CANDIDATES = 6  # words that are compared, the current one included
_REACH = 16  # tokens that are scored, the word included
_MIN_SHARE = 0.9  # probability among the candidates that a replacement needs
_MIN_DOUBT = 0.5  # nats of doubt below which a word is skipped
WORD_COST = 2 + _CANDIDATES * _REACH  # upper bound of the tokens computed for one word


def revise(search: Search, node: SearchNode, max_words: int) -> Moves[SearchNode]:
    """Revise at most `max_words` of the most doubtful words."""
    tokens = node.generation.tokens
    changed = False
    for index in sorted(doubtful_words(node.generation.steps)[:max_words], reverse=True):
        if search.budget.remaining < WORD_COST + len(tokens):
            break
        better = _better_word(search, node, tokens, index)
        if better is not None:
            tokens[index], changed = better, True
    if not changed:
        return node
    assert node.parent is not None
    (revision,) = yield from search.append([(node.parent, tokens)])
    yield from search.prune([node])
    return revision


def doubtful_words(steps: Sequence[Step]) -> list[int]:
    """Indices of single-token words that surprised the model, most doubtful first."""
    texts = [step.bytes.decode("utf-8", "replace") for step in steps]
    scores = [TokenScore(s.token, "", s.logprob, s.rank, s.entropy) for s in steps]
    doubts = causal_surprise(Score(scores), len(steps))
    words = [
        number
        for number, text in enumerate(texts[:-1])
        if _WORD.fullmatch(text) and not re.match(r"[\w'’-]", texts[number + 1])
    ]
    words = [number for number in words if doubts[number] >= _MIN_DOUBT]
    return sorted(words, key=lambda number: -doubts[number])


def _better_word(search: Search, node: SearchNode, tokens: list[int], index: int) -> int | None:
    """A better word for this position, if one is clearly better."""
    request, lm = node.generation.request, search.lm
    lm = lm.adapted(request.adapter) if request.adapter else lm
    before = [*request.prompt, *tokens[:index]]
    search.budget.reserve("judged", WORD_COST)
    likely = lm.choices(before, 4 * _CANDIDATES, interventions=request.branch_interventions())
    others = [c.token for c in likely if _WORD.fullmatch(c.text) and c.token != tokens[index]]
    words = [tokens[index], *others[: _CANDIDATES - 1]]
    suffix = tokens[index + 1 : index + _REACH]
    rows = [[*before, word, *suffix] for word in words]
    totals = [math.fsum(step.logprob for step in row) for row in score_rows(lm, rows, len(before))]
    search.budget.refund("judged", WORD_COST - 2 - len(words) * len(suffix))
    best = max(totals)
    share = 1 / math.fsum(math.exp(total - best) for total in totals)
    winner = words[totals.index(best)]
    return winner if winner != tokens[index] and share >= _MIN_SHARE else None


# -- Compose: an outline, then each section with the outline and all earlier sections in
# context, then one revision pass over the whole text


_ITEM = re.compile(r"^\s*\d+[.)]\s+(\S.*)$", re.MULTILINE)
_HEADING = "\n#"  # start of the next section
_MAX_HEADING_CHARS = 60


def compose(
    search: Search, *, sections: int = 4, outline: int = 96, width: int = 1, edits: int = 8
) -> Moves[None]:
    """Write up to `sections` sections from an outline of up to `outline` tokens. Each section is
    the best of `width` samples; the final pass revises up to `edits` doubtful words."""
    if check_int("width", width) > 1:
        check_partial(search, "compose, with a width,")
    check_int("edits", edits, least=0)
    titles = yield from _outline(
        search, check_int("sections", sections), check_int("outline", outline)
    )
    planned = "Outline:\n" + "".join(f"{n}. {title}\n" for n, title in enumerate(titles, 1))
    (node,) = yield from search.append([(search.root, planned)])
    section_tokens, edits = _plan_budget(search, titles, edits)
    bodies: list[str] = []
    for title in titles:
        if section_tokens < 1 or search.affordable_tokens(node) < section_tokens * width:
            break
        node, body = yield from _section(search, node, title, section_tokens, width)
        bodies.append(body)
    if not any(bodies):
        raise UnspoolError(
            f"the budget of {search.budget.limit} tokens was too small for an outline and a "
            "section; give a larger one"
        )
    pairs = zip(titles, bodies, strict=False)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in pairs if body)
    (draft,) = yield from search.append([(search.root, text)])
    draft = yield from revise(search, draft, edits)
    draft.generation.steps[-1] = replace(draft.generation.steps[-1], finish_reason="stop")
    yield from search.score([draft])
    yield from search.select_best([draft])


def _outline(search: Search, sections: int, tokens: int) -> Moves[list[str]]:
    """Let the model write an outline; returns its headings."""
    (opening,) = yield from search.append([(search.root, "Outline:\n1.")])
    planned = yield from search.sample([opening], 1, tokens, until=["\n\n"])
    text = planned[0].generation.text if planned else ""
    lines = text.split("\n")
    if len(lines) > 2 and planned and search.remaining(planned[0]) and not text.endswith("\n"):
        lines.pop()  # incomplete
    yield from search.prune([opening])
    titles = [_title(item) for item in _ITEM.findall("\n".join(lines))]
    titles = [title for title in dict.fromkeys(titles) if title][:sections]
    if not titles:
        raise UnspoolError("the model wrote no outline; ask for a text with sections")
    return titles


def _plan_budget(search: Search, titles: list[str], edits: int) -> tuple[int, int]:
    """Tokens per section and number of words to revise that the budget allows. The joined text is
    computed once more, and a third time if words were changed."""
    encode = search.lm.tokenizer.encode
    room = search.affordable_tokens(search.root)
    edits = min(edits, room // (4 * WORD_COST))
    headings = sum(len(encode(_heading(title))) + 2 for title in titles)
    readings = 3 if edits else 2
    for_text = min((room - edits * WORD_COST) // readings, search.remaining(search.root)) - headings
    # Tokenized again, the joined text may have a few tokens more.
    return for_text * 9 // 10 // len(titles), edits


def _section(
    search: Search, node: SearchNode, title: str, tokens: int, width: int
) -> Moves[tuple[SearchNode, str]]:
    """Write the best of `width` sections below a heading; returns its node and text."""
    (headed,) = yield from search.append([(node, _heading(title))])
    texts = yield from search.sample([headed], width, tokens // width, until=[_HEADING])
    if width > 1:
        yield from search.score(texts)
    best = search.rank(texts)[:1] or texts[:1]
    yield from search.prune([text for text in texts if text not in best])
    section, start = best[0] if best else headed, len(headed.generation.steps)
    length = tokens_before(section, _HEADING, start) if best else None
    if length is not None:
        section = yield from search.rewind(section, length)
    body = section.generation.text[len(headed.generation.text) :]
    return section, body.strip()


def _title(item: str) -> str:
    """Turn an outline item into a heading; a long one is shortened."""
    words = re.split(r"[.:;!?]\s", item.strip("*#: "))[0].strip("*#:. ")
    if len(words) > _MAX_HEADING_CHARS:
        words = words.split(",")[0]
    return (
        words if len(words) <= _MAX_HEADING_CHARS else words[:_MAX_HEADING_CHARS].rpartition(" ")[0]
    )


def _heading(title: str) -> str:
    return f"\n## {title}\n\n"
