"""The native backend among threads, signals and processes, and libraries that cannot be used."""

from __future__ import annotations

import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.paged_texts import RandomCheckpoint, config
from unspool import native
from unspool.backends.cpu.model import CpuModel, load_cpu
from unspool.backends.cpu.packing import Packing
from unspool.backends.cpu.threads import choose_threads
from unspool.errors import SettingsError, UnspoolError

needs_native = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)
SOURCES = Path(unspool.__file__).parent


def new_lm(seed: int = 0, kind: str = "F32", **changes: Any) -> Any:
    """A model on two threads on any machine."""
    model = CpuModel(
        RandomCheckpoint(config(**changes), kind, seed), store=None, threads=2, kv_bits=16
    )
    return unspool.LanguageModel(model, None, context=2048, memory=8 << 20)


def text_of(lm: Any, count: int = 60, seed: int = 1) -> list[int]:
    tokens = lm.generate([5, 6, 7], max_tokens=count, seed=seed, temperature=1.0, top=0).tokens
    return [int(token) for token in tokens]


@pytest.fixture
def lm() -> Iterator[Any]:
    created = new_lm()
    yield created
    created.close()


# -- forks -------------------------------------------------------------------------------------


def in_child(act: Callable[[], Any], seconds: float) -> Any:
    """Result of a function in a forked child; an error as its class and text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                result = act()
            except BaseException as error:
                result = [type(error).__name__, str(error)]
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], seconds)
        return json.loads(os.read(reading, 1 << 16)) if ready else "it hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@forks
@needs_native
def test_a_forked_child_cannot_use_the_model(lm: Any):
    assert "load it in the child process" in in_child(lambda: text_of(lm), 2)[1]
    _ = lm.engine  # made, but without a thread
    assert "load it in the child process" in in_child(lambda: text_of(lm), 2)[1]
    before = text_of(lm)  # the engine's thread and the pool have run
    name, words = in_child(lambda: text_of(lm), 2)
    assert name == "UnspoolError" and "before the process was forked; load it in the child" in words
    for use in (lambda: lm.engine.open([1, 2]), lambda: lm.model.rows("embed.weight", 0, 1)):
        assert in_child(lambda use=use: repr(use()), 2)[0] == "UnspoolError"
    assert in_child(lambda: lm.close(), 2) is None, "and closing it does nothing"
    assert text_of(lm) == before, "the parent's goes on"


@forks
@needs_native
def test_a_child_that_was_forked_while_the_model_was_loaded(monkeypatch: pytest.MonkeyPatch):
    go_on, finish = threading.Event(), Packing.finish
    monkeypatch.setattr(Packing, "finish", lambda packing: go_on.wait(20) and finish(packing))
    model = load_cpu(RandomCheckpoint(config()))
    try:
        assert not model.packed, "it is still loading"
        result = in_child(lambda: model.backend(memory=1 << 20, context=64), 2)
    finally:
        go_on.set()
    assert result[0] == "UnspoolError" and "load it in the child process" in result[1]
    assert model.backend(memory=1 << 20, context=64).page_count


@forks
@needs_native
def test_a_child_loads_another_model(lm: Any):
    before = text_of(lm)
    assert in_child(lambda: text_of(new_lm()), 20) == before


# -- threads -----------------------------------------------------------------------------------


@needs_native
def test_two_models_at_the_same_time():
    """They share the thread pool."""
    models = [new_lm(1), new_lm(2, "Q8_0", width=64, ff_width=64)]
    alone = [[text_of(lm, 50, seed) for seed in range(3)] for lm in models]
    result: dict[tuple[int, int], list[int]] = {}

    def write(number: int, seed: int) -> None:
        result[number, seed] = text_of(models[number], 50, seed)

    threads = [
        threading.Thread(target=write, args=(number, seed))
        for seed in range(3)
        for number in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [[result[number, seed] for seed in range(3)] for number in (0, 1)] == alone
    for lm in models:
        lm.close()


@needs_native
def test_an_idle_engine_uses_no_processor(lm: Any):
    text_of(lm)
    for _ in range(100):  # workers look out for the next token for a while
        before = time.process_time()
        time.sleep(0.5)
        if time.process_time() - before < 0.05:
            return
    pytest.fail("the processor is never left alone")


@needs_native
def test_the_lens_and_the_engine_at_the_same_time(lm: Any):
    """The lens has a separate runner, so that neither overwrites the buffers of the other."""
    import numpy as np

    vectors = np.random.default_rng(0).standard_normal((9, 32)).astype(np.float32)
    expected, before = lm.model.logits(vectors), text_of(lm, 200)
    _, steps = lm.begin([5, 6, 7], max_tokens=200, seed=1, temperature=1.0, top=0)
    looks = [lm.model.logits(vectors) for _ in range(50)]
    assert [int(step.token) for step in steps] == before
    assert all(np.array_equal(look, expected) for look in looks)


@needs_native
def test_requests_just_before_close_get_a_result(lm: Any):
    busy, go_on = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        go_on.wait(20)

    lm.engine.loop.post(keep_busy)
    assert busy.wait(20)
    _, steps = lm.begin([1, 2, 3], max_tokens=5)
    closing = threading.Thread(target=lm.engine.close)
    closing.start()
    time.sleep(0.05)
    go_on.set()
    closing.join(20)
    result: list[Any] = []

    def read() -> None:
        try:
            result.extend(steps)
        except UnspoolError as error:
            result.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert result == ["the engine was closed"]


# -- signals -----------------------------------------------------------------------------------


@needs_native
def test_ctrl_c_leaves_a_model_that_can_be_used(lm: Any):
    before = text_of(lm)
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for seed in range(10_000):
            text_of(lm, 2000, seed)
    assert text_of(lm) == before


@needs_native
@pytest.mark.real
def test_ctrl_c_on_the_command_line(default_model: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "Tell me a long story.", "-n", "6000",
         "--regex", "[a-z ]{30000}",
         "--model", str(default_model)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1), "it writes"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"Exception" not in err


# -- the library -------------------------------------------------------------------------------


def reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(native, "path", lambda: path)
    result, why = native._load.__wrapped__()
    assert result is None and why is not None
    return str(why)


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The message names the compiler only if there is none."""
    file = tmp_path / "none.so"
    monkeypatch.setattr("shutil.which", lambda name: None)
    words = reason(file, monkeypatch)
    assert str(file) in words and "there is no C++ compiler" in words
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    words = reason(file, monkeypatch)
    assert str(file) in words and "though there is a C++ compiler here" in words


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="of ELF files")
def test_a_library_of_another_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = bytearray(native.path().read_bytes())
    data[18:20] = (183 if data[18] == 62 else 62).to_bytes(2, "little")
    (tmp_path / "it.so").write_bytes(data)
    words = reason(tmp_path / "it.so", monkeypatch)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    assert f"built for {other}, and this is {platform.machine()}" in words


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_library_for_a_newer_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It needs a symbol of a newer glibc, as if it was built on such a system."""
    data = native.path().read_bytes()
    expected = sorted(set(re.findall(rb"GLIBC_2\.\d\d\0", data)))[-1]
    # The loader compares hashes of versions, and their names only to tell of them.
    changed = data.replace(elf_hash(expected[:-1]), elf_hash(b"GLIBC_2.99"))
    (tmp_path / "it.so").write_bytes(changed.replace(expected, b"GLIBC_2.99\0"))
    words = reason(tmp_path / "it.so", monkeypatch)
    assert "they need GLIBC_2.99, which is newer than what this system has" in words


def elf_hash(name: bytes) -> bytes:
    result = 0
    for byte in name:
        result = (result << 4) + byte
        top = result & 0xF0000000
        result = (result ^ (top >> 24)) & ~top
    return result.to_bytes(4, "little")


def test_messages_of_the_loader_are_explained(tmp_path: Path):
    file = tmp_path / "it.so"
    file.write_bytes(b"")
    for message, words in (
        ("libstdc++.so.6: cannot open shared object file: No such file", "need libstdc++.so.6"),
        (f"{file}: failed to map segment from shared object", "noexec"),
        (f"{file}: file too short", "file too short; install Unspool again"),
    ):
        assert words in native._why_not_loaded(file, message)


def test_a_file_that_is_not_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for content in (b"", b"rubbish", b"\x7fELF" + bytes(100)):
        (tmp_path / "it.so").write_bytes(content)
        words = reason(tmp_path / "it.so", monkeypatch)
        assert "cannot be loaded" in words and "install Unspool again" in words


@needs_native
def test_a_library_of_another_version_or_of_other_sources(monkeypatch: pytest.MonkeyPatch):
    path = native.path()
    with monkeypatch.context() as patch:
        patch.setattr(native, "VERSION", 999)
        words = reason(path, patch)
        assert re.search(r"have version \d+ and this Unspool needs 999; install it again", words)
    monkeypatch.setattr(native, "_FUNCTIONS", (*native._FUNCTIONS, "of_tomorrow"))
    assert "built from other sources (they lack of_tomorrow)" in reason(path, monkeypatch)


def test_all_called_functions_are_checked():
    text = "".join(file.read_text(encoding="utf-8") for file in SOURCES.rglob("*.py"))
    loaded = r"(?:library|library\(\)|functions\(\)|_library\(\)|lib|loaded)"
    called = set(re.findall(loaded + r"\.unspool_(\w+)", text))
    assert called == {*native._FUNCTIONS, "version"}


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="the check knows ELF files")
def test_a_library_that_was_cut_short(tmp_path: Path):
    """In a child process: the system kills a process that maps beyond the end of a file."""
    file = tmp_path / "it.so"
    code = f"""
