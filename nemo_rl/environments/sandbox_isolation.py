"""What locks a process in, by system calls of Linux and nothing else: seccomp filter, Landlock, capabilities, limits.

Everything here is for a process with one thread that is about to run somebody else's code. Sources: the kernel's
Documentation/userspace-api/{seccomp_filter,landlock,no_new_privs}.rst and include/uapi/linux/{seccomp,landlock}.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterator, Sequence

from nemo_rl.environments.sandbox_limits import SandboxLimits
from nemo_rl.environments.sandbox_syscalls import ALLOWED, ARCHITECTURES, CONDITIONAL, PRETENDED, numbers

PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_DROP = 1, 15, 16, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_VMA = 36, 38, 0x53564D41

NUM_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2). OSError when the kernel refuses."""
    _checked(_libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def _syscall(name: str, *args: object) -> int:
    number = numbers(CONDITIONAL, platform.machine())[name]
    return _checked(_libc.syscall(ctypes.c_long(number), *args), name)


def _checked(returned: int, name: str) -> int:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return returned


# --- Landlock: which files ---

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 16 | 32, 128, 256, 4096
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_ABI_1 = (1 << 13) - 1
_READ = _READ_FILE | _READ_DIR


def landlock_abi() -> int:
    """The version of Landlock that the kernel grants; 0: none."""
    try:
        return _syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict_files(*, abi: int, readable: Sequence[str], devices: Sequence[str], own_directory: str) -> None:
    """From now on this process reads `readable` (directories and files), uses `devices`, and owns one directory.

    Where the kernel can, TCP, abstract sockets and signals to other processes are refused too.
    """
    handled = _ALL_OF_ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if abi >= since else 0
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    own = _READ | _WRITE_FILE | _REMOVE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
    rules = [(path, _READ) for path in readable]
    rules += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
    for path, rights in [*rules, (own_directory, own)]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # not every system has every one of them
            continue
        if not os.path.isdir(path):
            rights &= _READ_FILE | _WRITE_FILE
        rule = struct.pack("=Qi", rights & handled, fd)
        _syscall("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(fd)
    _syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


# --- seccomp: which system calls ---

_LOAD, _AND, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST = 0x20, 0x54, 0x06, 0x15, 0x35
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PID = 0x7E57C0DE  # stands for the pid of the process until the filter is installed
_NAMESPACES = 0x7E020080  # CLONE_NEW*
_THREAD = 0x10000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicates, flags, locks; no signals, no leases
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes waiting, flags

_Instruction = tuple[int, int, int, int]


def _fail(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _argument(index: int) -> _Instruction:
    """Its lower 32 bits: every argument looked at here is an int or a set of flags."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _one_of(index: int, values: Sequence[int], code: int) -> list[_Instruction]:
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _fail(code), (_RETURN, 0, 0, _ALLOW)]


def _conditions(machine: str) -> Iterator[tuple[int, list[_Instruction]]]:
    """Number of a call -> what decides about it."""
    call = numbers(CONDITIONAL, machine)
    for name in ("fork", "vfork"):
        if name in call:
            yield call[name], [_fail(errno.EAGAIN)]
    yield call["clone3"], [_fail(errno.ENOSYS)]  # its flags are behind a pointer; libc then takes clone
    yield call["openat2"], [_fail(errno.ENOSYS)]
    yield (
        call["clone"],
        [
            _argument(0),
            (_AND, 0, 0, _THREAD | _NAMESPACES),
            (_JUMP_EQUAL, 1, 0, _THREAD),
            _fail(errno.EAGAIN),
            (_RETURN, 0, 0, _ALLOW),
        ],
    )
    for name in ("kill", "tgkill"):
        yield call[name], _one_of(0, [_PID], errno.EPERM)
    yield call["prlimit64"], _one_of(0, [0, _PID], errno.EPERM)
    yield call["fcntl"], _one_of(1, _FCNTL, errno.EPERM)
    yield call["ioctl"], _one_of(1, _IOCTL, errno.ENOTTY)
    yield call["prctl"], _one_of(0, [PR_SET_NAME, PR_GET_NAME, PR_SET_VMA], errno.EPERM)
    for name, index in (("openat", 2), ("open", 1)):
        if name in call:  # opened for reading and emptied: old versions of Landlock do not see it
            yield (
                call[name],
                [
                    _argument(index),
                    (_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE),
                    (_JUMP_EQUAL, 0, 1, os.O_TRUNC | os.O_RDONLY),
                    _fail(errno.EINVAL),
                    (_RETURN, 0, 0, _ALLOW),
                ],
            )
    # Connected for good, unlike datagram sockets: there is no address that it could be sent to.
    yield (
        call["socketpair"],
        [
            _argument(0),
            (_JUMP_EQUAL, 1, 0, _AF_UNIX),
            _fail(errno.EPERM),
            _argument(1),
            (_AND, 0, 0, _SOCK_TYPES),
            (_JUMP_EQUAL, 1, 0, _SOCK_STREAM),
            _fail(errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
    )


def build_filter(machine: str) -> list[_Instruction]:
    """The filter as classic BPF. What is in no table is refused with EPERM, another architecture's calls kill."""
    program: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine][1]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # calls of its 32-bit ABI have numbers of their own, from here on
        program += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for number in numbers(ALLOWED, machine).values():
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in numbers(PRETENDED, machine).values():
        program += [(_JUMP_EQUAL, 0, 1, number), _fail(0)]
    for number, decision in _conditions(machine):
        program += [(_JUMP_EQUAL, 0, len(decision), number), *decision]
    return [*program, _fail(errno.EPERM)]


class SyscallFilter:
    """The filter of this machine, made once and installed in many processes."""

    def __init__(self) -> None:
        self._program = build_filter(platform.machine())

    def install(self) -> None:
        """From now on this process makes no system call but those. For good; needs `no_new_privs`."""
        pid = os.getpid()
        code = b"".join(struct.pack("=HBBI", c, t, f, pid if k == _PID else k) for c, t, f, k in self._program)
        buffer = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("@HP", len(self._program), ctypes.addressof(buffer))
        _syscall("seccomp", ctypes.c_uint(1), ctypes.c_uint(0), header)


# --- privileges and limits ---


def set_limits(limits: SandboxLimits, *, exact_threads: bool) -> None:
    """Limits that the kernel keeps. `exact_threads`: nobody else runs under this user, so its tasks can be counted."""
    hard = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if exact_threads:
        hard[resource.RLIMIT_NPROC] = limits.threads
    for kind, value in hard.items():
        present = resource.getrlimit(kind)[1]
        value = value if present == resource.RLIM_INFINITY else min(value, present)
        # SIGXCPU one second before SIGKILL: a program may not outlive it by catching the first.
        top = value + 1 if kind == resource.RLIMIT_CPU else value
        resource.setrlimit(kind, (value, top))


def die_with(parent: int) -> None:
    """Be killed when `parent`, which has forked this process, ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def drop_user(uid: int) -> None:
    """Become a user who owns nothing."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_privileges() -> None:
    """No capability, now or ever after."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(NUM_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # no such capability, or no right to drop it; it is lost below, and nothing can be executed
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    _syscall("capset", header, struct.pack("=6I", *[0] * 6))
