"""The system calls that a Python program with threads and files needs: everything else is refused.

Numbers are those of the kernel's tables (`asm/unistd_64.h` of x86_64, `asm-generic/unistd.h` of aarch64).
"""

from __future__ import annotations

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
"""Answered with success and not done: copying a file with its mode and times works without them."""

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
    """Name -> number of the calls of a table which this architecture has."""
    column = ARCHITECTURES[machine][0]
    found: dict[str, int] = {}
    for word in table.split():
        name, *columns = word.split(":")
        if columns[column] != "-":
            found[name] = int(columns[column])
    return found
