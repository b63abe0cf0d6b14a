"""Training on the rows of a dataset: SFT, DPO and reward models share this step, `SupervisedTrainer.step`.

SFT and reward models are this trainer with a loss and a head task of their own and nothing else: `run_sft`, `run_rm`.
DPO has to score its rows first: `dpo.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nemo_rl.algorithms.config.supervised import RMMasterConfig, SFTMasterConfig, SupervisedMasterConfig
from nemo_rl.algorithms.loop import DataExhausted, RunTools, Trainer
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.own import chosen_loss
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.algorithms.parts.devices import Devices
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.rows import Rows
from nemo_rl.algorithms.parts.saves import Saves
from nemo_rl.algorithms.plan.batch import plan_samples
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.metrics import flops_metrics, measure_packing
from nemo_rl.data.rows.examples import ExampleLoader, require_same_questions
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool
from nemo_rl.types import BatchPlan, ExampleHandle, ExampleMeta, LossFunction, PlannedSample, TrainResult

MAX_PROBLEMS_SHOWN = 3


def run_sft(config: SFTMasterConfig, loss_fn: LossFunction | None = None) -> int:
    """Train; returns the exit status (see `Command`). `loss_fn`: a loss of your own (docs/adding-a-loss.md)."""
    return _run(config, loss_fn, NLLLoss(), Logprobs(filtered=False))


def run_rm(config: RMMasterConfig, loss_fn: LossFunction | None = None) -> int:
    """Train; returns the exit status (see `Command`). `loss_fn`: a loss of your own (docs/adding-a-loss.md)."""
    return _run(config, loss_fn, PreferenceLoss(config.rm), Scalars())


def _run(config: SupervisedMasterConfig, given: LossFunction | None, usual: LossFunction, task: HeadTask) -> int:
    with Run(config) as run:
        own = chosen_loss(given, config.loss_fn, config.loss_section)
        model, rows, saves = prepare_rows(config)
        run.start(saves)
        parts = start_rows(run, model, rows, rows.start_tokenizers(run))
        run.train(SupervisedTrainer(run.config, run.tools, parts, usual if own is None else own, task))
    return run.status


def prepare_rows(config: SupervisedMasterConfig) -> tuple[Model, Rows, Saves]:
    """Load and check the parts that need no worker.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    model = Model.prepare(config.policy, config.checkpointing)
    rows = Rows.prepare(config, model)
    identity = model.identity | rows.identity(config)
    return model, rows, Saves.prepare(config, {"policy": (config.policy, model.config)}, identity)


@dataclass(frozen=True, kw_only=True)
class SupervisedParts:
    """The components of a run that learns from rows."""

    policy: Policy
    loader: ExampleLoader
    num_batches: int | None  # in an epoch; None: not known before it ends
    # By the name of the set. A call tokenises the set again if its rows were lost with their worker.
    validation: Mapping[str, Callable[[], Sequence[ExampleHandle]]]
    flops: ModelFlops


def start_rows[ConfigT: SupervisedMasterConfig](
    run: Run[ConfigT], model: Model, rows: Rows, pool: TokenizerPool, *, init_reference_model: bool = False
) -> SupervisedParts:
    """Start the policy, while `pool` makes tokens of the validation rows."""
    config = run.config
    loop = config.loop
    devices = Devices.start(run, config.training_cluster, 1, config.section, take_turns=False)
    validation = {}
    for name, dataset in rows.data.validation.items() if loop.validates else ():
        num = len(dataset) if loop.max_val_rows is None else min(loop.max_val_rows, len(dataset))
        validation[name] = pool.start([dataset[index] for index in range(num)])
    policy = model.start(run, config.policy, devices, init_reference_model=init_reference_model)
    return SupervisedParts(
        policy=policy,
        loader=ExampleLoader(rows.prompts, pool, max_num_epochs=loop.max_num_epochs),
        num_batches=rows.prompts.num_batches,
        validation={name: partial(pool.finish, pending) for name, pending in validation.items()},
        flops=model.flops,
    )


