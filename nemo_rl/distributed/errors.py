"""Errors of workers, as the controller raises them."""

from ray.exceptions import OutOfMemoryError, RayActorError

ACTOR_DEATHS = (RayActorError, OutOfMemoryError)
"""How Ray reports that the process of an actor is gone. The second: Ray killed it, because a machine ran low on memory.
"""


class ResourceInsufficientError(RuntimeError):
    """The cluster has too few resources; the message lists the difference node by node."""


class RayLost(RuntimeError):
    """Ray did not start on this machine, or its own process has ended or is stopped: no worker can start again."""


class WorkerError(RuntimeError):
    """A worker failed. The message names actor, rank and method.

    `exception_type` is the class name of the worker's exception ("": it raised none, but died or hangs), and
    `remote_traceback` its traceback. Both are text, since only the worker's environment may have the class.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        rank: int,
        method: str,
        exception_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.rank = rank
        self.method = method
        self.exception_type = exception_type
        self.remote_traceback = remote_traceback

    def is_of(self, group: str) -> bool:
        """Whether the worker belongs to `group`, whose workers are called `<group>-<rank>`."""
        return self.worker.rpartition("-")[0] == group

    @property
    def engine_died(self) -> bool:
        """Whether the engine that the worker hosts died while the worker itself lives."""
        return self.exception_type == "EngineDied"


class WorkerDied(WorkerError):
    """The worker's process is gone."""


class WorkerHang(WorkerError):
    """The worker did not answer in time; the message holds its Python stacks."""


def death_text(error: RayActorError | OutOfMemoryError) -> str:
    """Ray's message. For want of memory: how much there was, the largest processes, and a remedy."""
    if not isinstance(error, OutOfMemoryError):
        return str(error)
    memory = str(error).partition(" was ")[2].partition("\n")[0]  # 22.36GB used / 23.54GB limit (0.95)
    largest = str(error).partition("Top 10 memory users: ")[2].partition("Refer to ")[0].strip()
    return (
        f"Ray killed it, because its machine ran low on memory: {memory}. Give the run more memory, end other "
        "processes there, or lower its batch sizes: --dry-run predicts the memory of each worker. The largest "
        f"processes:\n{largest}"
    )


def first_line(error: Exception) -> str:
    """The message without stacks and logs."""
    return str(error).splitlines()[0]


class UserCodeError(ValueError):
    """The user's code returned a wrong value. The message names it, and no traceback would say more."""


class WorkerCallError(Exception):
    """An exception of a worker as text, so that environments without its class can read it."""

    def __init__(self, exception_type: str, text: str, remote_traceback: str) -> None:
        super().__init__(exception_type, text, remote_traceback)  # all of them, so that it can be pickled
        self.exception_type = exception_type
        self.text = text
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.exception_type}: {self.text}"
