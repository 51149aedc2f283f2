"""Makes the modules of bench/ importable; last on the path, so that test helpers come first."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    """Run the `main` of a benchmark in this process: run_bench(module, "--tiny", ...)."""

    def run(module, *words: object) -> int | None:
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
        return module.main()

    return run
