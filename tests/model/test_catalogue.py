"""The catalogue says what is true, as far as it can be worked out, and its names are understood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.catalogue_shapes import SHAPES
from unspool.errors import UnspoolError
from unspool.model.families.registry import FAMILIES
from unspool.model.files.config_json import config_from_hf
from unspool.model.hub import find, memory, repository
from unspool.model.hub.catalogue import catalogue, display_name, find_entries, strip_hub_url
from unspool.model.hub.memory import READABLE, is_readable, kind_in_name
from unspool.model.hub.repository import RepoName, choose_files
from unspool.model.weights import parameter_count

ROOT = Path(__file__).parents[2]


def test_figures_follow_from_the_shapes() -> None:
    assert SHAPES.keys() == catalogue().keys()
    for name, entry in catalogue().items():
        config = config_from_hf(SHAPES[name])
        assert (entry.parameters, entry.family) == (parameter_count(config), config.family), name
        assert entry.kv_bytes == 2 * config.kv_floats_per_token, name
        assert entry.state_bytes == config.state_bytes, name


# Bits a weight of a file of this kind; more where small models keep tables of words in more bits.
BITS = {
    "Q4_1": (5, 6),
    "Q4_K_M": (4.7, 8),
    "Q8_0": (8.49, 11),
    "MXFP4_MOE": (4.3, 5),
    "F16": (16, 19),
    "F32": (32, 36),
}


def test_sizes_are_possible() -> None:
    for entry in catalogue().values():
        for kind, size in entry.size.items():
            least, most = BITS[kind]
            assert least <= size * 8e9 / entry.parameters <= most, (entry.name, kind)


def test_only_what_can_be_run_is_in_it() -> None:
    for entry in catalogue().values():
        assert set(entry.size) <= set(READABLE)
        assert RepoName.parse(entry.repository), entry.name
        assert entry.family in FAMILIES, entry.name
        assert re.fullmatch(r"[a-z0-9.-]+", entry.name)


@pytest.mark.parametrize(
    ("name", "expected", "kind"),
    [
        ("qwen3-0.6b", ["qwen3-0.6b"], None),
        ("QWEN3:0.6B", ["qwen3-0.6b"], None),
        ("qwen3-0", ["qwen3-0.6b"], None),
        ("qwen3:0.6b-q8_0", ["qwen3-0.6b"], "Q8_0"),
        ("llama-3.2-1b-instruct:Q4_K_M", ["llama3.2-1b"], "Q4_K_M"),
        ("llama3.2", ["llama3.2-1b", "llama3.2-3b"], None),
        ("phi4", ["phi4"], None),
        ("gemma3:4b-it", ["gemma3-4b"], None),
        ("mistral-nemo:latest", ["mistral-nemo-12b"], None),
        ("d", [], None),
        ("nothing", [], None),
    ],
)
def test_names_are_understood(name: str, expected: list[str], kind: str | None) -> None:
    entries, requested_kind = find_entries(name)
    assert [entry.name for entry in entries] == expected
    assert requested_kind == kind


def test_what_is_not_clear_is_told() -> None:
    with pytest.raises(UnspoolError, match=r"ambiguous: give one of llama3\.2-1b, llama3\.2-3b"):
        find.find_model("llama3.2", offline=True)
    with pytest.raises(UnspoolError, match=r"did you mean qwen3-0\.6b"):
        find.find_model("qwen3-0.6bb", offline=True)
    with pytest.raises(UnspoolError, match="not a URL of the hub"):
        find.find_model("https://example.org/model.gguf", offline=True)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("hf.co/org/name:latest", "org/name"),
        ("huggingface.co/org/name", "org/name"),
        ("https://huggingface.co/org/name", "org/name"),
        ("https://hf.co/org/name/", "org/name"),
        ("https://huggingface.co/org/name/tree/main", "org/name"),
        ("https://huggingface.co/org/name/blob/main/a/m.gguf", "org/name/a/m.gguf"),
        ("https://huggingface.co/org/name/resolve/v1/m.gguf?download=true", "org/name/m.gguf@v1"),
        ("hf://org/name", "org/name"),
        ("org/name:Q8_0", "org/name:Q8_0"),
    ],
)
def test_addresses_as_others_write_them(written: str, plain: str) -> None:
    assert strip_hub_url(written) == plain
    assert RepoName.parse(plain)


def test_kinds_in_names() -> None:
    for name, kind in {
        "n-Q4_K_M.gguf": "Q4_K_M",
        "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf": "Q4_K_M",
        "Q8_0/n-00001-of-00002.gguf": "Q8_0",
        "n-fp16.gguf": "F16",
        "n-IQ4_XS.gguf": "IQ4_XS",
        "n-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "n-Q4_0_4_4.gguf": "Q4_0_4_4",
        "Qwen3-0.6B.gguf": None,
    }.items():
        assert kind_in_name(name) == kind
    for kind in ("Q4_K_M", "IQ4_XS", "MXFP4_MOE", "NVFP4", "Q1_0", "UD-IQ2_M", None):
        assert is_readable(kind)
    for kind in ("Q4_0_4_4", "IQ4_NL_4_4", "Q2_0"):
        assert not is_readable(kind)


GB = 1_000_000_000
FILES = {
    "m-Q2_K.gguf": 3 * GB, "m-Q4_0.gguf": 45 * GB // 10, "m-Q4_K_M.gguf": 5 * GB,
    "m-Q5_K_M.gguf": 6 * GB, "m-Q8_0.gguf": 9 * GB, "m-F16.gguf": 16 * GB,
    "m-Q4_0_4_4.gguf": 4 * GB, "m-UD-Q4_K_XL.gguf": 5 * GB, "mmproj-F16.gguf": GB,
}  # fmt: skip


def best_file(monkeypatch: pytest.MonkeyPatch, free: float, files: dict[str, int]) -> str | None:
    monkeypatch.setattr(repository, "free_memory", lambda: int(free * GB))
    return choose_files(RepoName("org/name"), files).file


def test_the_best_file_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_file(monkeypatch, 64, FILES) == "m-Q4_K_M.gguf"
    assert best_file(monkeypatch, 5.5, FILES) == "m-Q4_0.gguf", "Q4_K_M does not fit"
    small = {file: size // 20 for file, size in FILES.items()}
    assert best_file(monkeypatch, 64, small) == "m-Q8_0.gguf", "few weights need more bits"
    assert best_file(monkeypatch, 64, {"m-Q4_0_4_4.gguf": 4 * GB, "m-F16.gguf": GB}) == "m-F16.gguf"
    some = {"m-IQ4_XS.gguf": 4 * GB, "m-IQ2_M.gguf": 2 * GB, "m-F16.gguf": 16 * GB}
    assert best_file(monkeypatch, 64, some) == "m-IQ4_XS.gguf"
    assert best_file(monkeypatch, 4.4, some) == "m-IQ2_M.gguf"
    assert best_file(monkeypatch, 1, dict.fromkeys(FILES, 0)) == "m-Q4_K_M.gguf", "sizes not told"
    with pytest.raises(UnspoolError, match=r"none of the 6 .* fits the 2\.0 GB.*org/name:Q2_K"):
        best_file(monkeypatch, 2, FILES)
    monkeypatch.setattr(repository, "free_memory", lambda: 64 * GB)
    here = choose_files(RepoName("org/name"), FILES, cached={"m-Q8_0.gguf"})
    assert here.file == "m-Q8_0.gguf", "what is here need not be fetched"


def test_whether_it_fits_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalogue()["qwen3-4b"]
    assert entry.best(64 * GB) == ("Q4_K_M", True)
    assert entry.best(1 * GB) == ("Q4_K_M", False)
    weights, text = memory.loaded_bytes(entry.bytes("Q4_K_M"), "Q4_K_M"), 4096 * entry.kv_bytes
    assert weights + text < entry.required_bytes("Q4_K_M") < weights + text + GB // 5


def test_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_memory() > 0, "not told"
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert memory.free_memory() == 8000 * 1024
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() == 8000 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert memory.free_memory() == 8000, "the container's limit"


def test_memory_of_kinds_is_what_the_kernels_take() -> None:
    from unspool import native

    if native.missing_reason():
        pytest.skip("no native library")
    import ctypes

    from unspool.backends.cpu.packing import PACKINGS, _library
    from unspool.model.files.gguf import BLOCK_TYPES

    for block in BLOCK_TYPES.values():
        matrix = PACKINGS[block.name].matrix(1024, 1024)
        packed = _library().unspool_packed_bytes(ctypes.byref(matrix))
        in_file = 1024 * 1024 * block.size // block.elements
        assert memory.loaded_bytes(in_file, block.name) == pytest.approx(packed, rel=0.15)


def test_names_for_people(tmp_path: Path) -> None:
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    (tmp_path / "m.Q8.gguf").touch()
    blob = tmp_path / "sha256-0"
    blob.touch()
    for value, path, listing in [
        (str(tmp_path / "Qwen2.5-0.5B"), tmp_path / "Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("", tmp_path / "m.Q8.gguf", "m.Q8"),
        ("ollama/llama3.2:1b", blob, "llama3.2:1b"),
        ("hf.co/org/name", tmp_path, "name"),
    ]:
        assert display_name(value, path) == listing


def test_the_guide_shows_the_catalogue() -> None:
    """docs/how-to/choose-a-model.md has the table that the catalogue gives; a failure prints it."""
    lines = [
        "| name | parameters | file | memory | context | licence | for |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in catalogue().values():
        kind, _ = entry.best(1 << 60)
        size = f"{kind}, {memory.format_bytes(entry.bytes(kind))}"
        needs = memory.format_bytes(entry.required_bytes(kind))
        count = entry.parameters
        many = f"{count / 1e9:.1f} B" if count >= 950_000_000 else f"{count / 1e6:.0f} M"
        context = f"{entry.context:,}"
        cells = (f"`{entry.name}`", many, size, needs, context, entry.licence, entry.use)
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    guide = (ROOT / "docs" / "how-to" / "choose-a-model.md").read_text(encoding="utf-8")
    assert table in guide, f"the table should be:\n{table}"
