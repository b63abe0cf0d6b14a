"""Programs in the sandbox: their rights, their limits, and nothing left behind."""

import errno
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import pytest

from nemo_rl.environments.code.sandbox import isolation
from nemo_rl.environments.code.sandbox.program import Guarantee, LimitHit, Program, SandboxResult
from nemo_rl.environments.code.sandbox.sandbox import DIRECTORY_PREFIX, SandboxPool, sweep
from nemo_rl.environments.line_process import WorkerPool
from nemo_rl.environments.section_parts import SandboxConfig
from tests.tables import named
from tests.unit.distributed.test_worker_groups import eventually
from tests.unit.environments.hostile_programs import HOSTILE

ROOT = str(Path(__file__).parents[3])
MARK = f"hostile_{secrets.token_hex(8)}"
# A busy machine gives a program little of a second: time ends those alone that would go on for ever.
LIMITS = SandboxConfig(time_limit_s=60.0, cpu_limit_s=5, memory_mib=256, max_disk_mib=32, max_files=200)
HURRIED = LIMITS.model_copy(update={"time_limit_s": 1.5, "cpu_limit_s": 1})
PLACES = ("/tmp", "/dev/shm", "/var/tmp", str(Path.home()), os.getcwd())


def source(name: str) -> str:
    return HOSTILE[name][0].replace("MARK", MARK).replace("HOME", str(Path.home()))


def one(pool: SandboxPool, text: str, **more) -> SandboxResult:
    return pool.run([Program(cells=[text], **more)])[0]


def assert_contained(name: str, result: SandboxResult) -> None:
    """It did not succeed, and the result names the limit."""
    expected = HOSTILE[name][1]
    # Those that would go on for ever may run out of memory or threads first.
    endless = (LimitHit.CPU_TIME, LimitHit.WALL_TIME, LimitHit.MEMORY, LimitHit.THREADS)
    is_missing = expected is LimitHit.FORBIDDEN and "FileNotFoundError" in result.stderr  # it may not be there at all
    assert is_missing or result.limit in (endless if expected in endless[:2] else [expected]), (name, result)
    assert "made" not in result.stderr
    assert not result.finished or name in ("directory without permissions", "deep directories")


def pids(pool: WorkerPool) -> list[int]:
    """The running processes of workers."""
    return [worker.lines.process.pid for worker in pool.workers if worker.lines is not None]


