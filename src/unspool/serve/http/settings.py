"""How a server is to be run: where it listens, who may ask, and how much."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError

SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything about a server but its models. Seconds and bytes are meant literally."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # empty: whoever reaches the port may ask
    cors: tuple[str, ...] = ()  # origins whose pages may ask; empty: none
    max_running: int = 64  # texts written at once
    max_queued: int = 256  # requests that wait for their turn; more are refused (429)
    max_choices: int = 16  # `n` and `best_of`
    max_tokens: int | None = None  # of an answer; None: what the context holds
    max_think: int = 32_768  # tokens that a search for an answer may compute
    max_prompt: int | None = None  # tokens of a prompt; None: what the context holds
    max_body: int = 4 << 20  # bytes of a request
    max_branches: int = 1000  # of the tree, kept for their owners
    deadline: float = 600.0  # seconds for a request, waiting included
    drain: float = 30.0  # seconds that running requests have to finish once asked to stop
    body_seconds: float = 30.0  # in which a request's head, and then its body, must have come
    write_seconds: float = 60.0  # in which a client must read some of what waits for it
    log_prompts: bool = False
    runs: Path | None = None  # where training runs lie; None: UNSPOOL_RUNS, or `runs` here
    replica: str = ""  # the server's name among several: a part of the ids of what it keeps

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise SettingsError(f"port is {self.port}; it may be from 0 (any free one) to 65535")
        for name in ("max_running", "max_choices", "max_body", "max_branches", "max_think"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_tokens", "max_prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}; it must be at least 1")
        if self.max_queued < 0:
            raise SettingsError(f"max_queued is {self.max_queued}; it may be 0 or more")
        for name in ("deadline", "drain", "body_seconds", "write_seconds"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        for key in self.api_keys:
            if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingsError(
                    f"an API key must have at least {SHORTEST_KEY} visible ASCII characters"
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

    def refusal(self, does: str) -> str | None:
        """Why work that uses up the machine cannot be asked for here, if it cannot: it needs that
        only programs on this machine reach the server, or a key."""
        if self.is_local or self.api_keys:
            return None
        return (
            f"anyone can reach this server: it {does} nothing without a key (--api-key-file), "
            "or where only this machine can ask (--host 127.0.0.1)"
        )
