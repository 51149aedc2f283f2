"""The native code under sanitizers: no byte read or written out of bounds, no undefined behaviour,
no race.

Each driver in `sanitized/` is built together with the sources it exercises and run on random input
for a few seconds, with a fixed seed. What runs with every test is built without optimization: it
compiles in half the time, and a byte out of bounds is one either way.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from unspool.backends import cpu

NATIVE = Path(cpu.__file__).parent / "native"
DRIVERS = Path(__file__).parent / "sanitized"
COMPILER = shutil.which("g++")
MEMORY = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]
SEED = "20240601"
# The search for leaks takes seconds at the end of each program, and little here is ever allocated.
ENVIRONMENT = os.environ | {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "UNSPOOL_ISA": "plain",
}

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="sanitizers are tried on Linux only"),
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
]


def compile(sources: list[Path], flags: list[str], target: Path) -> None:
    command = [
        str(COMPILER), "-std=c++17", "-g1", "-Wall", "-Wextra", "-Wno-psabi",
        "-ffp-contract=off", f"-I{NATIVE}", *flags, *map(str, sources), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def need(flags: list[str], folder: Path) -> None:
    """Skip where the compiler has no runtime for a sanitizer, or it does not start here."""
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n", encoding="utf-8")
    command = [str(COMPILER), *flags, str(empty), "-o", str(folder / "empty")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"the compiler cannot link {flags[0]}")
    if subprocess.run([str(folder / "empty")], env=ENVIRONMENT, capture_output=True).returncode:
        pytest.skip(f"programs built with {flags[0]} do not run here")


def run(program: Path, seconds: float) -> None:
    done = subprocess.run(
        [str(program), SEED, str(seconds)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_repacking(tmp_path: Path):
    need(MEMORY, tmp_path)
    sources = [DRIVERS / "fuzz_repack.cpp", *sorted(NATIVE.glob("repack*.cpp"))]
    compile(sources, MEMORY, tmp_path / "fuzz")
    run(tmp_path / "fuzz", 0.7)


def test_the_pool_of_threads(tmp_path: Path):
    need(THREAD, tmp_path)
    compile([DRIVERS / "stress_pool.cpp", NATIVE / "pool.cpp"], THREAD, tmp_path / "stress")
    run(tmp_path / "stress", 0.5)


@pytest.mark.slow  # compiling the kernels with sanitizers takes a minute
def test_kernels(tmp_path: Path):
    need(MEMORY, tmp_path)
    kernels = []
    for source in sorted((NATIVE / "kernels").glob("*.cpp")):
        kernels.append(tmp_path / f"{source.stem}.o")
        compile([source], [*MEMORY, "-O1", "-DISA=plain", "-DISA_plain=1", "-c"], kernels[-1])
    sources = [DRIVERS / "fuzz_kernels.cpp", *sorted(NATIVE.glob("*.cpp"))]
    flags = [*MEMORY, "-O1", "-DHAS_plain=1", "-pthread"]
    compile([*sources, *kernels], flags, tmp_path / "fuzz")
    run(tmp_path / "fuzz", 20)
