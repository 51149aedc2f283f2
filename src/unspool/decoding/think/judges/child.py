"""The sandboxed process that runs checkers: `python -m ...child FD`.

It reads its job from `job.json` (written by `limited.py`), drops its rights (`confine.py`), loads
the checker, reports that it is ready, and writes one JSON line per text to the file descriptor:
{"score", "why", "answer"}. Its stdout and stderr are discarded.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unspool.decoding.think.judges.confine import confine

Answer = dict[str, Any]
Check = Callable[[str, str], Answer]  # (text, prompt)

_MAX_REASON_CHARS = 300


def main() -> None:
    """Run the job and write the answers."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.set_inheritable(answers.fileno(), False)
    folder = Path.cwd()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "job.json").unlink()
    confine(folder, **job["limits"])

    def send(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        check = _CHECKERS[job["kind"]](job["of"])
    except BaseException as error:
        send({"error": describe_error(error)})
        return
    send({"ready": True})
    for text, prompt in job["texts"]:
        try:
            answer = check(text, prompt)
        except BaseException as error:  # SystemExit too: exiting is not a verdict
            answer = {"score": None, "why": f"the checker raised {describe_error(error)}"}
        send(answer)
    os._exit(0)  # skip atexit handlers and threads of the checker


def describe_error(error: BaseException) -> str:
    """Format an exception in one line, with the last line number in the caller's file."""
    message = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    own_folder = str(Path(__file__).parent)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own_folder, "<frozen"))
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return " ".join(message.split())[:_MAX_REASON_CHARS] + where


# -- kinds of checkers -------------------------------------------------------------------------


def pattern(source: str) -> Check:
    """Check a regular expression; the answer is its last match (its first group, if any)."""
    compiled = re.compile(source)

    def check(text: str, _: str) -> Answer:
        matches = list(compiled.finditer(text))
        answer = matches[-1][1 if compiled.groups else 0] if matches else None
        return {
            "score": 1.0 if matches else 0.0,
            "why": "" if matches else f"nothing matches {source[:60]}",
            "answer": None if answer is None else answer.strip(),
        }

    return check


def function(path_and_name: str) -> Check:
    """Check by a function of a Python file that takes the text, or the text and its prompt."""
    file, _, name = path_and_name.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("checker", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checker"] = module
    spec.loader.exec_module(module)
    checker = getattr(module, name, None)
    if not callable(checker):
        raise LookupError(f"it has no function {name!r}")
    takes_prompt = _takes_prompt(checker)

    def check(text: str, prompt: str) -> Answer:
        return to_answer(checker(text, prompt) if takes_prompt else checker(text))

    return check


def _takes_prompt(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return (
        sum(
            parameter.kind in kinds and parameter.default is parameter.empty
            for parameter in parameters
        )
        >= 2
    )


def to_answer(value: Any) -> Answer:
    """Convert a function's return value to a score, or explain what is wrong with it."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return {
            "score": None,
            "why": f"the checker returned {value!r:.60}, which is not a finite number",
        }
    return {"score": score, "why": ""}


def tests(file: str) -> Check:
    """Check by a test file: `test_*` functions, unittest classes, or plain asserts."""
    from unspool.decoding.think.judges.suite import run_suite

    source = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
    return lambda text, prompt: run_suite(source, file, text, prompt)


_CHECKERS: dict[str, Callable[[str], Check]] = {
    "pattern": pattern,
    "function": function,
    "tests": tests,
}

if __name__ == "__main__":
    main()
