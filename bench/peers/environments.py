"""Each engine: what it is installed from, and how it gets the weights.

Engines live in virtual environments of their own, made once and kept; so are the weights in the
form that each wants. What cannot be made here raises `UnavailableError` with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
# The newest torch for this processor may bring gigabytes for GPUs with it; this one does not.
TORCH = "torch==2.13.0"


class UnavailableError(Exception):
    """An engine cannot be had here, and why."""


@dataclass(frozen=True)
class Peer:
    """An engine beside which we measure."""

    key: str
    title: str
    script: str
    weights: str  # what it computes with, in words
    model: str  # its folder below models/, "hf" for the unpacked weights, "gguf" for the file
    home: str = ""  # the environment's folder, where two share one
    packages: tuple[str, ...] = ()
    converter: tuple[str, ...] = ()  # packages; empty: nothing to convert
    conversion: tuple[str, ...] = ()  # the command, in the converter's environment
    unwanted: tuple[str, ...] = ()  # packages that come along and break the converter
    options: tuple[str, ...] = ()
    building: dict[str, str] = field(default_factory=dict)  # environment of pip

    @property
    def folder(self) -> str:
        return self.home or self.key


US = Peer("us", "**Unspool**", "us.py", "Q4_1", "gguf")
PEERS = (
    US,
    Peer(
        "llama_cpp", "llama.cpp", "llama_cpp_.py", "Q4_1", "gguf",
        packages=("llama-cpp-python==0.3.36",),
        building={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    Peer(
        "onnxruntime", "onnxruntime-genai", "onnxruntime_.py", "int4", "onnxruntime-int4",
        packages=("onnxruntime-genai==0.18.0",),
        converter=(TORCH, "transformers==5.22.2", "onnxruntime-genai==0.18.0", "onnx", "onnx-ir"),
        conversion=(
            "python", "-m", "onnxruntime_genai.models.builder",
            "-i", "{hf}", "-o", "{out}", "-p", "int4", "-e", "cpu", "-c", "{out}.cache",
        ),
    ),
    Peer(
        "ctranslate2", "ctranslate2", "ctranslate2_.py", "int8", "ctranslate2-int8",
        packages=("ctranslate2==4.8.4", "tokenizers"),
        converter=(TORCH, "transformers==5.22.2", "ctranslate2==4.8.4"),
        conversion=(
            "ct2-transformers-converter", "--model", "{hf}", "--output_dir", "{out}",
            "--quantization", "int8", "--copy_files", "tokenizer.json", "--force",
        ),
    ),
    Peer(
        "openvino", "openvino-genai", "openvino_.py", "int4, table int8", "openvino-int4",
        packages=("openvino-genai==2026.4.1.0",),
        converter=(TORCH, "optimum-intel[openvino,nncf]==2.2.0", "openvino-tokenizers==2026.4.1.0"),
        unwanted=("torchvision",),
        conversion=(
            "optimum-cli", "export", "openvino", "--model", "{hf}",
            "--task", "text-generation-with-past", "--weight-format", "int4",
            "--group-size", "64", "--ratio", "1.0", "{out}",
        ),
    ),
    Peer(
        "transformers_bf16", "transformers bf16", "transformers_.py", "bf16", "hf",
        home="transformers", packages=(TORCH, "transformers==5.22.2"),
        options=("--dtype", "bfloat16"),
    ),
    Peer(
        "transformers_fp32", "transformers fp32", "transformers_.py", "fp32", "hf",
        home="transformers", packages=(TORCH, "transformers==5.22.2"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """An engine that can be started."""

    peer: Peer
    python: str
    model: str

    def command(self, threads: int) -> list[str]:
        script = str(HERE / self.peer.script)
        given = ["--model", self.model, "--threads", str(threads), *self.peer.options]
        return [self.python, script, *given]

    def cold(self, threads: int) -> list[str]:
        """What shows the first token soonest: our own command, or the worker's short way."""
        if self.peer is US:
            given = ["Hi", "--raw", "-n", "1", "-t", "0", "-q", "--model", self.model]
            return [self.python, "-m", "unspool", *given]
        return [*self.command(threads), "--cold", "Hi"]


