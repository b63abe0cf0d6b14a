"""Loss, gradients and metrics are equal for every micro-batch size, packing, mesh and accumulation."""

import itertools
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.types import PolicyGradientInputs
from tests.unit.policy.exact_cases import (
    BATCHINGS,
    LOSSES,
    NUM_SAMPLES,
    ORDINARY,
    RECORDING_SGD,
    SAMPLINGS,
    WHOLE,
    Bench,
    Case,
    Outcome,
    as_generated,
    distances,
    draw_rollouts,
)
from tests.unit.policy.filter_reference import filter_logits
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import ADVANTAGES, Rollouts, make_worker, masks_of, policy_config
from tests.worlds import run_world

TOLERANCE = 1e-6
UNCUT = "one rank"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    UNCUT: (1, {}),
    "hsdp": (4, {"dp_replicate_size": 2}),
    "tp-sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp": (2, {"context_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "dp2": (2, {}),
}
ALIKE = {"tp-sp": {"make_sequence_length_divisible_by": 48}}  # DTensor takes seconds to plan for shapes of its own
CUT = ["hsdp", "tp-sp", "cp", "pp"]  # share the losses; test_layouts.py has more layouts, with one loss
DEAL = [*CUT, "hsdp", "cp", "pp"]  # fewer to the layout that takes longest


def draw_case(loss: str) -> Case:
    """Several optimizer steps from the same weights amplify a difference; clipped gradients keep that below 1."""
    draw = random.Random(f"{loss} 0")
    steps = draw.choice([1, 2, 4]) if loss != "on-policy-ratio" else 1
    clip = draw.choice([0.5, 1.0]) if steps > 1 else draw.choice([1.0, None])
    sampling = draw.randrange(len(SAMPLINGS))
    return Case(loss=loss, sampling=sampling, samples_per_step=NUM_SAMPLES // steps, max_grad_norm=clip)


CASES = {loss: draw_case(loss) for loss in LOSSES}


def dealt(layout: str) -> list[tuple[str, str]]:
    """(loss, batching) of a layout: losses go round the cut layouts."""
    draw = random.Random(layout)
    turns = zip(LOSSES, itertools.cycle(DEAL), strict=False)
    losses = draw.sample(list(LOSSES), 6) if layout == UNCUT else [loss for loss, mine in turns if mine == layout]
    return [(loss, draw.choice(list(BATCHINGS))) for loss in losses]


def make_bench(path: Path, **settings: Any) -> Bench:
    config = policy_config(optimizer=RECORDING_SGD, dtensor_cfg=DTensorConfig(**settings))
    return Bench(make_worker(path, config), load_config(str(path), {}))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The rollouts of each sampling, and what cases come to on one rank with one padded micro-batch per step."""

    path: Path
    rollouts: list[Rollouts]
    outcomes: dict[Case, Outcome]

    @classmethod
    def of(cls, path: Path, cases: list[Case], kinds: tuple[str, ...] = ORDINARY) -> "Expected":
        return run_world(cls._computed, 1, path, cases, kinds, timeout=300)[0]

    @classmethod
    def _computed(cls, rank: int, world: int, path: Path, cases: list[Case], kinds: tuple[str, ...]) -> "Expected":
        bench = make_bench(path)
        base = draw_rollouts(kinds)
        rollouts = []
        for sampling in range(len(SAMPLINGS)):
            case = Case(loss="grpo", sampling=sampling, samples_per_step=NUM_SAMPLES, max_grad_norm=None)
            rollouts.append(as_generated(base, bench.logprobs(case, WHOLE, base), seed=sampling))
        outcomes = {case: bench.step(case, WHOLE, rollouts[case.sampling]) for case in cases}
        return cls(path=path, rollouts=rollouts, outcomes=outcomes)

    def distances(self, layout: str, draws: list[tuple[Case, str]]) -> dict[tuple[Case, str], dict[str, float]]:
        """Of every case and batching in `draws`: the worst rank's of `layout`."""
        world, settings = LAYOUTS[layout]

        def on_rank(rank: int, world: int) -> tuple[list[dict[str, float]], set[str]]:
            bench = make_bench(self.path, **settings)
            found = []
            for case, batching in draws:
                got = bench.step(case, BATCHINGS[batching] | ALIKE.get(layout, {}), self.rollouts[case.sampling])
                found.append(distances(got, self.outcomes[case]))
            return found, set(bench.names)

        ranks = run_world(on_rank, world, timeout=300)
        assert set.union(*(names for _, names in ranks)) == set(next(iter(self.outcomes.values())).gradients[0])
        found = zip(*(found for found, _ in ranks), strict=True)
        worst = [{kind: max(each[kind] for each in of_ranks) for kind in of_ranks[0]} for of_ranks in found]
        return dict(zip(draws, worst, strict=True))


def assert_equal(found: dict[tuple[Case, str], dict[str, float]]) -> None:
    off = {
        f"{case.loss}, {batching}, {kind}": distance
        for (case, batching), kinds in found.items()
        for kind, distance in kinds.items()
        if not distance <= TOLERANCE
    }
    assert not off


@pytest.fixture(scope="module")
def expected(llama: Path) -> "Expected":
    return Expected.of(llama, list(CASES.values()))


def test_the_cases_cover_what_they_are_here_for(expected: Expected) -> None:
    """Ratios are clipped, weights are out of bounds, the reference differs: no case is equal for want of anything."""
    assert {loss for layout in CUT for loss, _ in dealt(layout)} == LOSSES.keys()
    assert {batching for layout in (UNCUT, *CUT) for _, batching in dealt(layout)} == BATCHINGS.keys()
    assert {case.sampling for case in CASES.values()} == set(range(len(SAMPLINGS)))
    assert {case.samples_per_step for case in CASES.values()} == {4, 8, 16}
    metrics = {case.loss: outcome.metrics for case, outcome in expected.outcomes.items() if case.samples_per_step < 16}
    assert all(metrics[loss]["clip_fraction"] > 0.02 for loss in ("dapo", "gspo", "cispo"))
    for case, outcome in expected.outcomes.items():
        if LOSSES[case.loss].truncated_importance_sampling_ratio is not None:
            assert 0.05 < outcome.metrics["is_oob_ratio"] < 0.95, case
        if LOSSES[case.loss].reference_policy_kl_penalty and case.samples_per_step < 16:
            assert abs(outcome.metrics["kl_penalty"]) > 1e-4, case
        assert 0 < outcome.metrics["num_valid_samples"] < NUM_SAMPLES


@pytest.mark.parametrize("layout", [UNCUT, *CUT])
def test_nothing_depends_on_how_it_is_computed(expected: Expected, layout: str) -> None:
    draws = [(CASES[loss], batching) for loss, batching in dealt(layout)]
    assert_equal(expected.distances(layout, draws))


# Nothing to score on a rank, in a micro-batch, in an optimizer step; fewer tokens than chunks.
ODD = {
    "of one to three tokens": ("one", "two", "three", "two", "one", "three", "two"),
    "mostly silent": ("silent", "failed", "silent", "silent", "silent", "answer", "silent", "failed"),
    "none scored at all": ("silent", "failed", "one"),
}


@pytest.mark.parametrize(
    ("kind", "layout"), [("of one to three tokens", "cp"), ("mostly silent", "dp2"), ("none scored at all", "pp")]
)
def test_samples_with_little_or_nothing_to_score(llama: Path, kind: str, layout: str) -> None:
    cases = [
        Case(loss=loss, sampling=sampling, samples_per_step=samples, max_grad_norm=1.0)
        for loss, sampling, samples in (("grpo", 4, 4), ("gspo", 0, 4), ("kl-in-reward", 1, 8), ("seq-mask-tis", 0, 8))
    ]
    odd = Expected.of(llama, cases, ODD[kind])
    batchings = ["one by one", "packed", "threes padded", "packed alike"]
    assert_equal(odd.distances(layout, list(zip(odd.outcomes, batchings, strict=True))))


# -- what everything is compared with is right


def plain_step(path: Path, case: Case, rollouts: Rollouts) -> tuple[float, dict[str, torch.Tensor]]:
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
    sample_mask = torch.tensor(masks_of(handles)).double().flatten()
    logprobs = pad(scored)
    inputs = PolicyGradientInputs(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        token_mask=mask,
        sample_mask=sample_mask,
        advantages=torch.tensor(ADVANTAGES).double().flatten()[:, None].expand(mask.shape),
        prev_logprobs=logprobs.detach(),
        generation_logprobs=pad([torch.from_numpy(s.generation_logprobs) for s in samples]).double(),
        reference_policy_logprobs=pad(unfiltered),
    )
    loss, _ = case.loss_fn(logprobs, inputs, sample_mask.sum(), (mask * sample_mask[:, None]).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "losses"),
    [
        ("llama", {"grpo": 0, "gspo": 1, "k3-unclamped": 2, "tis": 3, "reinforce": 4}),
        *((family, {"grpo": 1}) for family in ("qwen3-moe", "mixtral", "deepseek_v3", "gemma3")),
    ],
)
def test_one_rank_computes_what_transformers_does_sample_by_sample(tmp_path, family, losses):
    """`losses`: and the sampling of each."""
    save_model(family, tmp_path)
    cases = [
        Case(loss=loss, sampling=sampling, samples_per_step=NUM_SAMPLES, max_grad_norm=None)
        for loss, sampling in losses.items()
    ]

    def both(rank: int, world: int) -> tuple[Expected, list[tuple[float, dict[str, torch.Tensor]]]]:
        expected = Expected._computed(rank, world, tmp_path, cases, ORDINARY)
        return expected, [plain_step(tmp_path, case, expected.rollouts[case.sampling]) for case in cases]

    [(expected, plain)] = run_world(both, 1)
    for case, (loss, gradients) in zip(cases, plain, strict=True):
        got = expected.outcomes[case]
        assert got.losses == pytest.approx([loss], abs=TOLERANCE), case
        assert got.gradients[0].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (got.gradients[0][name] - gradient).abs().max() < TOLERANCE * max(1.0, got.grad_norms[0]), name
