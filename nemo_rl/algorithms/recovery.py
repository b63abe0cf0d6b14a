"""The one place for every process of a run that dies and is replaced.

    who waits             for whom          what dies      who notices, and what unblocks the wait
    --------------------  ----------------  -------------  ------------------------------------------------------------
    the loop, in a step   policy, value,    a rank         `Trainer.recover`: `replace_dead`, then back to the last
                          teacher                          checkpoint
    the loop, in a step   finished groups   their keeper   the same; the groups are lost and played again
    RolloutCollector      rollout worker    the worker     the collector starts a new one with the same requests, after
                                                           `abandon_requests`
    RolloutCollector      engines           an engine      the collector calls `restart_dead_workers`; unfinished groups
                                                           are played again with the same seeds
    the loop, in a sync   engines           an engine      `sync`: the same
    anyone                Ray               its processes  nobody: RayLost ends the run

While the loop waits for the policy, the policy's group calls `RolloutCollector.poll` about twice a second, so groups
that are played beside training come in and a dead rollout worker is replaced at once. `poll` postpones the death of an
engine to the collector's next own wait: a new engine needs weights, and the policy is busy.

A wait that lasts longer than `cluster.worker_timeout_s` is a WorkerHang, which ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.rollouts.group_keeper import KEEPER

if TYPE_CHECKING:
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.refit.sync import WeightSync
    from nemo_rl.rollouts.collector import RolloutCollector
    from nemo_rl.utils.console import RunConsole


class Recovery:
    """Replaces dead workers of policies. `replacements`: prefix of their names -> function that makes new ones."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.replacements: dict[str, Callable[[], None]] = {policy.name_prefix: policy.restart for policy in policies}

    def replace_dead(self, error: WorkerDied) -> None:
        """New workers in place of those that died; they have no state. Raises `error` if nothing can replace them."""
        replacements = [replace for prefix, replace in self.replacements.items() if error.is_of(prefix)]
        if not replacements:
            raise error
        self.abandon_step()
        for replace in replacements:
            replace()

    def abandon_step(self) -> None:
        """Forget the unfinished work of a step that failed."""


class RolloutRecovery(Recovery):
    """Replaces engines and the keeper of finished groups, too.

    It brings weights to the engines (`sync`) and knows their version, because new engines need the same weights.
    `on_new_engines` is called with the workers of restarted engines: other users of the engines need the new ones.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        generation: GenerationInterface | None,
        refit: WeightSync,
        rollouts: RolloutCollector,
        console: RunConsole,
        on_new_engines: Callable[[Sequence[Any]], None] | None,
    ) -> None:
        super().__init__(policies)
        self.version = 0  # of the weights that generation has, or is being given
        self._policy = policies[0]
        self._generation, self._refit, self._rollouts, self._console = generation, refit, rollouts, console
        self._on_new_engines = on_new_engines
        self.replacements |= {self._policy.name_prefix: self._replace_policy, KEEPER: rollouts.replace_keeper}
        if generation is not None:
            rollouts.engines = self

    def sync(self, version: int) -> None:
        """Give generation the policy's present weights as `version`. An engine that dies meanwhile is replaced."""
        self.version = version
        try:
            self._refit.sync(version)
        except WorkerError as error:
            if self._generation is None or not (error.engine_died or error.worker.startswith(GENERATION)):
                raise
            self._console.warn(f"{first_line(error)}; the engine is started again")
            self._rollouts.use_generation(self.restart_dead_workers())

    # -- the `RestartableEngines` of the collector

    def restart_dead_workers(self) -> list[Any]:
        """Start dead engines again and give every engine the policy's weights. Returns the workers of all engines."""
        assert self._generation is not None, "recorded rollouts need no engines"
        workers = self._generation.restart_dead_workers()
        self._refit.sync(self.version)
        if self._on_new_engines is not None:
            self._on_new_engines(workers)
        return workers

    def abandon_requests(self) -> None:
        """Make the engines drop all requests."""
        assert self._generation is not None, "recorded rollouts need no engines"
        self._generation.abandon_requests()

    # -- replacements

    def abandon_step(self) -> None:
        self._rollouts.abandon()

    def _replace_policy(self) -> None:
        self._policy.restart()
        if self._generation is not None and self._generation.dead_workers():  # a lost node takes engines with it
            workers = self._generation.restart_dead_workers()
            self._rollouts.use_generation(workers)
            if self._on_new_engines is not None:
                self._on_new_engines(workers)
        self._refit.prepare()  # the engines are attached to the buffers of the dead workers
