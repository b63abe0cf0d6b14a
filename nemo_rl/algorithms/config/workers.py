"""How many CPU workers a node has when the configuration leaves that to the machine."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from nemo_rl.config.rules import CrossCheckError, StrictModel, value_of
from nemo_rl.distributed.limits import physical_cores
from nemo_rl.utils.config import ClusterConfig


class ChoosesWorkers(StrictModel):
    """A whole run or evaluation, with a section `cluster`. Once it is checked, `auto` of its CPU workers is a number.

    It is the largest number with which the whole configuration violates no rule, so no rule has to know of `auto`.
    `nemo_rl/algorithms/parts/workers.py` lowers it to what memory holds: a prediction needs torch.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        machines = self._machines
        if machines.cpu_workers_per_node == "auto" and not machines.use_gpus:  # beside GPUs nobody asks for the number
            self.at(self._path)  # rules name keys by their places
            cores = physical_cores()
            reason = "this machine has one physical core" if cores == 1 else f"one for each of {cores} physical cores"
            self.__dict__["cluster"] = self.with_at_most(cores, reason)._machines
        return super()._check()  # pyrefly: ignore[not-callable]  (pydantic leaves a validator callable)

    @property
    def _machines(self) -> ClusterConfig:
        return value_of(self, "cluster")

    def with_workers(self, number: int, reason: str) -> Self:
        """This configuration with `number` CPU workers on each node, chosen for a `reason` that the run tells."""
        return self.model_copy(update={"cluster": self._machines.with_workers(number, reason)})

    def with_at_most(self, most: int, limit: str) -> Self:
        """This configuration with the largest number of CPU workers, at most `most`, that violates no rule; else 1.

        `limit`: why there are not more than `most`.
        """
        for number in range(most, 1, -1):
            found = self.with_workers(number, limit)
            problem = next(found.problems(), None)
            if problem is None:
                return found
            text = str(CrossCheckError([problem]))
            limit = f"with {number}, {text.partition('; ')[0]}"
        return self.with_workers(1, limit)

    def with_workers_of(self, saved: Mapping[str, Any]) -> Self:
        """This configuration with the CPU workers of the configuration `saved`, if it was left to this run to choose.

        The number stays where `saved` used GPUs, where this machine has fewer cores, and where it violates a rule.
        """
        before = saved["cluster"]
        if self._machines.reason is None or before["gpus_per_node"] > 0:
            return self
        kept = self.with_workers(before["cpu_workers_per_node"], "as many as in the checkpoint")
        is_possible = kept._machines.workers_per_node <= physical_cores() and not any(kept.problems())
        return kept if is_possible else self

    @property
    def workers_line(self) -> str | None:
        """A line about the number of CPU workers; None if it was given, or there are GPUs."""
        machines = self._machines
        if machines.reason is None:
            return None
        return f"cluster.cpu_workers_per_node={machines.workers_per_node}: {machines.reason}"
