"""What a worker that does not answer, or has died, can still tell. Every question has a time limit of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.actor_host import HostIdentity

if TYPE_CHECKING:
    from nemo_rl.distributed.worker_groups import Worker

_MAX_STACKS = 4  # the other late workers mostly wait in the same collective
_LOG_TAIL_LINES = 20
_ON_NODE_S = 15.0


def inspect_workers(workers: list[Worker], timeout_s: float) -> str:
    """Phase and Python stacks of workers, one paragraph each; says so where a process answers nothing."""
    phases = {worker.rank: worker.handle.phase.remote() for worker in workers}
    stacks = {worker.rank: worker.handle.stack.remote() for worker in workers[:_MAX_STACKS]}
    refs = [*phases.values(), *stacks.values()]
    answered = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0])
    parts = []
    for worker in workers:
        try:
            if phases[worker.rank] not in answered:
                parts.append(f"--- {worker}: {_silence(worker, timeout_s)}")
                continue
            text = f"--- {worker}: {ray.get(phases[worker.rank])}"
            stack = stacks.get(worker.rank)
            if stack is not None and stack in answered:
                text += f"\n{ray.get(stack)}"
            parts.append(text)
        except RayError as error:
            parts.append(f"--- {worker}: {error}")
    return "\n".join(parts)


def log_tail(worker: Worker) -> str:
    """The last lines of what the worker wrote to stderr, ready to append to a message; "" when there is none."""
    if worker.identity is None or worker.identity.log_path is None:
        return ""
    tail = _on_node(worker.identity, _read_tail, worker.identity.log_path)
    return f"\nlast lines of {worker.identity.log_path}:\n{tail}" if tail else ""


def _silence(worker: Worker, timeout_s: float) -> str:
    if worker.identity is None:
        return (
            f"its process has not started (asked for {timeout_s:g} s): its Python environment may be missing or "
            "still be made, or its node may be out of reach"
        )
    state = _on_node(worker.identity, _process_state, worker.identity.pid)
    return (
        f"its process answers nothing within {timeout_s:g} s, so there is no stack; "
        f"state of process {worker.identity.pid}: {state or 'unknown, its node does not answer'}"
    )


def _on_node(identity: HostIdentity, function: Callable[[Any], str], argument: Any) -> str:
    """`function(argument)` on the worker's node; "" when that node does not answer either."""
    if identity.node_id == ray.get_runtime_context().get_node_id():
        return function(argument)
    strategy = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    try:
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
        return ray.get(remote.options(scheduling_strategy=strategy).remote(argument), timeout=_ON_NODE_S)
    except RayError:
        return ""


def _read_tail(path: str) -> str:
    if not Path(path).is_file():
        return ""
    with open(path, errors="replace") as file:
        return "".join(deque(file, maxlen=_LOG_TAIL_LINES)).rstrip()


def _process_state(pid: int) -> str:
    """As the kernel says it, e.g. "T (stopped)"."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return "gone"
    return next(line.split(":", 1)[1].strip() for line in status.read_text().splitlines() if line.startswith("State:"))
