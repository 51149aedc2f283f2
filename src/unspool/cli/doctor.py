"""`unspool doctor`: describe the installation, and what is broken or slow.

Torch is not imported unless `--torch` asks for it: its version and its CUDA version are read from
its files.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

import typer

from unspool import __version__, native
from unspool.cli import options as o
from unspool.cli.output import print_columns, print_json
from unspool.errors import count

_TIMEOUT_S = 10.0  # of the programs that are asked
_MIN_FREE_BYTES = 500_000_000  # the default model and its KV cache
_MAX_LISTED_MODELS = 6
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
# Instruction sets that every library for the processor has, the fastest first, and their flag in
# /proc/cpuinfo. AMX is not among them: the system may refuse it.
_CPU_FLAGS = {
    "avx512": "avx512_vnni", "avxvnni": "avx_vnni", "avx2": "avx2", "i8mm": "i8mm",
    "neon": "asimddp",
}  # fmt: skip
# "CPU part" of ARM's own cores in /proc/cpuinfo, which has no names.
_ARM_PARTS = {
    "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1", "0xd41": "Cortex-A78", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2",
    "0xd84": "Neoverse V3", "0xd8e": "Neoverse N3",
}  # fmt: skip
_CUDA_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu128"


@dataclass(frozen=True)
class Problem:
    """Something that is broken or slow, and how to fix it."""

    kind: str  # broken: nothing can run; slow: it runs, but slower than it could
    reason: str
    fix: str


@dataclass
class Diagnosis:
    """One line for each fact, the same facts for programs, and the problems."""

    lines: list[list[str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, line: str, /, **facts: Any) -> None:
        self.lines.append([name, line])
        self.facts[name] = facts

    def add_problem(self, kind: str, reason: str, fix: str) -> None:
        self.problems.append(Problem(kind, reason, fix))


def doctor(
    torch: Annotated[
        bool, typer.Option("--torch", help="Import torch, and ask it for its GPUs (seconds).")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Describe this installation, and say what is slow and why.

    One line for each fact, then one for each problem. The exit code is 1 if there is a problem.

    [b]Examples[/b]

      unspool doctor
      unspool doctor --torch
      unspool doctor --json
    """
    report = Diagnosis()
    _add_software(report)
    _add_processor(report)
    _add_memory(report)
    _add_gpu(report, import_torch=torch)
    _add_models(report)
    if as_json:
        print_json({**report.facts, "problems": [asdict(problem) for problem in report.problems]})
    else:
        for problem in report.problems:
            report.lines.append([problem.kind, f"{problem.reason}: {problem.fix}"])
        if not report.problems:
            report.lines.append(["result", "no problems"])
        print_columns(report.lines)
    if report.problems:
        raise typer.Exit(1)


# -- software, processor, memory -------------------------------------------------------------------


def _add_software(report: Diagnosis) -> None:
    package = Path(__file__).parents[1]
    report.add("unspool", f"{__version__}, {package}", version=__version__, path=str(package))
    python = platform.python_version()
    report.add("python", f"{python}, {sys.executable}", version=python, path=sys.executable)
    libc = " ".join(platform.libc_ver()).strip()
    system, machine = f"{platform.system()} {platform.release()}", platform.machine()
    line = ", ".join(part for part in (system, machine, libc) if part)
    report.add("system", line, name=system, machine=machine, libc=libc or None)


def _add_processor(report: Diagnosis) -> None:
    from unspool.backends.cpu.threads import choose_threads

    name, num_processors, threads = _processor_name(), os.cpu_count() or 1, choose_threads(None)
    report.add(
        "processor", f"{name}, {count(num_processors, 'logical processor')}",
        name=name, logical_processors=num_processors,
    )  # fmt: skip
    _add_native(report)
    report.add("threads", f"{threads} (one for each core that this process may use)", used=threads)


def _add_native(report: Diagnosis) -> None:
    compiler, version = native.compiler_on_path(), None
    if compiler:
        version = (_output_of(compiler, "--version") or compiler).splitlines()[0]
    reason = native.missing_reason()
    if reason is None:
        used, available = native.instruction_set(), native.available_instruction_sets()
        line = f"{used} (available: {', '.join(available)})"
        report.add("instructions", line, used=used, available=available)
        size, builder = native.path().stat().st_size, native.compiler()
        report.add(
            "kernels", f"{native.path()}, {size / 1e6:.1f} MB, built with {builder}",
            path=str(native.path()), bytes=size, compiler=builder, missing=None,
        )  # fmt: skip
        if used != available[0]:
            report.add_problem(
                "slow", f"UNSPOOL_ISA={os.environ.get('UNSPOOL_ISA')} selects {used}, and this "
                f"processor has {available[0]}", "unset UNSPOOL_ISA",
            )  # fmt: skip
        if missing_set := _missing_instruction_set(available):
            report.add_problem(
                "slow", f"this processor has {missing_set}, and the kernels were compiled without "
                "it, on another machine or by an old compiler",
                "install a wheel, or install from source on this machine",
            )  # fmt: skip
    else:
        report.add("instructions", "unknown without the native kernels", used=None, available=None)
        report.add("kernels", "missing", path=None, bytes=None, compiler=None, missing=reason)
        has_torch = util.find_spec("torch") is not None
        message, _, fix = reason.rpartition("; ")
        consequence = "torch runs models instead" if has_torch else "no model can run"
        report.add_problem("slow" if has_torch else "broken", f"{message}; {consequence}", fix)
    report.add(
        "compiler", version or "none (not needed with a wheel)", name=compiler, version=version
    )


