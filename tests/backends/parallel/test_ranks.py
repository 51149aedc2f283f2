"""Failures of ranks: one is killed, one raises, rank 0 exits.

Real processes. Time limits are generous: the tests check that nothing hangs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unspool
from helpers import tiny_gguf
from unspool.backends.torch import several
from unspool.backends.torch.parallel.ranks import RankError, RankMessage, Ranks, start_processes
from unspool.cli.main import _exit_code
from unspool.cli.serve import _watch_ranks
from unspool.errors import SettingsError

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def workers_of(pid: int) -> list[int]:
    """Process ids of the other ranks that a process started."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True)
    rows = (line.split(None, 2) for line in listed.stdout.splitlines()[1:])
    return [int(child) for child, parent, args in rows if int(parent) == pid and "worker" in args]


def has_exited(pid: int) -> bool:
    """Whether a process has exited; a zombie counts as exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_a_killed_rank_raises_and_nothing_hangs(model: Path):
    lm = unspool.load(model, tensor_parallel=2, memory=4 << 20)
    (worker,) = workers_of(os.getpid())
    notified = threading.Event()
    lm.model.ranks.on_failure.append(lambda message: notified.set())  # type: ignore[attr-defined]
    steps = lm.stream("he", max_tokens=250, logit_bias={257: -100}, temperature=1.0)
    for number, _ in enumerate(steps):
        if number == 5:
            os.kill(worker, signal.SIGKILL)
            break
    with pytest.raises(RankError, match=r"rank 1 of 2 exited \(killed by SIGKILL\); the model"):
        for _ in range(1000):
            lm.generate("he", max_tokens=200, logit_bias={257: -100})
    with pytest.raises(RankError, match="rank 1 of 2 exited"):
        lm.generate("he")
    assert notified.wait(TIMEOUT_S)
    assert has_exited(worker)
    lm.close()


def test_a_failing_rank_reports_its_error():
    ranks = Ranks.spawn(2, "cpu")
    (worker,) = workers_of(os.getpid())
    bad_load = RankMessage("load", 1, {"path": "/is missing here", "name": "/is missing here"})
    with (
        pytest.raises(RankError, match=r"rank 1 of 2 failed: .*is missing here"),
        ranks.run_on_all(bad_load),
    ):
        ranks.groups.minimum(0)
    wait_until(lambda: has_exited(worker))
    with pytest.raises(RankError, match="rank 1 of 2 failed"), ranks.run_on_all(RankMessage("end")):
        pass
    ranks.close()


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_whose_rank_is_killed_exits(model: Path):
    with started(
        "serve", "--model", str(model), "--tensor-parallel", "2", "--port", "0",
        "--cache-memory", "4000000", "--log-format", "json",
    ) as server:  # fmt: skip
        assert server.stderr is not None
        for line in server.stderr:
            if '"started"' in line:
                break
        (worker,) = workers_of(server.pid)
        os.kill(worker, signal.SIGKILL)
        log = server.stderr.read()
        assert server.wait(TIMEOUT_S) != 0
        assert "unspool: rank 1 of 2 exited (killed by SIGKILL)" in log


def test_a_rank_exits_with_rank_zero():
    """Its stdin is closed then. `-m slow` tests Ctrl-C."""
    (process,) = start_processes(port=1, count=2, threads=1)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(model: Path):
    with started(
        "run", "he", "--raw", "--model", str(model), "--tensor-parallel", "2", "-n", "100000",
        "--endless", "--logit-bias", "257=-100",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(20), "it writes"
        (worker,) = workers_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        wait_until(lambda: has_exited(worker))


def test_two_processes_of_torchrun_generate_one_text(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In the environment of torchrun; this process is rank 0. `-m slow` runs torchrun itself."""
    expected = unspool.load(model, backend="torch").generate("he", max_tokens=9, seed=3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ("run", "he", "--raw", "--model", str(model), "-n", "9", "--seed", "3", "--quiet")
    ranks: list[Ranks] = []
    monkeypatch.setattr(several, "_torchrun_ranks", ranks)
    with started(*words, RANK="1", LOCAL_RANK="1", **job) as other:
        for name, value in (*job.items(), ("RANK", "0"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(name, value)
        assert _exit_code(words) == 0
        ranks[0].close()
        assert other.communicate(timeout=TIMEOUT_S) == ("", ""), "only rank 0 prints"
        assert other.returncode == 0
    assert capsys.readouterr().out.strip("\n") == expected.text.strip("\n")


def test_a_server_is_notified_when_ranks_fail():
    """`-m slow` tests a whole server."""
    messages: list[str] = []
    alone = SimpleNamespace(model=SimpleNamespace())
    assert _watch_ranks(lambda: alone, messages.append)() is alone  # type: ignore[arg-type,return-value]
    ranks = SimpleNamespace(on_failure=[])
    several = SimpleNamespace(model=SimpleNamespace(ranks=ranks))
    _watch_ranks(lambda: several, messages.append)()  # type: ignore[arg-type,return-value]
    for callback in ranks.on_failure:
        callback("rank 1 exited")
    assert messages == ["rank 1 exited"]


@pytest.mark.slow
def test_torchrun(model: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "unspool", "run", "he", "--raw", "--model", str(model), "-n", "9", "--seed", "3"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 5
    done = subprocess.run(
        [*command, "-m", "unspool", "models", "list"], capture_output=True, timeout=300
    )
    assert done.returncode == 0, "which needs no other rank"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be an integer >= 1, got 0"),
        ({"tensor_parallel": 3}, "it has 4 heads; 2, 4 would fit"),
        ({"tensor_parallel": 2, "backend": "native"}, "needs the torch backend"),
        ({"tensor_parallel": 2, "exact": True}, "exact is not possible"),
        ({"tensor_parallel": 2, "threads": 2}, "threads is for the native"),
        ({"tensor_parallel": 2, "devices": "cpu,cpu,cpu"}, "got 3 names"),
        ({"devices": "cpu,"}, "must be device names"),
        ({"devices": "cpu,cpu", "device": "cpu"}, "give only one"),
        ({"devices": "cpu,cpu"}, "2 devices are too many"),
        ({"devices": "nonsense:0"}, "cannot be used here"),
    ],
)
def test_invalid_settings_are_rejected_before_a_process_starts(
    model: Path, options: dict[str, Any], words: str
):
    with pytest.raises(SettingsError, match=words):
        unspool.load(model, **options)
    assert workers_of(os.getpid()) == []
