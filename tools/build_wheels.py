"""Build the Linux wheels for x86-64 and aarch64 on either machine, and check them.

    python3 tools/build_wheels.py                  # both wheels, into dist/
    python3 tools/build_wheels.py x86_64 --out /tmp/wheels

Clang from the `ziglang` package compiles for both processors and links against an old glibc, so
that the wheels also run on old systems. The library contains its C++ runtime and depends only on
glibc. The kernels, which need no C++ runtime, are compiled by GCC, whose code for them is faster
(Debian, Ubuntu: `apt-get install g++-x86-64-linux-gnu g++-aarch64-linux-gnu`). The other tools are
installed into an environment in build/wheels.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "wheels"
GLIBC = "2.17"  # manylinux2014: CentOS 7, Debian 8, Ubuntu 14.04 and everything newer
LIBRARY = "unspool/backends/cpu/unspool_native.so"
MAX_WHEEL_BYTES = 15_000_000
ARCHITECTURES = ("x86_64", "aarch64")
# Zig has its own names for -march of ARM, and takes tuning only in clang's internal form.
ZIG_FLAGS = {
    "-march=armv8.2-a+dotprod+fp16": ["-mcpu=generic+v8_2a+dotprod+fullfp16"],
    "-march=armv8.2-a+dotprod+fp16+i8mm": ["-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm"],
    "-march=armv8.2-a+i8mm": ["-mcpu=generic+v8_2a+i8mm"],
    "-mtune=neoverse-n1": ["-Xclang", "-tune-cpu", "-Xclang", "neoverse-n1"],
}


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="x86_64|aarch64")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    options = parser.parse_args()
    if unknown := {*options.architectures} - {*ARCHITECTURES}:
        parser.error(f"architecture must be x86_64 or aarch64, got {', '.join(sorted(unknown))}")
    tools = install_tools()
    options.out.mkdir(parents=True, exist_ok=True)
    architectures = options.architectures or ARCHITECTURES
    if missing := [name for name in map(gcc_of, architectures) if shutil.which(name) is None]:
        packages = " ".join(
            f"g++-{architecture.replace('_', '-')}-linux-gnu" for architecture in architectures
        )
        raise SystemExit(f"{missing[0]} is not installed: apt-get install {packages}")
    for architecture in architectures:
        wheel = build_wheel(architecture, tools, options.out.resolve())
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


def install_tools() -> Path:
    """Create the environment with the build tools; return its Python."""
    folder, requirements = WORK / "tools", ROOT / "tools" / "requirements.txt"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        venv.create(folder, clear=True, with_pip=True)
        run([python, "-m", "pip", "install", "-q", "-r", requirements])
        shutil.copyfile(requirements, stamp)
    return python


def build_wheel(architecture: str, tools: Path, out: Path) -> Path:
    """Build, tag and check the wheel for one architecture."""
    folder = WORK / architecture
    shutil.rmtree(folder, ignore_errors=True)
    toolchain = write_toolchain(architecture, tools, folder)
    settings = {
        "cmake.define.CMAKE_TOOLCHAIN_FILE": toolchain,
        "cmake.define.UNSPOOL_KERNELS": "all",
        "build-dir": folder / "cmake",
    }
    date = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    scripts = os.pathsep.join([str(tools.parent), os.environ["PATH"]])
    run(
        [tools, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
        + [f"--config-settings={name}={value}" for name, value in settings.items()],
        SOURCE_DATE_EPOCH=date.strip(),
        PATH=scripts,
    )
    (built,) = folder.glob("unspool-*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}.manylinux2014_{architecture}"
    command = [tools, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, built]
    name = run(command, capture=True).split()[-1]
    check_wheel(folder / name, architecture, tools)
    target = out / name
    target.unlink(missing_ok=True)
    shutil.move(folder / name, target)
    return target


def write_toolchain(architecture: str, tools: Path, folder: Path) -> Path:
    """Write a CMake toolchain file that compiles with Zig for the architecture."""
    folder.mkdir(parents=True)
    compiler, toolchain = folder / "c++", folder / "toolchain.cmake"
    command = shlex.join([str(tools), str(Path(__file__).resolve()), "--compile", architecture])
    compiler.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    compiler.chmod(0o755)
    toolchain.write_text(
        f"""set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {architecture})
set(CMAKE_CXX_COMPILER "{compiler}")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # linking would compile the C++ runtime twice
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")  # without symbols for debuggers
"""
    )
    return toolchain


def gcc_of(architecture: str) -> str:
    """The name of GCC for an architecture, as Debian calls it."""
    return f"{architecture}-linux-gnu-g++"


def compile_source(architecture: str, arguments: list[str]) -> int:
    """Run GCC for kernels, and clang for everything else and for linking; return the exit code."""
    is_kernel = any(word.startswith("-DISA=") for word in arguments)
    is_repacking = any(re.search(r"/repack\w*\.cpp$", word) for word in arguments)
    if "-c" in arguments and (is_kernel or is_repacking):
        # Without calls into libgcc, which is not linked.
        atomics = ["-mno-outline-atomics"] if architecture == "aarch64" else []
        return subprocess.run([gcc_of(architecture), *arguments, *atomics]).returncode
    translated = [word for argument in arguments for word in ZIG_FLAGS.get(argument, [argument])]
    target = f"{architecture}-linux-gnu.{GLIBC}"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *translated]
    return subprocess.run(command).returncode


def check_wheel(wheel: Path, architecture: str, tools: Path) -> None:
    """Fail unless the wheel has kernels, runs with the old glibc, and is well formed."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if LIBRARY not in names:  # an install without a compiler is allowed, a wheel is not
        raise SystemExit(f"{wheel.name} has no kernels: compiling them failed (see above)")
    if sources := [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt"))]:
        raise SystemExit(f"{wheel.name} holds C++ sources, such as {sources[0]}")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        raise SystemExit(f"{wheel.name} is larger than {MAX_WHEEL_BYTES / 1e6:.0f} MB")
    report = run([tools, "-m", "auditwheel", "show", wheel], capture=True)
    print(report)
    expected = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    if expected not in report.replace("\n", "").split("following platform tag:")[-1][:80]:
        raise SystemExit(f"{wheel.name} needs a newer system than {expected} (see above)")
    run([tools, "-m", "twine", "check", "--strict", wheel])


def run(command: list[object], *, capture: bool = False, **environment: str) -> str:
    """Run a command in the project's folder; return its output if captured."""
    words = [str(word) for word in command]
    print("+", shlex.join(words), flush=True)
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE if capture else None,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}{words[0]} ended with {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        sys.exit(compile_source(sys.argv[2], sys.argv[3:]))
    main()
