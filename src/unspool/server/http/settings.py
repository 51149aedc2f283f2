"""Settings of a server: address, keys and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError
from unspool.store.folder import PAGES_BYTES

MIN_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of a server but its models. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    cors: tuple[str, ...] = ()  # origins whose pages may send requests
    max_running: int = 64  # texts that run in parallel
    max_queued: int = 256  # queued requests; more are rejected (429)
    max_choices: int = 16  # `n` and `best_of`
    max_tokens: int | None = None  # of an answer; None: up to the context length
    max_think: int = 32_768  # tokens that a search may compute
    max_prompt: int | None = None  # tokens of a prompt; None: up to the context length
    max_body: int = 4 << 20  # bytes of a request
    max_branches: int = 1000  # stored in /v1/tree
    deadline: float = 600.0  # seconds for a request, time in the queue included
    drain: float = 30.0  # seconds for running requests to finish at shutdown
    body_seconds: float = 30.0  # for a request's head to arrive, and again for its body
    write_seconds: float = 60.0  # without progress, then a client that does not read is dropped
    log_prompts: bool = False
    state: Path | None = None  # folder of stored texts; None: they are lost with the server
    state_bytes: int = PAGES_BYTES  # of KV-cache pages in that folder
    slots: Path | None = None  # folder of saved slots (llama.cpp's API); None: none can be saved
    runs: Path | None = None  # folder of training runs; None: UNSPOOL_RUNS, or ./runs
    replica: str = ""  # name of this replica, part of the ids of stored objects

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise SettingsError(f"port must be 0 (any free one) to 65535, got {self.port}")
        for name in ("max_running", "max_choices", "max_body", "max_branches", "max_think"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_tokens", "max_prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be at least 1, got {value}")
        if self.max_queued < 0:
            raise SettingsError(f"max_queued must be >= 0, got {self.max_queued}")
        for name in ("deadline", "drain", "body_seconds", "write_seconds"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        for key in self.api_keys:
            if (
                len(key) < MIN_KEY_LENGTH
                or not key.isascii()
                or not key.isprintable()
                or " " in key
            ):
                raise SettingsError(
                    f"an API key must have at least {MIN_KEY_LENGTH} visible ASCII characters"
                )

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def refusal(self, verb: str) -> str | None:
        """Why this server rejects expensive work; None if it accepts it.

        It requires an API key, or that only programs on this machine can reach the server.
        """
        if self.is_local or self.api_keys:
            return None
        return (
            f"anyone can reach this server: it {verb} nothing without a key (--api-key-file), "
            "unless it listens locally only (--host 127.0.0.1)"
        )
