"""Compose: an outline, then each section with the outline and all earlier sections in context, then
one revision pass over the whole text.

Everything grows on one branch, so nothing is computed twice until the sections are joined.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.policies.pieces import check_partial, tokens_before
from unspool.decoding.think.revising import WORD_COST, revise
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int
from unspool.errors import UnspoolError

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
