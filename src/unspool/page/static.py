"""`unspool page --static DIR`: the page as a folder for any file host, with the engine in the tab.

DIR/index.html          the page; names the model
DIR/sw.js               makes it work offline after the first visit
DIR/page/               the page's files, without the views that need a server
DIR/model/NAME.gguf     the model, unless the page loads it from an address
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import posixpath
import re
import shutil
from pathlib import Path
from urllib.parse import quote, urlsplit

from unspool.errors import UnspoolError
from unspool.page.files import FOLDER, PREFIX
from unspool.page.minify import minify_script, minify_style

_WORKER = "tab/service_worker.js"
_SCRIPTS = ("code/main.js", "tab/worker.js", "tab/thread.js")  # what the browser starts
# Modules that a script imports, when it starts or for a part of the page that is loaded later. A
# name after `file` is relative to code/. Lines with `needsServer` or `!isTab` are for a server.
_IMPORT = re.compile(r"""(?:from|import\(|(file)[=:])\s*["'](\.[^"']+\.js)["']""")
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "worker-src 'self'; img-src 'self' data: blob:; connect-src 'self' https: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_static(folder: Path, model: Path | str) -> tuple[int, int]:
    """Write the page into a folder, minified; return its bytes without the model, and compressed
    with gzip, as most file hosts send them.

    Args:
        folder: Is created; files of an earlier page in it are replaced.
        model: A GGUF file, which is copied, or the https address of one.
    """
    if folder.exists() and not folder.is_dir():
        raise UnspoolError(f"--static must be a folder, got the file {folder}")
    is_page = not folder.exists() or not any(folder.iterdir()) or (folder / "sw.js").is_file()
    if not is_page:
        raise UnspoolError(
            f"--static must be a new or empty folder, or an earlier page; {folder} has other files"
        )
    shutil.rmtree(folder / "page", ignore_errors=True)
    names = _page_files()
    files = {f"page/{name}": _minified(name) for name in names}
    files["index.html"] = _index(_model_address(model), names).encode()
    files["sw.js"] = _with_file_list(_minified(_WORKER).decode(), files).encode()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if isinstance(model, Path):
        _copy_model(model, folder / "model" / model.name)
    contents = files.values()
    return sum(map(len, contents)), sum(len(gzip.compress(content)) for content in contents)


def _page_files() -> set[str]:
    """Names of the files that a page without a server loads."""
    scripts = _imported_scripts()
    folders = {posixpath.dirname(name) for name in scripts}

    def is_needed(path: Path) -> bool:
        if path.suffix == ".css":  # named after the folder of code that it is for, if it is for one
            folder = f"code/{path.stem}"
            return folder in folders or not (FOLDER / folder).is_dir()
        return path.suffix in (".svg", ".gz")

    others = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if is_needed(path)}
    return scripts | others


def _imported_scripts() -> set[str]:
    names: set[str] = set()
    todo = list(_SCRIPTS)
    while todo:
        name = todo.pop()
        if name in names:
            continue
        names.add(name)
        for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
            if "needsServer" in line or "!isTab" in line:
                continue
            for is_part, target in _IMPORT.findall(line):
                base = "code" if is_part else posixpath.dirname(name)
                todo.append(posixpath.normpath(posixpath.join(base, target)))
    return names


def _minified(name: str) -> bytes:
    content = (FOLDER / name).read_bytes()
    if "/vendor/" in name or not name.endswith((".js", ".css")):
        return content
    minify = minify_script if name.endswith(".js") else minify_style
    return minify(content.decode()).encode()


def _model_address(model: Path | str) -> str:
    if isinstance(model, Path):
        if model.suffix.lower() != ".gguf":
            raise UnspoolError(f"the page in a tab needs a GGUF file, got {model}")
        return f"model/{quote(model.name)}"
    parts = urlsplit(model)
    if parts.scheme != "https" or not parts.netloc or not parts.path.lower().endswith(".gguf"):
        raise UnspoolError(f"--model-url must be the https address of a GGUF file, got {model}")
    return model


def _index(model: str, names: set[str]) -> str:
    """The page's document with relative addresses, its policy and its model."""
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    for link, name in re.findall(rf'(<link rel="stylesheet" href="{PREFIX}(.*?)">\n)', page):
        page = page if name in names else page.replace(link, "")
    tags = (
        f'<meta http-equiv="content-security-policy" content="{html.escape(_POLICY)}">\n'
        f'<meta name="referrer" content="no-referrer">\n'
        f'<meta name="unspool-model" content="{html.escape(model)}">\n'
    )
    page = page.replace('<meta name="viewport"', f'{tags}<meta name="viewport"', 1)
    page = page.replace('Without it, use <a href="/docs">the HTTP API</a>.', "")
    return page.replace(f'"{PREFIX}', f'"{PREFIX[1:]}')


def _with_file_list(service_worker: str, files: dict[str, bytes]) -> str:
    """The service worker with the files that it keeps; another version replaces all of them."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    version, names = (
        digest.hexdigest()[:16],
        ["./", *(name for name in sorted(files) if name != "index.html")],
    )
    head = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(names)};\n"
    return head + service_worker


def _copy_model(source: Path, target: Path) -> None:
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
