"""Which recurrent states of a text are worth keeping.

A text can only be rewound to a position whose state is kept; the tokens from there to the requested
position are computed again. States are large, so they are kept densely near the end of a text,
where most rewinds go, and ever more sparsely before: one for each of the last pages, then one at
every second page border, every fourth, and so on. Rewinding n tokens so costs at most about n/3
recomputed tokens, n/10 on average; of n pages about 4 log2(n) states are kept.

Besides these, states are marked where texts are known to part: at the end of a prompt, between the
messages of a chat, at forks, and where a text was rewound to or left another one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

DENSE = 8  # every border of this many last pages is kept
MESSAGES = 8  # the ends of this many last messages of a prompt are marked, and of the first one

# Why a state is kept; a larger reason is worth more.
DRAFT, PAGE, MARK = 0, 1, 2


def is_kept(border: int, num_pages: int) -> bool:
    """Return whether the state after `border` pages is kept in a text of `num_pages` pages."""
    power_of_two = border & -border  # the largest that divides it
    return num_pages - border < DENSE * power_of_two


def furthest_thinned(num_pages: int) -> int:
    """Return how many pages before the end the furthest state lies that is no longer kept.

    For a text that has just grown to `num_pages` pages; 0: all states are kept.
    """
    furthest, power_of_two = 0, 1
    while DENSE * power_of_two < num_pages:
        border = num_pages - DENSE * power_of_two
        if border & -border == power_of_two:
            furthest = DENSE * power_of_two
        power_of_two *= 2
    return furthest


def max_recomputed(num_rewound: int, page_size: int) -> int:
    """Return the most tokens that rewinding by `num_rewound` computes again, if no state of the
    text was evicted."""
    pages, gap = -(-num_rewound // page_size) + 1, 1
    while (DENSE - 1) * gap < pages:
        gap *= 2
    return (gap + 1) * page_size


def find_captures(
    first: int, until: int, length: int, page_size: int, every: bool, marks: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yield the positions inside a step whose states are kept, and why; the most valuable first.

    Args:
        first: The step computes from here ...
        until: ... up to here.
        length: Of the whole text.
        page_size: Tokens of a page.
        every: Keep the states at all page borders: they are cheap.
        marks: Positions where texts part.
    """
    marked = sorted((position for position in marks if first < position < until), reverse=True)
    for position in marked:
        yield position, MARK
    num_pages = length // page_size
    for border in range((until - 1) // page_size, first // page_size, -1):
        position = border * page_size
        if position not in marked and (every or is_kept(border, num_pages)):
            yield position, PAGE


def message_ends(prompt: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return the positions after the messages of a prompt: of the first, and of the last ones."""
    ends = [index + 1 for index, token in enumerate(prompt) if token in end_ids]
    return ends if len(ends) <= MESSAGES else [ends[0], *ends[-MESSAGES:]]
