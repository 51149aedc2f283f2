"""Peer engines: how each is installed, how it gets the weights, and its worker process.

Each engine has a virtual environment, created once and kept, and so are the converted weights.
`UnavailableError` gives the reason if an engine cannot be installed here.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lib.report import say

# The newest torch for this processor may bring gigabytes for GPUs with it; this version does not.
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.22.2"
START_S, JOB_S = 300.0, 900.0  # loading may include compiling graphs
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "unspool-bench"


class UnavailableError(Exception):
    """An engine cannot be installed here, and why."""


class WorkerError(Exception):
    """An engine could not do a job."""


@dataclass(frozen=True)
class Peer:
    """An engine that is compared."""

    key: str
    title: str
    weights: str  # precision, for the table
    model: str  # folder below models/, "hf" for dequantized weights, "gguf" for the file
    packages: tuple[str, ...] = ()
    converter: tuple[str, ...] = ()  # packages; empty: nothing to convert
    conversion: tuple[str, ...] = ()  # command, run in the converter's environment
    unneeded: tuple[str, ...] = ()  # packages that break the converter
    options: tuple[str, ...] = ()
    pip_environment: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """Name of the worker; both precisions of transformers share one, and an environment."""
        return "transformers" if self.key.startswith("transformers") else self.key


US = Peer("us", "**Unspool**", "Q4_1", "gguf")
LLAMA = Peer(
    "llama_cpp", "llama.cpp", "Q4_1", "gguf", packages=("llama-cpp-python==0.3.36",),
    pip_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
)  # fmt: skip
PEERS = (
    US,
    LLAMA,
    Peer(
        "onnxruntime", "onnxruntime-genai", "int4", "onnxruntime-int4",
        packages=("onnxruntime-genai==0.18.0",),
        converter=(TORCH, TRANSFORMERS, "onnxruntime-genai==0.18.0", "onnx", "onnx-ir"),
        conversion=(
            "python", "-m", "onnxruntime_genai.models.builder",
            "-i", "{hf}", "-o", "{out}", "-p", "int4", "-e", "cpu", "-c", "{out}.cache",
        ),
    ),
    Peer(
        "ctranslate2", "ctranslate2", "int8", "ctranslate2-int8",
        packages=("ctranslate2==4.8.4", "tokenizers"),
        converter=(TORCH, TRANSFORMERS, "ctranslate2==4.8.4"),
        conversion=(
            "ct2-transformers-converter", "--model", "{hf}", "--output_dir", "{out}",
            "--quantization", "int8", "--copy_files", "tokenizer.json", "--force",
        ),
    ),
    Peer(
        "openvino", "openvino-genai", "int4, table int8", "openvino-int4",
        packages=("openvino-genai==2026.4.1.0",),
        converter=(TORCH, "optimum-intel[openvino,nncf]==2.2.0", "openvino-tokenizers==2026.4.1.0"),
        unneeded=("torchvision",),
        conversion=(
            "optimum-cli", "export", "openvino", "--model", "{hf}",
            "--task", "text-generation-with-past", "--weight-format", "int4",
            "--group-size", "64", "--ratio", "1.0", "{out}",
        ),
    ),
    Peer(
        "transformers_bf16", "transformers bf16", "bf16", "hf", packages=(TORCH, TRANSFORMERS),
        options=("--dtype", "bfloat16"),
    ),
    Peer(
        "transformers_fp32", "transformers fp32", "fp32", "hf", packages=(TORCH, TRANSFORMERS),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class InstalledPeer:
    """An engine that can be started."""

    peer: Peer
    python: str
    model: str

    def command(self, threads: int) -> list[str]:
        script = str(Path(__file__).with_name("engines.py"))
        options = ["--model", self.model, "--threads", str(threads), *self.peer.options]
        return [self.python, script, self.peer.engine, *options]

    def cold_command(self, threads: int) -> list[str]:
        """Fastest way to a first token: our command line, or the worker's short path."""
        if self.peer is US:
            options = ["Hi", "--raw", "-n", "1", "-t", "0", "-q", "--model", self.model]
            return [self.python, "-m", "unspool", *options]
        return [*self.command(threads), "--cold", "Hi"]

    def start(self, threads: int) -> "Worker":
        return Worker(self.command(threads), thread_environment(threads))


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables with the thread count, for libraries that only read it there."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    env = {**os.environ, **dict.fromkeys(names, str(threads)), "PYTHONUNBUFFERED": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else a cold start would compile our modules
    return env