def processes_of(directory: str) -> list[int]:
    """Processes started for a pool, and whatever they have forked: all have its directory in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if directory.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def assert_nothing_left(pool: SandboxPool) -> None:
    servers = pids(pool)
    assert sorted(processes_of(pool.directory)) == sorted(servers)
    children = [Path(f"/proc/{server}/task/{server}/children") for server in servers]
    assert "".join(listing.read_text() for listing in children if listing.exists()).strip() == ""
    assert [entry for place in PLACES for entry in Path(place).iterdir() if MARK in entry.name] == []
    assert f"{0x5EED}" not in Path("/proc/sysvipc/shm").read_text()
    assert {path.name for path in Path(pool.directory).rglob("*")} <= {"lock", "root", *map(str, range(8))}


@pytest.fixture(scope="module")
def pool():
    with closing(SandboxPool(4, LIMITS)) as pool:
        yield pool


def test_hostile_programs_are_contained_and_named(pool: SandboxPool) -> None:
    endless = [name for name, (_, limit) in HOSTILE.items() if limit in (LimitHit.CPU_TIME, LimitHit.WALL_TIME)]
    with closing(SandboxPool(4, HURRIED)) as hurried:
        for ends_them, names in ((hurried, endless), (pool, [name for name in HOSTILE if name not in endless])):
            *results, sound = ends_them.run([Program(cells=[text]) for text in [*map(source, names), "print(1)"]])
            assert_nothing_left(ends_them)
            for name, result in zip(names, results, strict=True):
                assert_contained(name, result)
            assert sound.stdout == "1\n"


def test_hostile_programs_in_a_row_leave_nothing_behind(pool: SandboxPool) -> None:
    """60, and up to 1,000 by HOSTILE_CASES."""
    number = min(1000, int(os.environ.get("HOSTILE_CASES", "60")))
    quick = [name for name, (_, limit) in HOSTILE.items() if limit not in (LimitHit.WALL_TIME, LimitHit.CPU_TIME)]
    servers = pids(pool)
    pool.run([Program(cells=[source(quick[i % len(quick)])]) for i in range(number)])
    assert pids(pool) == servers  # none had to be replaced
    assert_nothing_left(pool)
    assert one(pool, "print('alive')").stdout == "alive\n"


@named(
    "text, said",
    {
        "input": ("print(int(input()) + int(input()))", "12"),
        "thread": ("import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()", "hi"),
        "asyncio": ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "3"),
        "shutil": ("import shutil\nopen('a', 'w').write('x')\nshutil.copy('a', 'b')\nprint(open('b').read())", "x"),
        "pickle": ("import dataclasses, pickle\nclass A: pass\npickle.dumps(A())\nprint('ok')", "ok"),
    },
)
def test_ordinary_programs_print_what_they_should(text: str, said: str, pool: SandboxPool) -> None:
    assert one(pool, text, stdin="5\n7\n").stdout == f"{said}\n"


def test_ordinary_programs_end_with_status_output_and_error(pool: SandboxPool) -> None:
    assert one(pool, "import atexit\natexit.register(print, 'bye')\nraise SystemExit(3)").exit_status == 3
    result = one(pool, "print('before')\n1 / 0")
    assert (result.stdout, result.exit_status) == ("before\n", 1)
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero" and "sandbox" not in result.stderr
    assert "SyntaxError" in one(pool, "def f(:").stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
def test_programs_of_different_servers_are_different_users() -> None:
    with closing(SandboxPool(1, LIMITS)) as first, closing(SandboxPool(1, LIMITS)) as second:
        users = {int(one(pool, "import os\nprint(os.getuid())").stdout) for pool in (first, second)}
    if users == {0}:
        pytest.skip("no other user than root can read the interpreter here")
    assert len(users) == 2 and 0 not in users


def test_no_program_sees_the_files_or_the_environment_of_another(pool: SandboxPool, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    one(pool, "import builtins, json\nopen('a', 'w').write('x')\nbuiltins.left = json.left = 1")
    look = "import os, builtins, json\nprint(os.listdir(), hasattr(builtins, 'left'), hasattr(json, 'left'))"
    assert [result.stdout for result in pool.run([Program(cells=[look])] * 4)] == ["[] False False\n"] * 4
    assert "secret" not in one(pool, "import os\nprint(dict(os.environ))").stdout


def test_cells_share_names_and_only_the_last_one_speaks(pool: SandboxPool) -> None:
    cells = ["print('silent')\nx = 5", "y = x + 2", "print(y)\nx * y"]
    result = pool.run([Program(cells=cells, echo=True)])[0]
    assert (result.stdout, result.finished) == ("7\n35\n", True)
    assert 'File "<cell 2>", line 1' in pool.run([Program(cells=["x = 1", "1 / 0", "print(x)"])])[0].stderr


def test_a_check_is_passed_by_running_to_its_end(pool: SandboxPool) -> None:
    programs = (
        "def f(x): return x + 1",
        "def f(x): return x",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return x",
        "import os\nos.write(3, b'{\"finished\": true}\\n')\nos._exit(0)",
    )
    results = pool.run([Program(cells=[program], check="assert f(1) == 2") for program in programs])
    assert [result.finished for result in results] == [True] + [False] * 5


@named(
    "mechanisms, missing",
    {
        "no landlock": (["seccomp", "user"], {"reads", "writes"}),
        "no seccomp": (["landlock", "namespaces"], {"processes"}),
        "none": ([], {"network", "processes", "reads", "signals", "writes"}),
    },
)
def test_a_machine_that_cannot_isolate_is_refused_by_name(mechanisms: list[str], missing: set[str]) -> None:
    with pytest.raises(ValueError, match="programs cannot be isolated on this machine") as refused:
        SandboxPool(1, LIMITS, mechanisms=mechanisms)
    lacking = str(refused.value).partition("allow_weaker: [")[2].rstrip("]").split(", ")
    assert missing <= set(lacking) <= set(Guarantee)


def test_what_is_waived_is_logged(caplog) -> None:
    """Where processes may be started, they still do not stay."""
    limits = LIMITS.model_copy(update={"allow_weaker": list(Guarantee)})
    with closing(SandboxPool(1, limits, mechanisms=["landlock"])) as weaker:
        assert "does NOT guarantee" in caplog.text and "processes" in caplog.text
        assert one(weaker, source("daemon")).exit_status == 0
        assert_nothing_left(weaker)


@pytest.mark.parametrize("mechanisms", [["seccomp", "landlock"], ["seccomp", "namespaces"]])
def test_each_way_to_confine_files_is_enough(mechanisms: list[str]) -> None:
    names = [name for name, (text, limit) in HOSTILE.items() if limit is LimitHit.FORBIDDEN]
    with closing(SandboxPool(2, LIMITS, mechanisms=mechanisms)) as pool:
        results = pool.run([Program(cells=[source(name)]) for name in names])
        for name, result in zip(names, results, strict=True):
            assert_contained(name, result)
        assert_nothing_left(pool)


FILLS = """
import os, time
for i in range(60):
    open(str(i), "wb").write(bytes(1 << 20))
    for _ in range(5):
        {}
        time.sleep(0.001)