from pathlib import Path
from unspool import native
native.path = lambda: Path({str(file)!r})
data = Path({str(native.path())!r}).read_bytes()
for part in (0.0001, 0.02, 0.5, 0.999):
    native.path().write_bytes(data[: int(len(data) * part)])
    print(native._load.__wrapped__()[1])
    native.path().unlink()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"it ended with {done.returncode}"
    assert done.stdout.count("install Unspool again") == 4


@needs_native
def test_an_unknown_instruction_set():
    code = "from unspool import native; print(native.missing_reason()); native.library()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "UNSPOOL_ISA": "mmx"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "UNSPOOL_ISA names an instruction set that this processor does not have" in done.stdout
    assert UnspoolError.__name__ in done.stderr


# -- How many threads -----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of files: build(cores of each processor, group=..., files of groups)."""

    def build(cores: list[tuple[int, int]], group: str = "", **files: str) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(cores))), False)
        for number, (package, core) in enumerate(cores):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{package}\n")
            (folder / "core_id").write_text(f"{core}\n")
        write(tmp_path / "proc/self/cgroup", group)
        for name, text in files.items():
            file = name.replace("__", "/").replace("cpu_", "cpu.")
            write(tmp_path / "sys/fs/cgroup" / file, text)
        return tmp_path

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return build


