"""What a checker may not do, told to the kernel before any of its code runs.

    confine(folder, memory=1 << 30, cpu=10, files=64 << 20, processes=32)

From then on this process, and whatever it starts, has no network, writes nowhere but in its folder,
cannot leave its process group, and gets only so much memory and time. On Linux the kernel holds it
to that (resource limits, Landlock, a seccomp filter); where there is no such filter, Python's own
audit hook refuses sockets. It can still read what the user can: these are limits, not a jail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from pathlib import Path

# Of each kind of machine: its number in audit records, and the numbers of the calls refused:
# socket, setsid, setpgid, ptrace, unshare, setns, process_vm_writev, io_uring_setup, pidfd_getfd.
_REFUSED = {
    "x86_64": (0xC000003E, (41, 112, 109, 101, 272, 308, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 157, 154, 117, 97, 268, 271, 425, 438)),
}
_X32 = 0x40000000  # calls of x86-64's other face have this bit
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _KILL, _NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06

# Landlock's rights to change files: write, remove folders and files, make all kinds of them; then
# move between folders and truncate, which came later.
_CHANGE = (1 << 1) | sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_TCP, _SIGNALS_AND_SOCKETS = 0b11, 0b11
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def confine(folder: Path, *, memory: int, cpu: int, files: int, processes: int) -> None:
    """Take the rights away; nothing gives them back."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CPU, cpu)
    _limit(resource.RLIMIT_FSIZE, files)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_NPROC, _tasks_of_user() + processes)
    filtered = False
    if sys.platform == "linux":
        kernel = ctypes.CDLL(None, use_errno=True)
        if kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
            _write_only_in(folder, kernel)
            filtered = _refuse_calls(kernel)
    if not filtered:
        sys.addaudithook(_refuse_sockets)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # a system that does not know this limit
        resource.setrlimit(kind, (most, most))


def _tasks_of_user() -> int:
    """Processes and threads that the user has already: the kernel's limit counts them all."""
    found, own = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == own:
                found += sum(1 for _ in (process / "task").iterdir())
    return found


def _write_only_in(folder: Path, kernel: ctypes.CDLL) -> None:
    """Landlock: files may be changed below the folder alone, and signals stay among our own."""
    version = kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:  # a kernel without it
        return
    rights = _CHANGE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    wanted = (rights, *([_TCP] if version >= 4 else []), *([_SIGNALS_AND_SOCKETS] * (version >= 6)))
    asked = struct.pack(f"{len(wanted)}Q", *wanted)
    rules = kernel.syscall(_CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0)
    if rules < 0:
        return
    write = rights & ((1 << 1) | _TRUNCATE)
    for path, allowed in ((folder, rights), (Path(os.devnull), write)):
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        kernel.syscall(_ADD_RULE, rules, 1, rule, 0)
        os.close(place)
    kernel.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _refuse_calls(kernel: ctypes.CDLL) -> bool:
    """A seccomp filter: no sockets, no way out of the process group, no hands on others."""
    known = _REFUSED.get(platform.machine())
    if known is None:
        return False
    machine, calls = known
    refused = len(calls)
    steps = [
        (_LOAD, 0, 0, 4),  # which machine's numbers these are
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
        (_AT_LEAST, refused + 1, 0, _X32),
        *((_EQUAL, refused - place, 0, call) for place, call in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOT_PERMITTED),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    return bool(kernel.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0)


def _refuse_sockets(event: str, _: tuple[object, ...]) -> None:
    if event in ("socket.__new__", "socket.connect", "socket.bind"):
        raise PermissionError("a checker has no network")
