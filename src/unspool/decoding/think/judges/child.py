"""The process in which checkers run, apart from everything else: `python -m ...child FD`.

It finds its job in `job.json` (written by `limited.py`), gives up its rights (`confine.py`), loads
the checker, says so, and then answers one line of JSON for each text: {"score", "why", "answer"}.
Whatever else it prints is nobody's business, and whatever it does wrong ends with it.
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
Check = Callable[[str, str], Answer]  # of a text and the prompt before it

_LONGEST = 300  # characters of a reason


def main() -> None:
    """Read the job, and answer."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.set_inheritable(answers.fileno(), False)
    folder = Path.cwd()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / "job.json").unlink()
    confine(folder, **job["limits"])

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        check = _CHECKERS[job["kind"]](job["of"])
    except BaseException as error:
        say({"error": told(error)})
        return
    say({"ready": True})
    for text, prompt in job["texts"]:
        try:
            answer = check(text, prompt)
        except BaseException as error:  # SystemExit too: that a checker leaves is no verdict
            answer = {"score": None, "why": f"the checker raised {told(error)}"}
        say(answer)
    os._exit(0)  # nothing that was registered for the end keeps us


def told(error: BaseException) -> str:
    """An exception in a line, with the last line of the caller's own that it came from."""
    said = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    ours = str(Path(__file__).parent)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<frozen"))
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return " ".join(said.split())[:_LONGEST] + where


# -- what can be checked by --------------------------------------------------------------------


def pattern(source: str) -> Check:
    """A regular expression: its last match, and of that the first group if there are groups."""
    found = re.compile(source)

    def check(text: str, _: str) -> Answer:
        matches = list(found.finditer(text))
        answer = matches[-1][1 if found.groups else 0] if matches else None
        return {
            "score": 1.0 if matches else 0.0,
            "why": "" if matches else f"nothing in it matches {source[:60]}",
            "answer": None if answer is None else answer.strip(),
        }

    return check


def function(named: str) -> Check:
    """A function of a Python file: of the text, or of the text and its prompt."""
    file, _, name = named.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("checker", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checker"] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise LookupError(f"it has no function {name!r}")
    wants_prompt = _takes_two(found)

    def check(text: str, prompt: str) -> Answer:
        return scored(found(text, prompt) if wants_prompt else found(text))

    return check


def _takes_two(given: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):  # something built in, which does not tell
        return False
    return sum(each.kind in kinds and each.default is each.empty for each in parameters) >= 2


def scored(value: Any) -> Answer:
    """What a function gave, as a score; or what is wrong with it."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return {"score": None, "why": f"the checker gave {value!r:.60}, which is no finite number"}
    return {"score": score, "why": ""}


def tests(file: str) -> Check:
    """A file of tests: `test_*` functions, unittest's classes, or plain asserts."""
    from unspool.decoding.think.judges.suite import passed

    source = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
    return lambda text, prompt: passed(source, file, text, prompt)


_CHECKERS: dict[str, Callable[[str], Check]] = {
    "pattern": pattern,
    "function": function,
    "tests": tests,
}

if __name__ == "__main__":
    main()
