"""Isolation of a process by system calls of Linux: namespaces, Landlock, a seccomp filter, capabilities, limits.

Every function is for a process with one thread that is about to run untrusted code. Sources: the kernel's
Documentation/userspace-api/{seccomp_filter,landlock,no_new_privs}.rst, include/uapi/linux/{seccomp,landlock}.h, and the
manual pages mount_namespaces(7), user_namespaces(7) and pivot_root(2). Standard library only.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

# System calls as "name:number on x86_64:number on aarch64", from the kernel's tables (`asm/unistd_64.h` of x86_64,
# `asm-generic/unistd.h` of aarch64). "-": the architecture does not have the call.

ALLOWED = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 pipe:22:-
    pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
    epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19
    timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 flock:73:32 fsync:74:82 fdatasync:75:83
    ftruncate:77:46 fallocate:285:47 fadvise64:221:223 readahead:187:213 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79
    statx:332:291 statfs:137:43 fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:-
    readlinkat:267:78 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:- mkdirat:258:34
    rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 link:86:- linkat:265:37
    symlink:88:- symlinkat:266:36 umask:95:166 sendfile:40:71 copy_file_range:326:285 splice:275:76 tee:276:77
    mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232
    getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
    getpgrp:111:- getpgid:121:155 getsid:124:156 getgroups:115:158 getresuid:118:148 getresgid:120:150 setsid:112:157
    uname:63:160 sysinfo:99:179 times:100:153 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 sched_yield:24:124
    sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 getpriority:140:141 getcpu:309:168 get_mempolicy:239:236 nanosleep:35:101
    clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- getitimer:36:102
    setitimer:38:103 alarm:37:- timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_delete:226:111
    timer_getoverrun:225:109 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
    rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- restart_syscall:219:128 wait4:61:260
    waitid:247:95 exit:60:93 exit_group:231:94 getrandom:318:278 membarrier:324:283 arch_prctl:158:-
    set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 futex:202:98 futex_waitv:449:449
    recvfrom:45:207 recvmsg:47:212 sendto:44:206 sendmsg:46:211 shutdown:48:210 getsockopt:55:209 getsockname:51:204
    getpeername:52:205 creat:85:-
"""
"""Name, number on x86_64, number on aarch64."""

PRETENDED = """
    chmod:90:- fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88 sync:162:81
    syncfs:306:267
"""
"""They succeed and do nothing: copying a file with its mode and times works without them."""

CONDITIONAL = """
    clone:56:220 clone3:435:435 fork:57:- vfork:58:- kill:62:129 tgkill:234:131 prlimit64:302:261 fcntl:72:25
    ioctl:16:29 prctl:157:167 socketpair:53:199 open:2:- openat:257:56 openat2:437:437 landlock_create_ruleset:444:444
    landlock_add_rule:445:445 landlock_restrict_self:446:446 seccomp:317:277 capset:126:91
"""
"""Allowed by their arguments, or used only on the way into the sandbox."""

NAMESPACES = "pivot_root:155:41 mount_setattr:442:442"
"""Used by the server before it runs any program."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""`platform.machine()` -> column of the numbers, and the AUDIT_ARCH value that the kernel gives to filters."""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Name -> number, for the calls of a table that this architecture has."""
    column = ARCHITECTURES[machine][0]
    rows = (word.split(":") for word in table.split())
    return {name: int(columns[column]) for name, *columns in rows if columns[column] != "-"}


_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *args: object, name: str = "") -> int:
    """Call a function of libc. OSError, with `name` or the function's, when the kernel refuses."""
    returned = _libc[function](*args)
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name or function}: {os.strerror(code)}")
    return returned


def _syscall(name: str, *args: object) -> int:
    number = numbers(f"{CONDITIONAL} {NAMESPACES}", platform.machine())[name]
    return _call("syscall", ctypes.c_long(number), *args, name=name)


# Namespaces: a view of the machine that holds nothing but Python

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 1 << 28, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MNT_DETACH = 1 << 18, 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ST_NOATIME, ST_NODIRATIME = 1024, 2048
SPARE_FILES = 16


