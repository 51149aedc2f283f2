"""`unspool doctor` names what there is, and what is broken or slow; shells complete commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unspool as package
from unspool import native
from unspool.cli import doctor

ROOT = Path(__file__).parents[2]
NAMES = [
    "unspool", "python", "system", "processor", "instructions", "kernels", "compiler", "threads",
    "memory", "gpu", "torch", "triton", "models", "cache",
]  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and a machine without a GPU."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(doctor, "_nvidia_gpus", lambda: [])
    monkeypatch.setattr("unspool.backends.placement.has_nvidia_driver", lambda: False)


@pytest.fixture
def problems_of(bare_unspool: Any) -> Any:
    """The problems as `kind: reason: fix`, and the exit code that goes with them."""

    def run(*arguments: str) -> list[str]:
        code, out, _ = bare_unspool("doctor", "--json", *arguments)
        problems = json.loads(out)["problems"]
        assert code == (1 if problems else 0)
        return [": ".join(problem.values()) for problem in problems]

    return run


def test_one_line_for_each_fact(bare_unspool: Any):
    code, out, err = bare_unspool("doctor")
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    assert (code, err) == (0, "") and list(lines) == [*NAMES, "result"]
    assert lines["result"] == "no problems"
    assert lines["unspool"].startswith(package.__version__)
    assert native.instruction_set() in lines["instructions"].split(" (")[0]
    assert "98 MB" in lines["models"], "the default model is not downloaded yet"
    facts = json.loads(bare_unspool("doctor", "--json")[1])
    assert list(facts) == [*NAMES, "problems"]
    assert facts["instructions"]["available"][-1] == "plain"
    assert facts["kernels"]["bytes"] == native.path().stat().st_size


def test_the_guide_names_every_line():
    page = (ROOT / "docs" / "how-to" / "check-your-installation.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}`" in page, name


def test_torch_is_not_imported():
    code = (
        "import sys; from unspool.cli.main import _exit_code; _exit_code(['doctor']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_missing_kernels(monkeypatch: pytest.MonkeyPatch, problems_of: Any):
    reason = "the native kernels are not at lib.so; install one and run pip install again"
    monkeypatch.setattr(native, "missing_reason", lambda: reason)
    (problem,) = problems_of()
    assert problem.startswith("slow: the native kernels are not at lib.so; torch runs models")
    assert problem.endswith(": install one and run pip install again")
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    assert problems_of()[0].startswith("broken: ")


def test_slower_kernels_than_the_processor_has(monkeypatch: pytest.MonkeyPatch, problems_of: Any):
    monkeypatch.setattr(native, "instruction_set", lambda: "plain")
    monkeypatch.setattr(native, "available_instruction_sets", lambda: ["avx512", "avx2", "plain"])
    monkeypatch.setenv("UNSPOOL_ISA", "plain")
    (problem,) = problems_of()
    assert "UNSPOOL_ISA=plain selects plain, and this processor has avx512" in problem


@pytest.mark.parametrize(
    ("flags", "available", "missing"),
    [
        ("avx2 avx_vnni avx512_vnni", ["amx", "avx512", "plain"], None),
        ("avx2 avx_vnni avx512_vnni", ["avx2", "plain"], "avx512"),
        ("avx2 avx_vnni", ["plain"], "avxvnni"),
        ("avx2", ["avx2", "plain"], None),
        ("asimd asimddp i8mm", ["i8mm", "neon", "plain"], None),
        ("asimd asimddp i8mm", ["neon", "plain"], "i8mm"),
        ("asimd", ["plain"], None),
    ],
)
def test_kernels_that_were_compiled_on_another_machine(
    flags: str,
    available: list[str],
    missing: str | None,
    monkeypatch: pytest.MonkeyPatch,
    problems_of: Any,
    tmp_path: Path,
):
    (tmp_path / "cpuinfo").write_text(f"model name : x\nflags : fpu {flags}\n")
    monkeypatch.setattr(doctor, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(native, "instruction_set", lambda: available[0])
    monkeypatch.setattr(native, "available_instruction_sets", lambda: available)
    problems = problems_of()
    assert len(problems) == (missing is not None)
    assert all(f"this processor has {missing}, and" in problem for problem in problems)


@pytest.mark.parametrize(
    ("versions", "cuda", "problem"),
    [
        ({}, None, "pip install 'unspool[torch]'"),
        ({"torch": "2.13.0+cpu"}, None, "built without CUDA"),
        ({"torch": "2.13.0"}, "12.8", "pip install triton"),
        ({"torch": "2.13.0", "triton": "3.7.1"}, "12.8", None),
    ],
)
def test_a_gpu_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    problems_of: Any,
    versions: dict[str, str],
    cuda: str | None,
    problem: str | None,
):
    gpu = {"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "570.1"}
    monkeypatch.setattr(doctor, "_nvidia_gpus", lambda: [gpu])
    monkeypatch.setattr(doctor, "_version_of", versions.get)
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: cuda)
    problems = problems_of()
    assert len(problems) == (problem is not None)
    assert all(str(problem) in line for line in problems)


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.undo()  # restores _nvidia_gpus too
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    code = "from unspool.cli.doctor import _nvidia_gpus; print(_nvidia_gpus()[0]['name'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "NVIDIA H200", done.stderr


def test_little_memory(monkeypatch: pytest.MonkeyPatch, problems_of: Any):
    monkeypatch.setattr("unspool.model.hub.memory.free_memory", lambda: 100_000_000)
    assert problems_of() == ["slow: only 100 MB of memory are free: end other programs"]


# -- completion, `python -m unspool` ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("unspool mod", "models"),
        ("unspool models pu", "pull"),
        ("unspool run --temp", "--temperature"),
        ("unspool run -m smol", "smollm2-135m"),
        ("unspool doc", "doctor"),
    ],
)
def test_bash_completes(line: str, expected: str):
    environment = {
        "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1),
        "_UNSPOOL_COMPLETE": "complete_bash",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "unspool"], env={**os.environ, **environment},
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert expected in done.stdout.split(), done.stderr


def test_python_m_unspool():
    done = subprocess.run(
        [sys.executable, "-m", "unspool", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"unspool {package.__version__}\n"
