"""Stories with one fact that is asked for at the end: templates with all values in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Story:
    """A beginning that states a fact, and a question that asks for it."""

    beginning: str
    question: str
    values: tuple[str, ...]  # possible answers, all of one kind
    answer: str  # the correct one of `values`


# Values by kind of fact; values of one kind are about equally common words.
_COLOURS = ("red", "blue", "green", "yellow")
_PLACES = ("kitchen", "garden", "garage", "attic")
_ANIMALS = ("dog", "cat", "horse", "rabbit")
_DRINKS = ("tea", "coffee", "milk", "water")
_NUMBERS = ("two", "three", "four", "five")
_TOWNS = ("London", "Paris", "Rome", "Berlin")

# Beginning, question, values. {} is the correct value.
_TEMPLATES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "{name} had a {} bicycle. Every morning {name} rode it to school, and all the other "
        "children knew it from far away. One day it rained very hard.",
        "In the evening {name} put the bicycle away. The colour of the bicycle was",
        _COLOURS,
    ),
    (
        "Before the guests came, {name} hid the key in the {}. Nobody saw it. Then the doorbell "
        "rang, and the party began.",
        "When everybody had left, {name} went to get the key. The key was in the",
        _PLACES,
    ),
    (
        "{name} lived alone with a {}. It slept beside the stove, and it was the only company "
        "that {name} had in the long winter.",
        "In spring a neighbour asked what kind of animal {name} had. It was a",
        _ANIMALS,
    ),
    (
        "At breakfast {name} always drank {}, and nothing else. The others at the table laughed "
        "about it. That morning a letter came.",
        "The next day at breakfast {name} had the same drink as always: a cup of",
        _DRINKS,
    ),
    (
        "{name} had {} sisters, all of them older. They shared one room under the roof. In "
        "summer the whole family went to the sea.",
        "On the train a stranger asked how many sisters {name} had. The answer was",
        _NUMBERS,
    ),
    (
        "{name} was born in {} and had never lived anywhere else. The house stood beside a "
        "bakery. When the war was over, work was hard to find.",
        "Many years later {name} still lived in the town of birth, the city of",
        _TOWNS,
    ),
    (
        "The old man gave {name} a {} coat. It was too large, but it was warm. With the coat on, "
        "{name} went out into the snow.",
        "Back at home {name} hung the coat on the door. The colour of the coat was",
        _COLOURS,
    ),
    (
        "{name} found a small {} behind the house and took it in. It ate everything it was given. "
        "After a week it had grown.",
        "The children came to see what {name} had found behind the house. It was a",
        _ANIMALS,
    ),
    (
        "The box of letters stood in the {}, where {name} had left it. Years went by. Then the "
        "house was to be sold.",
        "Before the house was sold, {name} took the box of letters from where it stood, in the",
        _PLACES,
    ),
    (
        "{name} bought {} tickets for the theatre and put them on the table. The play was to "
        "begin at eight. At six the telephone rang.",
        "{name} counted the tickets on the table once more. The number of tickets was",
        _NUMBERS,
    ),
    (
        "The train that {name} took went to {}. The journey lasted all night. In the same "
        "carriage sat a woman with a violin.",
        "In the morning the train arrived, and {name} got out in",
        _TOWNS,
    ),
    (
        "In the bottle that {name} carried there was only {}. The road was long and the sun was "
        "high. At noon there was a tree with some shade.",
        "Under the tree {name} opened the bottle and drank the",
        _DRINKS,
    ),
)
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")


def make_stories(seed: int) -> list[Story]:
    """Return every template with every value, mixed: the first n are a fair sample."""
    draw = random.Random(seed)
    result = []
    for turn in range(4):
        for number, (beginning, question, values) in enumerate(_TEMPLATES):
            answer = values[(number + turn) % len(values)]
            name = draw.choice(_NAMES)
            result.append(
                Story(
                    beginning.format(answer, name=name),
                    " " + question.format(name=name),
                    values,
                    answer,
                )
            )
    return result
