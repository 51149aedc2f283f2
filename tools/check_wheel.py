"""Install a wheel into an empty environment without a compiler, and write a text with it.

    python3 tools/check_wheel.py dist               # the wheel in dist/ for this machine

Prints the seconds of each step. The default model is downloaded if it is not in the cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = ("Hi", "-n", "8", "-t", "0")


def main() -> None:
    """Check the wheel of this machine among those in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with unspool-*.whl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(options.folder.resolve(), Path(folder))


def check(wheels: Path, folder: Path) -> None:
    """Install, look at the installation, and write the same text twice."""
    timed("environment", lambda: venv.create(folder, with_pip=True))
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = scripts / ("python.exe" if sys.platform == "win32" else "python")
    # Only the environment's programs: whatever needs a compiler fails.
    environment = {**os.environ, "PATH": str(scripts), "PYTHONSAFEPATH": "1"}
    environment.pop("PYTHONPATH", None)

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words], env=environment, cwd=folder, text=True,
            encoding="utf-8", stdout=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stdout}{words[1:]} ended with {done.returncode}")
        return done.stdout

    install = [python, "-m", "pip", "install", "-q", "--only-binary=:all:"]
    version = package_version()
    timed(
        "install",
        lambda: run(*install, "--find-links", wheels, f"unspool=={version}"),
    )
    print(timed("doctor", lambda: run(python, "-m", "unspool", "doctor")))
    first = timed("first text", lambda: run(python, "-m", "unspool", *PROMPT))
    second = timed("second text", lambda: run(python, "-m", "unspool", *PROMPT))
    print(first)
    if not first.strip() or first != second:
        raise SystemExit(f"the same prompt gave two texts: {first!r} and {second!r}")


def package_version() -> str:
    """The version of the package in this repository."""
    sys.path.insert(0, str(Path(__file__).parent))
    from check_release import package_version

    return package_version()


def timed(name: str, action: Callable[[], Any]) -> Any:
    """Call a function and print the seconds it took."""
    start = time.perf_counter()
    result = action()
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
