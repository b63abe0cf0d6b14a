"""Connection to Ray, and the part of its cluster that a run has booked."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray
from ray import _raylet
from ray._common.usage import usage_constants
from ray._private import node as node_of_ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.node import Node
from ray._private.state import available_resources_per_node
from ray._private.utils import check_version_info
from ray._private.worker import global_worker
from ray.exceptions import AuthenticationError, RpcError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.errors import RayLost, ResourceInsufficientError
from nemo_rl.distributed.ray_places import find_cluster, folder_of_ray, own_token, protect_token
from nemo_rl.distributed.worker_template import READ_WHEN_LOADED, WorkerTemplate
from nemo_rl.utils.guards import end_children_after_me, scratch_folder

logger = logging.getLogger(__name__)

_MIN_LOCAL_CPU_SLOTS = 64
_MAX_OBJECT_STORE_GB = 16.0
_OBJECT_STORE_FRACTION = 0.1  # of the machine's memory: token data is small, weights do not travel through the store
_POLL_S = 0.5
_JOIN_WAIT_S = 180.0  # for nodes that have not joined the cluster yet
_FREE_WAIT_S = 30.0  # for resources that another group of the same run is returning
_MESSAGE_EVERY_S = 15.0
_LOST_S = 90.0  # in which Ray notices that a node is lost: it asks each one every few seconds, and several times
_CONNECT_S = 3.0
_SHUTDOWN_S = 15.0  # in which a cluster of this machine ends
_NOT_IN_USE = -1  # the port of a service of Ray that is not there
_AGENT_MS = 600_000  # in which Ray's process that prepares workers' environments answers
_MAX_STARTS = 4
_MAX_SOCKET_FOLDER = 90  # bytes: Unix limits the path of a socket to 107, and the names of Ray's have 16
_LEAST_START_S, _IMPORTS_PER_START = 60.0, 30.0  # a start may take so long, and so many times an import of Ray

# Becomes a worker of Python with the environment that Ray has for it; or has the template fork one and ends with it,
# unless the worker has a Python of its own or loads libraries in another way. Ray's own program for this imports all of
# Ray first, as the worker does again.
_SETUP = r"""
import json, os, re, shlex, socket, struct, sys
TEMPLATE = json.loads({template})
KEY, LANGUAGE = "--serialized-runtime-env-context=", "--language=PYTHON"
own = [text.removeprefix(KEY) for text in sys.argv if text.startswith(KEY)]
context = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable} | json.loads((own + ["{}"])[0])
for name, value in context["env_vars"].items():
    os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
worker = [text for text in sys.argv[1:] if text != LANGUAGE and not text.startswith(KEY)]
python, prefix = context["py_executable"], context["command_prefix"]
def is_like_template():
    prefixes, known = tuple(TEMPLATE["prefixes"]), TEMPLATE["environment"]
    own = {name: os.environ[name] for name in os.environ if name.startswith(prefixes) and name != "PYTHONPATH"}
    return python == sys.executable and not prefix and all(known.get(name) == own[name] for name in own)
