"""The listening socket, bound before a model is loaded, so that a used port fails early."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from unspool.errors import UnspoolError
from unspool.server.http.settings import ServerSettings

# Errors of accept() when the system has no descriptors or memory left.
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.5  # shorter than asyncio's own wait before a retry


class ListeningSocket(socket.socket):
    """A socket whose accept() fails once and then pauses when file descriptors run out.

    asyncio accepts up to `backlog` connections in a row and schedules a retry for each failure:
    thousands of errors a second, and growing.
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


def bind_socket(settings: ServerSettings) -> socket.socket:
    """Bind the socket. Raises UnspoolError that names the wrong host or port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; without it small answers wait 40 ms.
    sock = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except (OSError, UnicodeError, TypeError) as error:  # the last two: invalid host names
        sock.close()
        raise UnspoolError(_bind_error(settings.host, settings.port, error)) from None
    sock.set_inheritable(True)
    return sock


def _bind_error(host: str, port: int, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror) or number is None or number in _HOST_ERRORS:
        return (
            f"cannot listen on host {host!r}, which is not an address of this machine; --host may "
            "be 127.0.0.1 (this machine only), 0.0.0.0 (all interfaces) or one of its addresses"
        )
    if number == errno.EADDRINUSE:
        reason = f"port {port} of {host} is already in use"
    elif number in (errno.EACCES, errno.EPERM):
        reason = f"no permission to listen on port {port}; ports from 1024 need none"
    else:
        reason = f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
    return f"{reason}; choose another with --port (0: any free one)"


_HOST_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
