"""A view of the machine that holds nothing but Python: mount, network and IPC namespaces of a server and its programs.

Root enters them directly; anybody else through a user namespace, where the kernel and the container allow that. See
mount_namespaces(7), user_namespaces(7) and pivot_root(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from nemo_rl.environments.sandbox_syscalls import NAMESPACES, numbers

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 1 << 28, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MNT_DETACH = 1 << 18, 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SPARE_FILES = 16

_libc = ctypes.CDLL(None, use_errno=True)


def enter(*, directory: str, own: str, readable: Sequence[str], devices: Sequence[str], size: int, files: int) -> None:
    """Leave everything behind but `readable`, read-only, `devices`, and `own`, an empty directory with its own limits.

    The limits are `size` in bytes and a number of `files`. All keep their paths; `directory` is written to on the way.
    For a process with one thread. OSError where the kernel refuses, halfway perhaps: try it in a process that may end
    there.
    """
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
    try:
        _call("unshare", flags)
    except PermissionError:
        _enter_user_namespace(flags)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = os.path.join(directory, "root")
    os.mkdir(root)
    _mount("sandbox", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in readable:
        _show(path, root, read_only=True)
    for path in devices:
        _show(path, root, read_only=False)
    inside = root + own
    os.makedirs(inside, exist_ok=True)
    limits = f"size={size},nr_inodes={files + SPARE_FILES},mode=700"
    _mount("sandbox", inside, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, limits)
    os.chdir(root)
    number = numbers(NAMESPACES, platform.machine())["pivot_root"]
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _call("umount2", b".", MNT_DETACH)  # the old root, which lies on top of the new one
    os.chdir("/")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _enter_user_namespace(flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _show(path: str, root: str, *, read_only: bool) -> None:
    """Make a path of the old root appear in the new one, with everything mounted below it."""
    target = root + path
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, MS_BIND | MS_REC)
    if read_only:
        _make_read_only(target)


def _make_read_only(target: str) -> None:
    wanted = MS_RDONLY | MS_NOSUID | MS_NODEV
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    number = numbers(NAMESPACES, platform.machine())["mount_setattr"]
    try:
        returned = _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_int(AT_FDCWD),
            target.encode(),
            ctypes.c_uint(AT_RECURSIVE),
            attributes,
            ctypes.c_size_t(len(attributes)),
        )
        _check(returned, "mount_setattr")
    except OSError as error:
        if error.errno != errno.ENOSYS:  # Linux 5.12; before it, what is mounted further below keeps its flags
            raise
        kept = os.statvfs(target).f_flag & (MS_NOEXEC | 1024 | 2048)  # no execution, no access times
        _mount(None, target, None, MS_REMOUNT | MS_BIND | wanted | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def _call(name: str, *args: object) -> None:
    _check(_libc[name](*args), name)


def _check(returned: int, name: str) -> None:
    if returned != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
