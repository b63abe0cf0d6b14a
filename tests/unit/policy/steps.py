"""Training steps of a policy worker on made-up rollouts: what the tests of layouts, batching and exactness share."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.model import export_weights
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.worker import PolicyWorkerSettings
from nemo_rl.types import GroupHandle, RolloutGroup, RowKey, Sample, SampleStatus, SamplingParams, TrainResult
from tests import fakes
from tests.unit.policy.models import VOCAB

Worker = Any  # of either backend
NUM_GROUPS, NUM_GENERATIONS = 4, 4
TEMPERATURE = 0.8
LOSS = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
ADVANTAGES = [[math.sin(3 * g + i) for i in range(NUM_GENERATIONS)] for g in range(NUM_GROUPS)]

PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70)}
PADDED = {"padding_free": False}

Rollouts = tuple[list[GroupHandle], list[RolloutGroup]]
PairsOfLogprobs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def policy_config(**changes: Any) -> PolicyConfig:
    settings: dict[str, Any] = {
        "model_name": "unused", "tokenizer": {"name": "unused"}, "precision": "float32",
        "train_global_batch_size": 8, "logprob_batch_size": 3, "logprob_chunk_size": 5,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}, "dtensor_cfg": DTensorConfig(),
        **changes,
    }  # fmt: skip
    if settings["dtensor_cfg"].fsdp_per_block is None:  # as in models of a real size
        settings["dtensor_cfg"] = settings["dtensor_cfg"].model_copy(update={"fsdp_per_block": True})
    return PolicyConfig(**settings)


def megatron_policy(changes: dict[str, Any] | None = None, **megatron: Any) -> PolicyConfig:
    """Trained by the other backend. `changes`: keys of policy; `megatron`: of policy.megatron_cfg.

    Also imports that backend, which takes seconds: once here, and not in every rank that is forked later.
    """
    import nemo_rl.models.policy.megatron.worker  # noqa: F401
    from nemo_rl.models.policy.megatron.config import MegatronConfig

    off = {"dtensor_cfg": DTensorConfig(enabled=False), "optimizer": None, "padding_free": None}
    return policy_config(**off, **(changes or {}), megatron_cfg=MegatronConfig(enabled=True, **megatron))


SHORT = {"one": 1, "two": 2, "three": 3}
"""Kinds of samples with so many tokens altogether."""
USUAL = (*["answer"] * 6, "failed", *["answer"] * 9)


def make_groups(kinds: Sequence[str] = USUAL, seed: int = 0) -> Rollouts:
    """16 samples of `kinds` in turn, random tokens. Those that are not `SHORT` have 6 to 23, 4 of them the prompt: an
    answer to it, one in two turns ("turns"), nothing sampled ("silent"), and nothing in an episode that failed."""
    generator, samples = np.random.default_rng(seed), []
    for number, kind in zip(range(NUM_GROUPS * NUM_GENERATIONS), itertools.cycle(kinds)):
        length, prompt = (SHORT[kind], 1) if kind in SHORT else (int(generator.integers(6, 24)), 4)
        mask = (np.arange(length) >= prompt) & (kind not in ("failed", "silent"))
        if kind == "turns":
            mask[length // 2 : length // 2 + 2] = False
        generated, name = int(mask.sum()), f"{number // NUM_GENERATIONS}/{number % NUM_GENERATIONS}"
        parts = {"prompt": min(4, length - 1), "generated": generated, "env": length - min(4, length - 1) - generated}
        status = SampleStatus.FAILED if kind == "failed" else SampleStatus.COMPLETED
        meta = fakes.sample(float(generator.integers(0, 2)), status, sample_id=name, **parts)
        ids, noise = generator.integers(2, VOCAB, length), generator.normal(-4.0, size=length)
        logprobs = np.where(mask, noise, 0.0).astype(np.float32)
        samples.append(Sample(meta=meta, token_ids=ids, token_mask=mask, generation_logprobs=logprobs))
    groups, handles = [], []
    for g in range(NUM_GROUPS):
        own = samples[NUM_GENERATIONS * g :][:NUM_GENERATIONS]
        groups.append(RolloutGroup(group_id=str(g), prompt_id="p", samples=own))
        handles.append(fakes.handle(*(sample.meta for sample in own), name=str(g), prompt="p", task="t", ref=g))
    return handles, groups


def masks_of(handles: Sequence[GroupHandle]) -> list[list[float]]:
    """Which samples take part in the loss."""
    return [[float(sample.has_reward) for sample in handle.samples] for handle in handles]


def worker_settings(path: Path | str, **changes: Any) -> PolicyWorkerSettings:
    """Of a rank on the CPU that trains the model in `path`."""
    settings: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=16, temperature=TEMPERATURE), "use_gpu": False,
        "workers_per_node": 8, "init_reference_model": False, "init_optimizer": True, "seed": 0,
    }  # fmt: skip
    return PolicyWorkerSettings(model_path=str(path), **settings | changes)


def make_worker(path: Path, config: PolicyConfig, **settings: Any) -> Any:
    """A worker of the backend that `config` enables, with a reference model unless `settings` say otherwise."""
    how = worker_settings(path, **{"init_reference_model": True} | settings)
    if config.megatron_cfg.enabled:
        from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

        return MegatronPolicyWorker(config, how)
    return DTensorPolicyWorker(config, how)


def load_step(
    worker: Worker,
    rollouts: Rollouts | None = None,
    reported: Collection[RowKey] = (),
    advantages: Sequence[Sequence[float]] = ADVANTAGES,
    **how: Any,
) -> None:
    """This rank's part of the rollouts, of `make_groups` if none are given; rows in `reported` go into the report.

    `advantages` and `how` are as in `plan_batch`.
    """
    handles, groups = make_groups() if rollouts is None else rollouts
    plan = plan_batch(
        handles,
        advantages,
        masks_of(handles),
        **how,
        num_ranks=worker.mesh.sizes.data_parallel,
        global_batch_size=worker.config.train_global_batch_size,
        batching=Batching.of(worker.config, quadratic_weight=0.001),
    )
    own = plan.ranks[worker.mesh.data_rank]
    own.reported = [key for batch in own.logprobs for planned in batch for key in planned.keys if key in reported]
    worker.load(own, {n: (0, n) for n in range(NUM_GROUPS)}, groups)


def train_step(worker: Worker) -> TrainResult:
    """The optimizer steps of `make_groups`, with all phases before them."""
    load_step(worker)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    return worker.train(ClippedPGLoss(LOSS), Logprobs())


@torch.no_grad()
def whole_weights(worker: Worker) -> dict[str, torch.Tensor]:
    if isinstance(worker, DTensorPolicyWorker):  # merged, whatever a refit would send
        tensors = export_weights([stage.hf for stage in worker.stages], worker.mesh, worker.device)
    else:
        tensors = worker._export()
    return {tensor.name: tensor.gather(None).clone() for tensor in tensors}


def logprobs_of(worker: Worker) -> PairsOfLogprobs:
    """(previous, reference) logprobs of the samples of this data-parallel rank, 0 where nothing was sampled."""
    columns = ("prev_logprobs", "reference_policy_logprobs")
    return {row.sample_id: (row.columns[columns[0]], row.columns[columns[1]]) for row in worker.rows.values()}


def plain_logprobs(model: Any) -> dict[str, torch.Tensor]:
    """By sample of `make_groups`, from all logits of a model of transformers, one sequence at a time."""
    found = {}
    for group in make_groups()[1]:
        for sample in group.samples:
            ids = torch.from_numpy(sample.token_ids)
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1].float() / TEMPERATURE
            scored = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found[sample.sample_id] = torch.cat([torch.zeros(1), scored]) * torch.from_numpy(sample.token_mask)
    return found


@dataclass(kw_only=True)
class Step:
    """Results of a step on one rank."""

    result: TrainResult
    weights: dict[str, torch.Tensor]  # all of the model's, whole
    logprobs: PairsOfLogprobs


def one_step(rank: int, world: int, path: Path, config: PolicyConfig) -> Step:
    return step_of(make_worker(path, config))


def step_of(worker: Worker) -> Step:
    result = train_step(worker)
    # The weights have moved; the columns are still those of before.
    return Step(result=result, weights=whole_weights(worker), logprobs=logprobs_of(worker))