def install(peer: Peer, folder: Path, gguf: Path, installed: bool = False) -> InstalledPeer:
    """Install an engine and convert the weights for it, unless that was done before.

    With `installed`, engines are those of the running Python, and nothing is installed.
    """
    python = sys.executable
    if peer is not US and not installed:
        python = make_environment(folder / peer.engine, peer.packages, peer.pip_environment)
    if peer.model == "gguf":
        return InstalledPeer(peer, python, str(gguf))
    hf, out = _models_of(gguf, folder) / "hf", _models_of(gguf, folder) / peer.model
    if not (hf / "model.safetensors").exists() and not out.exists():
        say("dequantizing the weights to 32 bits (once)")
        code = (
            "import sys, unspool; "
            "unspool.load(sys.argv[1], backend='torch', dtype='float32').save(sys.argv[2])"
        )
        part = _empty_part(hf)
        run_command([sys.executable, "-c", code, str(gguf), str(part)], "weights not dequantized")
        part.rename(hf)
    if not out.exists():
        if installed:
            raise UnavailableError(f"{out} is missing, and --installed converts nothing")
        home = folder / f"{peer.engine}-convert"
        tools = Path(make_environment(home, peer.converter, {}, peer.unneeded)).parent
        say(f"converting the weights for {peer.title} (once)")
        part = _empty_part(out)
        tool, *words = [word.format(hf=hf, out=part) for word in peer.conversion]
        offline = {"HF_HUB_OFFLINE": "1"}
        run_command([str(tools / tool), *words], "the weights cannot be converted", offline)
        part.rename(out)
    return InstalledPeer(peer, python, str(out))


def make_environment(
    home: Path,
    packages: tuple[str, ...],
    variables: dict[str, str] | None = None,
    unneeded: tuple[str, ...] = (),
) -> str:
    """Create a virtual environment with these packages; return its Python."""
    python, note = home / "bin" / "python", home / "packages.txt"
    if note.exists() and note.read_text("utf-8") == "\n".join(packages) and python.exists():
        return str(python)
    say(f"installing {', '.join(packages)} (once)")
    shutil.rmtree(home, ignore_errors=True)
    run_command([sys.executable, "-m", "venv", str(home)], f"{home.name}: no virtual environment")
    pip = [str(python), "-m", "pip"]
    add = ["install", "--quiet", "--disable-pip-version-check", *packages]
    run_command([*pip, *add], "cannot be installed", variables)
    if unneeded:
        run_command([*pip, "uninstall", "--quiet", "--yes", *unneeded], "cannot be installed")
    note.write_text("\n".join(packages), encoding="utf-8")
    return str(python)


# Types of GGUF files, and llama.cpp's numbers of them (enum llama_ftype).
GGUF_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip
_QUANTIZE = """
import ctypes, sys, llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(
    sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)))
"""


def quantize_gguf(gguf: Path, kind: str, folder: Path, installed: bool = False) -> Path:
    """Have llama.cpp write the file in another type, unless that was done before."""
    out = _models_of(gguf, folder) / f"{gguf.stem}-{kind}.gguf"
    if not out.exists():
        python = install(LLAMA, folder, gguf, installed).python
        say(f"quantizing to {kind} (once)")
        part = out.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        number = str(GGUF_TYPES[kind])
        run_command([python, "-c", _QUANTIZE, str(gguf), str(part), number], "not quantized")
        part.rename(out)
    return out


def _models_of(gguf: Path, folder: Path) -> Path:
    """Folder of the files made from a model; another file may have its name."""
    return folder / "models" / f"{gguf.stat().st_size}-{gguf.stat().st_mtime_ns}"


def run_command(command: list[str], failure: str, variables: dict[str, str] | None = None) -> None:
    env = {**os.environ, **(variables or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise UnavailableError(f"{failure}: {errors[-1][:300] if errors else 'no reason given'}")


def _empty_part(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    return part


class Worker:
    """An engine in a process.

    Idle threads of an engine may spin and slow the engine that is measured, so a worker is
    suspended by a signal except while it runs a job.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr,
            env=environment,
        )  # fmt: skip
        self._buffer = b""
        try:
            ready = self._receive(START_S)
        except BaseException:
            self.close()
            raise
        self.engine: str = ready["engine"]
        self.weights: str | None = ready["weights"]
        self.load_s: float = ready["load_s"]
        self.weight_bytes: int = ready["weight_bytes"]
        self._signal(signal.SIGSTOP)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Resume the worker for one job."""
        self._signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._receive(JOB_S)
        except BrokenPipeError:
            raise WorkerError(exit_reason(self.process, self.stderr)) from None
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, also in the middle of a job."""
        if self.process.poll() is None:
            self.process.kill()  # works on a suspended process too
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        pipe, deadline = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerError(f"no answer within {timeout_s:.0f} s")
            data = os.read(pipe, 1 << 20)
            if not data:
                raise WorkerError(exit_reason(self.process, self.stderr))
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))


def exit_reason(process: subprocess.Popen[bytes], stderr: Any) -> str:
    """Exit status and the last line of stderr."""
    code = process.wait()
    stderr.seek(0)
    lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1].strip() if lines else "no message on stderr"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"ended with {how}: {reason[:300]}"


def cold_start(command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds from starting a process to the first byte that it writes."""
    with tempfile.TemporaryFile() as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            env=environment,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            elapsed = time.perf_counter() - start
            process.stdout.read()
            if process.wait() or not first:
                raise WorkerError(exit_reason(process, stderr))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return elapsed
