"""The filter of system calls as the kernel would run it, for both architectures."""

import errno
import os

import pytest

from nemo_rl.environments.code.sandbox.isolation import (
    ALLOWED,
    ARCHITECTURES,
    CONDITIONAL,
    PRETENDED,
    build_filter,
    numbers,
)

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
PID = 0x7E57C0DE
THREAD = 0x3D0F00  # what libc gives clone for a thread


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns: classic BPF over seccomp_data {nr, arch, instruction pointer, args}."""
    program = build_filter(machine)
    words = {0: number, 4: ARCHITECTURES[machine][1] if architecture is None else architecture}
    words |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate(arguments)}
    accumulator = position = 0
    while True:
        code, if_true, if_false, k = program[position]
        position += 1
        if code == 0x20:
            accumulator = words[k]
        elif code == 0x54:
            accumulator &= k
        elif code == 0x06:
            return k
        else:
            assert code in (0x15, 0x35)
            position += if_true if (accumulator == k if code == 0x15 else accumulator >= k) else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_call_is_decided_as_its_table_says(machine: str) -> None:
    for number in numbers(ALLOWED, machine).values():
        assert decide(machine, number) == ALLOW
    for number in numbers(PRETENDED, machine).values():
        assert decide(machine, number) == ERRNO
    known = {n for table in (ALLOWED, PRETENDED, CONDITIONAL) for n in numbers(table, machine).values()}
    for number in set(range(470)) - known:
        assert decide(machine, number) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_are_judged_by_their_arguments(machine: str) -> None:
    call = numbers(CONDITIONAL, machine)
    refused = ERRNO | errno.EPERM
    assert decide(machine, call["clone"], THREAD) == ALLOW
    assert decide(machine, call["clone"], 17) == ERRNO | errno.EAGAIN  # a process: SIGCHLD
    assert decide(machine, call["clone"], THREAD | 1 << 28) == ERRNO | errno.EAGAIN
    assert decide(machine, call["clone3"], 0) == ERRNO | errno.ENOSYS
    assert [decide(machine, call["kill"], pid, 9) for pid in (PID, 1, 0, -1)] == [ALLOW, refused, refused, refused]
    assert [decide(machine, call["tgkill"], pid, pid, 9) for pid in (PID, 1)] == [ALLOW, refused]
    assert [decide(machine, call["prlimit64"], pid) for pid in (0, PID, 1)] == [ALLOW, ALLOW, refused]
    assert [decide(machine, call["fcntl"], 3, what) for what in (1, 8, 10, 15)] == [ALLOW, refused, refused, refused]
    assert decide(machine, call["ioctl"], 0, 0x5412) == ERRNO | errno.ENOTTY  # types into a terminal
    assert decide(machine, call["socketpair"], 1, 1 | 0o2000000) == ALLOW
    assert decide(machine, call["socketpair"], 1, 2) == refused
    assert decide(machine, call["socketpair"], 2, 1) == refused
    assert decide(machine, call["openat"], 0, 0, os.O_RDONLY) == ALLOW
    assert decide(machine, call["openat"], 0, 0, os.O_WRONLY | os.O_TRUNC) == ALLOW
    assert decide(machine, call["openat"], 0, 0, os.O_RDONLY | os.O_TRUNC) == ERRNO | errno.EINVAL
    for name in ("seccomp", "capset", "landlock_restrict_self"):
        assert decide(machine, call[name]) == refused


def test_other_architectures_are_killed() -> None:
    assert decide("x86_64", 1, architecture=0x40000003) == KILL  # int 0x80
    assert decide("x86_64", 0x40000000 + 1) == KILL  # x32
    assert decide("aarch64", 64, architecture=0x40000028) == KILL
