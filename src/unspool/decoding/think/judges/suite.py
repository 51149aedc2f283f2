"""Code out of a text, and how many of a file's tests it passes. Runs in the checkers' process.

The code becomes `solution.py` beside the tests: they may import it, start it as a program, or use
its names as if they stood in the same file.
"""

from __future__ import annotations

import re
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^ {0,3}```([^\n`]*)\n(.*?)(?:^ {0,3}```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")

Test = Callable[[], object]


def code_in(text: str, prompt: str) -> str:
    """The longest block of Python between fences; without any, the text itself, or, where that is
    the end of code whose beginning is the prompt, both."""
    found: list[tuple[str, str]] = _FENCE.findall(text)
    blocks = [body for kind, body in found if kind.strip().lower() in _PYTHON]
    if blocks:
        return max(blocks, key=len)
    return prompt + text if not _compiles(text) and _compiles(prompt + text) else text


def _compiles(code: str) -> bool:
    try:
        compile(code, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def passed(source: types.CodeType, file: str, text: str, prompt: str) -> dict[str, Any]:
    """The share of tests that the text's code passes; `why` names those that it does not."""
    code = code_in(text, prompt)
    Path("solution.py").write_text(code, encoding="utf-8")
    sys.path[:0] = [str(Path.cwd()), str(Path(file).parent)]
    solution = types.ModuleType("solution")
    solution.__file__ = "solution.py"
    sys.modules["solution"] = solution
    try:
        exec(compile(code, "solution.py", "exec"), solution.__dict__)
    except BaseException as error:  # also one that leaves: sys.exit is no way to pass
        return {"score": 0.0, "why": f"its code raised {_brief(error)}"}
    given = {n: v for n, v in vars(solution).items() if not n.startswith("__")}
    suite = types.ModuleType("suite")
    suite.__dict__.update(given, __file__=file)
    sys.modules["suite"] = suite
    try:
        exec(source, suite.__dict__)
    except BaseException as error:
        return {"score": 0.0, "why": f"the tests could not begin: {_brief(error)}"}
    # What the code itself calls a test is none: only those count that the file has written.
    own = {n: v for n, v in vars(suite).items() if n not in given or given[n] is not v}
    return _share(_collected(own) or [(Path(file).name, lambda: None)])


def _collected(names: dict[str, Any]) -> list[tuple[str, Test]]:
    found: list[tuple[str, Test]] = []
    for name, value in names.items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                found.append((f"{name}.{method}", _case(value(method))))
        elif name.startswith("test") and isinstance(value, types.FunctionType):
            found.append((name, value))
    return found


def _case(case: unittest.TestCase) -> Test:
    def run() -> None:
        result = unittest.TestResult()
        case.run(result)
        if not result.wasSuccessful():
            trouble = [*result.errors, *result.failures]
            raise AssertionError(
                trouble[0][1].strip().splitlines()[-1] if trouble else "unexpected"
            )

    return run


def _share(tests: list[tuple[str, Test]]) -> dict[str, Any]:
    failed: list[str] = []
    for name, test in tests:
        try:
            test()
        except BaseException as error:
            failed.append(f"{name}: {_brief(error)}")
    good = len(tests) - len(failed)
    why = f"{good} of {len(tests)} tests passed"
    return {"score": good / len(tests), "why": f"{why}; {failed[0]}" if failed else why}


def _brief(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(":")
