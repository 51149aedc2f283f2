"""The process that runs untrusted checkers: confined, with limits on memory, time and files."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import resource
import struct
import sys
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

# -- Drop a checker process's rights before any of its code runs
#
#     confine(folder, memory=1 << 30, cpu=10, files=64 << 20, processes=32)
#
# After that, this process and its children have no network, can only write to their folder, cannot
# leave their process group, and have limited memory and time. On Linux the kernel enforces this
# (resource limits, Landlock, seccomp); without seccomp, a Python audit hook refuses sockets. The
# process can still read every file that the user can: this is not a full sandbox.

# By architecture: the AUDIT_ARCH value, and the numbers of the refused system calls:
# socket, setsid, setpgid, ptrace, unshare, setns, process_vm_writev, io_uring_setup, pidfd_getfd.
_REFUSED = {
    "x86_64": (0xC000003E, (41, 112, 109, 101, 272, 308, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 157, 154, 117, 97, 268, 271, 425, 438)),
}
_X32 = 0x40000000  # bit that marks x32 system calls on x86-64
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _KILL, _NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06

# Landlock access rights: write, remove and create files and folders; ABI 2 and 3 added moving
# between folders and truncating.
_CHANGE = (1 << 1) | sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_TCP, _SIGNALS_AND_SOCKETS = 0b11, 0b11
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def confine(folder: Path, *, memory: int, cpu: int, files: int, processes: int) -> None:
    """Drop rights; they cannot be regained."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CPU, cpu)
    _limit(resource.RLIMIT_FSIZE, files)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_NPROC, _tasks_of_user() + processes)
    filtered = False
    if sys.platform == "linux":
        kernel = ctypes.CDLL(None, use_errno=True)
        if kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
            _write_only_in(folder, kernel)
            filtered = _refuse_calls(kernel)
    if not filtered:
        sys.addaudithook(_refuse_sockets)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # not supported by this system
        resource.setrlimit(kind, (most, most))


def _tasks_of_user() -> int:
    """Number of the user's existing processes and threads; RLIMIT_NPROC counts them all."""
    num_tasks, user = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                num_tasks += sum(1 for _ in (process / "task").iterdir())
    return num_tasks


def _write_only_in(folder: Path, kernel: ctypes.CDLL) -> None:
    """Landlock: only allow writes below the folder, and signals to own processes."""
    version = kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:  # the kernel has no Landlock
        return
    rights = _CHANGE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (
        rights,
        *([_TCP] if version >= 4 else []),
        *([_SIGNALS_AND_SOCKETS] * (version >= 6)),
    )
    ruleset = struct.pack(f"{len(handled)}Q", *handled)
    rules = kernel.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    if rules < 0:
        return
    write = rights & ((1 << 1) | _TRUNCATE)
    for path, allowed in ((folder, rights), (Path(os.devnull), write)):
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        kernel.syscall(_ADD_RULE, rules, 1, rule, 0)
        os.close(place)
    kernel.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _refuse_calls(kernel: ctypes.CDLL) -> bool:
    """Install a seccomp filter: no sockets, no new process group, no tracing of others."""
    machine_calls = _REFUSED.get(platform.machine())
    if machine_calls is None:
        return False
    machine, calls = machine_calls
    refused = len(calls)
    steps = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # system call number
        (_AT_LEAST, refused + 1, 0, _X32),
        *((_EQUAL, refused - place, 0, call) for place, call in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOT_PERMITTED),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    return bool(kernel.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0)


def _refuse_sockets(event: str, _: tuple[object, ...]) -> None:
    if event in ("socket.__new__", "socket.connect", "socket.bind"):
        raise PermissionError("a checker has no network")


# -- Extract code from a text and run a file of tests on it. Runs in the checker process


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


# -- The sandboxed process that runs checkers: `python -m ...child FD`


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

    source = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
    return lambda text, prompt: run_suite(source, file, text, prompt)


_CHECKERS: dict[str, Callable[[str], Check]] = {
    "pattern": pattern,
    "function": function,
    "tests": tests,
}

if __name__ == "__main__":
    main()
