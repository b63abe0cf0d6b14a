"""DPO: prefer the chosen answers over the rejected ones, relative to a reference policy (arXiv 2305.18290).

The step is `SupervisedTrainer.step`; the phase `score` adds the reference policy's logprob of each answer. Before the
first step the policy is the reference policy, so they can all be computed then, without a second copy of the weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.algorithms.config.supervised import DPOMasterConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.losses.own import chosen_loss
from nemo_rl.algorithms.losses.preference import DPOLoss
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.rows import Rows
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.supervised import SupervisedParts, SupervisedTrainer, prepare_rows, start_rows
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool
from nemo_rl.types import BatchPlan, ExampleHandle, LossFunction, RowKey
from nemo_rl.utils.files import digest

logger = logging.getLogger(__name__)

LOGPROBS = "reference_policy_logprobs"  # column of a logprob per token
SUM = "reference_logprob_sum"  # column of one number per row, which the loss reads

ReferenceSums = dict[str, tuple[float, float]]
"""Id of the prompt -> the reference policy's logprobs of chosen and rejected answer; unusable rows have none."""


def run_dpo(config: DPOMasterConfig, loss_fn: LossFunction | None = None) -> int:
    """Train; returns the exit status (see `Command`). `loss_fn`: a loss of your own (docs/adding-a-loss.md)."""
    with Run(config) as run:
        loss_fn = chosen_loss(loss_fn, config.loss_fn, config.dpo)
        model, rows, saves = prepare_rows(config)
        run.start(saves)
        is_ahead = config.dpo.precompute_reference_logprobs
        pool = rows.start_tokenizers(run)
        parts = start_rows(run, model, rows, pool, init_reference_model=not is_ahead)
        trainer = DPOTrainer(run.config, run.tools, parts, None, loss_fn)
        if is_ahead:
            trainer.score_all(model, rows, pool)
        run.train(trainer)
    return run.status


class DPOTrainer(SupervisedTrainer):
    """Direct preference optimisation. `known`: the reference logprobs of all rows, if they were computed beforehand."""

    def __init__(
        self,
        config: DPOMasterConfig,
        tools: RunTools,
        parts: SupervisedParts,
        known: ReferenceSums | None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """`loss_fn`: None is the loss of `losses/preference.py`."""
        loss = loss_fn if loss_fn is not None else DPOLoss(config.dpo)
        super().__init__(config, tools, parts, loss, Logprobs(filtered=False))
        self.config: DPOMasterConfig = config
        self.known = known

    def score_all(self, model: Model, rows: Rows, pool: TokenizerPool) -> None:
        """Take over the reference logprobs that an earlier start of the same run has kept, or compute them.

        The policy computes them, which still has the weights that the run starts from.
        """
        checkpointing = self.tools.checkpointing
        name = f"reference_logprobs_{digest(repr(sorted(self._reference_identity(model, rows).items())))}.npz"
        path = Path(checkpointing.checkpoint_dir) / name if checkpointing.enabled else None
        with self.phase("reference_logprobs"):
            if path is not None and path.is_file():
                self.known = load_sums(path)
            else:
                plan = partial(self.plan_rows, batching=self.batching)
                self.known = compute_reference_sums(self.policy, self._every_batch(rows, pool), plan)
                if path is not None:
                    keep_sums(self.known, path)
        self.timer.reset()

    def _reference_identity(self, model: Model, rows: Rows) -> Mapping[str, Any]:
        """The values on which the reference logprobs depend."""
        config = self.config
        identity = {name: value for name, value in self.tools.identity.items() if name != config.section}
        sets = rows.data.validation if config.dpo.validates else {}
        identity["validation"] = {name: dataset.fingerprint() for name, dataset in sets.items()}
        identity["how"] = (config.dpo.max_val_rows, config.policy.precision, rows.make.fingerprint())
        identity["weights"] = weights_identity(config.policy.model_name, model.model_path, model.config)
        return identity

    def _every_batch(self, rows: Rows, pool: TokenizerPool) -> Iterator[Sequence[ExampleHandle]]:
        """All rows of validation and training."""
        yield from (tokenise() for tokenise in self.validation.values())
        yield from rows.batches_of_all(pool, self.config.policy.train_global_batch_size)

    def score(self, batch: Sequence[ExampleHandle], plan: BatchPlan) -> None:
        """The reference policy's logprob of each answer, kept with the rows on the workers."""
        with self.phase("reference_logprobs"):
            if self.known is not None:
                self.policy.attach(SUM, sums_of_plan(self.known, batch, plan))
            else:
                self.policy.compute_reference_logprobs()
                self.policy.sum_column(LOGPROBS, SUM)


def sums_of_plan(sums: ReferenceSums, batch: Sequence[ExampleHandle], plan: BatchPlan) -> dict[RowKey, np.ndarray]:
    """The sums of the rows of the `plan` of `batch`, float32 [] each; 0 for stubs, and copies that fill up ranks.

    Raises ValueError for a row that could not be used when the sums were computed, and can be now.
    """
    found = {key: 0.0 for rank in plan.ranks for mb in rank.logprobs for s in mb for key in s.keys}
    for number, handle in enumerate(batch):
        for row in handle.rows:
            if row.problem is not None:
                continue
            if row.prompt_id not in sums:
                raise ValueError(
                    f"row {row.prompt_id} could not be used (an image that could not be read?) when the reference "
                    "logprobs were computed, and has none: remove reference_logprobs_*.npz from "
                    "checkpointing.checkpoint_dir, and start the run again"
                )
            for offset, value in enumerate(sums[row.prompt_id]):
                found[number, row.index + offset] = value
    return {key: np.array(value, dtype=np.float32) for key, value in found.items()}


def compute_reference_sums(
    policy: Policy,
    batches: Iterable[Sequence[ExampleHandle]],
    plan: Callable[[Sequence[ExampleHandle]], BatchPlan],
) -> ReferenceSums:
    """Score `batches` with the present weights of `policy`."""
    sums: ReferenceSums = {}
    for batch in batches:
        policy.load(plan(batch))
        policy.compute(Logprobs(filtered=False), LOGPROBS)
        found = policy.sum_column(LOGPROBS, f"{LOGPROBS}_sum")
        for number, handle in enumerate(batch):
            for row in handle.rows:
                if row.problem is None:
                    sums[row.prompt_id] = (found[number, row.index], found[number, row.index + 1])
    return sums


def save_sums(sums: ReferenceSums, path: Path) -> None:
    """Write the sums, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f"tmp_{path.name}")
    np.savez(work, prompt_ids=np.array(list(sums)), sums=np.array(list(sums.values())))
    os.replace(work, path)


def keep_sums(sums: ReferenceSums, path: Path) -> None:
    """`save_sums` for further runs; a warning if they cannot be written, since this run has them in memory."""
    try:
        save_sums(sums, path)
    except OSError as error:
        logger.warning("the reference logprobs cannot be kept for further runs in %s: %s", path, error)


def load_sums(path: Path) -> ReferenceSums:
    """Inverse of `save_sums`."""
    with np.load(path, allow_pickle=False) as file:
        found = zip(file["prompt_ids"].tolist(), file["sums"].tolist(), strict=True)
        return {prompt_id: (chosen, rejected) for prompt_id, (chosen, rejected) in found}
