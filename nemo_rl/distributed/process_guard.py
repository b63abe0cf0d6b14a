"""What a worker started ends with it, however it ends.

An engine's own processes, a verifier's sandbox: when their worker is killed nobody else would end them, and they
would keep the memory of the accelerator. A small process outside of Ray's watches the worker and then kills its group.
"""

from __future__ import annotations

import os
import subprocess
import sys

_GUARD = """
import os, select, signal, sys
worker = os.pidfd_open(int(sys.argv[1]))
if os.fork():
    os._exit(0)
os.setsid()
select.select([worker], [], [])
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def guard_children() -> None:
    """Make this process the leader of a process group that is killed when it ends. Children in other groups escape."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    # -I -S: nothing of the environment is read, so that it is up in some 20 ms.
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    null = subprocess.DEVNULL
    subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)
