"""Sandbox ("cage") of a silo's worker on Linux: no network, no access to other processes, few writable folders.

The worker enters it with ctypes before it imports torch. It has three independent layers ("walls"): namespaces, a
seccomp filter and Landlock. Each is tested at startup by attempting a forbidden action; only the result is reported.

python -m silo.worker.cage FOLDER...   prints as JSON which walls hold on this machine
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

_TRIAL_S = 30.0


class Walls(NamedTuple):
    """Test result of each layer: "" if a forbidden action failed as it must, else why the layer is missing.

    namespace: no network interface   seccomp: only AF_UNIX sockets, no connection, no access to other processes' memory
    landlock: no writes outside the worker's folders.
    """

    namespace: str
    seccomp: str
    landlock: str

    @property
    def offline(self) -> bool:
        """Whether no network can be reached."""
        return not self.namespace or not self.seccomp

    @property
    def holding(self) -> str:
        """Names of the layers that hold, in a machine-readable form."""
        return ",".join(name for name in self._fields if not getattr(self, name)) or "none"

    def sentences(self) -> list[str]:
        """Describe each layer that holds, and each that does not with its reason."""
        texts = (
            ("cannot open a socket", "can open sockets", self.seccomp),
            ("sees no network interface", "sees the machine's network interfaces", self.namespace),
            ("writes only below its folders", "can write wherever this user can", self.landlock),
        )
        return [f"{missing} ({why})" if why else holds for holds, missing, why in texts]


class Whereabouts(NamedTuple):
    """Where a worker runs. machine: as `machine`   job: its Slurm job id, or empty."""

    host: str
    machine: str
    job: str

    @classmethod
    def here(cls) -> Whereabouts:
        return cls(platform.node(), machine(), os.environ.get("SLURM_JOB_ID", ""))


def machine() -> str:
    """Boot id of the running kernel, which containers on one machine share; a random id if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)


NO_CAGE = Walls(*["no cage: it is a thread of the service"] * 3)


def enter(writable: Iterable[Path]) -> Walls:
    """Sandbox this process irreversibly, and test each layer. writable: folders that it may still write to.

    Call it while the process has one thread. A layer that cannot be set up here is reported, not raised.
    """
    if sys.platform != "linux":
        return Walls(*[f"not on {sys.platform}"] * 3)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    namespace = _without_network()
    _prctl(_NO_NEW_PRIVS, 1)
    landlock = _built(lambda: _confine_writes(writable), [lambda: os.close(os.open("/proc/self/comm", os.O_WRONLY))])
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET)
    calls = [partial(_open_socket, family) for family in families]
    calls.append(partial(_open_socket, socket.AF_UNIX, "\0nobody"))
    seccomp = _built(_filter_calls, calls)
    _prctl(_DUMPABLE, 0)
    return Walls(namespace, seccomp, landlock)


def end_with_parent(number: int) -> None:
    """Send this process a signal when its parent thread ends. Entering a user namespace resets this."""
    with suppress(OSError):
        _prctl(_PARENT_DEATH_SIGNAL, number)


def rehearse(writable: Sequence[Path]) -> Walls:
    """Test in a separate process which layers would hold here."""
    words = [sys.executable, "-P", "-m", __name__, *map(str, writable)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this module
            words, capture_output=True, check=True, timeout=_TRIAL_S
        )
        return Walls(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        return Walls(*[f"it could not be tested: {error}"] * 3)


def _built(
    build: Callable[[], object],
    refused: Iterable[Callable[[], object]],
    refusal: type[OSError] = PermissionError,
) -> str:
    """Set up a layer; return "" if every forbidden action then raises `refusal`, else why it does not hold."""
    try:
        build()
    except (OSError, AttributeError) as error:
        return str(error)
    for attempt in refused:
        try:
            attempt()
        except refusal:
            continue
        except OSError:
            pass
        return "it was tested and did not hold"
    return ""


def _open_socket(family: int, address: tuple[str, int] | str | None = None) -> None:
    with socket.socket(family, socket.SOCK_DGRAM if address is None else socket.SOCK_STREAM) as opened:
        if address is not None:
            opened.connect(address)


# ---- system calls ----------------------------------------------------------------------------------------------------

_PARENT_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, value: int, more: object = 0) -> None:
    _checked("prctl", _libc.prctl(option, value, more, 0, 0))


