"""Write `constraints.txt`: the exact version of every package that the tests install.

    python3 tests/update_constraints.py

It resolves `.[dev]` anew, without the constraints that are in force, and writes what pip would
install today. Run the tests before committing the result. `.ci/newest` tries today's versions
without writing them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = Path(__file__).parent / "constraints.txt"
_HEADER = """\
# Exact versions of all test dependencies, so that a clone passes its tests at any later date.
# Written by: python3 tests/update_constraints.py
"""


def resolve_versions() -> dict[str, str]:
    """Ask pip what a fresh environment would get for `.[dev]`: name to version."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        report = Path(folder) / "report.json"
        command = [
            f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--dry-run",
            "--ignore-installed", "--report", str(report), f"{ROOT}[dev]",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    versions = {p["metadata"]["name"]: p["metadata"]["version"] for p in packages}
    del versions["unspool"]
    return versions


def main() -> int:
    lines = []
    for name, version in sorted(resolve_versions().items(), key=lambda item: item[0].lower()):
        public_version = version.partition("+")[0]  # 2.13.0+cpu is 2.13.0 on another machine
        lines.append(f"{name.lower().replace('_', '-')}=={public_version}\n")
    CONSTRAINTS.write_text(_HEADER + "".join(lines), encoding="utf-8")
    print(f"{len(lines)} packages pinned in {CONSTRAINTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
