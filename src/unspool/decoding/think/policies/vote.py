"""Majority vote over n texts (self-consistency; Wang et al. 2022). If the caller named a verifier,
its scores weigh the votes."""

from __future__ import annotations

from unspool.decoding.think.judge import VoteVerifier
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.voting import Extract, final_answer
from unspool.decoding.written import check_int
from unspool.errors import SettingsError


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
