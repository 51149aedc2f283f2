"""MkDocs hooks: generated reference pages, navigation by folders, links into the repository.

    mkdocs build --strict

A page is added by writing it: the navigation lists the pages of `ORDER` first, then all others by
title. A folder without an `index.md` gets one that lists its pages with their first sentence.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import (
    BOOSTS,
    FOLDERS,
    GENERATED,
    INTRODUCTIONS,
    LOW_BOOSTS,
    ORDER,
    OTHERS,
    ROOT,
    generate,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and set the navigation."""
    for path in GENERATED:
        text = generate(path)
        if written := files.get_file_from_path(path):  # a hand-written introduction comes first
            text = _with_introduction(written.content_string, text)
            files.remove(written)
        files.append(File.generated(config, path, content=text))
    icon = (ROOT / "src/unspool/page/icon.svg").read_text(encoding="utf-8")  # of the web UI
    files.append(File.generated(config, "assets/icon.svg", content=icon))
    on_dark = icon.replace("#0f766e", "#ffffff").replace("#e08a1e", "#f4b860")
    files.append(File.generated(config, "assets/logo.svg", content=on_dark))
    pages = [file for file in files.documentation_pages() if file.inclusion.is_included()]
    for folder in FOLDERS:
        index = f"{folder}/index.md"
        if files.get_file_from_path(index) is None:
            members = [file for file in pages if file.src_uri.startswith(f"{folder}/")]
            text = _index(folder, members)
            files.append(File.generated(config, index, content=text))
    config.nav = _navigation([file for file in files.documentation_pages()])
    return files


def _with_introduction(written: str, generated: str) -> str:
    """Put the generated part below a page that is written by hand.

    A generated section is left out if the page has a section with the same heading.
    """
    body = generated.split("\n", 1)[1]
    start, *sections = re.split(r"^## ", body, flags=re.MULTILINE)
    headings = set(re.findall(r"^## (.+)$", written, re.MULTILINE))
    added = [text for text in sections if text.partition("\n")[0] not in headings]
    parts = [written.rstrip(), f"## Complete list\n\n{start.strip()}"]
    return "\n\n".join([*parts, *(f"## {text.strip()}" for text in added)]) + "\n"


def page_title(text: str) -> str:
    """Return the first heading of a page."""
    match = re.search(r"^# (.+?)(?: \{.*\})?$", text, re.MULTILINE)
    return match[1] if match else ""


def first_sentence(text: str) -> str:
    """Return the first sentence after the first heading."""
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    body = body.split("\n# ", 1)[-1] if not body.startswith("# ") else body
    body = body.partition("\n")[2]
    for block in re.split(r"\n\s*\n", body):
        plain = " ".join(block.split())
        if plain and not plain.startswith(("!", "#", "|", "```", "<", "-", ">", "**Note")):
            plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", plain)
            return re.split(r"(?<=[.!?])\s", plain, maxsplit=1)[0]
    return ""


def _grouped(folder: str, members: list[File]) -> dict[str, list[File]]:
    """Return the pages of a folder by heading: those of `ORDER`, then all others by title."""
    by_stem = {Path(file.src_uri).stem: file for file in members}
    groups = {}
    for heading, stems in ORDER.get(folder, {"": []}).items():
        groups[heading] = [by_stem.pop(stem) for stem in stems if stem in by_stem]
    others = sorted(by_stem.values(), key=lambda file: page_title(file.content_string).lower())
    heading = "" if "" in groups else OTHERS
    groups[heading] = groups.get(heading, []) + others
    return {heading: files for heading, files in groups.items() if files}


def _index(folder: str, members: list[File]) -> str:
    """Return the page of a folder: its pages with their first sentence."""
    lines = [f"# {FOLDERS[folder]}", "", INTRODUCTIONS[folder], ""]
    for heading, files in _grouped(folder, members).items():
        lines += [f"## {heading}", ""] if heading else []
        for file in files:
            target = posixpath.relpath(file.src_uri, folder)
            text = first_sentence(file.content_string)
            lines += [f"[{page_title(file.content_string)}]({target})", f":   {text}", ""]
    return "\n".join(lines)


def _navigation(pages: list[File]) -> list[Any]:
    """Return the navigation: home, the folders in order, then everything else."""
    navigation: list[Any] = [{"Home": "index.md"}]
    for folder, title in FOLDERS.items():
        members = [f for f in pages if f.src_uri.startswith(f"{folder}/")]
        index = f"{folder}/index.md"
        entries: list[Any] = [index]
        others = [f for f in members if f.src_uri != index]
        for heading, files in _grouped(folder, others).items():
            paths = [file.src_uri for file in files]
            entries += [{heading: paths}] if heading else paths
        navigation.append({title: entries})
    top_level = sorted(f.src_uri for f in pages if f.src_uri.partition("/")[0] not in FOLDERS)
    top_level.remove("index.md")
    return navigation + ([{"More": top_level}] if top_level else [])


def repository_url() -> str:
    """Return the address of the repository from pyproject.toml; empty if there is none."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {})
    names = ("repository", "source", "source code", "homepage")
    by_name = {name.lower(): str(url) for name, url in urls.items()}
    return next((by_name[name] for name in names if "github.com" in by_name.get(name, "")), "")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the repository's address from pyproject.toml."""
    if url := repository_url().rstrip("/"):
        config.repo_url = url
        config.repo_name = "/".join(url.split("/")[-2:])
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` to the repository; set how search ranks the page."""
    folder = page.file.src_uri.partition("/")[0]
    if folder in BOOSTS:
        page.meta.setdefault("search", {}).setdefault("boost", BOOSTS[folder])
    for path, boost in LOW_BOOSTS.items():
        if posixpath.basename(page.file.src_uri) == path:
            page.meta["search"] = {"boost": boost}
    if page.file.generated_by:
        return markdown
    here = posixpath.dirname(f"docs/{page.file.src_uri}")
    url = repository_url().rstrip("/")

    def replace(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        full = posixpath.normpath(posixpath.join(here, path))
        is_page = full.startswith("docs/") and not full.endswith(".py")
        if is_page or not (ROOT / full).exists():
            return match[0]
        if not url:
            return label
        kind = "tree" if (ROOT / full).is_dir() else "blob"
        return f"[{label}]({url}/{kind}/main/{full}{'#' + anchor if anchor else ''})"

    return re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)", replace, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Remove what no page loads: source maps, and stemmers of other languages."""
    scripts = Path(config.site_dir) / "assets" / "javascripts"
    for path in Path(config.site_dir).rglob("*.map"):
        path.unlink()
    shutil.rmtree(scripts / "lunr", ignore_errors=True)
