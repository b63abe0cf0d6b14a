"""Small processes that clean up after this one, however it ends, kill -9 included.

A guard waits for the end of its process and then acts. It is a Python of 20 ms with only the standard library.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from functools import cache

_WAIT = """
import os, shutil, signal, sys, time
guarded = os.pidfd_open(int(sys.argv[1]))
if os.fork():
    os._exit(0)
os.setsid()
import select
select.select([guarded], [], [])
"""

# Python gives these names to shared memory and semaphores, and has a process to remove them, which is killed too.
_SHARED = """
def shared_by(folder):
    with open(folder + "maps") as file:
        paths = [line[line.index("/dev/shm/"):].strip() for line in file if "/dev/shm/" in line]
    return {path for path in paths if path[9:].startswith(("psm_", "sem.mp-"))}
def unlink(paths):
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
"""

_END_GROUP = (
    _SHARED
    + """
group, shared = int(sys.argv[1]), set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.getpgid(int(pid)) == group:
            shared |= shared_by("/proc/" + pid + "/")
    except OSError:  # it has ended
        pass
try:
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
unlink(shared)
"""
)

_REMOVE = """
try:
    os.unlink(sys.argv[2])
except FileNotFoundError:
    pass
except OSError:  # a folder
    shutil.rmtree(sys.argv[2], ignore_errors=True)
"""

# A process that is just being started may have no environment yet, and one that is killed may have started another.
# Ray's agents write their names over their environment: they have the log of a session open whose name ends with the
# id of the driver. Other guards end by themselves.
_END_MARKED = (
    _SHARED
    + """
mark, log, quiet, shared = sys.argv[2].encode(), "_" + sys.argv[1] + "/logs/", 0, set()
def is_marked(folder):
    with open(folder + "cmdline", "rb") as file:
        if b"pidfd_open(int(sys.argv[1]))" in file.read():
            return False
    with open(folder + "environ", "rb") as file:
        if mark in file.read():
            return True
    files = [os.readlink(folder + "fd/" + number) for number in os.listdir(folder + "fd")]
    return any("/session_" in file and log in file for file in files)
while quiet < 3:
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            process = os.pidfd_open(int(pid))
            with open("/proc/" + pid + "/stat") as file:
                is_dead = file.read().rpartition(")")[2].split()[0] in "ZX"
            if not is_dead and is_marked("/proc/" + pid + "/"):
                shared |= shared_by("/proc/" + pid + "/")
                signal.pidfd_send_signal(process, signal.SIGKILL)
                found += 1
            os.close(process)
        except OSError:  # it has ended, or belongs to another user
            pass
    quiet = 0 if found else quiet + 1
    time.sleep(0.3)
unlink(shared)
"""
)

_MAX_BYTES = 60  # of a folder for sockets; vLLM's names have 37, those of `multiprocessing` 32
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

MARKS = "NEMO_RL_PARENTS"
"""The environment variable by which the processes that a run has started are known."""


def end_group_after_me() -> None:
    """When this process ends, kill its process group: the processes that a worker has started.

    Otherwise they would survive a worker that is killed, and keep the memory of the accelerator.
    """
    _start(_END_GROUP)


def remove_after_me(path: str) -> None:
    """When this process ends, remove a file or a folder; nothing, if there is none by then."""
    _start(_REMOVE, path)


@cache
def scratch_folder() -> str:
    """A folder for temporary files of this process and its children, which disappears with this process.

    Its path, a link if need be, suits sockets, which Unix limits to 107 bytes, and lists like LD_PRELOAD, which split
    at spaces and colons.
    """
    folder = tempfile.mkdtemp(prefix="nemo_rl_")
    remove_after_me(folder)
    if len(os.fsencode(folder)) <= _MAX_BYTES and not re.search(r"[\s:]", folder):
        return folder
    parent = next((parent for parent in _SHORT_FOLDERS if os.access(parent, os.W_OK | os.X_OK)), None)
    if parent is None:
        raise ValueError(f"{folder} is too long for sockets: set TMPDIR to a folder of at most {_MAX_BYTES - 17} bytes")
    link = os.path.join(own := tempfile.mkdtemp(prefix="nemo_rl_", dir=parent), "t")
    remove_after_me(own)
    os.symlink(folder, link)
    return link


@cache
def end_children_after_me() -> str:
    """When this process ends, kill every process of this machine that it or one of its children will have started.

    Those are known by a mark in their environment, so that processes in sessions and groups of their own are found,
    those of Ray among them. Returns the mark.
    """
    mark = f"<{os.getpid()}-{time.time_ns()}>"
    _start(_END_MARKED, mark)
    os.environ[MARKS] = os.environ.get(MARKS, "") + mark
    return mark


def _start(program: str, *arguments: object) -> None:
    # -I -S: Python reads nothing of its environment and starts in about 20 ms.
    command = [sys.executable, "-I", "-S", "-c", _WAIT + program, str(os.getpid()), *map(str, arguments)]
    null = subprocess.DEVNULL
    subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)