# ---- namespaces ------------------------------------------------------------------------------------------------------

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
UNMAPPED = 65534
"""The overflow user id, which owns the files of users not mapped in the namespace (user_namespaces(7))."""


def _without_network() -> str:
    """Enter a network namespace, and a user namespace that keeps file owners as far as this process may map them."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            return _built(_leave_network, [partial(_open_socket, socket.AF_INET, address)], OSError)
    except OSError as error:
        return f"it could not be tested: {error}"


def _leave_network() -> None:
    """Enter new namespaces. A child outside writes the user map, because this process may only map itself."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(outside)
            if os.read(inside, 1):
                _name_users(os.getppid())
        finally:
            os._exit(0)
    os.close(inside)
    try:
        _checked("unshare", _libc.unshare(_NEW_USER | _NEW_NET))
        os.write(outside, b"x")
    finally:
        os.close(outside)
        os.waitpid(child, 0)


def _name_users(process: int) -> None:
    """Map every user and group to itself if permitted, else only this process's own."""
    place = Path("/proc", str(process))
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        mapped = (line.split() for line in Path("/proc/self", name).read_text().splitlines())
        try:
            (place / name).write_text("".join(f"{first} {first} {count}\n" for first, _, count in mapped))
        except OSError:
            (place / "setgroups").write_text("deny")
            (place / name).write_text(f"{own} {own} 1\n")


# ---- seccomp ---------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SOCKET = (41, 198)
_REFUSED = {
    "connect": (42, 203),
    "ptrace": (101, 117),
    "unshare": (272, 97),
    "setns": (308, 268),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "pidfd_getfd": (438, 438),
}
"""System call numbers on x86-64 and on aarch64 (asm/unistd_64.h; asm-generic/unistd.h)."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data. The argument's lower half suffices: the kernel reads only that of an int."""


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_calls() -> None:
    """Block system calls that reach a network or another process, and all calls of other ABIs (i386, x32)."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {platform.machine()}")
    audit, column = _ARCHITECTURES[platform.machine()]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    head = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _NUMBER)]
    head += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    calls = [step for number in refused for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE))]
    tail = [(_EQUAL, 0, 2, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, socket.AF_UNIX)]
    tail += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    steps = [*head, *calls, *tail]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    _prctl(_SECCOMP, 2, ctypes.byref(_Program(len(steps), code)))


# ---- Landlock --------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _WRITES, _REFER, _TRUNCATE = 1 << 1, sum(1 << bit for bit in (1, *range(4, 13))), 1 << 13, 1 << 14
_DEVICES = ("null", "zero", "nvidia*", "dri", "kfd", "dxg")
"""GPU device files, and harmless ones such as /dev/null; not /dev/shm, which other processes read."""
_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 0b11, 0b11
"""Bits of linux/landlock.h: writing, removing and making files; binding and connecting; both scopes."""


def _confine_writes(writable: Iterable[Path]) -> None:
    """Block writes, and if the kernel supports it, TCP and signals to outside processes. GPUs stay usable."""
    abi = _checked("landlock", _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    writes = _WRITES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    rules = struct.pack("QQQ", writes, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _checked("landlock", _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0))
    try:
        devices = (path for pattern in _DEVICES for path in Path("/dev").glob(pattern))
        for path, allowed in (*((path, writes) for path in writable), *((path, _WRITE_FILE) for path in devices)):
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", allowed, at)
                _checked("landlock", _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
            finally:
                os.close(at)
        _checked("landlock", _libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


if __name__ == "__main__":
    print(json.dumps(enter(map(Path, sys.argv[1:]))._asdict()))
