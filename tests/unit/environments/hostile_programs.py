"""Programs that try to break out of the sandbox or to wear the machine down, and the limit that each one hits.

`MARK` in a source is replaced by a name that nothing else on the machine has: whatever they leave behind bears it.
The thread bomb fails for want of threads, and waits for those that it has.
"""

from nemo_rl.environments.code.sandbox.program import LimitHit

# Name, limit or "-", source with its ends of lines; a line that begins with "|" goes on with the one before.
TABLE = r"""
fork bomb | PROCESSES | import os⏎while True:⏎    os.fork()
stubborn fork bomb | CPU_TIME | import os⏎while True:⏎    try:⏎        os.fork()⏎    except OSError:⏎        pass
daemon | PROCESSES | import os, time⏎if os.fork() == 0:⏎    os.setsid()⏎    if os.fork() == 0:⏎        time.sleep(60)
subprocess | PROCESSES | import subprocess⏎subprocess.Popen(['sleep', '60'])
exec | FORBIDDEN | import os⏎os.execv('/bin/sh', ['sh', '-c', 'sleep 60'])
posix_spawn | PROCESSES | import os⏎os.posix_spawn('/bin/sleep', ['sleep', '60'], {})
thread bomb | WALL_TIME | import threading, time⏎while 1:⏎    threading.Thread(target=time.sleep, args=(60,)).start()
infinite output | OUTPUT | while True:⏎    print('x' * 100)
infinite error output | OUTPUT | import os⏎while True:⏎    os.write(2, b'x' * 4096)
one huge line | OUTPUT | import sys⏎sys.stdout.write('x' * 50_000_000)
flood of the status pipe | OUTPUT | import os⏎while True:⏎    os.write(3, b'{}' * 999)
nested lists in the status pipe | - | import os⏎os.write(3, b'[' * 50_000 + b'\n')⏎os._exit(1)
facts of the wrong types, with the token | - | import os, sys⏎f = sys._getframe()⏎
    |while 'report' not in f.f_locals:⏎    f = f.f_back⏎f.f_locals['report'](limit=[], finished=[1])⏎os._exit(1)
busy loop | CPU_TIME | while True:⏎    pass
busy loop that catches SIGXCPU | CPU_TIME | from signal import *⏎signal(SIGXCPU, SIG_IGN)⏎while True:⏎    pass
sleep | WALL_TIME | import time⏎time.sleep(60)
sleep with everything closed | WALL_TIME | import os, time⏎os.closerange(0, 100)⏎time.sleep(60)
stops itself | WALL_TIME | import os, signal⏎os.kill(os.getpid(), signal.SIGSTOP)
memory hog | MEMORY | x = [bytearray(1 << 20) for _ in range(1 << 20)]
memory at once | MEMORY | x = bytearray(1 << 40)
memory file | FORBIDDEN | import os⏎os.memfd_create('MARK')
deep recursion | CPU_TIME | import sys⏎sys.setrecursionlimit(10**9)⏎f = lambda: f()⏎f()
deep recursion in C | - | x = []⏎for _ in range(10**5):⏎    x = [x]⏎repr(x)
segmentation fault | - | import ctypes⏎ctypes.string_at(0)
kills itself | - | import os⏎os.kill(os.getpid(), 9)
write outside | FORBIDDEN | open('/tmp/MARK', 'w')
write to the home | FORBIDDEN | open('HOME/MARK', 'w')
shared memory file | FORBIDDEN | open('/dev/shm/MARK', 'w')
shared memory | FORBIDDEN | from multiprocessing.shared_memory import *⏎SharedMemory('MARK', create=True, size=9)
System V memory | - | import ctypes⏎assert ctypes.CDLL(None).shmget(0x5EED, 4096, 0o1666) >= 0⏎raise SystemExit('made')
directory above | FORBIDDEN | open('../MARK', 'w')
link to the outside | FORBIDDEN | import os⏎os.symlink('/tmp', 'out')⏎open('out/MARK', 'w')
hard link to the outside | FORBIDDEN | import os, sys⏎os.link(os.__file__, 'mine')
truncate outside | FORBIDDEN | import os⏎os.truncate('HOME/.bashrc', 0)
mode of a file outside | FORBIDDEN | import os⏎os.chown(os.__file__, 0, 0)
big file | FILE_SIZE | f = open('a', 'wb')⏎while True:⏎    f.write(bytes(1 << 20))
full disk | DISK | import os⏎for i in range(10**6):⏎    open(str(i), 'wb').write(bytes(1 << 20))
many files | DISK | for i in range(10**6):⏎    open(str(i), 'w').close()
many open files | OPEN_FILES | x = [open('a', 'w') for _ in range(10**6)]
deep directories | - | import os⏎for _ in range(150):⏎    os.mkdir('d')⏎    os.chdir('d')
directory without permissions | - | import os⏎os.mkdir('d')⏎os.mkdir('d/e', 0)⏎os.mkdir('f', 0)
fifo | FORBIDDEN | import os⏎os.mkfifo('f')
socket | FORBIDDEN | import socket⏎socket.create_connection(('127.0.0.1', 22))
unix socket | FORBIDDEN | import socket⏎socket.socket(socket.AF_UNIX).bind('\0MARK')
datagram pair | FORBIDDEN | import socket⏎a, b = socket.socketpair(type=socket.SOCK_DGRAM)⏎a.sendto(b'x', '/dev/log')
netlink | FORBIDDEN | import socket⏎socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
signal to the parent | FORBIDDEN | import os⏎os.kill(os.getppid(), 9)
signal to everybody | FORBIDDEN | import os⏎os.kill(-1, 9)
signal to the group | FORBIDDEN | import os⏎os.kill(0, 9)
signal by an owner of a pipe | FORBIDDEN | import os⏎from fcntl import *⏎fcntl(os.pipe()[0], F_SETOWN, os.getppid())
debugger | - | import ctypes, os⏎raise SystemExit(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1 and 'refused')
limits of the parent | FORBIDDEN | import os, resource⏎resource.prlimit(os.getppid(), 7, (3, 3))
environment of the parent | FORBIDDEN | import os⏎open(f'/proc/{os.getppid()}/environ').read()
memory of the parent | FORBIDDEN | import os⏎open(f'/proc/{os.getppid()}/mem', 'rb')
keys of the user | FORBIDDEN | open('HOME/.ssh/id_rsa').read()
passwords | FORBIDDEN | open('/etc/passwd').read()
becomes another user | FORBIDDEN | import os⏎os.setresuid(0, 0, 0)
set-user-id program | FORBIDDEN | import os⏎os.execv('/bin/su', ['su', '-c', 'touch /tmp/MARK'])
clock | FORBIDDEN | import time⏎time.clock_settime(time.CLOCK_REALTIME, 0)
leaves at once | - | import os⏎os._exit(0)
leaves in an exit handler | - | import atexit, os⏎atexit.register(os._exit, 0)⏎1 / 0
exception that cannot be printed | - | class E(Exception):⏎    def __str__(self):⏎        raise RuntimeError⏎raise E
user namespace | - | import ctypes⏎raise SystemExit(ctypes.CDLL(None).unshare(0x10000000) == -1 and 'refused')
"""


def _programs() -> dict[str, tuple[str, LimitHit | None]]:
    rows = [line.split(" | ", 2) for line in TABLE.replace("\n    |", "").strip().splitlines()]
    return {name: (text.replace("⏎", "\n"), None if limit == "-" else LimitHit[limit]) for name, limit, text in rows}


HOSTILE = _programs()
