"""Training steps of every kind, and how far one is from another: what the tests of exactness share.

A `Case` is what the answer depends on: the loss, the sampling, the rollouts, the samples of an optimizer step. How it
is computed (ranks, micro-batches) is said apart from it, and must not matter.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.token_advantages import KLInReward
from nemo_rl.models.policy.config import DynamicBatchingConfig, OptimizerConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.model import row_layout, trainable
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.weight_loading import hf_name, local_part
from nemo_rl.refit.layout import gathered
from nemo_rl.types import LossFunction, SamplingParams
from tests.unit.policy.steps import NUM_GENERATIONS, NUM_GROUPS, Rollouts, in_groups, load_step, make_sample

NUM_SAMPLES = NUM_GROUPS * NUM_GENERATIONS


# -- what is computed


_BY_SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
_BOUNDED = {"use_importance_sampling_correction": True}

# tests/unit/algorithms/losses has every loss: here are those whose columns, counts or clipping differ.
LOSSES: dict[str, ClippedPGLossConfig] = {
    "grpo": ClippedPGLossConfig(),
    "dapo": ClippedPGLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.03, reference_policy_kl_penalty=0.0),
    "gspo": ClippedPGLossConfig(**_BY_SEQUENCE, ratio_clip_min=0.003, ratio_clip_max=0.004),
    "cispo": ClippedPGLossConfig(use_cispo=True, ratio_clip_min=0.02, ratio_clip_max=0.03),
    "reinforce": ClippedPGLossConfig(
        disable_ppo_ratio=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type="k2"
    ),
    "on-policy-ratio": ClippedPGLossConfig(force_on_policy_ratio=True, reference_policy_kl_type="k1"),
    "dr-grpo": ClippedPGLossConfig(length_normalizer=16, reference_policy_kl_penalty=0.0),
    "k3-unclamped": ClippedPGLossConfig(
        reference_policy_kl_penalty=0.5,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
        use_on_policy_kl_approximation=True,
    ),
    "tis": ClippedPGLossConfig(**_BOUNDED, truncated_importance_sampling_ratio=1.2),
    "seq-mask-tis": ClippedPGLossConfig(
        **_BOUNDED,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.05,
        truncated_importance_sampling_ratio_min=0.95,
    ),
    "kl-in-reward": ClippedPGLossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1),
}

SAMPLINGS = tuple(
    SamplingParams(max_new_tokens=16, temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in (
        (1.0, None, 1.0),
        (0.7, None, 1.0),
        (1.0, 20, 1.0),
        (0.9, None, 0.9),
        (1.2, 40, 0.8),
    )
)

_LENGTHS = {"one": 1, "two": 2, "three": 3}

ORDINARY = ("answer", "answer", "turns", "answer", "failed", "turns", "answer", "silent", "answer", "two")
"""Kinds of samples: an answer to a prompt of 4 tokens, one in two turns, a failed episode, nothing sampled, and one of
two tokens altogether."""


def draw_rollouts(kinds: Sequence[str]) -> Rollouts:
    """Samples of `kinds` in turn, the long ones of 6 to 23 tokens; generation logprobs are 0."""
    generator = np.random.default_rng(1)
    samples = []
    for number, kind in zip(range(NUM_SAMPLES), itertools.cycle(kinds)):
        length = _LENGTHS[kind] if kind in _LENGTHS else int(generator.integers(6, 24))
        mask = np.arange(length) >= (1 if kind in _LENGTHS else 4)
        if kind == "turns":
            mask[length // 2 : length // 2 + 2] = False
        mask &= kind not in ("failed", "silent")
        name = f"{number // NUM_GENERATIONS}/{number % NUM_GENERATIONS}"
        samples.append(make_sample(name, mask, generator, failed=kind == "failed"))
    return in_groups(samples)


def as_generated(rollouts: Rollouts, logprobs: dict[str, torch.Tensor], seed: int) -> Rollouts:
    """With generation logprobs that are somewhat off the policy's own `logprobs`, by sample."""
    generator = np.random.default_rng(seed)
    handles, groups = rollouts
    noisy = []
    for group in groups:
        samples = []
        for sample in group.samples:
            off = generator.normal(scale=0.3, size=len(sample.token_ids))
            values = logprobs[sample.meta.sample_id].numpy() + off
            values = np.where(sample.token_mask, values, 0.0).astype(np.float32)
            samples.append(replace(sample, generation_logprobs=values))
        noisy.append(replace(group, samples=samples))
    return handles, noisy


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an answer depends on."""

    loss: str
    sampling: int  # of SAMPLINGS
    samples_per_step: int
    max_grad_norm: float | None

    @property
    def loss_fn(self) -> LossFunction:
        return ClippedPGLoss(LOSSES[self.loss])


# -- how it is computed

_PACKED = {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 80}
_ALIKE = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64, "algorithm": "first_fit_shuffle"}
_DYNAMIC = {"enabled": True, "train_mb_tokens": 72, "logprob_mb_tokens": 96, "sequence_length_round": 8}
BATCHINGS: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1},
    "threes padded": {"train_micro_batch_size": 3, "padding_free": False},
    "packed": {"sequence_packing": SequencePackingConfig(**_PACKED)},
    "packed alike": {"sequence_packing": SequencePackingConfig(**_ALIKE), "make_sequence_length_divisible_by": 6},
    "dynamic padded": {"dynamic_batching": DynamicBatchingConfig(**_DYNAMIC), "padding_free": False},
}
WHOLE = {"train_micro_batch_size": NUM_SAMPLES, "logprob_batch_size": NUM_SAMPLES, "padding_free": False}


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients it was given, by optimizer step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.gradients: list[list[torch.Tensor | None]] = []

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            taken = [p.grad for group in self.param_groups for p in group["params"]]
            self.gradients.append([None if grad is None else gathered(grad, None).clone() for grad in taken])
        return super().step(closure)


RECORDING_SGD = OptimizerConfig(name=f"{__name__}.RecordingSGD", kwargs={"lr": 0.1})


@dataclass(kw_only=True)
class Outcome:
    """Results of a step. Gradients by optimizer step and name, of the parameters that this rank has."""

    losses: list[float]
    grad_norms: list[float]
    metrics: dict[str, float]
    gradients: list[dict[str, torch.Tensor]]
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)  # by sample, where they were computed


class Bench:
    """A worker that can take many steps from the same weights."""

    def __init__(self, worker: DTensorPolicyWorker, hf_config: Any) -> None:
        self.worker = worker
        self.hf_config = hf_config
        self.parameters = trainable(worker.stages)
        self.names = [hf_name(n) for s in worker.stages for n, p in s.hf.named_parameters() if p.requires_grad]
        assert len(self.names) == len(self.parameters)
        self.start = [local_part(p).detach().clone() for p in self.parameters]

    def _set_up(self, case: Case, batching: dict[str, Any]) -> None:
        """Weights as in the beginning, everything else as `case` and `batching` say."""
        worker = self.worker
        changes = {"train_global_batch_size": case.samples_per_step, "max_grad_norm": case.max_grad_norm} | batching
        config = worker.config = self.worker.config.model_copy(update=changes)
        worker.layout = row_layout(config, self.hf_config, worker.mesh)
        for stage in worker.stages:
            stage.reshard()
            stage.sampling = SAMPLINGS[case.sampling]
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.start, strict=True):
                local_part(parameter).copy_(start)
        assert isinstance(worker.optimizer, RecordingSGD)
        worker.optimizer.gradients.clear()

    def logprobs(self, case: Case, batching: dict[str, Any], rollouts: Rollouts) -> dict[str, torch.Tensor]:
        """Logprobs of the samples of this rank, by sample."""
        self._set_up(case, batching)
        load_step(self.worker, rollouts)
        self.worker.compute(Logprobs(), "prev_logprobs")
        return {row.sample_id: _scored(row) for row in self.worker.rows.values()}

    def step(self, case: Case, batching: dict[str, Any], rollouts: Rollouts) -> Outcome:
        """All phases of a training step, as the trainer calls them."""
        worker, loss = self.worker, LOSSES[case.loss]
        self._set_up(case, batching)
        load_step(self.worker, rollouts)
        logprobs = {}
        if case.samples_per_step < NUM_SAMPLES or loss.use_kl_in_reward:
            worker.compute(Logprobs(), "prev_logprobs")
            logprobs = {row.sample_id: _scored(row) for row in worker.rows.values()}
        if loss.reference_policy_kl_penalty:
            worker.compute_reference_logprobs()
        if loss.use_kl_in_reward:
            worker.set_token_advantages(KLInReward(loss, eps=1e-6))
        result = worker.train(case.loss_fn, Logprobs())
        assert isinstance(worker.optimizer, RecordingSGD)
        return Outcome(
            losses=result.losses,
            grad_norms=result.grad_norms,
            metrics=result.metrics,
            gradients=[
                {name: grad for name, grad in zip(self.names, step, strict=True) if grad is not None}
                for step in worker.optimizer.gradients
            ],
            logprobs=logprobs,
        )


def _scored(row: Any) -> torch.Tensor:
    return torch.where(row.token_mask, row.columns["prev_logprobs"], 0.0)


# -- how far apart

OF_SINGLE_LOGPROBS = {
    "probs_ratio_min",
    "probs_ratio_max",
    "probs_ratio_clamped_min",
    "probs_ratio_clamped_max",
    "sampling_importance_ratio",
}


def distances(got: Outcome, want: Outcome) -> dict[str, float]:
    """Largest difference of each kind, of what `got` has, in units of what it is measured by.

    Everything is a sum of terms of size 1 that may cancel, so the unit is 1, or the value where that is above 1: of an
    element of a gradient the norm of the whole. But for the ratio of a single token, or of a whole sequence, it is the
    largest logprob that enters: exp(a - b) has the absolute error of a and b, and float32 holds a number of size 8 to
    5e-7. In the mean over many tokens that is lost.
    """
    assert got.metrics.keys() == want.metrics.keys() and len(got.gradients) == len(want.gradients)
    of_logprobs = max((float(values.abs().max()) for values in want.logprobs.values()), default=1.0)
    found = {
        "loss": max(_distance(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
        "grad norm": max(_distance(a, b) for a, b in zip(got.grad_norms, want.grad_norms, strict=True)),
        "logprobs": max((_apart(got.logprobs[name], want.logprobs[name]) for name in got.logprobs), default=0.0),
        "gradients": 0.0,
    }
    for name, value in got.metrics.items():
        unit = of_logprobs if name in OF_SINGLE_LOGPROBS else 1.0
        found[f"metric {name}"] = _distance(value, want.metrics[name], at_least=unit)
    for ours, theirs in zip(got.gradients, want.gradients, strict=True):
        size = max(1.0, math.sqrt(sum(float(grad.double().square().sum()) for grad in theirs.values())))
        errors = [float((grad - theirs[name]).abs().max()) / size for name, grad in ours.items()]
        found["gradients"] = max([found["gradients"], *errors])
    return found


def _distance(got: float, want: float, *, at_least: float = 1.0) -> float:
    return 0.0 if got == want else abs(got - want) / max(at_least, abs(want))


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs() / want.abs().clamp(min=1.0)).max())
