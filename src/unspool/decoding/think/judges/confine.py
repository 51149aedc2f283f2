"""Drop a checker process's rights before any of its code runs.

    confine(folder, memory=1 << 30, cpu=10, files=64 << 20, processes=32)

After that, this process and its children have no network, can only write to their folder, cannot
leave their process group, and have limited memory and time. On Linux the kernel enforces this
(resource limits, Landlock, seccomp); without seccomp, a Python audit hook refuses sockets. The
process can still read every file that the user can: this is not a full sandbox.
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

# By architecture: the AUDIT_ARCH value, and the numbers of the refused system calls:
# socket, setsid, setpgid, ptrace, unshare, setns, process_vm_writev, io_uring_setup, pidfd_getfd.
_REFUSED = {
    "x86_64": (0xC000003E, (41, 112, 109, 101, 272, 308, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 157, 154, 117, 97, 268, 271, 425, 438)),
}
_X32 = 0x40000000  # bit that marks x32 system calls on x86-64
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _KILL, _NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06

# Landlock access rights: write, remove and create files and folders; ABI 2 and 3 added moving
# between folders and truncating.
_CHANGE = (1 << 1) | sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_TCP, _SIGNALS_AND_SOCKETS = 0b11, 0b11
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def confine(folder: Path, *, memory: int, cpu: int, files: int, processes: int) -> None:
    """Drop rights; they cannot be regained."""
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
    with contextlib.suppress(ValueError, OSError):  # not supported by this system
        resource.setrlimit(kind, (most, most))


def _tasks_of_user() -> int:
    """Number of the user's existing processes and threads; RLIMIT_NPROC counts them all."""
    num_tasks, user = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                num_tasks += sum(1 for _ in (process / "task").iterdir())
    return num_tasks


def _write_only_in(folder: Path, kernel: ctypes.CDLL) -> None:
    """Landlock: only allow writes below the folder, and signals to own processes."""
    version = kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:  # the kernel has no Landlock
        return
    rights = _CHANGE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (
        rights,
        *([_TCP] if version >= 4 else []),
        *([_SIGNALS_AND_SOCKETS] * (version >= 6)),
    )
    ruleset = struct.pack(f"{len(handled)}Q", *handled)
    rules = kernel.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0)
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
    """Install a seccomp filter: no sockets, no new process group, no tracing of others."""
    machine_calls = _REFUSED.get(platform.machine())
    if machine_calls is None:
        return False
    machine, calls = machine_calls
    refused = len(calls)
    steps = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # system call number
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