def _missing_instruction_set(available: list[str]) -> str | None:
    """The best instruction set of the processor, if the library has neither it nor a better one."""
    try:
        flags = set(_CPUINFO.read_text(encoding="utf-8").split())
    except OSError:
        return None
    for name, flag in _CPU_FLAGS.items():
        if name in available:
            return None
        if flag in flags:
            return name
    return None


def _processor_name() -> str:
    if sys.platform == "darwin":
        return (_output_of("sysctl", "-n", "machdep.cpu.brand_string") or "Apple").strip()
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    part = fields.get("CPU part", "")
    if fields.get("CPU implementer") == "0x41" and part in _ARM_PARTS:
        return f"ARM {_ARM_PARTS[part]}"
    return fields.get("model name") or platform.processor() or platform.machine()


def _add_memory(report: Diagnosis) -> None:
    from unspool.model.hub.memory import format_bytes, free_memory

    free, total = free_memory(), _total_memory()
    line = f"{format_bytes(free)} free" + (f" of {format_bytes(total)}" if total else "")
    report.add("memory", line, free_bytes=free, total_bytes=total)
    if free < _MIN_FREE_BYTES:
        report.add_problem(
            "slow", f"only {format_bytes(free)} of memory are free", "end other programs",
        )  # fmt: skip


def _total_memory() -> int | None:
    """Physical memory in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


# -- GPU, torch, triton ----------------------------------------------------------------------------


def _add_gpu(report: Diagnosis, *, import_torch: bool) -> None:
    from unspool.backends.placement import INSTALL_TORCH, has_nvidia_driver

    gpus = _nvidia_gpus()
    has_gpu = bool(gpus) or has_nvidia_driver()
    line = "; ".join(f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in gpus)
    report.add("gpu", line or ("a driver without nvidia-smi" if has_gpu else "none"), gpus=gpus)
    torch, triton, cuda = _version_of("torch"), _version_of("triton"), _cuda_of_torch()
    if torch is None:
        torch_line = "not installed (needed for GPUs and training)"
    else:
        torch_line = f"{torch}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    report.add("torch", torch_line, version=torch, cuda=cuda)
    report.add("triton", triton or "not installed", version=triton)
    if has_gpu and torch is None:
        report.add_problem("slow", "a GPU is not used without torch", INSTALL_TORCH)
    elif has_gpu and cuda is None:
        report.add_problem("slow", f"torch {torch} was built without CUDA, and there is a GPU",
                           _CUDA_TORCH)  # fmt: skip
    elif has_gpu and triton is None:
        report.add_problem("slow", "the GPU kernels need Triton", "pip install triton")
    if import_torch:
        _add_torch_devices(report, has_gpu=has_gpu)


def _add_torch_devices(report: Diagnosis, *, has_gpu: bool) -> None:
    """Ask torch itself: a driver that is too old shows only here."""
    try:
        import torch
    except ImportError as error:
        report.add("devices", "torch cannot be imported", names=[])
        if _version_of("torch") is not None:
            report.add_problem("broken", f"torch cannot be imported ({error})", "install it again")
        return
    from unspool.backends.cuda.availability import why_unavailable

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(number) for number in range(num_gpus)]
    report.add("devices", ", ".join(["cpu", *names]), names=names)
    reason = why_unavailable("cuda:0") if names else None
    if reason:
        report.add_problem("slow", "the GPU kernels cannot run", reason)
    elif has_gpu and not names and _cuda_of_torch():
        report.add_problem(
            "slow", f"torch cannot use the GPU (its CUDA is {torch.version.cuda})",
            "update the NVIDIA driver, or install a torch for an older CUDA",
        )  # fmt: skip


def _nvidia_gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU, from nvidia-smi."""
    query = "--query-gpu=name,memory.total,driver_version"
    lines = (_output_of("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    names = ("name", "memory", "driver")
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """The CUDA version of the installed torch, read from its file; None: built without CUDA."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *'([^']+)'", source, re.MULTILINE)
    return match[1] if match else None


# -- models ----------------------------------------------------------------------------------------


def _add_models(report: Diagnosis) -> None:
    from unspool.model.hub.download import DEFAULT, cache_folder
    from unspool.model.hub.find import cached_models
    from unspool.model.hub.memory import format_bytes

    models = cached_models(include_unusable=True)
    usable = [model for model in models if not model.problem]
    names = [f"{model.name} ({model.source})" for model in usable if model.source != "shipped"]
    listed = names[:_MAX_LISTED_MODELS]
    if len(names) > len(listed):
        listed.append(f"{len(names) - len(listed)} more (unspool models list)")
    num_shipped = len(usable) - len(names)
    listed.append(f"{num_shipped} shipped")
    if not any(model.name == DEFAULT.name for model in usable):
        listed.append(f"the first prompt downloads {DEFAULT.name} ({format_bytes(DEFAULT.size)})")
    report.add(
        "models", ", ".join(listed),
        models=[{"name": model.name, "source": model.source, "path": str(model.path),
                 "bytes": model.bytes, "problem": model.problem or None} for model in models],
    )  # fmt: skip
    for model in models:
        if model.problem and model.source == "unspool":
            report.add_problem("broken", f"{model.name}: {model.problem}",
                               f"unspool models rm {model.name}")  # fmt: skip
    cache = cache_folder()
    files = [path for path in cache.rglob("*") if path.is_file()] if cache.is_dir() else []
    size = sum(path.lstat().st_size for path in files)
    report.add("cache", f"{cache}, {format_bytes(size)}", path=str(cache), bytes=size)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        report.add_problem("broken", f"the cache folder {cache} cannot be written",
                           "set UNSPOOL_CACHE to another folder")  # fmt: skip


def _output_of(*command: str) -> str | None:
    """Standard output of a program; None if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None
