"""Environment variables as Markdown; a test compares the list with what the source reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docstrings import table

SOURCE = Path(__file__).parents[2] / "src" / "unspool"

VARIABLES = {
    "Models and files": {
        "UNSPOOL_CACHE": "Folder for downloads. Default: `unspool` in `XDG_CACHE_HOME` or "
        "`~/.cache` (macOS: `~/Library/Caches`, Windows: `LOCALAPPDATA`).",
        "XDG_CACHE_HOME": "The system's cache folder on Linux. See `UNSPOOL_CACHE`.",
        "LOCALAPPDATA": "The system's folder for caches and data on Windows. See `UNSPOOL_CACHE` "
        "and `UNSPOOL_STATE`.",
        "UNSPOOL_DEFAULT_MODEL": "File of the default model, or its package that you downloaded "
        "by hand.",
        "UNSPOOL_DEFAULT_DATA": "Package with the default training text that you downloaded by "
        "hand.",
        "UNSPOOL_STATE": "Folder of stored texts. Default: `unspool` in `XDG_DATA_HOME` or "
        "`~/.local/share` (macOS: `~/Library/Application Support`, Windows: `LOCALAPPDATA`).",
        "XDG_DATA_HOME": "The system's folder for data on Linux. See `UNSPOOL_STATE`.",
        "UNSPOOL_RUNS": "Folder of training runs. Default: `runs` in the current folder.",
        "HF_HOME": "Folder of Hugging Face files, shared with other programs.",
        "HF_HUB_CACHE": "Folder of models from the Hugging Face Hub, shared with other programs.",
        "HUGGINGFACE_HUB_CACHE": "Older name of `HF_HUB_CACHE`.",
        "OLLAMA_MODELS": "Folder of Ollama's models. They are used in place.",
        "LLAMA_CACHE": "Folder of llama.cpp's models. They are used in place.",
        "TIKTOKEN_CACHE_DIR": "Folder with OpenAI's vocabularies (`.tiktoken` files), for "
        "`unspool tokenize --vocabulary` and the web UI.",
    },
    "Server": {
        "UNSPOOL_API_KEY": "An API key that clients of `unspool serve` must send. `unspool ps` "
        "sends it.",
    },
    "Processor": {
        "UNSPOOL_ISA": "Instruction set of the CPU kernels: `plain`, `avx2`, `avxvnni`, `avx512`, "
        "`amx`, `neon` or `i8mm`. Default: the best one that the processor has.",
        "OMP_NUM_THREADS": "Threads of each process that holds a part of a model (tensor "
        "parallelism on CPUs). Default: the processes share the cores.",
    },
    "Several processes": {
        "RANK": "Number of this process. torchrun sets it.",
        "LOCAL_RANK": "Number of this process on this machine. torchrun sets it.",
        "WORLD_SIZE": "Number of processes. torchrun sets it.",
        "TORCHELASTIC_RUN_ID": "Name of the job. torchrun sets it.",
    },
    "Installation": {
        "UNSPOOL_KERNELS": "`native` during an installation from source: kernels for this machine "
        "only (the default); `all`: for every processor of this architecture, as in wheels.",
        "UNSPOOL_STRICT": "`ON` during installation: C++ warnings are on, and are errors.",
    },
    "Read by libraries": {
        "HF_TOKEN": "Your Hugging Face token, for gated or private models.",
        "HF_ENDPOINT": "Another address of the Hugging Face Hub, such as a mirror.",
        "HF_HUB_OFFLINE": "`1`: no network, as with `--offline`.",
        "HTTPS_PROXY": "Proxy for downloads.",
        "NO_PROXY": "Hosts that are reached without a proxy.",
        "NO_COLOR": "Any value: output without colours.",
        "CUDA_VISIBLE_DEVICES": "The GPUs that this process may use.",
    },
}
# Names in the source that users do not set.
INTERNAL = {
    "RAY_USAGE_STATS_ENABLED": "set for Ray",
    "RAY_DISABLE_IMPORT_WARNING": "set for Ray",
    "_UNSPOOL_COMPLETE": "set by shell completion",
    "UNSPOOL_SANITIZE": "CMake option for developers",
    "UNSPOOL_BLOCK_BYTES": "constant of the C++ sources",
}


def variables_in_source() -> set[str]:
    """Return the names of environment variables that the source reads, or that start UNSPOOL_."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"\b_?UNSPOOL_[A-Z_]+\b", text))
        if "environ" in text or "getenv" in text:
            names |= {name for node in ast.walk(ast.parse(text)) for name in _names_read(node)}
    for pattern in ("*.cpp", "*.h", "CMakeLists.txt"):
        for path in SOURCE.rglob(pattern):
            text = path.read_text(encoding="utf-8")
            names |= set(re.findall(r'getenv\("(\w+)"\)', text))
            names |= set(re.findall(r"option\((UNSPOOL_\w+)", text))
    return names


def _names_read(node: ast.AST) -> list[str]:
    """Return the names in `environ.get("X")`, `environ["X"]`, `getenv("X")`, `"X" in environ`."""
    candidates: list[ast.expr] = []
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.endswith("getenv") or re.search(r"\benviron\.(get|setdefault|pop)$", name):
            candidates = node.args[:1]
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        candidates = [node.slice]
    elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
        candidates = [node.left]
    constants = [c.value for c in candidates if isinstance(c, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def environment_page() -> str:
    """Return the page of environment variables."""
    parts = [
        "# Environment variables reference",
        "This page lists every environment variable that Unspool reads.",
    ]
    for heading, variables in VARIABLES.items():
        rows = [[f"`{name}`", text] for name, text in variables.items()]
        parts += [f"## {heading}", table(["Variable", "What it does"], rows)]
    return "\n\n".join(parts) + "\n"
