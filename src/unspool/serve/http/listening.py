"""The socket a server listens on, bound before anything is loaded: a taken port is told at once."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from unspool.errors import UnspoolError
from unspool.serve.http.settings import ServeSettings

# Errors of the system when there is nothing left to accept a connection with.
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.5  # less than asyncio waits before it tries again


class ListeningSocket(socket.socket):
    """A socket that fails once, and then pauses, when the system has no file descriptors left.

    asyncio tries to accept `backlog` connections in a row and schedules a retry for every one that
    fails: thousands of errors a second, and more each second.
    """

    _paused_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() < self._paused_until:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            raise


def bound_socket(settings: ServeSettings) -> socket.socket:
    """The socket, bound; or an error that names the host or the port, whichever is to blame."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Named as TCP: else asyncio does not know that it is, and leaves small answers waiting 40 ms.
    found = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except (OSError, UnicodeError, TypeError) as error:  # the last two for names that are none
        found.close()
        raise UnspoolError(_why(settings.host, settings.port, error)) from None
    found.set_inheritable(True)
    return found


def _why(host: str, port: int, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror) or number is None or number in _OF_THE_HOST:
        return (
            f"cannot listen on host {host!r}, which is no address of this machine; --host may be "
            "127.0.0.1 (for this machine only), 0.0.0.0 (for all) or one of its own"
        )
    if number == errno.EADDRINUSE:
        why = f"port {port} of {host} is taken by another program"
    elif number in (errno.EACCES, errno.EPERM):
        why = f"port {port} needs rights that this program has not; those from 1024 up do not"
    else:
        why = f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
    return f"{why}; choose another with --port (0: any free one)"


_OF_THE_HOST = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
