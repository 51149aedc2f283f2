"""Build the native library for the browser: compressed WebAssembly files beside the page's engine.

    pip install ziglang==0.17.0
    python tools/build_wasm.py                  # both files; or name one, as unspool.wasm.gz

The sources are those of the native library; the compiler is Zig's clang, which brings a C++ library
for WebAssembly. Two files are written: one with the fixed SIMD instructions, which every browser
has, and one with the relaxed SIMD instructions, which are quicker. The engine chooses when it
starts. Both are in the repository, with a hash of their sources that a test compares.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "unspool" / "backends" / "cpu" / "native"
TARGET = ROOT / "src" / "unspool" / "page" / "tab"
WORK = ROOT / "build" / "wasm"
HASH = TARGET / "sources.sha256"
CPU = "-mcpu=generic+atomics+bulk_memory+simd128"
VARIANTS = {"unspool.wasm.gz": CPU, "unspool-relaxed.wasm.gz": f"{CPU}+relaxed_simd"}
MAX_MEMORY = 65535 * 65536
# The functions that the engine calls; what they do not use is left out.
EXPORTS = (
    "malloc", "unspool_isa", "unspool_work", "unspool_packed_bytes", "unspool_repack",
    "unspool_model_new", "unspool_run", "unspool_run_head", "unspool_copy_page", "unspool_pick",
    "unspool_leading", "unspool_measure",
)  # fmt: skip
# Memory that threads share, and what the page sets for each of them.
SHARED = (
    "-Wl,--import-memory", "-Wl,--shared-memory", f"-Wl,--max-memory={MAX_MEMORY}",
    "-Wl,--export=__stack_pointer", "-Wl,--export=__wasm_init_tls", "-Wl,--export=__tls_size",
)  # fmt: skip
FLAGS = (
    "-target", "wasm32-wasi", "-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti",
    "-DNDEBUG", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-DHAS_wasm=1",
)  # fmt: skip


def sources() -> list[Path]:
    """The C++ files of the library."""
    return sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("kernels/*.cpp")])


def headers() -> list[Path]:
    return [*NATIVE.glob("*.h"), *NATIVE.glob("kernels/*.h")]


def sources_hash() -> str:
    """Hash of everything that the WebAssembly files are made of."""
    digest = hashlib.sha256()
    for path in sorted([*sources(), *headers(), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def build(name: str, cpu: str) -> None:
    """Compile what has changed, and link one file."""
    compiler = [sys.executable, "-m", "ziglang", "c++", *FLAGS, cpu]
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in [Path(__file__), *headers()])

    def compile_source(path: Path) -> str:
        target = folder / f"{path.parent.name}_{path.stem}.o"
        options = [] if path.name.startswith("repack") else ["-Os"]
        if path.parent.name == "kernels":  # where the time is spent
            options = ["-DISA=wasm", "-DISA_wasm=1"]
        changed = max(newest, path.stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < changed:
            subprocess.run([*compiler, *options, "-c", str(path), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_source, sources()))
    exports = [f"-Wl,--export={function}" for function in EXPORTS]
    link = ["-mexec-model=reactor", "-Wl,--gc-sections", "-Wl,--strip-all", *SHARED, *exports]
    linked, target = folder / "linked.wasm", TARGET / name
    subprocess.run([*compiler, *objects, *link, "-o", str(linked)], check=True)
    target.write_bytes(gzip.compress(linked.read_bytes(), 9, mtime=0))
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size:,} bytes")


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    for name in sys.argv[1:] or VARIANTS:
        build(name, VARIANTS[name])
    HASH.write_text(sources_hash() + "\n")


if __name__ == "__main__":
    main()
