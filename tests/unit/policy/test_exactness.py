"""Loss, gradients and metrics are equal for every micro-batch size, packing, mesh and accumulation.

A `Case` is what the answer depends on: the loss, the sampling, the rollouts, the samples of an optimizer step. How it
is computed (ranks, micro-batches) is said apart from it, and must not matter.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.token_advantages import KLInReward
from nemo_rl.models.policy.config import DTensorConfig, DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.model import row_layout, trainable
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.models.policy.weight_loading import hf_name, local_part
from nemo_rl.refit.layout import gathered
from nemo_rl.types import PolicyGradientInputs, SamplingParams, TrainResult
from tests.unit.policy import steps
from tests.unit.policy.filter_reference import filter_logits
from tests.worlds import run_world

NUM_SAMPLES = steps.NUM_GROUPS * steps.NUM_GENERATIONS

_BY_SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
_TIS = "truncated_importance_sampling"
_MASKED = {f"{_TIS}_type": "seq-mask-tis", f"{_TIS}_ratio": 1.05, f"{_TIS}_ratio_min": 0.95}
_UNCLAMPED = {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": None, "kl_output_clamp_value": None}
_BOUNDED, _KL = {"use_importance_sampling_correction": True}, {"reference_policy_kl_penalty": 0.1}

# tests/unit/algorithms/losses has every loss: here are those whose columns, counts or clipping differ.
LOSSES: dict[str, ClippedPGLossConfig] = {
    "grpo": ClippedPGLossConfig(),
    "dapo": ClippedPGLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.03, reference_policy_kl_penalty=0.0),
    "gspo": ClippedPGLossConfig(**_BY_SEQUENCE, ratio_clip_min=0.003, ratio_clip_max=0.004),
    "cispo": ClippedPGLossConfig(use_cispo=True, ratio_clip_min=0.02, ratio_clip_max=0.03),
    "reinforce": ClippedPGLossConfig(**_KL, disable_ppo_ratio=True, reference_policy_kl_type="k2"),
    "on-policy-ratio": ClippedPGLossConfig(force_on_policy_ratio=True, reference_policy_kl_type="k1"),
    "dr-grpo": ClippedPGLossConfig(length_normalizer=16, reference_policy_kl_penalty=0.0),
    "k3-unclamped": ClippedPGLossConfig(**_UNCLAMPED, use_on_policy_kl_approximation=True),
    "tis": ClippedPGLossConfig(**_BOUNDED, truncated_importance_sampling_ratio=1.2),
    "seq-mask-tis": ClippedPGLossConfig(**_BOUNDED, **_MASKED),
    "kl-in-reward": ClippedPGLossConfig(**_KL, use_kl_in_reward=True),
}

SAMPLINGS = [
    SamplingParams(max_new_tokens=16, temperature=temperature, top_k=k, top_p=p)
    for temperature, k, p in ((1.0, None, 1), (0.7, None, 1), (1.0, 20, 1), (0.9, None, 0.9), (1.2, 40, 0.8))
]

ORDINARY = ("answer", "answer", "turns", "answer", "failed", "turns", "answer", "silent", "answer", "two")


class Case(NamedTuple):
    """What an answer depends on."""

    loss: str
    sampling: int  # of SAMPLINGS
    samples_per_step: int
    max_grad_norm: float | None


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


@dataclass(kw_only=True)
class Outcome:
    """Results of a step. Gradients by optimizer step and name, of the parameters that this rank has."""

    result: TrainResult
    gradients: list[dict[str, torch.Tensor]]
    logprobs: dict[str, torch.Tensor]  # by sample, where they were computed


class Bench:
    """A worker that can take many steps from the same weights."""

    def __init__(self, path: Path, **layout: Any) -> None:
        self.config = steps.policy_config(dtensor_cfg=DTensorConfig(**layout))
        self.worker, self.hf_config = steps.make_worker(path, self.config), load_config(str(path), {})
        held = [pair for stage in self.worker.stages for pair in stage.hf.named_parameters()]
        self.names = [hf_name(name) for name, parameter in held if parameter.requires_grad]
        self.start = [local_part(p).detach().clone() for p in trainable(self.worker.stages)]
        self.worker.optimizer.register_step_pre_hook(self.record)

    def record(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the gradients that an optimizer step is given."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held = [(name, p.grad) for name, p in zip(self.names, parameters, strict=True) if p.grad is not None]
        self.gradients.append({name: gathered(grad, None).clone() for name, grad in held})

    def load(self, case: Case, batching: dict[str, Any], rollouts: steps.Rollouts) -> None:
        """The weights of the beginning, this rank's part of the rollouts, and everything else as said."""
        worker = self.worker
        batching = batching | {"train_global_batch_size": case.samples_per_step, "max_grad_norm": case.max_grad_norm}
        worker.config = self.config.model_copy(update=batching)
        worker.layout = row_layout(worker.config, self.hf_config, worker.mesh)
        for stage in worker.stages:
            stage.reshard()
            stage.sampling = SAMPLINGS[case.sampling]
        with torch.no_grad():
            for parameter, start in zip(trainable(worker.stages), self.start, strict=True):
                local_part(parameter).copy_(start)
        self.gradients: list[dict[str, torch.Tensor]] = []
        steps.load_step(worker, rollouts)

    def logprobs(self) -> dict[str, torch.Tensor]:
        """Of the samples of this rank, by sample."""
        self.worker.compute(Logprobs(), "prev_logprobs")
        rows = self.worker.rows.values()
        return {row.sample_id: torch.where(row.token_mask, row.columns["prev_logprobs"], 0.0) for row in rows}

    def step(self, case: Case, batching: dict[str, Any], rollouts: steps.Rollouts) -> Outcome:
        """All phases of a training step, as the trainer calls them."""
        self.load(case, batching, rollouts)
        worker, loss, logprobs = self.worker, LOSSES[case.loss], {}
        if case.samples_per_step < NUM_SAMPLES or loss.use_kl_in_reward:
            logprobs = self.logprobs()
        if loss.reference_policy_kl_penalty:
            worker.compute_reference_logprobs()
        if loss.use_kl_in_reward:
            worker.set_token_advantages(KLInReward(loss, eps=1e-6))
        result = worker.train(ClippedPGLoss(loss), Logprobs())
        return Outcome(result=result, gradients=self.gradients, logprobs=logprobs)