FOUR = [(0, core) for core in range(4)]
V2 = "0::/box/inner\n"
V1 = "7:memory:/else\n4:cpu,cpuacct:/box\n"


def test_cores_are_counted(machine: Any, tmp_path: Path):
    assert choose_threads(None, machine([(0, 0), (0, 1), (0, 0), (0, 1)])) == 2, "two threads each"
    shutil.rmtree(tmp_path / "sys")
    assert choose_threads(None, machine([(0, 0), (0, 1), (1, 0), (1, 1)])) == 4, "two sockets"


def test_only_the_processors_we_may_run_on(machine: Any, monkeypatch: pytest.MonkeyPatch):
    root = machine([(0, core // 2) for core in range(8)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 6}, False)
    assert choose_threads(None, root) == 2
    assert choose_threads(3, root) == 3
    with pytest.raises(SettingsError, match=r"threads must be <= 3, .* got 4"):
        choose_threads(4, root)


def test_a_system_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert choose_threads(None, tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert choose_threads(None, tmp_path) == 1


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (V2, {"box__inner__cpu_max": "250000 100000\n"}, 2),  # whole processors' worth
        (V2, {"box__inner__cpu_max": "max 100000\n", "box__cpu_max": "100000 100000\n"}, 1),
        (V2, {"box__inner__cpu_max": "50000 100000\n"}, 1),
        (V2, {"box__inner__cpu_max": "900000 100000\n"}, 4),
        (V2, {"box__inner__cpu_max": "max 100000\n"}, 4),
        (V2, {"box__inner__cpu_max": "rubbish"}, 4),
        (V2, {"box__inner__cpu_max": "100000 0\n"}, 4),
        ("0::/../..\n", {"cpu_max": "200000 100000\n"}, 2),  # seen from inside a container
        ("", {"cpu_max": "300000 100000\n"}, 3),
        (V1, {"cpu,cpuacct__box__cpu_cfs_quota_us": "150000",
              "cpu,cpuacct__box__cpu_cfs_period_us": "50000"}, 3),
        (V1, {"cpu__cpu_cfs_quota_us": "100000", "cpu__cpu_cfs_period_us": "50000"}, 2),
        (V1, {"cpu,cpuacct__box__cpu_cfs_quota_us": "-1",
              "cpu,cpuacct__box__cpu_cfs_period_us": "50000"}, 4),
        # The innermost limit alone would promise time that the outer group does not give.
        (V2, {"box__inner__cpu_max": "300000 100000\n", "box__cpu_max": "100000 100000\n"}, 1),
    ],
)  # fmt: skip
def test_the_time_that_a_container_gives(
    machine: Any, group: str, files: dict[str, str], expected: int
):
    assert choose_threads(None, machine(FOUR, group, **files)) == expected


def test_what_was_asked_for_goes_over_what_the_container_gives(machine: Any):
    root = machine(FOUR, V2, box__cpu_max="100000 100000\n")
    assert choose_threads(None, root) == 1
    assert choose_threads(4, root) == 4


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_numbers_that_are_none(machine: Any, wrong: Any):
    with pytest.raises(SettingsError, match=r"threads must be an integer >= 1, got"):
        choose_threads(wrong, machine(FOUR))


def test_two_threads_that_wait_for_the_same_weights():
    """One of them sees the end of the loading while the other is about to wait for it."""

    class Racing(CpuModel):
        looks = 0

        @property
        def _loading(self) -> Any:  # type: ignore[override]
            self.looks += 1
            return None if self.looks > 1 else ended

        @_loading.setter
        def _loading(self, thread: Any) -> None: ...

    ended = threading.Thread(target=lambda: None)
    ended.start()
    model = object.__new__(Racing)
    model._process, model._fault = os.getpid(), None
    assert model.wait() is model
