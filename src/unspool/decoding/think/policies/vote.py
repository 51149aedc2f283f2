"""A vote: n whole texts are written, and the answer wins that most of them give (self-consistency;
Wang et al. 2022). Where a judge was named, its scores are the weights of the votes."""

from __future__ import annotations

from unspool.decoding.think.judge import VoteJudge
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.voting import Extract, final_answer
from unspool.decoding.written import whole
from unspool.errors import SettingsError


def vote(search: Search, *, n: int = 8, extract: Extract | None = None) -> Moves[None]:
    """`n` texts; `extract` finds a text's answer: a pattern, whose last match counts, or a function
    of the text. Without it, what is boxed, stands behind "answer is", or is the last number."""
    given = search.given
    if isinstance(given, VoteJudge):
        if extract is not None:
            raise SettingsError("extract was given, and the judge has a pattern too; give only one")
        search.judge_by(given)
    else:
        search.judge_by(VoteJudge(final_answer if extract is None else extract, given))
    texts = yield from search.sample([search.root], whole("n", n))
    # A text that the budget cut short has not come to its answer.
    voting = [node for node in texts if not search.left(node)] or texts
    yield from search.judge(voting)
    yield from search.win(voting)
