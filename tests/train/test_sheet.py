"""Sheets of samples: each model's own texts, the same prompts and seeds, as text and as a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

import unspool
from helpers import small_model as small
from unspool.errors import SettingsError
from unspool.train.evaluation.sample_sheet import named_models, write_sheet
from unspool.train.export import export_folder
from unspool.train.running.runs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sheet") / "model"
    small.save_model(folder)
    return folder


def test_each_text_is_what_the_model_writes_alone(folder: Path):
    prompts, seeds = ["The union", "a <b> & c"], [1, 2]
    sheet = write_sheet(
        {"one": folder, "two": folder}, prompts, seeds=seeds, max_tokens=8, temperature=1.0
    )
    with unspool.load(folder) as lm:
        for prompt in prompts:
            for seed in seeds:
                expected = lm.generate(prompt, seed=seed, max_tokens=8, temperature=1.0).text
                assert sheet.texts["one", prompt, seed] == expected
                assert sheet.texts["two", prompt, seed] == expected
    assert len(sheet.to_dict()) == 8
    printed = sheet.as_text()
    assert printed.count("seed 1") == 2
    assert printed.count("  two ") == 4


def test_the_page_shows_texts_as_they_are(folder: Path):
    sheet = write_sheet({"a<b": folder}, ["<script>x"], max_tokens=4)
    cells: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            cells.append(data)

        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag != "script"

    page = sheet.as_html("Samples")
    Reader().feed(page)
    assert "a<b" in cells
    assert cells.count("<script>x") == 2
    assert any(sheet.texts["a<b", "<script>x", 0] in cell for cell in cells)
    assert "prefers-color-scheme: dark" in page


def test_a_run_as_a_film(folder: Path, tmp_path: Path):
    run = Run.create(tmp_path / "run", "new")
    for step in (0, 10):
        checkpoint = run.folder / "checkpoints" / f"{step:06}"
        export_folder(folder, checkpoint)
        (checkpoint / "training.json").write_text(json.dumps({"step": step, "tokens": step}))
    result = named_models([str(run.folder)], film=True)
    assert list(result) == ["000000", "000010"]
    assert list(named_models([str(run.folder)])) == ["run"]
    assert write_sheet(result, ["The"], max_tokens=2).models == ("000000", "000010")
    with pytest.raises(SettingsError, match="at least one model"):
        write_sheet({}, ["The"])
