"""Check that a tag, the package and the changelog name the same version.

python3 tools/check_release.py v1.0.0
python3 tools/check_release.py v1.0.0 --notes notes.md  # and write its notes
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def package_version() -> str:
    """The version of the package: `__version__`."""
    source = (ROOT / "src" / "unspool" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert match, "src/unspool/__init__.py has no __version__"
    return match[1]


def release_notes(version: str) -> str | None:
    """The section of the changelog for a version; None if there is none."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(
        rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    return match[1].strip() if match else None


def main() -> None:
    """Fail with one line unless the tag can be released."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag", help="such as v1.0.0")
    parser.add_argument("--notes", type=Path, help="write the release notes to this file")
    options = parser.parse_args()
    version = package_version()
    if options.tag != f"v{version}":
        raise SystemExit(
            f"the tag must be v{version}, the version of the package; got {options.tag}"
        )
    notes = release_notes(version)
    if not notes:
        raise SystemExit(f"CHANGELOG.md has no section for {version}")
    if options.notes:
        options.notes.write_text(notes + "\n", encoding="utf-8")
    print(f"{version} can be released")


if __name__ == "__main__":
    main()
