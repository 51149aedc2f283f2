"""Rule-based verifiers: every checker returns a verdict and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.decoding.search import checkers
from unspool.decoding.search.checker_process import code_in
from unspool.decoding.search.checkers import (
    CheckerLimits,
    FileVerifier,
    PatternVerifier,
    PatternVoteVerifier,
    UnitTestVerifier,
)
from unspool.decoding.search.verifiers import FunctionVerifier, Verdict
from unspool.errors import SettingsError, UnspoolError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own limits")


def text(content: str, prompt: str = "") -> Any:
    return SimpleNamespace(text=content, prompt=prompt, steps=[], logprob=0.0)


# Of a model only what a prompt says is asked.
LM: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, specials: ids))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Folders of checkers are made below this one, and are gone afterwards."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


def test_a_pattern_is_found_or_not():
    judge = PatternVerifier(LM, r"answer is (\d+)")
    output = [text("The answer is 4. No: the answer is 42."), text("No idea.")]
    assert [item.score for item in judge.score(output)] == [1.0, 0.0]
    assert "answer is" in judge.score(output)[1].why
    assert [item.answer for item in judge.score_with_match(output)] == ["42", None]
    assert judge.cost(output) == 0 and not judge.partial


def test_a_pattern_that_never_ends_fails_its_text_alone():
    judge = PatternVerifier(LM, r"(a+)+b", CheckerLimits(seconds=1))
    result = judge.score([text("ab"), text("a" * 60), text("b"), text("aab")])
    assert [item.score for item in result] == [1.0, None, 0.0, 1.0]
    assert "1 s" in result[1].why


def test_a_vote_on_what_a_pattern_finds():
    judge = PatternVoteVerifier(LM, r"(?:a+)+b(\d)", limits=CheckerLimits(seconds=1))
    result = judge.score([text("ab1"), text("aab1"), text("ab2"), text("c"), text("a" * 60)])
    assert [item.score for item in result] == pytest.approx([2 / 3, 2 / 3, 1 / 3, None, None])
    assert [item.answer for item in result] == ["1", "1", "2", None, None]
    assert "matches" in result[3].why and "within 1 s" in result[4].why


@pytest.mark.parametrize("pattern", ["(", "a" * 2000])
def test_what_is_no_pattern_is_refused(pattern: str):
    with pytest.raises(SettingsError, match="pattern"):
        PatternVerifier(LM, pattern)


TROUBLE = {  # what a checker does with a text, and what its verdict says
    "fine": ("return True", ""),
    "raises": ('raise ValueError("no such\\nthing")', "ValueError: no such thing (line"),
    "leaves": ("raise SystemExit(0)", "SystemExit"),
    "hangs": ("while True: pass", "within 2 s"),
    "dies": ("os.abort()", "SIGABRT"),
    "quits": ("os._exit(0)", "exited"),
    "memory": ("return len(bytearray(3 << 30))", "MemoryError"),
    "file": ("write('big', 3 << 20)", "File too large"),
    "files": ("[write(f'big{n}', 1 << 20) for n in range(20)] and time.sleep(60)", "MiB written"),
    "forks": ("return [os.fork() or time.sleep(600) for _ in range(3)] != []", ""),
    "nan": ("return float('nan')", "nan"),
    "none": ("return None", "None"),
    "words": ("return 'good'", "'good'"),
    "list": ("return [1]", "[1]"),
    "forges": ("return forge()", None),  # no verdict, and others are not affected
    "again": ("return True", ""),
}
CHECKER = """
import os, time

def check(text):
    return len(text)

def both(text, prompt):
    return prompt in text

def write(name, count):
    with open(name, "wb") as file:
        file.write(bytes(count))

def forge():
    for number in range(3, 64):
        try:
            os.write(number, b"nonsense\\n")
        except OSError:
            pass
    return True

def trouble(text):
    return globals()["trouble_" + text]()
