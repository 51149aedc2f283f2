"""Extract code from a text and run a file of tests on it. Runs in the checker process.

The code becomes `solution.py`: tests may import it, run it as a program, or use its names as if
they were defined in the test file.
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
    """The longest fenced block of Python. Without one, the text itself; prompt and text, if only
    both together compile."""
    fences: list[tuple[str, str]] = _FENCE.findall(text)
    blocks = [body for kind, body in fences if kind.strip().lower() in _PYTHON]
    if blocks:
        return max(blocks, key=len)
    return prompt + text if not _compiles(text) and _compiles(prompt + text) else text


def _compiles(code: str) -> bool:
    try:
        compile(code, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def run_suite(source: types.CodeType, file: str, text: str, prompt: str) -> dict[str, Any]:
    """Share of the tests that the text's code passes; `why` names the first failure."""
    code = code_in(text, prompt)
    Path("solution.py").write_text(code, encoding="utf-8")
    sys.path[:0] = [str(Path.cwd()), str(Path(file).parent)]
    solution = types.ModuleType("solution")
    solution.__file__ = "solution.py"
    sys.modules["solution"] = solution
    try:
        exec(compile(code, "solution.py", "exec"), solution.__dict__)
    except BaseException as error:  # SystemExit too: exiting does not pass a test
        return {"score": 0.0, "why": f"its code raised {_error_line(error)}"}
    solution_names = {n: v for n, v in vars(solution).items() if not n.startswith("__")}
    suite = types.ModuleType("suite")
    suite.__dict__.update(solution_names, __file__=file)
    sys.modules["suite"] = suite
    try:
        exec(source, suite.__dict__)
    except BaseException as error:
        return {"score": 0.0, "why": f"the tests failed to load: {_error_line(error)}"}
    # Ignore test functions defined by the solution: only those of the test file count.
    suite_names = {
        n: v
        for n, v in vars(suite).items()
        if n not in solution_names or solution_names[n] is not v
    }
    return _run_tests(_collect_tests(suite_names) or [(Path(file).name, lambda: None)])


def _collect_tests(names: dict[str, Any]) -> list[tuple[str, Test]]:
    tests: list[tuple[str, Test]] = []
    for name, value in names.items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                tests.append((f"{name}.{method}", _case(value(method))))
        elif name.startswith("test") and isinstance(value, types.FunctionType):
            tests.append((name, value))
    return tests


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


def _run_tests(tests: list[tuple[str, Test]]) -> dict[str, Any]:
    failed: list[str] = []
    for name, test in tests:
        try:
            test()
        except BaseException as error:
            failed.append(f"{name}: {_error_line(error)}")
    good = len(tests) - len(failed)
    why = f"{good} of {len(tests)} tests passed"
    return {"score": good / len(tests), "why": f"{why}; {failed[0]}" if failed else why}


def _error_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(":")
