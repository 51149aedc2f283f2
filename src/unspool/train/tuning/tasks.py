"""Reward functions, and the tasks of `reasoning-gym`: generated questions with a verifier.

task = Task("word_sequence_reversal")
task.rows(1000, seed=1)                        # {"prompt": ..., "completion": ...}
accuracy(lm, task.entries(100, seed=2), task)  # the share of correct answers of a model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from unspool.errors import SettingsError, UnspoolError
from unspool.lm import LanguageModel

Entry = dict[str, Any]
RewardFunction = Callable[[str, str, dict[str, Any]], float]  # (prompt, answer, data row)


class Task:
    """A task of reasoning-gym; `settings` are its own options."""

    def __init__(self, name: str, **settings: Any) -> None:
        try:
            gym = import_module("reasoning_gym")
        except ImportError:
            raise UnspoolError(
                "tasks need reasoning-gym, which is not installed: pip install reasoning-gym"
            ) from None
        datasets = import_module("reasoning_gym.factory").DATASETS
        if name not in datasets:
            names = ", ".join(sorted(datasets))
            raise SettingsError(f"reasoning-gym has no task {name!r}; it has {names}")
        self.name, self._gym, self._settings = name, gym, settings
        self._verifier = gym.create_dataset(name, size=1, seed=0, **settings)

    def entries(self, count: int, seed: int) -> list[Entry]:
        dataset = self._gym.create_dataset(self.name, size=count, seed=seed, **self._settings)
        return [dataset[number] for number in range(count)]

    def rows(self, count: int, seed: int) -> list[dict[str, str]]:
        """Questions with their reference answers; those without one are dropped."""
        return [
            {"prompt": entry["question"], "completion": str(entry["answer"])}
            for entry in self.entries(count, seed)
            if entry["answer"] is not None
        ]

    def reward(self, prompt: str, answer: str, entry: Entry) -> float:
        """Score of an answer from 0 to 1; 1 is correct."""
        return float(self._verifier.score_answer(answer.strip(), entry))


def accuracy(
    lm: LanguageModel,
    entries: Sequence[Entry],
    task: Task,
    *,
    max_tokens: int = 128,
    on_answer: Callable[[Entry, str, float], None] = lambda entry, answer, score: None,
) -> float:
    """Share of questions that a model answers correctly, at temperature 0."""
    questions = [entry["question"] for entry in entries]
    answers = lm.chat(questions, temperature=0, max_tokens=max_tokens, progress=False)
    num_correct = 0
    for entry, answer in zip(entries, answers, strict=True):
        score = task.reward(entry["question"], answer.text, entry)
        on_answer(entry, answer.text, score)
        num_correct += score >= 1.0
    return num_correct / len(entries)


def load_reward_function(name: str) -> RewardFunction:
    """Import a reward function by `module:function`."""
    module, _, function = name.partition(":")
    try:
        reward = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"the judge {name!r} cannot be imported ({error}); name it as module:function"
        ) from None
    if not callable(reward):
        raise SettingsError(f"the judge {name!r} is not a function")
    result: RewardFunction = reward
    return result
