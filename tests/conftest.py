"""Shared by all tests: quiet libraries, and one default model per run."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# The same examples in every run, so that a failure is never a matter of luck. To look for new
# ones: pytest --hypothesis-profile=explore
# Hypothesis would draw constants that it finds in our source: examples would change with any edit,
# and the first draw of a process would parse every module.
providers._get_local_constants = lambda: providers._local_constants
_ANY_SPEED = [HealthCheck.too_slow]
settings.register_profile("same-every-run", derandomize=True, suppress_health_check=_ANY_SPEED)
settings.register_profile("explore", max_examples=2_000, suppress_health_check=_ANY_SPEED)
settings.load_profile("same-every-run")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are taken: more threads only wait for another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU the kernels of backends/cuda are run by Triton's interpreter, which has to be said
# before the first of them is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# In the background of a shell Ctrl-C is ignored, by children too; some tests send it to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking for garbage in it would take half a second a time."""
    gc.freeze()


# Commands of the tests keep their texts here, not in the folder of the user.
os.environ["UNSPOOL_STATE"] = tempfile.mkdtemp(prefix="unspool-state-")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Where the default model lies; fetched the first time."""
    from unspool.model.hub.find import find_model

    return find_model(None, progress=False)


@pytest.fixture(scope="session")
def real_lm(default_model: Path) -> Any:
    """The default model as people load it, once for the whole run."""
    import unspool

    return unspool.load(default_model)


@pytest.fixture(scope="session")
def lm(real_lm: Any) -> Any:
    """The model that a folder's tests compare with; some folders have a small one instead."""
    return real_lm


@pytest.fixture(scope="session")
def go_on(lm: Any) -> dict[str, Any]:
    """An option by which a text ends for want of tokens only."""
    return {"logit_bias": {token: -100 for token in lm.end_ids}}


@pytest.fixture(scope="session")
def real_server(default_model: Path) -> Iterator[Any]:
    """The default model, served: shared by all tests that leave the server as it was."""
    from helpers.running_server import default_entry, running

    with running([default_entry(default_model, memory=256 << 20)]) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def server(real_server: Any) -> Any:
    """The server that a folder's tests share; some folders have a small one instead."""
    return real_server


@pytest.fixture(scope="session")
def small_default(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in place of the default one, with its vocabulary and chat template."""
    from helpers.running_server import write_small_default

    return write_small_default(tmp_path_factory.mktemp("small") / "small.gguf", default_model)


@pytest.fixture(scope="session")
def small_lm(small_default: Path) -> Any:
    import unspool

    return unspool.load(small_default, memory=64 << 20, threads=1)


@pytest.fixture(scope="session")
def small_server(small_default: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The small model, served: shared by all tests that leave the server as it was."""
    from helpers.running_server import default_entry, running

    entry = default_entry(small_default, memory=64 << 20, threads=1)
    with running([entry], slots=tmp_path_factory.mktemp("slots")) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def torch_lm(default_model: Path) -> Any:
    """The default model on torch, in 32 bits: what the native backend is compared with."""
    import unspool

    return unspool.load(default_model, backend="torch")


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model without a vocabulary: quick, for everything that needs only ids."""
    import unspool
    from helpers import tiny

    folder = tmp_path_factory.mktemp("tiny-lm")
    tiny.save("llama", folder)
    return unspool.load(folder, backend="torch", memory=8 << 20)