"""


def test_files_are_counted_without_a_file_system_of_its_own_though_a_program_prints_or_has_closed_its_pipes() -> None:
    with closing(SandboxPool(1, LIMITS, mechanisms=["seccomp", "landlock"])) as pool:
        for each in ("os.write(1, b'x')", "os.closerange(0, 9)"):
            assert one(pool, FILLS.format(each)).limit is LimitHit.DISK, each


AS_NOBODY = """
import json, sys
from dataclasses import asdict
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.code.sandbox.program import Program
pool = SandboxPool(1, SimpleNamespace(**json.loads(sys.argv[2])))  # this interpreter has no pydantic
results = pool.run([Program(cells=[text]) for text in json.loads(sys.argv[3])])
pool.close()
print(json.dumps([asdict(result) for result in results]))
"""


# In a mount namespace: an interpreter in a folder that only root may enter, as one of pyenv's, with the way to it open.
OPENED = """
set -e
kept=$(mktemp -d)
mount --bind "$1" "$kept"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --bind "$kept" "$1"
shift 2
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""


def as_another_user() -> list[str]:
    """What comes before a command of Python without root's rights, and the Python."""
    if os.geteuid() != 0:
        return [sys.executable]
    python = Path(os.path.realpath(sys.executable))
    hidden = next((folder for folder in reversed(python.parents) if not folder.stat().st_mode & 0o001), None)
    if hidden is None:
        return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(python)]
    return ["unshare", "--mount", "sh", "-c", OPENED, "sh", str(python.parents[1]), str(hidden), str(python)]


def test_it_needs_no_root() -> None:
    names = ["fork bomb", "write outside", "socket", "signal to the parent", "passwords", "memory hog", "busy loop"]
    arguments = [ROOT, LIMITS.model_dump_json(), json.dumps([source(name) for name in names])]
    command = [*as_another_user(), "-B", "-c", AS_NOBODY, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd="/tmp", env={"PATH": os.environ["PATH"]})
    assert ran.returncode == 0, ran.stderr
    for name, facts in zip(names, json.loads(ran.stdout), strict=True):
        assert_contained(name, SandboxResult(**facts | {"limit": facts["limit"] and LimitHit(facts["limit"])}))


