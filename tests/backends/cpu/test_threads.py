"""How many threads: physical cores that we may use, and the time that the container gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from unspool.backends.cpu.model import CpuModel
from unspool.backends.cpu.threads import choose_threads
from unspool.errors import SettingsError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of files: build(cores of each processor, group=..., files of groups)."""

    def build(cores: Iterable[tuple[int, int]], group: str = "", **files: str) -> Path:
        cores = list(cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(cores))), False)
        for number, (package, core) in enumerate(cores):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{package}\n")
            (folder / "core_id").write_text(f"{core}\n")
        write(tmp_path / "proc/self/cgroup", group)
        for name, text in files.items():
            write(
                tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_", "cpu."), text
            )
        return tmp_path

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return build


FOUR = [(0, core) for core in range(4)]
V2 = "0::/box/inner\n"
V1 = "7:memory:/else\n4:cpu,cpuacct:/box\n"


def test_two_threads_of_a_core_count_once(machine: Any):
    assert choose_threads(None, machine([(0, 0), (0, 1), (0, 0), (0, 1)])) == 2


def test_the_same_number_in_two_sockets_is_two_cores(machine: Any):
    assert choose_threads(None, machine([(0, 0), (0, 1), (1, 0), (1, 1)])) == 4


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
    ],
)  # fmt: skip
def test_the_time_that_a_container_gives(
    machine: Any, group: str, files: dict[str, str], expected: int
):
    assert choose_threads(None, machine(FOUR, group, **files)) == expected


def test_a_narrow_group_inside_and_a_narrower_one_outside(machine: Any):
    """The innermost limit alone would promise time that the outer group does not give."""
    files = {"box__inner__cpu_max": "300000 100000\n", "box__cpu_max": "100000 100000\n"}
    assert choose_threads(None, machine(FOUR, V2, **files)) == 1


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
