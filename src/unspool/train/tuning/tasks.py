"""Tasks of `reasoning-gym`: questions without end, each with a judge that knows right answers.

task = Task("word_sequence_reversal")
task.rows(1000, seed=1)                        # {"prompt": ..., "completion": ...}
accuracy(lm, task.entries(100, seed=2), task)  # the share that a model answers rightly
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from unspool.errors import SettingsError, UnspoolError
from unspool.language_model import LanguageModel
from unspool.train.tuning.preference import Judge

Entry = dict[str, Any]


class Task:
    """One task by its name; `settings` are its own dials."""

    def __init__(self, name: str, **settings: Any) -> None:
        try:
            gym = import_module("reasoning_gym")
        except ImportError:
            raise UnspoolError(
                "tasks come from reasoning-gym, which is not installed: pip install reasoning-gym"
            ) from None
        known = import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            near = ", ".join(sorted(known))
            raise SettingsError(f"reasoning-gym has no task {name!r}; it has {near}")
        self.name, self._gym, self._settings = name, gym, settings
        self._judging = gym.create_dataset(name, size=1, seed=0, **settings)

    def entries(self, count: int, seed: int) -> list[Entry]:
        made = self._gym.create_dataset(self.name, size=count, seed=seed, **self._settings)
        return [made[number] for number in range(count)]

    def rows(self, count: int, seed: int) -> list[dict[str, str]]:
        """Questions with the answers that the task itself gives; those without one are left out."""
        return [
            {"prompt": entry["question"], "completion": str(entry["answer"])}
            for entry in self.entries(count, seed)
            if entry["answer"] is not None
        ]

    def judge(self, prompt: str, answer: str, entry: Entry) -> float:
        """From 0 to 1; 1 is a right answer."""
        return float(self._judging.score_answer(answer.strip(), entry))


def accuracy(
    lm: LanguageModel,
    entries: Sequence[Entry],
    task: Task,
    *,
    max_tokens: int = 128,
    told: Callable[[Entry, str, float], None] = lambda entry, answer, score: None,
) -> float:
    """The share of questions that a model answers exactly, at temperature 0."""
    asked = [entry["question"] for entry in entries]
    answers = lm.chat(asked, temperature=0, max_tokens=max_tokens, progress=False)
    right = 0
    for entry, written in zip(entries, answers, strict=True):
        score = task.judge(entry["question"], written.text, entry)
        told(entry, written.text, score)
        right += score >= 1.0
    return right / len(entries)


def judge_of(name: str) -> Judge:
    """A function by `module:function`; it is given the prompt, the answer and the row of data."""
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"the judge {name!r} cannot be imported ({error}); name it as module:function"
        ) from None
    if not callable(found):
        raise SettingsError(f"the judge {name!r} is no function")
    judge: Judge = found
    return judge