"""
CHECKER += "".join(f"def trouble_{name}():\n    {code}\n" for name, (code, _) in TROUBLE.items())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "checker.py"
    path.write_text(CHECKER)
    return path


def test_a_function_of_a_file(file: Path):
    assert FileVerifier(LM, file).score([text("abc")]) == [Verdict(3.0)]
    pair = FileVerifier(LM, str(file), "both").score([text("abc", "b"), text("abc", "x")])
    assert [item.score for item in pair] == [1.0, 0.0]


def test_whatever_goes_wrong_is_told_of_its_text(file: Path):
    limits = CheckerLimits(seconds=2, memory=512 << 20, files=2 << 20)
    result = FileVerifier(LM, file, "trouble", limits).score([text(name) for name in TROUBLE])
    for (name, (_, why)), verdict in zip(TROUBLE.items(), result, strict=True):
        if why is not None:
            assert why in verdict.why, name
            assert (verdict.score is None) == bool(why), name


@LINUX
def test_what_was_started_ends_with_its_checker(file: Path):
    before = children()
    FileVerifier(LM, file, "trouble").score([text("forks")])
    until = time.monotonic() + 20
    while children() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not children() - before


def children() -> set[str]:
    """Processes whose command is a checker's."""
    result = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"checker_process" in (process / "cmdline").read_bytes():
                result.add(process.name)
        except OSError:
            continue
    return result


def test_a_checker_that_cannot_be_loaded_is_told_at_once(file: Path, tmp_path: Path):
    with pytest.raises(UnspoolError, match="no function 'absent'"):
        FileVerifier(LM, file, "absent")
    with pytest.raises(SettingsError, match="does not exist"):
        FileVerifier(LM, tmp_path / "absent.py")
    broken = tmp_path / "broken.py"
    broken.write_text("def check(text:\n")
    with pytest.raises(UnspoolError, match="SyntaxError"):
        FileVerifier(LM, broken)
    with pytest.raises(UnspoolError, match="SyntaxError"):
        UnitTestVerifier(LM, broken)


FORBIDDEN = """
import os, socket, subprocess, sys

def listening(text):
    socket.create_connection(("127.0.0.1", int(text)), timeout=5)
    return 1

def unresolved(text):
    socket.getaddrinfo("example.com", 80)
    return 1

def outside(text):
    open(text, "w").write("changed")
    return 1

def removed(text):
    os.unlink(text)
    return 1

def inside(text):
    open("note", "w").write(text)
    return subprocess.run([sys.executable, "-c", "open('note').read()"]).returncode == 0

def filtered(text):
    return "Seccomp:\\t2" in open("/proc/self/status").read()

def escapes(text):
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def secrets(text):
    return len([name for name in os.environ if "TOKEN" in name or "KEY" in name])
"""


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, mine = tmp_path / "forbidden.py", tmp_path / "mine.txt"
    path.write_text(FORBIDDEN)
    mine.write_text("mine")
    monkeypatch.setenv("HF_TOKEN", "secret")

    def check(function: str, content: str = "") -> Verdict:
        return FileVerifier(LM, path, function).score([text(content)])[0]

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "PermissionError" in check("listening", str(server.getsockname()[1])).why
    assert check("unresolved").score is None
    assert check("inside", "x").score == 1.0
    assert check("secrets").score == 0.0
    if sys.platform == "linux" and check("filtered").score:
        assert check("escapes").score == 0.0
    if has_landlock():
        assert "PermissionError" in check("outside", str(mine)).why
        assert "PermissionError" in check("removed", str(mine)).why
        assert mine.read_text() == "mine"


def has_landlock() -> bool:
    """Whether this kernel can hold files back; older ones cannot."""
    import ctypes

    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


TESTS = """
import subprocess, sys, unittest
from solution import add

def test_one():
    assert add(1, 2) == 3

def test_two():
    assert add(2, 2) == 5, "two and two"

def test_as_a_program():
    assert subprocess.run([sys.executable, "solution.py"]).returncode == 0

class Cases(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 0), 0)
"""
GOOD = "def add(a, b):\n    return a + b\n"


