"""Programs that try to break out of the sandbox or to wear the machine down, and the limit that each one hits.

`MARK` in a source is replaced by a name that nothing else on the machine has: whatever they leave behind bears it.
"""

from nemo_rl.environments.code.sandbox.program import LimitHit

HOSTILE: dict[str, tuple[str, LimitHit | None]] = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", LimitHit.PROCESSES),
    "stubborn fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        LimitHit.CPU_TIME,
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)",
        LimitHit.PROCESSES,
    ),
    "zombie maker": ("import os\nfor _ in range(50):\n    if os.fork() == 0:\n        os._exit(0)", LimitHit.PROCESSES),
    "subprocess": ("import subprocess\nsubprocess.Popen(['sleep', '60'])", LimitHit.PROCESSES),
    "exec": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 60'])", LimitHit.FORBIDDEN),
    "posix_spawn": ("import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})", LimitHit.PROCESSES),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        LimitHit.WALL_TIME,  # the program fails for want of threads, and waits for those that it has
    ),
    "infinite output": ("while True:\n    print('x' * 100)", LimitHit.OUTPUT),
    "infinite error output": ("import os\nwhile True:\n    os.write(2, b'x' * 4096)", LimitHit.OUTPUT),
    "one huge line": ("import sys\nsys.stdout.write('x' * 50_000_000)", LimitHit.OUTPUT),
    "flood of the status pipe": ("import os\nwhile True:\n    os.write(3, b'{}' * 999)", LimitHit.OUTPUT),
    "nested lists in the status pipe": ("import os\nos.write(3, b'[' * 50_000 + b'\\n')\nos._exit(1)", None),
    "facts of the wrong types, with the token": (
        "import os, sys\nframe = sys._getframe()\nwhile 'report' not in frame.f_locals:\n    frame = frame.f_back\n"
        "frame.f_locals['report'](limit=[], finished=[1])\nos._exit(1)",
        None,
    ),
    "busy loop": ("while True:\n    pass", LimitHit.CPU_TIME),
    "busy loop that catches SIGXCPU": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        LimitHit.CPU_TIME,
    ),
    "sleep": ("import time\ntime.sleep(60)", LimitHit.WALL_TIME),
    "sleep with everything closed": ("import os, time\nos.closerange(0, 100)\ntime.sleep(60)", LimitHit.WALL_TIME),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", LimitHit.WALL_TIME),
    "memory hog": ("x = [bytearray(1 << 20) for _ in range(1 << 20)]", LimitHit.MEMORY),
    "memory at once": ("x = bytearray(1 << 40)", LimitHit.MEMORY),
    "memory file": ("import os\nos.memfd_create('MARK')", LimitHit.FORBIDDEN),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", LimitHit.CPU_TIME),
    "deep recursion in C": ("x = []\nfor _ in range(10**5):\n    x = [x]\nrepr(x)", None),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", None),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", None),
    "write outside": ("open('/tmp/MARK', 'w')", LimitHit.FORBIDDEN),
    "write to the home": ("open('HOME/MARK', 'w')", LimitHit.FORBIDDEN),
    "shared memory file": ("open('/dev/shm/MARK', 'w')", LimitHit.FORBIDDEN),
    "shared memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory('MARK', create=True, size=9)",
        LimitHit.FORBIDDEN,
    ),
    "System V shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.shmget(0x5EED, 4096, 0o1666) >= 0\nraise SystemExit('made')",
        None,
    ),
    "directory above": ("open('../MARK', 'w')", LimitHit.FORBIDDEN),
    "link to the outside": ("import os\nos.symlink('/tmp', 'out')\nopen('out/MARK', 'w')", LimitHit.FORBIDDEN),
    "hard link to the outside": ("import os, sys\nos.link(os.__file__, 'mine')", LimitHit.FORBIDDEN),
    "truncate outside": ("import os\nos.truncate('HOME/.bashrc', 0)", LimitHit.FORBIDDEN),
    "mode of a file outside": ("import os\nos.chown(os.__file__, 0, 0)", LimitHit.FORBIDDEN),
    "big file": ("f = open('a', 'wb')\nwhile True:\n    f.write(bytes(1 << 20))", LimitHit.FILE_SIZE),
    "full disk": ("import os\nfor i in range(10**6):\n    open(str(i), 'wb').write(bytes(1 << 20))", LimitHit.DISK),
    "many files": ("for i in range(10**6):\n    open(str(i), 'w').close()", LimitHit.DISK),
    "many open files": ("x = [open('a', 'w') for _ in range(10**6)]", LimitHit.OPEN_FILES),
    "deep directories": ("import os\nfor _ in range(150):\n    os.mkdir('d')\n    os.chdir('d')", None),
    "directory without permissions": ("import os\nos.mkdir('d')\nos.mkdir('d/e', 0)\nos.mkdir('f', 0)", None),
    "fifo": ("import os\nos.mkfifo('f')", LimitHit.FORBIDDEN),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 22))", LimitHit.FORBIDDEN),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX).bind('\\0MARK')", LimitHit.FORBIDDEN),
    "datagram pair": (
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', '/dev/log')",
        LimitHit.FORBIDDEN,
    ),
    "netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", LimitHit.FORBIDDEN),
    "signal to the parent": ("import os\nos.kill(os.getppid(), 9)", LimitHit.FORBIDDEN),
    "signal to everybody": ("import os\nos.kill(-1, 9)", LimitHit.FORBIDDEN),
    "signal to the group": ("import os\nos.kill(0, 9)", LimitHit.FORBIDDEN),
    "signal by an owner of a pipe": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
        LimitHit.FORBIDDEN,
    ),
    "debugger": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "raise SystemExit(libc.ptrace(16, os.getppid(), 0, 0) == -1 and 'refused')",
        None,
    ),
    "limits of the parent": ("import os, resource\nresource.prlimit(os.getppid(), 7, (3, 3))", LimitHit.FORBIDDEN),
    "environment of the parent": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", LimitHit.FORBIDDEN),
    "memory of the parent": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')", LimitHit.FORBIDDEN),
    "keys of the user": ("open('HOME/.ssh/id_rsa').read()", LimitHit.FORBIDDEN),
    "passwords": ("open('/etc/passwd').read()", LimitHit.FORBIDDEN),
    "becomes another user": ("import os\nos.setresuid(0, 0, 0)", LimitHit.FORBIDDEN),
    "set-user-id program": ("import os\nos.execv('/bin/su', ['su', '-c', 'touch /tmp/MARK'])", LimitHit.FORBIDDEN),
    "clock": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)", LimitHit.FORBIDDEN),
    "leaves at once": ("import os\nos._exit(0)", None),
    "leaves in an exit handler": ("import atexit, os\natexit.register(os._exit, 0)\n1 / 0", None),
    "exception that cannot be printed": (
        "class E(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise E",
        None,
    ),
    "user namespace": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nraise SystemExit(libc.unshare(0x10000000) == -1 and 'refused')",
        None,
    ),
}