def test_a_pool_that_starts_is_not_swept_away_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process sweeps between the file of the lock and its being held."""
    lock = fcntl.flock

    def after_a_sweep(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            sweep()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_a_sweep)
    with closing(SandboxPool(1, SandboxConfig())) as pool:
        assert Path(pool.directory, "lock").exists()


def test_a_killed_server_is_replaced_and_its_program_dies_with_it() -> None:
    with closing(SandboxPool(1, LIMITS)) as small:
        (server,) = pids(small)
        os.kill(server, signal.SIGKILL)
        assert one(small, "print(1)").stdout == "1\n"
        assert pids(small) != [server]
        assert_nothing_left(small)
    assert processes_of(small.directory) == [] and not Path(small.directory).exists()


ABANDONED = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.section_parts import SandboxConfig
from nemo_rl.environments.code.sandbox.program import Program
pool = SandboxPool(1, SandboxConfig(time_limit_s=60.0))
program = Program(cells=["open('a', 'w').write('x'); import time; time.sleep(60)"])
threading.Thread(target=pool.run, args=([program],)).start()
print(pool.directory, flush=True)
time.sleep(60)
"""


def test_a_killed_run_leaves_no_process_and_the_next_one_removes_its_directory(tmp_path, monkeypatch) -> None:
    tmp_path.chmod(0o755)
    command, variables = [sys.executable, "-c", ABANDONED, ROOT], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as run:
        directory = run.stdout.readline().strip()
        assert eventually(lambda: len(processes_of(directory)) == 2)  # the server and the program
        run.kill()
    assert eventually(lambda: not processes_of(directory))
    assert directory.startswith(f"{tmp_path}/{DIRECTORY_PREFIX}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    SandboxPool(1, LIMITS).close()
    assert list(tmp_path.iterdir()) == []


ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
PID = 0x7E57C0DE
THREAD = 0x3D0F00  # what libc gives clone for a thread


filter_of = cache(isolation.build_filter)


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns: classic BPF over seccomp_data {nr, arch, instruction pointer, args}."""
    program = filter_of(machine)
    words = {0: number, 4: isolation.ARCHITECTURES[machine][1] if architecture is None else architecture}
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


@pytest.mark.parametrize("machine", isolation.ARCHITECTURES)
def test_calls_are_decided_by_their_table_and_arguments_and_other_architectures_are_killed(machine: str) -> None:
    tables = (isolation.ALLOWED, isolation.PRETENDED, isolation.CONDITIONAL)
    allowed, pretended, call = (isolation.numbers(table, machine) for table in tables)
    refused = ERRNO | errno.EPERM
    assert {decide(machine, number) for number in allowed.values()} == {ALLOW}
    assert {decide(machine, number) for number in pretended.values()} == {ERRNO}
    known = {number for table in (allowed, pretended, call) for number in table.values()}
    assert {decide(machine, number) for number in set(range(470)) - known} == {refused}
    again = ERRNO | errno.EAGAIN  # SIGCHLD, 17, makes a process
    assert [decide(machine, call["clone"], flags) for flags in (THREAD, 17, THREAD | 1 << 28)] == [ALLOW, again, again]
    assert decide(machine, call["clone3"], 0) == ERRNO | errno.ENOSYS
    assert [decide(machine, call["kill"], pid, 9) for pid in (PID, 1, 0, -1)] == [ALLOW, refused, refused, refused]
    assert [decide(machine, call["tgkill"], pid, pid, 9) for pid in (PID, 1)] == [ALLOW, refused]
    assert [decide(machine, call["prlimit64"], pid) for pid in (0, PID, 1)] == [ALLOW, ALLOW, refused]
    assert [decide(machine, call["fcntl"], 3, what) for what in (1, 8, 10, 15)] == [ALLOW, refused, refused, refused]
    assert decide(machine, call["ioctl"], 0, 0x5412) == ERRNO | errno.ENOTTY  # types into a terminal
    pairs = ((1, 1 | 0o2000000), (1, 2), (2, 1))
    assert [decide(machine, call["socketpair"], *kind) for kind in pairs] == [ALLOW, refused, refused]
    opened = [os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC]
    assert [decide(machine, call["openat"], 0, 0, how) for how in opened] == [ALLOW, ALLOW, ERRNO | errno.EINVAL]
    for name in ("seccomp", "capset", "landlock_restrict_self"):
        assert decide(machine, call[name]) == refused
    assert decide("x86_64", 1, architecture=0x40000003) == KILL  # int 0x80
    assert decide("x86_64", 0x40000000 + 1) == KILL  # x32
    assert decide("aarch64", 64, architecture=0x40000028) == KILL