class SupervisedTrainer(Trainer):
    """A `Trainer` with one optimizer step per batch of rows. The loss gets the outputs of `task` for each token."""

    def __init__(
        self,
        config: SupervisedMasterConfig,
        tools: RunTools,
        parts: SupervisedParts,
        loss_fn: LossFunction,
        task: HeadTask,
    ) -> None:
        loop = config.loop
        in_epochs = None if parts.num_batches is None else loop.max_num_epochs * parts.num_batches
        num_steps = loop.max_num_steps if in_epochs is None else min(loop.max_num_steps, in_epochs)
        super().__init__(
            loop,
            tools,
            num_steps=num_steps,
            policies=[parts.policy],
            data=parts.loader,
            nonfinite_action=config.policy.nonfinite_action,
        )
        self.config = config
        self.policy = parts.policy
        self.loader = parts.loader
        self.validation = parts.validation
        self.loss_fn = loss_fn
        self.task = task
        self.plan_rows = partial(plan_examples, num_ranks=parts.policy.data_parallel_size)
        self.flops = parts.flops
        sequences, weights = config.sequences_per_row, parts.flops.cost_weights
        self.batching = Batching.of(config.policy, sequences_per_sample=sequences, **weights)

    def start(self) -> None:
        """Resume if there is a checkpoint. Warns once of the rows of validation sets that are left out.

        Raises:
            ValueError: all rows of a validation set are left out.
        """
        for name, tokenise in self.validation.items():
            rows = [row for handle in tokenise() for row in handle.rows]
            num_left_out = self._left_out(rows, f"validation set {name!r}")["num_left_out"]
            if num_left_out == len(rows):
                raise ValueError(
                    f"validation set {name!r}: not one of its {len(rows)} rows can be scored; the first: "
                    f"{rows[0].problem}"
                )
        self.resume()

    def step(self) -> None:
        batch = self.next_batch()
        plan = self.plan(batch)
        self.score(batch, plan)
        trained = self.update()
        self.report(batch, trained)

    # -- the phases, in order

    def next_batch(self) -> list[ExampleHandle]:
        """The next batch of rows, tokenised during the last step; raises DataExhausted after the last batch."""
        with self.phase("data_loading"):
            batch = self.loader.next()
        if batch is None:
            raise DataExhausted
        return batch

    def plan(self, batch: Sequence[ExampleHandle]) -> BatchPlan:
        """Which row goes to which rank and micro-batch; the workers fetch their rows."""
        plan = self.plan_rows(batch, batching=self.batching)
        self.packing = measure_packing(plan, self.batching)
        self.record("train", self.packing.metrics())
        if self.tools.recorder is not None:
            self.tools.recorder.choose_samples(plan)
        with self.phase("data_processing"):
            self.policy.load(plan)
        return plan

    def score(self, batch: Sequence[ExampleHandle], plan: BatchPlan) -> None:
        """Compute further inputs of the loss; here there are none. Runs in a validation too."""

    def update(self) -> TrainResult:
        """The optimizer step."""
        with self.phase("policy_training"):
            return self.take_steps(self.policy, self.loss_fn, self.task)

    def report(self, batch: Sequence[ExampleHandle], trained: TrainResult) -> None:
        """Metrics of the step from metadata; warns of rows that are left out."""
        rows = [row for handle in batch for row in handle.rows]
        self.state.consumed_samples += len(rows)
        self.record("train", self._left_out(rows, "this step"))
        lengths = [length for row in rows if row.problem is None for length in row.lengths]
        self.record("train", {"total_num_tokens": sum(lengths)})
        seconds = self.timer.get_timing_metrics("sum")
        total, training, workers = sum(seconds.values()), seconds["policy_training"], self.config.cluster.num_workers
        valid_tokens_per_s = trained.num_valid_tokens / total
        self.record("timing/train", {"valid_tokens_per_sec_per_gpu": valid_tokens_per_s / workers})
        throughput = {
            "samples_per_sec": len(rows) / total,
            "samples_per_sec_per_gpu": len(rows) / total / workers,
            "tokens_per_sec": sum(lengths) / total,
            "tokens_per_sec_per_gpu": sum(lengths) / total / workers,
            "policy_training_tokens_per_sec_per_gpu": sum(lengths) / training / workers,
            "average_token_imbalance": self.packing.token_imbalance,
        }
        images = [num_pixels for row in rows for num_pixels in row.images.values()]
        train_flops = self.flops.train(lengths, images, has_adapters=self.config.policy.adapters.enabled)
        throughput |= flops_metrics(train_flops, training, workers, self.policy.gpu)
        self.record("performance", throughput)

    def _left_out(self, rows: Sequence[ExampleMeta], where: str) -> dict[str, float]:
        require_same_questions(rows, where)
        kinds = Counter(row.problem_kind for row in rows if row.problem is not None)
        if kinds:
            lines = "\n".join([row.problem for row in rows if row.problem is not None][:MAX_PROBLEMS_SHOWN])
            self.tools.console.warn(f"{kinds.total()} of {len(rows)} rows of {where} are left out:\n{lines}")
        counts = {f"num_{kind}": float(number) for kind, number in kinds.items()}
        return {"num_left_out": float(kinds.total()), **counts}

    # -- validation

    def validate(self) -> dict[str, float]:
        """`validation-<set>_<metric>` of every set, and `val_loss` over all sets together.

        A loss is a mean over tokens, for pairs over pairs.
        """
        metrics: dict[str, float] = {}
        count = "global_valid_toks" if self.config.sequences_per_row == 1 else "global_valid_seqs"
        batching = self.batching
        if isinstance(batching.train, FixedSize):
            size = FixedSize(self.config.loop.val_micro_batch_size)
            batching = replace(batching, train=size, logprobs=size)
        weighted, total = 0.0, 0.0
        for name, tokenise in self.validation.items():
            handles = tokenise()
            plan = self.plan_rows(handles, batching=batching)
            self.policy.load(plan)
            self.score(handles, plan)
            found = self.policy.evaluate(self.loss_fn, self.task)
            found["num_left_out"] = float(sum(row.problem is not None for handle in handles for row in handle.rows))
            metrics |= {f"validation-{name}_{metric}": value for metric, value in found.items()}
            weighted += found["loss"] * found[count]
            total += found[count]
        return metrics | {"val_loss": weighted / total}


def plan_examples(handles: Sequence[ExampleHandle], *, num_ranks: int, batching: Batching) -> BatchPlan:
    """One optimizer step of all rows. Rows that are left out have mask 0.

    If ranks and micro-batches cannot share the rows evenly, the shortest row is repeated with mask 0.
    """
    groups = [(handle.ref, 0) for handle in handles]
    samples = [
        PlannedSample(
            group=number,
            index=row.index,
            lengths=row.lengths,
            advantage=0.0,
            mask=0.0 if row.problem is not None else 1.0,
            num_pixels=sum(row.images.values()),
        )
        for number, handle in enumerate(handles)
        for row in handle.rows
    ]
    shortest = min(samples, key=lambda sample: sample.length)
    for _ in range(-len(samples) % (num_ranks * batching.micro_batch_multiple)):
        # The same group under another number, so that the copy is a row of its own on the worker.
        groups.append(groups[shortest.group])
        samples.append(replace(shortest, group=len(groups) - 1, mask=0.0))
    alone = [[sample] for sample in samples]
    return plan_samples(alone, groups, num_ranks=num_ranks, global_batch_size=len(samples), batching=batching)
