"""Compose: an outline first, then each section with the outline and all before it in view, then one
pass over the whole.

A text that is written from left to right has no view of the whole; an outline gives it one. All of
it grows on one branch, so nothing is read twice until the sections are put together.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unspool.decoding.search_tree import Node
from unspool.decoding.think.policies.pieces import check_partial, tokens_before
from unspool.decoding.think.revising import PRICE, revised
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole
from unspool.errors import UnspoolError

_ITEM = re.compile(r"^\s*\d+[.)]\s+(\S.*)$", re.MULTILINE)
_HEADING = "\n#"  # what the model writes where the next section begins
_LONGEST = 60  # characters of a heading


def compose(
    search: Search, *, sections: int = 4, outline: int = 96, width: int = 1, edits: int = 8
) -> Moves[None]:
    """At most so many `sections`, from an `outline` of at most so many tokens; each section is the
    best of `width`, and `edits` is how many doubtful words are looked at in the end."""
    if whole("width", width) > 1:
        check_partial(search, "compose, with a width,")
    whole("edits", edits, least=0)
    titles = yield from _outline(search, whole("sections", sections), whole("outline", outline))
    planned = "Outline:\n" + "".join(f"{n}. {title}\n" for n, title in enumerate(titles, 1))
    (node,) = yield from search.put([(search.root, planned)])
    each, edits = _shares(search, titles, edits)
    bodies: list[str] = []
    for title in titles:
        if each < 1 or search.affordable(node) < each * width:
            break
        node, body = yield from _section(search, node, title, each, width)
        bodies.append(body)
    if not any(bodies):
        raise UnspoolError(
            f"the budget of {search.budget.limit} tokens was too small for an outline and a "
            "section; give a larger one"
        )
    pairs = zip(titles, bodies, strict=False)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in pairs if body)
    (made,) = yield from search.put([(search.root, text)])
    made = yield from revised(search, made, edits)
    made.generation.steps[-1] = replace(made.generation.steps[-1], finish_reason="stop")
    yield from search.judge([made])
    yield from search.win([made])


def _outline(search: Search, sections: int, tokens: int) -> Moves[list[str]]:
    """The headings, as the model plans them."""
    (opening,) = yield from search.put([(search.root, "Outline:\n1.")])
    planned = yield from search.sample([opening], 1, tokens, until=["\n\n"])
    text = planned[0].generation.text if planned else ""
    lines = text.split("\n")
    if len(lines) > 2 and planned and search.left(planned[0]) and not text.endswith("\n"):
        lines.pop()  # cut short
    yield from search.prune([opening])
    titles = [_title(item) for item in _ITEM.findall("\n".join(lines))]
    titles = [title for title in dict.fromkeys(titles) if title][:sections]
    if not titles:
        raise UnspoolError("the model wrote no outline; ask it for a text that has parts")
    return titles


def _shares(search: Search, titles: list[str], edits: int) -> tuple[int, int]:
    """How many tokens each section may have, and how many words can be looked at. What is written
    is read once more as a whole, and a third time if words were changed."""
    encode = search.lm.tokenizer.encode
    room = search.affordable(search.root)
    edits = min(edits, room // (4 * PRICE))
    headings = sum(len(encode(_heading(title))) + 2 for title in titles)
    readings = 3 if edits else 2
    for_text = min((room - edits * PRICE) // readings, search.left(search.root)) - headings
    # Cut anew, a text may have some tokens more.
    return for_text * 9 // 10 // len(titles), edits


def _section(
    search: Search, node: Node, title: str, tokens: int, width: int
) -> Moves[tuple[Node, str]]:
    """The best of some sections below a heading, and its text."""
    (headed,) = yield from search.put([(node, _heading(title))])
    texts = yield from search.sample([headed], width, tokens // width, until=[_HEADING])
    if width > 1:
        yield from search.judge(texts)
    best = search.ranked(texts)[:1] or texts[:1]
    yield from search.prune([text for text in texts if text not in best])
    section, begun = best[0] if best else headed, len(headed.generation.steps)
    length = tokens_before(section, _HEADING, begun) if best else None
    if length is not None:
        section = yield from search.rewound(section, length)
    body = section.generation.text[len(headed.generation.text) :]
    return section, body.strip()


def _title(item: str) -> str:
    """A heading from an item of the outline: its first words, if it goes on and on."""
    words = re.split(r"[.:;!?]\s", item.strip("*#: "))[0].strip("*#:. ")
    if len(words) > _LONGEST:
        words = words.split(",")[0]
    return words if len(words) <= _LONGEST else words[:_LONGEST].rpartition(" ")[0]


def _heading(title: str) -> str:
    return f"\n## {title}\n\n"
