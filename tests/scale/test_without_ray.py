"""Without Ray everything else works, and an error message says what to install."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from unspool.scale import RayMissingError, require_ray


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unspool.scale.find_spec", lambda name: None)
    with pytest.raises(
        RayMissingError, match=r"--replicas needs Ray.*pip install 'unspool\[ray\]'"
    ):
        require_ray("--replicas")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_with_ray_nothing_is_said():
    require_ray()


def test_ray_is_not_imported_before_use():
    code = (
        "import sys, unspool; from unspool.cli.main import _exit_code; _exit_code(['--help']); "
        "sys.exit('ray' in sys.modules or 'unspool.scale.replicas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
