"""Which recurrent states of a text are worth keeping.

A text can only be taken back to where a state of it is kept; what lies between that place and the
one that is wanted is computed again. States are large, so they are kept densely where texts are
mostly taken back to, near their end, and the further apart the further away: of the last pages one
each, then at every second page border, every fourth, and so on. So taking back n tokens costs at
most about a third of n, and on average a tenth; of n pages about 4 log2(n) states are kept.

Besides these, states are marked where texts are known to part: at the end of a prompt, between the
messages of a chat, at forks, and where a text was taken back to or left another one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

DENSE = 8  # of the last so many pages every border is kept
MESSAGES = 8  # of the last so many messages of a prompt the end is marked, and of the first

# Why a state is kept; the larger, the more it is worth.
GUESS, PAGE, MARK = 0, 1, 2


def is_kept(border: int, tip: int) -> bool:
    """Whether the state behind so many pages is kept, if the text has so many whole pages."""
    twos = border & -border  # the largest power of two that divides it
    return tip - border < DENSE * twos


def furthest_thinned(tip: int) -> int:
    """How many pages before a text's end the furthest state lies that is not kept any more, now
    that the text has so many pages (and had one less before); 0: all are kept."""
    furthest, twos = 0, 1
    while DENSE * twos < tip:
        border = tip - DENSE * twos
        if border & -border == twos:
            furthest = DENSE * twos
        twos *= 2
    return furthest


def most_again(back: int, page_size: int) -> int:
    """How many tokens at most are computed again when a text is taken back so many tokens, if no
    state of it was evicted."""
    pages, gap = -(-back // page_size) + 1, 1
    while (DENSE - 1) * gap < pages:
        gap *= 2
    return (gap + 1) * page_size


def on_the_way(
    first: int, until: int, length: int, page_size: int, every: bool, marks: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Where states are kept of what a step computes of a text, those worth most first, and why."""
    inside = sorted((place for place in marks if first < place < until), reverse=True)
    for place in inside:
        yield place, MARK
    tip = length // page_size
    for border in range((until - 1) // page_size, first // page_size, -1):
        place = border * page_size
        if place not in inside and (every or is_kept(border, tip)):
            yield place, PAGE


def message_ends(prompt: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Behind which tokens of a prompt a message ends: the first, and the last ones."""
    ends = [place + 1 for place, token in enumerate(prompt) if token in end_ids]
    return ends if len(ends) <= MESSAGES else [ends[0], *ends[-MESSAGES:]]