def enter(*, directory: str, own: str, readable: Sequence[str], devices: Sequence[str], size: int, files: int) -> None:
    """Move to a root that holds `readable`, read-only, `devices`, and `own`, an empty directory with its own limits.

    The limits are `size` in bytes and a number of `files`. Paths stay the same; `directory` is used on the way. Root
    enters the namespaces directly, other users through a user namespace. OSError when the kernel or the container
    refuses, perhaps halfway: try it in a process that may end there.
    """
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
    try:
        _call("unshare", flags)
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", flags | CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
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
    _syscall("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)  # the old root, which lies on top of the new one
    os.chdir("/")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


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
    if not read_only:
        return
    wanted = MS_RDONLY | MS_NOSUID | MS_NODEV
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    place = ctypes.c_int(AT_FDCWD), target.encode(), ctypes.c_uint(AT_RECURSIVE)
    try:
        _syscall("mount_setattr", *place, attributes, ctypes.c_size_t(len(attributes)))
    except OSError as error:
        if error.errno != errno.ENOSYS:  # before Linux 5.12, mounts further below keep their flags
            raise
        kept = os.statvfs(target).f_flag & (MS_NOEXEC | ST_NOATIME | ST_NODIRATIME)
        _mount(None, target, None, MS_REMOUNT | MS_BIND | wanted | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


# Landlock: which files

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


def restrict(
    *,
    abi: int,
    readable: Sequence[str],
    writable: Sequence[str],
    devices: Sequence[str],
    ports: Sequence[int] | None,
    runs_programs: bool,
) -> None:
    """Restrict this process to reading `readable`, changing `writable` (directories and files) and using `devices`.

    With `runs_programs` it may also run what it reads, and make files of every kind. It sees the memory and the
    environment of no process outside. `ports`: the only TCP ports to which it connects, from version 4 of Landlock on;
    None: it has the network. From version 6 on it has no abstract sockets of and no signals to others. Needs
    `no_new_privs`.
    """
    read, use = _READ, _READ_FILE | _WRITE_FILE
    change = _READ | _WRITE_FILE | _REMOVE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
    if runs_programs:
        read, use = read | _EXECUTE, use | _IOCTL_DEV
        change = _ALL_OF_ABI_1 | _REFER | _TRUNCATE | _IOCTL_DEV
    handled = _ALL_OF_ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if abi >= since else 0
    has_ports = abi >= 4 and ports is not None
    attributes = struct.pack("=QQQ", handled, 3 if has_ports else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    rights_of = ((readable, read), (writable, change), (devices, use))
    for path, rights in ((path, rights) for paths, rights in rights_of for path in paths):
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # not every system has all of these paths
            continue
        if not os.path.isdir(path):
            rights &= _READ_FILE | _WRITE_FILE | _EXECUTE | _TRUNCATE | _IOCTL_DEV
        rule = struct.pack("=Qi", rights & handled, fd)
        _syscall("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(fd)
    for port in ports or () if has_ports else ():
        rule = struct.pack("=QQ", 2, port)  # connect
        _syscall("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(2), rule, ctypes.c_uint32(0))
    _syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


# seccomp: which system calls. The filter is a program of classic BPF: (code, jump if true, jump if false, constant).

_LOAD, _AND, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST = 0x20, 0x54, 0x06, 0x15, 0x35
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PID = 0x7E57C0DE  # stands for the pid of the process until the filter is installed
_NAMESPACES = 0x7E020080  # CLONE_NEW*
_THREAD = 0x10000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicates, flags, locks; no signals, no leases
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes waiting, flags

_Instruction = tuple[int, int, int, int]
_ALLOWED: _Instruction = (_RETURN, 0, 0, _ALLOW)


def _fail(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _argument(index: int) -> _Instruction:
    """Load the lower 32 bits: every argument tested here is an int or a set of flags."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _one_of(index: int, values: Sequence[int], code: int) -> list[_Instruction]:
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _fail(code), _ALLOWED]


def _masked(index: int, mask: int, value: int, code: int, *, is_refused: bool = False) -> list[_Instruction]:
    """Allow (or, with `is_refused`, refuse) a call if `mask` of its argument is `value`."""
    test = (_JUMP_EQUAL, 0, 1, value) if is_refused else (_JUMP_EQUAL, 1, 0, value)
    return [_argument(index), (_AND, 0, 0, mask), test, _fail(code), _ALLOWED]


def _conditions(machine: str) -> Iterator[tuple[int, list[_Instruction]]]:
    """Number of a call -> the instructions that decide about it."""
    call = numbers(CONDITIONAL, machine)
    for name in ("fork", "vfork"):
        if name in call:
            yield call[name], [_fail(errno.EAGAIN)]
    yield call["clone3"], [_fail(errno.ENOSYS)]  # its flags are behind a pointer; libc then takes clone
    yield call["openat2"], [_fail(errno.ENOSYS)]
    yield call["clone"], _masked(0, _THREAD | _NAMESPACES, _THREAD, errno.EAGAIN)
    for name in ("kill", "tgkill"):
        yield call[name], _one_of(0, [_PID], errno.EPERM)
    yield call["prlimit64"], _one_of(0, [0, _PID], errno.EPERM)
    yield call["fcntl"], _one_of(1, _FCNTL, errno.EPERM)
    yield call["ioctl"], _one_of(1, _IOCTL, errno.ENOTTY)
    yield call["prctl"], _one_of(0, [PR_SET_NAME, PR_GET_NAME, PR_SET_VMA], errno.EPERM)
    for name, index in (("openat", 2), ("open", 1)):
        if name in call:  # opened for reading and emptied: old versions of Landlock do not refuse it
            emptied = os.O_TRUNC | os.O_RDONLY
            yield call[name], _masked(index, os.O_TRUNC | os.O_ACCMODE, emptied, errno.EINVAL, is_refused=True)
    # Stream sockets of a pair are connected for good; a datagram socket could be sent to an address.
    is_unix = [_argument(0), (_JUMP_EQUAL, 1, 0, _AF_UNIX), _fail(errno.EPERM)]
    yield call["socketpair"], [*is_unix, *_masked(1, _SOCK_TYPES, _SOCK_STREAM, errno.EPERM)]


def build_filter(machine: str) -> list[_Instruction]:
    """The filter as classic BPF. A call in no table fails with EPERM; a call of another architecture kills."""
    program: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine][1]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # calls of its 32-bit ABI have numbers of their own, from here on
        program += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for number in numbers(ALLOWED, machine).values():
        program += [(_JUMP_EQUAL, 0, 1, number), _ALLOWED]
    for number in numbers(PRETENDED, machine).values():
        program += [(_JUMP_EQUAL, 0, 1, number), _fail(0)]
    for number, decision in _conditions(machine):
        program += [(_JUMP_EQUAL, 0, len(decision), number), *decision]
    return [*program, _fail(errno.EPERM)]


def install_filter(program: list[_Instruction]) -> None:
    """Restrict this process to the system calls that `program` allows, for good. It needs `no_new_privs`."""
    pid = os.getpid()
    code = b"".join(struct.pack("=HBBI", c, t, f, pid if k == _PID else k) for c, t, f, k in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _syscall("seccomp", ctypes.c_uint(1), ctypes.c_uint(0), header)


# Privileges and limits

PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_DROP = 1, 15, 16, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_VMA = 36, 38, 0x53564D41
NUM_CAPABILITIES = 64


def prctl(option: int, value: int) -> None:
    """prctl(2). OSError when the kernel refuses."""
    _call("prctl", option, value, 0, 0, 0)


def set_limits(limits: SimpleNamespace, *, exact_threads: bool) -> None:
    """Set the limits of SandboxConfig that the kernel enforces; `exact_threads` if this user runs no other process."""
    hard = {
        resource.RLIMIT_CPU: limits.cpu_limit_s,
        resource.RLIMIT_AS: limits.memory_mib << 20,
        resource.RLIMIT_FSIZE: limits.max_file_mib << 20,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if exact_threads:
        hard[resource.RLIMIT_NPROC] = limits.max_threads
    for kind, value in hard.items():
        present = resource.getrlimit(kind)[1]
        value = value if present == resource.RLIM_INFINITY else min(value, present)
        # SIGXCPU comes one second before SIGKILL, so that a program that catches it ends as well.
        top = value + 1 if kind == resource.RLIMIT_CPU else value
        resource.setrlimit(kind, (value, top))


def drop_user(uid: int) -> None:
    """Become a user that owns nothing."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_privileges() -> None:
    """Drop all capabilities for good."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(NUM_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # no such capability, or no right to drop it; it is lost below, and nothing can be executed
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    _syscall("capset", header, struct.pack("=6I", *[0] * 6))
