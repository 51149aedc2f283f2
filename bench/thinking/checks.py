"""Which texts are right: one exact check for each kind of problem, and what a text answers.

Where there is one right answer it is compared, and countdown's expressions are worked out, which
is what reasoning-gym's own judges call 1.0 (tests compare them); IFEval's checkers are those of
`if-verifiable`. So a machine that only has the prepared files needs no reasoning-gym.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from thinking.tasks import Problem

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_AFTER = re.compile(r"(?i)answer is:?\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def answer_of(problem: Problem, text: str) -> str | None:
    """What a text answers, so that answers can be counted; None: nothing, or nothing countable."""
    if problem.check == "ifeval":
        return None
    if problem.check == "number":
        found = _AFTER.findall(text) or _NUMBER.findall(text)
        return found[-1].replace(",", "").removesuffix(".00").removesuffix(".0") if found else None
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) or None


def score(problem: Problem, text: str) -> float:
    """1 for a right text; of IFEval's, the share of instructions that it follows."""
    if problem.check == "ifeval":
        return _instructions_followed(problem, text)
    answer = answer_of(problem, text)
    if answer is None:
        return 0.0
    if problem.check == "countdown":
        return float(_makes(answer, problem.data["numbers"], problem.data["target"]))
    return float(answer == problem.answer)


def is_right(problem: Problem, text: str) -> bool:
    return score(problem, text) >= 1.0


def votes(problem: Problem) -> bool:
    """Whether texts can vote: they answer something that can be equal."""
    return problem.check != "ifeval"


# -- countdown --------------------------------------------------------------------------------


def _makes(expression: str, numbers: list[int], target: int) -> bool:
    """Whether an expression uses just these numbers, each once, and comes to the target."""
    if len(expression) > 200:
        return False
    try:
        tree = ast.parse(expression, mode="eval")
        used: list[int] = []
        value = _value(tree.body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return sorted(used) == sorted(numbers) and value == target


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("only numbers and + - * / are understood")


# -- IFEval -----------------------------------------------------------------------------------


def find_punkt(folder: Path) -> None:
    """Have NLTK look for its model of sentences in a folder of prepared tasks first."""
    if (folder / "nltk_data").exists():
        import nltk

        nltk.data.path.insert(0, str((folder / "nltk_data").resolve()))


@cache
def _checkers() -> dict[str, Any]:
    """The checkers of if-verifiable, by the names of instructions."""
    if importlib.util.find_spec("datasets") is None:
        # The package imports it to fetch prompts, which we have: its checkers do without.
        stand_in: Any = types.ModuleType("datasets")
        stand_in.load_dataset = None
        sys.modules["datasets"] = stand_in
    import langdetect
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # else it may guess another language the next time
    return INSTRUCTION_DICT


def _instructions_followed(problem: Problem, text: str) -> float:
    """The share of a prompt's instructions that a text follows, strictly."""
    if not text.strip():
        return 0.0
    followed = 0
    for name, given in zip(problem.data["instructions"], problem.data["kwargs"], strict=True):
        checker = _checkers()[name](name)
        checker.build_description(**{key: one for key, one in given.items() if one is not None})
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=problem.data["prompt"])
        followed += bool(checker.check_following(text.strip()))
    return followed / len(problem.data["instructions"])
