"""The page's files: all of them reach the browser, and nothing else does."""

from __future__ import annotations

import gzip
import re
from typing import Any

import httpx

from unspool.features import FEATURES
from unspool.page.files import FOLDER, TYPES

VENDOR = FOLDER / "code" / "vendor"


def test_the_page_and_its_files_are_served_under_a_strict_policy(server: Any) -> None:
    with httpx.Client(base_url=server.url) as client:
        page = client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        for name in re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text):
            result = client.get(name)
            assert result.status_code == 200, name
            assert result.headers["x-content-type-options"] == "nosniff"
            again = client.get(name, headers={"if-none-match": result.headers["etag"]})
            assert again.status_code == 304 and not again.content
        raw = client.get("/page/code/main.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in raw.headers
        assert raw.text == client.get("/page/code/main.js").text
        assert client.get("/page/code/main.js").headers["content-encoding"] == "gzip"


OTHER_FILES = ["", "nothing.js", "files.py", "../errors.py", "..%2ferrors.py", "code/../files.py",
               "code", "/etc/passwd", "code/vendor/LICENSE.htm", "index.html%00.js"]  # fmt: skip


def test_no_other_file_can_be_had(server: Any) -> None:
    with httpx.Client(base_url=server.url) as client:
        for name in OTHER_FILES:
            result = client.get(f"/page/{name}")
            assert result.status_code == 404 and "error" in result.json(), name


def test_every_import_names_a_file_that_is_there() -> None:
    pattern = re.compile(r"""(?:from|import|file[=:])\s*\(?["'](\.{1,2}/[^"']+\.js)["']""")
    observed = 0
    for path in (FOLDER / "code").rglob("*.js"):
        if path.parent == VENDOR:
            continue
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            bases = (path.parent, FOLDER / "code")  # lib.js imports for the others
            assert any((base / name).resolve().is_file() for base in bases), f"{path}: {name}"
            observed += 1
    assert observed > 40


def test_views_of_features_are_in_the_list_and_nowhere_else() -> None:
    listed = (FOLDER / "code" / "views.js").read_text(encoding="utf-8")
    for name in [name for feature in FEATURES for name in feature.page_views]:
        assert f'file: "./{name}/view.js"' in listed
        for path in (FOLDER / "code").rglob("*.js"):
            if path.parent.name not in (name, "vendor") and path.name != "views.js":
                assert f"/{name}/" not in path.read_text(encoding="utf-8"), path.name


def test_what_is_preloaded_is_what_is_imported() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    preloaded = set(re.findall(r'rel="modulepreload" href="/page/([^"]+)"', page))
    expected: set[str] = set()
    todo = [FOLDER / "code" / "main.js"]
    while todo:
        path = todo.pop()
        for name in re.findall(r'from ?"(\.[^"]+)"', path.read_text(encoding="utf-8")):
            result = (path.parent / name).resolve()
            if (relative := result.relative_to(FOLDER.resolve()).as_posix()) not in expected:
                expected.add(relative)
                todo.append(result)
    assert preloaded == expected


def test_the_page_is_small_and_speaks_to_nobody_else() -> None:
    others = (VENDOR, FOLDER / "tab")  # the engine of pages without a server is loaded there only
    mine = sorted(p for p in FOLDER.rglob("*") if p.suffix in TYPES and p.parent not in others)
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    first = {"index.html", *re.findall(r'href="/page/([^"]+)"', page), "code/main.js"}
    size = sum(len(gzip.compress((FOLDER / name).read_bytes(), 9)) for name in first)
    assert size <= 150_000, f"{size:,} bytes are loaded before a text can be written"
    size = len(gzip.compress(b"".join(p.read_bytes() for p in mine), 9))
    assert size <= 320_000, f"{size:,} bytes compressed"
    for path in mine:
        text = path.read_text(encoding="utf-8")
        for address in re.findall(r"https?://[^\s\"'`)]+", text):
            assert address.startswith("http://www.w3.org/"), f"{path.name}: {address}"