_RATIOS = {f"probs_ratio{clamped}_{end}" for clamped in ("", "_clamped") for end in ("min", "max")}
OF_SINGLE_LOGPROBS = _RATIOS | {"sampling_importance_ratio"}
TOLERANCE = 1e-6


def assert_same_result(
    got: TrainResult, want: TrainResult, logprobs: Iterable[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """To `tolerance`, in units of what each number is measured by. `logprobs`: those that enter.

    Everything is a sum of terms of size 1 that may cancel, so the unit is 1, or the value where that is above 1. But
    for the ratio of a single token, or of a whole sequence, it is the largest logprob that enters: exp(a - b) has the
    absolute error of a and b, and float32 holds a number of size 8 to 5e-7. In the mean over many tokens that is lost.
    """
    largest, near = max((float(own.abs().max()) for own in logprobs), default=1.0), {"rel": tolerance, "abs": tolerance}
    assert got.losses == pytest.approx(want.losses, **near)
    assert got.grad_norms == pytest.approx(want.grad_norms, **near)
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        unit = largest if name in OF_SINGLE_LOGPROBS else 1.0
        assert got.metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance * unit), name


def assert_same(got: Outcome, want: Outcome) -> None:
    """Of what `got` has; an element of a gradient in units of the norm of the whole."""
    assert_same_result(got.result, want.result, want.logprobs.values())
    for name, logprobs in got.logprobs.items():
        assert logprobs.numpy() == pytest.approx(want.logprobs[name].numpy(), rel=TOLERANCE, abs=TOLERANCE), name
    for ours, theirs in zip(got.gradients, want.gradients, strict=True):
        size = max(1.0, math.sqrt(sum(float(grad.double().square().sum()) for grad in theirs.values())))
        for name, grad in ours.items():
            assert float((grad - theirs[name]).abs().max()) <= TOLERANCE * size, name


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "hsdp": (4, {"dp_replicate_size": 2}),
    "tp-sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp": (2, {"context_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "dp2": (2, {}),
}
ALIKE = {"tp-sp": {"make_sequence_length_divisible_by": 48}}  # DTensor takes seconds to plan for shapes of its own

# Several optimizer steps from the same weights amplify a difference; clipped gradients keep that below 1.
DEALT = {
    Case("grpo", 3, 4, 1.0): {"hsdp": "packed", "one rank": "one by one"},
    Case("dapo", 4, 4, 0.5): {"tp-sp": "threes padded"},
    Case("gspo", 3, 4, 0.5): {"cp": "threes padded"},
    Case("cispo", 0, 4, 0.5): {"pp": "dynamic padded", "one rank": "packed"},
    Case("reinforce", 1, 8, 0.5): {"hsdp": "one by one", "one rank": "one by one"},
    Case("on-policy-ratio", 2, 16, 1.0): {"cp": "packed alike", "one rank": "one by one"},
    Case("dr-grpo", 4, 16, 1.0): {"pp": "packed alike"},
    Case("k3-unclamped", 2, 16, None): {"hsdp": "packed alike", "one rank": "packed alike"},
    Case("tis", 3, 4, 0.5): {"tp-sp": "packed alike"},
    Case("seq-mask-tis", 3, 4, 1.0): {"cp": "packed alike", "one rank": "threes padded"},
    Case("kl-in-reward", 4, 16, 1.0): {"pp": "dynamic padded"},
}
"""Layouts share the losses, each with a batching there; test_layouts.py has more layouts, with one loss."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The rollouts of each sampling, and what cases come to on one rank with one padded micro-batch per step."""

    path: Path
    rollouts: dict[int, steps.Rollouts]
    outcomes: dict[Case, Outcome]

    @classmethod
    def of(cls, rank: int, world: int, path: Path, cases: list[Case], kinds: tuple[str, ...]) -> "Expected":
        bench, rollouts = Bench(path), {}
        for sampling in {case.sampling for case in cases}:
            drawn, generator = steps.make_groups(kinds, seed=1), np.random.default_rng(sampling)
            bench.load(Case("grpo", sampling, NUM_SAMPLES, None), WHOLE, drawn)
            logprobs = bench.logprobs()
            for sample in (sample for group in drawn[1] for sample in group.samples):
                # Those of generation are somewhat off the policy's own.
                values = logprobs[sample.sample_id].numpy() + generator.normal(scale=0.3, size=len(sample.token_ids))
                sample.generation_logprobs = np.where(sample.token_mask, values, 0.0).astype(np.float32)
            rollouts[sampling] = drawn
        outcomes = {case: bench.step(case, WHOLE, rollouts[case.sampling]) for case in cases}
        return cls(path=path, rollouts=rollouts, outcomes=outcomes)

    def assert_same_on(self, layout: str, draws: list[tuple[Case, str]]) -> None:
        """Every case and batching in `draws`, on every rank of `layout`."""
        world, settings = LAYOUTS[layout]

        def on_rank(rank: int, world: int) -> list[str]:
            bench = Bench(self.path, **settings)
            for case, batching in draws:
                got = bench.step(case, BATCHINGS[batching] | ALIKE.get(layout, {}), self.rollouts[case.sampling])
                try:
                    assert_same(got, self.outcomes[case])
                except AssertionError as error:
                    error.add_note(f"{case}, {batching}")
                    raise
            return bench.names

        names = set().union(*run_world(on_rank, world))
        assert names == set(next(iter(self.outcomes.values())).gradients[0])


@pytest.fixture(scope="module")
def expected(llama: Path) -> "Expected":
    return run_world(Expected.of, 1, llama, list(DEALT), ORDINARY)[0]


def test_the_cases_cover_what_they_are_here_for(expected: Expected) -> None:
    """Ratios are clipped, weights are out of bounds, the reference differs: no case is equal for want of anything."""
    assert {case.loss for case in DEALT} == LOSSES.keys()
    assert {batching for how in DEALT.values() for batching in how.values()} == BATCHINGS.keys()
    for case, outcome in expected.outcomes.items():
        loss, metrics, moves = LOSSES[case.loss], outcome.result.metrics, case.samples_per_step < NUM_SAMPLES
        assert case.loss not in ("dapo", "gspo", "cispo") or (moves and metrics["clip_fraction"] > 0.02), case
        assert loss.truncated_importance_sampling_ratio is None or 0.05 < metrics["is_oob_ratio"] < 0.95, case
        assert not (loss.reference_policy_kl_penalty and moves) or abs(metrics["kl_penalty"]) > 1e-4, case
        assert 0 < metrics["num_valid_samples"] < NUM_SAMPLES


@pytest.mark.parametrize("layout", ["one rank", "hsdp", "tp-sp", "cp", "pp"])
def test_nothing_depends_on_how_it_is_computed(expected: Expected, layout: str) -> None:
    expected.assert_same_on(layout, [(case, how[layout]) for case, how in DEALT.items() if layout in how])


# Nothing to score on a rank, in a micro-batch, in an optimizer step; fewer tokens than chunks.
@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("cp", ("one", "two", "three", "two", "one", "three", "two")),
        ("dp2", ("silent", "failed", "silent", "silent", "silent", "answer", "silent", "failed")),
        ("pp", ("silent", "failed", "one")),  # none scored at all
    ],
)
def test_samples_with_little_or_nothing_to_score(llama: Path, layout: str, kinds: tuple[str, ...]) -> None:
    cases = [Case("grpo", 4, 4, 1.0), Case("gspo", 0, 4, 1.0)]
    cases += [Case("kl-in-reward", 1, 8, 1.0), Case("seq-mask-tis", 0, 8, 1.0)]
    odd = run_world(Expected.of, 1, llama, cases, kinds)[0]
    batchings = ["one by one", "packed", "threes padded", "packed alike"]
    odd.assert_same_on(layout, list(zip(odd.outcomes, batchings, strict=True)))