def environment(threads: int) -> dict[str, str]:
    """What a worker's process sees: the thread count, for libraries that only look there."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads)), "PYTHONUNBUFFERED": "1"}


def prepare(peer: Peer, folder: Path, gguf: Path, installed: bool) -> Ready:
    """Install an engine and convert the weights for it, where that was not done before.

    With `installed`, engines are taken from the Python that runs this, and nothing is installed.
    """
    if peer is US or installed:
        python = sys.executable
    else:
        python = make_environment(folder / peer.folder, peer.packages, peer.building, ())
    if peer.model == "gguf":
        return Ready(peer, python, str(gguf))
    hf = folder / "models" / "hf"
    if not (hf / "model.safetensors").exists() and not (folder / "models" / peer.model).exists():
        _unpack(gguf, hf)
    if peer.model == "hf":
        return Ready(peer, python, str(hf))
    out = folder / "models" / peer.model
    if not out.exists():
        if installed:
            raise UnavailableError(f"{out} is not there, and nothing is converted with --installed")
        _convert(peer, folder, hf, out)
    return Ready(peer, python, str(out))


def make_environment(
    home: Path, packages: tuple[str, ...], building: dict[str, str], unwanted: tuple[str, ...]
) -> str:
    """The Python of a virtual environment with these packages."""
    python, note = home / "bin" / "python", home / "packages.txt"
    wanted = "\n".join(packages)
    if note.exists() and note.read_text(encoding="utf-8") == wanted and python.exists():
        return str(python)
    say(f"installing {', '.join(packages)} (once)")
    shutil.rmtree(home, ignore_errors=True)
    _do([sys.executable, "-m", "venv", str(home)], f"{home.name}: no virtual environment")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _do([*pip, *packages], "cannot be installed", building)
    if unwanted:
        remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted]
        _do(remove, "cannot be installed")
    note.write_text(wanted, encoding="utf-8")
    return str(python)


def _unpack(gguf: Path, hf: Path) -> None:
    """The GGUF file's numbers in 32 bits, as a folder that transformers reads."""
    say("unpacking the weights into 32 bits (once)")
    code = (
        "import sys, unspool; "
        "unspool.load(sys.argv[1], backend='torch', dtype='float32').save(sys.argv[2])"
    )
    hf.parent.mkdir(parents=True, exist_ok=True)
    fresh = hf.with_name("hf.part")
    shutil.rmtree(fresh, ignore_errors=True)
    _do([sys.executable, "-c", code, str(gguf), str(fresh)], "the weights cannot be unpacked")
    fresh.rename(hf)


def _convert(peer: Peer, folder: Path, hf: Path, out: Path) -> None:
    home = folder / f"{peer.folder}-convert"
    python = make_environment(home, peer.converter, {}, peer.unwanted)
    say(f"converting the weights for {peer.title} (once)")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    words = [word.format(hf=hf, out=part) for word in peer.conversion]
    tool = Path(python).with_name(words[0])
    _do([str(tool), *words[1:]], "the weights cannot be converted", {"HF_HUB_OFFLINE": "1"})
    part.rename(out)


def _do(command: list[str], what: str, more: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env={**os.environ, **(more or {})}, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise UnavailableError(f"{what}: {errors[-1][:300] if errors else 'no reason was given'}")


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def draw(script: Path, results: Path, folder: Path, environments: Path) -> None:
    """Plots are drawn in an environment of their own: nothing else needs matplotlib."""
    try:
        python = make_environment(environments / "plot", ("matplotlib",), {}, ())
    except UnavailableError as reason:
        say(f"no plots: matplotlib {reason}")
        return
    if subprocess.run([python, script, str(results), str(folder)]).returncode:
        say("no plots: drawing failed")