def test_the_share_of_tests_that_a_texts_code_passes(tmp_path: Path):
    path = tmp_path / "tests.py"
    path.write_text(TESTS)
    output = [
        text(f"Here it is:\n```python\n{GOOD}```\nUse it so:\n```\nadd(1, 2)\n```\n"),
        text(GOOD + "def test_mine():\n    pass\n"),
        text("    return a + b\n", "def add(a, b):\n"),
        text("def add(a, b):\n    return 0\n"),
        text("def add(a, b"),
        text("import os\nos._exit(0)\n"),
        text("raise SystemExit(0)\n"),
        text("while True:\n    pass\n"),
        text("I do not know."),
    ]
    result = UnitTestVerifier(LM, path, CheckerLimits(seconds=4)).score(output)
    assert [item.score for item in result] == [0.75, 0.75, 0.75, 0.5, 0, 0, 0, 0, 0]
    assert "3 of 4 tests passed; test_two: AssertionError: two and two" in result[0].why
    assert "SyntaxError" in result[4].why and "within 4 s" in result[7].why


def test_plain_asserts_are_one_test(tmp_path: Path):
    path = tmp_path / "asserts.py"
    path.write_text("assert add(1, 2) == 3\n")
    result = UnitTestVerifier(LM, path).score([text(GOOD), text(GOOD.replace("+", "-"))])
    assert [item.score for item in result] == [1.0, 0.0]


def test_which_code_is_meant():
    assert code_in("```py\nlonger = 1\n```\n```\nx\n```", "") == "longer = 1\n"
    assert code_in("```sh\nrm -rf /\n```\nno code", "") == "```sh\nrm -rf /\n```\nno code"
    assert code_in("```python\ncut = 1", "") == "cut = 1"


def test_leaving_a_test_run_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, scratch = tmp_path / "tests.py", tmp_path / "scratch"
    path.write_text(TESTS)
    judge = UnitTestVerifier(LM, path, CheckerLimits(seconds=120))

    def interrupted(_: Any) -> None:
        until = time.monotonic() + 60
        while not list(scratch.glob("*/solution.py")) and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judge.score([text("while True: pass")])
    until = time.monotonic() + 60
    while list(scratch.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)


def test_a_checker_can_be_ended_from_elsewhere(tmp_path: Path):
    judge = PatternVerifier(LM, r"(a+)+b", CheckerLimits(seconds=120))
    result: list[Verdict] = []
    working = threading.Thread(target=lambda: result.extend(judge.score([text("a" * 60)] * 3)))
    working.start()
    until = time.monotonic() + 60
    while not list((tmp_path / "scratch").iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    judge.cancel()
    working.join(60)
    assert [item.score for item in result] == [None] * 3
    assert judge.score([text("ab")])[0].score == 1.0  # it can be asked again


def test_a_function_that_hangs_raises_or_talks_nonsense():
    release = threading.Event()

    def judge(generation: Any) -> Any:
        if generation.text == "hangs":
            release.wait(60)
        if generation.text == "raises":
            raise KeyError("what")
        if generation.text == "leaves":
            raise SystemExit
        return {"nan": float("nan"), "none": None, "words": "x", "why": Verdict(2, "so")}.get(
            generation.text, generation.text == "true"
        )

    names = ["true", "hangs", "raises", "leaves", "nan", "none", "words", "why", "false"]
    result = FunctionVerifier(judge, seconds=0.5).score([text(name) for name in names])
    release.set()
    assert [item.score for item in result] == [1, None, None, None, None, None, None, 2, 0]
    assert "0.5 s" in result[1].why and "KeyError" in result[2].why and result[7].why == "so"


@pytest.mark.parametrize("broken", ["os.pipe", "subprocess.Popen"])
def test_a_process_that_cannot_start_leaves_nothing_behind(
    broken: str, monkeypatch: pytest.MonkeyPatch
):
    pipes: list[int] = []

    def pipe() -> tuple[int, int]:
        if broken == "os.pipe":
            raise OSError("no more files")
        pipes.extend(real_pipe())
        return pipes[0], pipes[1]

    def start(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    real_pipe = os.pipe
    monkeypatch.setattr("os.pipe", pipe)
    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(OSError, match="no more"):
        checkers.answers("pattern", "a", [("a text", "its prompt")])
    assert not list(Path(tempfile.gettempdir()).iterdir())
    for file in pipes:
        with pytest.raises(OSError):
            os.fstat(file)