def plain_step(path: Path, case: Case, rollouts: steps.Rollouts) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one optimizer step, in float64 by transformers alone: sample by sample, with all logits."""
    sampling = SAMPLINGS[case.sampling]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **plain)
    handles, groups = rollouts
    samples = [sample for group in groups for sample in group.samples]
    scored, unfiltered = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)
        logits = model(input_ids=ids[None]).logits[0, :-1] / sampling.temperature
        kept = filter_logits(logits, ids[1:], sampling.top_k, sampling.top_p)
        for into, of in ((scored, kept), (unfiltered, logits.detach())):
            logprobs = of.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            into.append(torch.cat([torch.zeros(1), logprobs]) * torch.from_numpy(sample.token_mask))
    pad = partial(pad_sequence, batch_first=True)
    mask = pad([torch.from_numpy(sample.token_mask) for sample in samples]).double()
    sample_mask = torch.tensor(steps.masks_of(handles)).double().flatten()
    logprobs = pad(scored)
    inputs = PolicyGradientInputs(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        token_mask=mask,
        sample_mask=sample_mask,
        advantages=torch.tensor(steps.ADVANTAGES).double().flatten()[:, None].expand(mask.shape),
        prev_logprobs=logprobs.detach(),
        generation_logprobs=pad([torch.from_numpy(s.generation_logprobs) for s in samples]).double(),
        reference_policy_logprobs=pad(unfiltered),
    )
    loss, _ = ClippedPGLoss(LOSSES[case.loss])(logprobs, inputs, sample_mask.sum(), (mask * sample_mask[:, None]).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "losses"),
    [
        ("llama", {"grpo": 0, "gspo": 1, "k3-unclamped": 2, "tis": 3, "reinforce": 4}),
        *((family, {"grpo": 1}) for family in ("qwen3-moe", "mixtral", "deepseek_v3", "gemma3")),
    ],
)
def test_one_rank_computes_what_transformers_does_sample_by_sample(models, family, losses):
    """`losses`: and the sampling of each."""
    path, cases = models[family], [Case(loss, sampling, NUM_SAMPLES, None) for loss, sampling in losses.items()]

    def both(rank: int, world: int) -> tuple[Expected, list[tuple[float, dict[str, torch.Tensor]]]]:
        expected = Expected.of(rank, world, path, cases, ORDINARY)
        return expected, [plain_step(path, case, expected.rollouts[case.sampling]) for case in cases]

    [(expected, plain)] = run_world(both, 1)
    for case, (loss, gradients) in zip(cases, plain, strict=True):
        got = expected.outcomes[case]
        assert got.result.losses == pytest.approx([loss], abs=TOLERANCE), case
        assert got.gradients[0].keys() == gradients.keys()
        for name, gradient in gradients.items():
            apart = (got.gradients[0][name] - gradient).abs().max()
            assert apart < TOLERANCE * max(1.0, got.result.grad_norms[0]), name
