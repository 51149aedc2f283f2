"""Helpers beside these tests can be imported by their names."""

from __future__ import annotations