if TEMPLATE and is_like_template():
    with socket.socket(socket.AF_UNIX) as template:
        try:
            template.connect("\0" + TEMPLATE["address"])
        except ConnectionRefusedError:  # it was killed
            pass
        else:
            asked = json.dumps({"argv": worker, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
            socket.send_fds(template, [struct.pack("!I", len(asked))], [0, 1, 2])
            template.sendall(asked)
            template.recv(1)  # nothing, when the worker has ended
            os._exit(0)
quoted = [shlex.quote(python) if os.path.exists(python) else python, *map(shlex.quote, worker)]
os.execvp("bash", ["bash", "-c", " ".join([*prefix, "exec", *quoted])])
"""

_started_here = False  # this process started the cluster, so no node will join it
_template: WorkerTemplate | None = None  # of that cluster


def init_ray(log_dir: str | None = None, *, forks_workers: bool = False) -> None:
    """Connect to Ray once: to the cluster of `find_cluster`, else to a new one.

    A local cluster has no dashboard and a bounded object store, and ends with this process. `log_dir` gets a link `ray`
    to the logs of Ray and of every worker. Workers do not inherit the driver's environment: a worker group passes the
    variables that it is given. `forks_workers`: those of a new cluster are forked from a `WorkerTemplate`, which is for
    machines without GPUs.

    Raises:
        ValueError: if the cluster cannot be joined, with the remedy.
    """
    if ray.is_initialized():
        return
    _prepare()
    if (address := find_cluster()) is None:
        start_local_ray(forks_workers=forks_workers)
    else:
        _join(address)
    if log_dir is not None:
        # Not Ray's temporary directory itself: it holds sockets, whose paths are limited to 107 characters.
        node, link = global_worker.node, Path(log_dir) / "ray"
        assert node is not None
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(node.get_logs_dir_path())


def _join(address: str) -> None:
    """Connect to the cluster at `address`. ValueError if it is none that this run can use."""
    host, _, port = address.rpartition(":")
    logger.info("Joining the Ray cluster at %s", address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()  # Ray itself would try for minutes
        with _token_errors(), _own_sigterm():
            reason = misfit(address)
            if reason is None:
                context = ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
                dashboard = context.dashboard_url
                url = f"http://{dashboard}" if dashboard else "none (start Ray with --include-dashboard=true)"
                logger.info("joined the Ray cluster at %s; dashboard: %s", address, url)
                return
    except (OSError, RpcError) as error:
        reason = f"it does not answer ({error})"
    raise ValueError(
        f"cannot join the Ray cluster at {address}: {reason}. RAY_ADDRESS=local starts a cluster of only this machine"
    )


def misfit(address: str) -> str | None:
    """Why this process cannot use the cluster at `address`, or None. `ray.init` would try for minutes."""
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    core: Any = _raylet  # its names are unknown to type checkers
    where = ray_constants.KV_NAMESPACE_CLUSTER
    try:
        told = core.GcsClient(address=address).internal_kv_get(usage_constants.CLUSTER_METADATA_KEY, namespace=where)
    except AuthenticationError as error:
        if "InvalidAuthToken" not in str(error):
            raise
        return (
            "this process does not have its token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's "
            "token file (~/.ray/auth_token on the node that started it)"
        )
    if told is None:
        return None  # it has just started
    cluster = json.loads(told)
    if cluster.get("ray_init_cluster"):
        return "it is the cluster of one other run, and ends with that"
    try:
        check_version_info(cluster, "the driver")
    except RuntimeError:
        versions = f"it has Ray {cluster['ray_version']} with Python {cluster['python_version']}"
        return f"{versions}, and this process Ray {ray.__version__} with Python {platform.python_version()}"
    return None


def start_local_ray(
    *, num_cpus: int | None = None, object_store_gb: float | None = None, forks_workers: bool = False
) -> None:
    """Start a Ray cluster of only this machine, which ends with this process.

    Its CPUs are worker slots, not cores: by default at least 64, so that the bundles of a small run fit on a laptop.
    The environment variables of a worker decide how many threads it uses. All ports are on loopback.
    `forks_workers`: as `init_ray`.
    """
    global _started_here, _template
    _prepare()
    folder = folder_of_ray()
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(own_token())
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if object_store_gb is None:
        object_store_gb = min(_MAX_OBJECT_STORE_GB, _OBJECT_STORE_FRACTION * memory_gb)
    logger.info("Starting Ray on this machine")
    # No other machine joins, so every port of Ray is on loopback. Ray reads this switch when a node starts; without it,
    # Ray replaces _node_ip_address="127.0.0.1" by the address of the machine.
    ray_constants.ENABLE_RAY_CLUSTER = False
    end_children_after_me()  # agents of Ray outlive a killed driver by a minute
    _template = WorkerTemplate() if forks_workers else None
    start: Any = ray.init  # its stubs say that arguments with the default None must not be None
    with _token_errors(), _light_node(), _own_sigterm():
        start_under_load(
            partial(
                start,
                address="local",
                num_cpus=num_cpus if num_cpus is not None else max(os.cpu_count() or 1, _MIN_LOCAL_CPU_SLOTS),
                object_store_memory=int(object_store_gb * 2**30),
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _temp_dir=folder,
                _system_config={
                    # Otherwise Ray starts one idle process per logical CPU.
                    "prestart_worker_first_driver": False,
                    "enable_worker_prestart": False,
                    # Notes on every call, for `ray list tasks`: 3 kB each in Ray's own process, up to 100,000 calls.
                    "task_events_report_interval_ms": 0,
                    "agent_register_timeout_ms": _AGENT_MS,
                },
            ),
            measure_import=_import_of_ray_s,
        )
    _started_here = True


def ray_loss() -> str | None:
    """Why nothing runs any more: Ray's process that starts workers on this machine has ended or is stopped, else None.

    Only of a cluster that this process started.
    """
    if (raylet := _own_raylet()) is None:
        return None
    what = f"Ray's own process on this node (raylet, pid {raylet.pid})"
    if raylet.poll() is not None:
        return (
            f"{what} has ended with status {raylet.returncode}, and all workers with it: killed from outside, or out "
            "of memory (`dmesg -T | tail`)"
        )
    state = Path(f"/proc/{raylet.pid}/stat").read_text().rpartition(")")[2].split()[0]  # man proc_pid_stat
    if state == "T":
        return f"{what} is stopped (SIGSTOP, or a debugger), so no worker can start, end or send large results"
    return None


def shutdown_ray() -> None:
    """`ray.shutdown`, which would wait forever for a raylet that is stopped: kill it if it does not answer."""
    global _template
    with ExitStack() as stack:
        if (raylet := _own_raylet()) is not None:
            killer = threading.Timer(_SHUTDOWN_S if ray_loss() is None else 0.0, raylet.kill)
            killer.start()
            stack.callback(killer.cancel)
        ray.shutdown()
        if _template is not None:
            _template.close()
            _template = None


def await_lost_nodes(nodes: Callable[[], list[dict[str, Any]]] = ray.nodes) -> None:
    """Return when Ray has noticed each node that is lost. Until then it places new workers there, which die with it.

    `nodes`: their table, as Ray has it. A node is lost if nothing listens at the port of Ray's process there.
    """
    if _started_here:
        return
    deadline, next_message = time.monotonic() + _LOST_S, 0.0
    while lost := [node for node in nodes() if node["Alive"] and not _listens(node)]:
        if time.monotonic() > deadline:
            return  # the start of the workers says what is wrong
        if time.monotonic() > next_message:
            logger.warning("Ray is about to notice that %s is lost", ", ".join(n["NodeManagerAddress"] for n in lost))
            next_message = time.monotonic() + _MESSAGE_EVERY_S
        time.sleep(_POLL_S)


def _listens(node: Mapping[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _own_raylet() -> subprocess.Popen[bytes] | None:
    """Ray's process that starts workers, of a cluster that this process started."""
    node = global_worker.node
    if not _started_here or node is None or "raylet" not in node.all_processes:
        return None
    return node.all_processes["raylet"][0].process


def _prepare() -> None:
    # Under `uv run`, Ray's hook would copy the project and start every worker with the driver's `uv run` command, in a
    # new environment and folder, and ignore `py_executable`. Ray reads the variable when it is imported, which may have
    # happened already.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not (sys.stdout.isatty() and sys.stderr.isatty()):  # lines of workers go to both, coloured
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # It warns that a local cluster has token authentication, which is intended.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    protect_token()


class _LightNode(Node):
    """A node of Ray for a run on one machine: it waits for no process of Python, and starts workers by `_SETUP`.

    Ray's own has three more: the dashboard, its agent and the autoscaler's monitor, which serve other machines or
    pages that `include_dashboard=False` refuses; it waits for the first two, 15 s for the agents of the raylet, which a
    busy machine exceeds by importing them (https://github.com/ray-project/ray/issues/65983). No setting says so.
    """

    def start_head_processes(self) -> None:
        self._ray_params.no_monitor = True
        program = os.memfd_create("setup_worker")  # a file that ends with this process
        how = _template and {
            "address": _template.address,
            "environment": _template.environment,
            "prefixes": READ_WHEN_LOADED,
        }
        os.write(program, _SETUP.replace("{template}", repr(json.dumps(how))).encode())
        self._ray_params.setup_worker_path = f"/proc/{os.getpid()}/fd/{program}"
        super().start_head_processes()

    def _prepare_socket_file(self, socket_path: Any, default_prefix: str) -> str:
        if len(os.fsencode(self.get_sockets_dir_path())) > _MAX_SOCKET_FOLDER:
            socket_path = self._make_inc_temp(prefix=default_prefix, directory_name=scratch_folder())
        return super()._prepare_socket_file(socket_path, default_prefix)

    def start_api_server(self, **_: Any) -> None:
        """No dashboard."""

    def start_ray_processes(self) -> None:
        # The raylet waits for a file with each port of an agent, unless it is told the port.
        core: Any = _raylet  # its names are unknown to type checkers
        unused = (core.METRICS_AGENT_PORT_NAME, core.METRICS_EXPORT_PORT_NAME, core.DASHBOARD_AGENT_LISTEN_PORT_NAME)
        for name in unused:
            core.persist_port(self.get_session_dir_path(), self.node_id, name, _NOT_IN_USE)
        # Bound as long as this node lives: the agent can bind it too, and listens; nobody else is given it.
        self._agent_port = socket.socket()
        self._agent_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._agent_port.bind(("127.0.0.1", 0))
        self._ray_params.runtime_env_agent_port = self._agent_port.getsockname()[1]
        build: Any = services._build_python_executable_command_memory_profileable
        services._build_python_executable_command_memory_profileable = partial(_command_of_ray, build)
        try:
            super().start_ray_processes()
        finally:
            services._build_python_executable_command_memory_profileable = build


def _command_of_ray(build: Callable[..., list[str]], component: str, *arguments: Any, **named: Any) -> list[str]:
    """The command of one of Ray's own processes: for the dashboard's agent, without which the raylet ends, a sleep."""
    if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
        return ["/bin/sh", "-c", "exec sleep infinity"]
    return build(component, *arguments, **named)


@contextmanager
def _light_node() -> Generator[None]:
    """`ray.init` inside starts a `_LightNode`."""
    node_of_ray.Node = _LightNode
    try:
        yield
    finally:
        node_of_ray.Node = Node


@contextmanager
def _own_sigterm() -> Generator[None]:
    """Give SIGTERM back to this process after `ray.init`, whose handler prints addresses and aborts."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _token_errors() -> Generator[None]:
    """Make Ray's errors about its token a ValueError of one line."""
    try:
        yield
    except AuthenticationError as error:
        reason = str(error).partition(". Ensure")[0]
        raise ValueError(
            f"Ray's token cannot be read: {reason}. Set RAY_AUTH_TOKEN_PATH to the cluster's token file, which this "
            "user must be able to read, or RAY_AUTH_TOKEN to the token"
        ) from error


def start_under_load(
    start: Callable[[], object],
    *,
    measure_import: Callable[[], float],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """`start()`, which starts Ray, up to four times in a limit that grows with the time that an import of Ray takes.

    Ray waits 15 to 30 s for its own processes, and no setting changes that. A busy machine may take longer.
    `measure_import` returns seconds. Raises RayLost with them.
    """
    began = clock()
    for number in range(1, _MAX_STARTS + 1):
        failures: list[BaseException] = []
        with ExitStack() as trying:
            trying.push(partial(_late_start, failures))
            start()
        if not failures:
            return
        import_s, elapsed_s = measure_import(), clock() - began
        limit_s = _LEAST_START_S + _IMPORTS_PER_START * import_s
        slow = (
            f"`import ray` takes {import_s:.1f} s here now, and about 1 s on an idle machine: other processes hold its "
            "cores, or its disk is slow"
        )
        if number == _MAX_STARTS or elapsed_s > limit_s:
            raise RayLost(
                f"Ray did not start on this machine, in {number} tries and {elapsed_s:.0f} s: {failures[0]} {slow}. "
                f"Its logs are in {folder_of_ray()}"
            ) from failures[0]
        logger.warning("Ray did not start and is started again (try %d): %s. Ray said: %s", number, slow, failures[0])


def _late_start(
    failures: list[BaseException], kind: type[BaseException] | None, error: BaseException | None, _: object
) -> bool:
    """The end of a block in which Ray starts: its plain `Exception`, which says that it was too slow, is noted."""
    if kind is not Exception or error is None:
        return False
    failures.append(error)
    return True


def _import_of_ray_s() -> float:
    """Seconds of a new Python that imports Ray, as each of Ray's own processes does."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import ray"], check=True)
    return time.monotonic() - began


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Room for one rank of each colocated worker group: one GPU, or one set of CPU worker slots."""

    node_rank: int
    node_id: str
    node_ip: str
    gpu_id: str | None  # as CUDA_VISIBLE_DEVICES names it; None for a CPU bundle
    placement_group: PlacementGroup
    placement_group_bundle_index: int


class RayVirtualCluster:
    """Bundles booked in Ray's cluster, `bundle_ct_per_node_list[i]` of them on the i-th node.

    A bundle is one GPU (none with `use_gpus=False`) and `max_colocated_worker_groups` CPUs, one for each worker group
    that may share it. CPUs are worker slots here. Bundles are booked at first use: one placement group per node, packed
    onto that node, so that neighbouring ranks (a tensor-parallel group) share a node. If a single worker spans nodes,
    there is one unified group, laid out by `placement_group_strategy` and ordered by node and GPU. Without
    `distinct_nodes`, one node of Ray may take the place of several.

    Raises ValueError for an impossible layout, and ResourceInsufficientError if the cluster has too few resources:
    immediately on a cluster that this process started, after three minutes on one whose nodes may still join.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        *,
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        distinct_nodes: bool = False,
    ) -> None:
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise ValueError(f"every node needs at least one bundle, got {bundle_ct_per_node_list}")
        if use_gpus and max(bundle_ct_per_node_list) > num_gpus_per_node:
            raise ValueError(
                f"{max(bundle_ct_per_node_list)} bundles asked for on a node of {num_gpus_per_node} GPUs: "
                "spread them over more nodes or set cluster.gpus_per_node"
            )
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups must be 1 or more, got {max_colocated_worker_groups}")
        self._bundle_counts = list(bundle_ct_per_node_list)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.name = name
        self._resources = {"CPU": float(max_colocated_worker_groups)} | ({"GPU": 1.0} if use_gpus else {})
        self._strategy = placement_group_strategy
        self._distinct_nodes = distinct_nodes
        self._placement_groups: list[PlacementGroup] = []
        self._bundles: list[Bundle] | None = None
        self._seats: dict[int, list[str]] = {}  # bundle -> names of the worker groups on it

    def world_size(self) -> int:
        """Number of bundles."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        return len(self._bundle_counts)

    def bundles_by_node(self) -> list[list[int]]:
        """Bundle indices of each node."""
        counts = self._bundle_counts
        return [list(range(end - count, end)) for end, count in zip(accumulate(counts), counts, strict=True)]

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups; books them on the first call."""
        self.bundles()
        return list(self._placement_groups)

    def bundles(self, *, spanning_nodes: bool = False) -> list[Bundle]:
        """All bundles with their node and GPU. Books them on the first call, unified if a worker spans nodes."""
        unified = spanning_nodes and self.node_count() > 1
        if self._bundles is not None:
            if unified and len(self._placement_groups) > 1:
                raise ValueError(
                    f"the bundles of cluster {self.name!r} are booked node by node already: make the worker group that "
                    "spans nodes first, or give it a cluster of its own"
                )
            return self._bundles
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self._book(unified)
            self._bundles = self._locate(unified)
            undo.pop_all()
        return self._bundles

    def take_seats(self, bundle_indices: Sequence[int], group: str) -> None:
        """Assign these bundles to the worker group `group`. Raises ValueError if one of them is full."""
        for index in bundle_indices:
            sitting = self._seats.get(index, [])
            if len(sitting) >= self.max_colocated_worker_groups:
                raise ValueError(
                    f"bundle {index} of cluster {self.name!r} holds {sitting} already and {group!r} finds no room: "
                    f"raise max_colocated_worker_groups (now {self.max_colocated_worker_groups})"
                )
        for index in bundle_indices:
            self._seats.setdefault(index, []).append(group)

    def leave_seats(self, group: str, *, failed: bool = False) -> None:
        """Free the bundles of `group`. After a failed start, the last group returns them to Ray."""
        self._seats = {
            index: left for index, names in self._seats.items() if (left := [name for name in names if name != group])
        }
        if failed and not self._seats:
            self.shutdown()

    def shutdown(self) -> None:
        """Return the bundles to Ray. May be called again, and after Ray itself has ended."""
        groups, self._placement_groups, self._bundles, self._seats = self._placement_groups, [], None, {}
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)

    def __enter__(self) -> RayVirtualCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _book(self, unified: bool) -> None:
        counts = [self.world_size()] if unified else self._bundle_counts
        # Not PACK, which silently scatters bundles over nodes if they do not fit.
        strategy = self._strategy if unified else "STRICT_PACK"
        # First check that the resources exist. Others may still hold them, which Ray waits for.
        deadline = time.monotonic() + (0.0 if _started_here else _JOIN_WAIT_S)
        on_nodes = [1] * counts[0] if unified else counts
        distinct = self._distinct_nodes and not unified
        self._wait_until(lambda: _fit(on_nodes, self._resources, distinct) is not None, deadline, "nodes")
        # Ray would put two groups onto one node that has room for both.
        targets = (_fit(counts, self._resources, distinct) if distinct else None) or [None] * len(counts)
        for i, count in enumerate(counts):
            suffix = "unified" if unified else f"node{i}"
            name = f"{self.name}-{suffix}" if self.name else ""
            bundles, target = [self._resources] * count, targets[i]
            group = placement_group(bundles, strategy=strategy, name=name, _soft_target_node_id=target)
            self._placement_groups.append(group)
        deadline = max(deadline, time.monotonic() + _FREE_WAIT_S)
        groups = self._placement_groups
        self._wait_until(lambda: all(group.wait(1) for group in groups), deadline, "resources that others hold")

    def _wait_until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        next_message = time.monotonic()
        while not condition():
            left_s = deadline - time.monotonic()
            difference = self._lack()
            if left_s < 0:
                raise ResourceInsufficientError(difference)
            if time.monotonic() > next_message:
                logger.warning("Waiting %.0f s more for %s: %s", left_s, what, difference)
                next_message = time.monotonic() + _MESSAGE_EVERY_S
            time.sleep(_POLL_S)

    def _lack(self) -> str:
        return _difference(self._bundle_counts, self._resources, self._distinct_nodes)

    def _locate(self, unified: bool) -> list[Bundle]:
        ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = []  # (node id, GPU id, placement group, index in it)
        for group in self._placement_groups:
            node_ids = placement_group_table(group)["bundles_to_node_id"]
            gpu_ids = _gpu_ids(group) if self.use_gpus else [None] * len(node_ids)
            in_group = [(node_ids[i], gpu_ids[i], group, i) for i in range(len(node_ids))]
            places += sorted(in_group, key=lambda place: (place[0], _gpu_order(place[1]), place[3]))
        if self._distinct_nodes and len({place[0] for place in places}) < self.node_count():
            raise ResourceInsufficientError(f"others hold a node, and one would stand for two: {self._lack()}")
        node_ranks: dict[Any, int] = {}
        return [
            Bundle(
                node_rank=node_ranks.setdefault(node_id if unified else group.id, len(node_ranks)),
                node_id=node_id,
                node_ip=ips[node_id],
                gpu_id=gpu_id,
                placement_group=group,
                placement_group_bundle_index=group_index,
            )
            for node_id, gpu_id, group, group_index in places
        ]


def _gpu_order(gpu_id: str | None) -> tuple[int, str]:
    return (int(gpu_id), "") if gpu_id is not None and gpu_id.isdigit() else (0, gpu_id or "")


def _gpu_ids(group: PlacementGroup) -> list[str | None]:
    """The GPU behind each bundle, as a task placed on it sees it."""

    def probe() -> str:
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    remote = ray.remote(num_cpus=0, num_gpus=0.01)(probe)
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(group.bundle_count)]
    return list(ray.get([remote.options(scheduling_strategy=place).remote() for place in places], timeout=120))


def _nodes() -> list[tuple[str, str, dict[str, float], dict[str, float]]]:
    """(id, ip, resources, free resources) of each live node."""
    available = available_resources_per_node()
    return [
        (node["NodeID"], node["NodeManagerAddress"], node["Resources"], available.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _fit(counts: Sequence[int], bundle: dict[str, float], distinct: bool) -> list[str] | None:
    """The id of a node for each of the `counts` sets of bundles; None if an otherwise idle cluster has no room.

    `distinct`: no two are the same. Those with the most free come first, so that two clusters share no node needlessly.
    """
    nodes, found = _nodes(), dict[int, str]()
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        asked = {name: amount * counts[index] for name, amount in bundle.items()}
        fitting = [node for node in nodes if _share(node[2], asked) >= 1]
        if not fitting:
            return None
        node = max(fitting, key=lambda node: _share(node[3], asked))
        found[index] = node[0]
        if distinct:
            nodes.remove(node)
        for name, amount in asked.items():
            node[2][name] -= amount
    return [found[index] for index in range(len(counts))]


def _share(resources: dict[str, float], asked: dict[str, float]) -> float:
    """The number of times that the free resources hold the request."""
    return min(resources.get(name, 0.0) / amount for name, amount in asked.items())


def _difference(counts: Sequence[int], bundle: dict[str, float], distinct: bool) -> str:
    def describe(resources: dict[str, float], times: int = 1) -> str:
        return ", ".join(f"{resources.get(name, 0.0) * times:g} {name}" for name in sorted(bundle, reverse=True))

    nodes = _nodes()
    lines = ["not enough resources in the Ray cluster", "asked for:"]
    if distinct and len(nodes) < len(counts):
        lack = f"{len(counts)} nodes asked for, and the Ray cluster has {len(nodes)}"
        lines[0] = f"{lack}: start Ray on more machines, or set cluster.num_nodes={max(len(nodes), 1)}"
    lines += [f"  node {i}: {describe(bundle, count)}" for i, count in enumerate(counts)]
    lines.append("there is:" if nodes else "there is: no node")
    lines += [f"  {ip}: {describe(total)} ({describe(free)} free)" for _, ip, total, free in nodes]
    totals = {name: sum(total.get(name, 0.0) for *_, total, _ in nodes) for name in bundle}
    for name, amount in sorted(bundle.items(), reverse=True):
        short = amount * sum(counts) - totals[name]
        if short > 0:
            lines.append(f"missing: {short:g} {name}")
    if bundle.get("GPU") and totals["GPU"] == 0:
        lines.append("no node has a GPU: set cluster.gpus_per_node=0 or use a *_cpu.yaml config to run on CPUs")
    return "\n".join(lines)
