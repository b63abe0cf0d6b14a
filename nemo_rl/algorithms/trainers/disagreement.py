"""Why training and generation disagree on the probabilities of sampled tokens: what an investigation finds and says.

The worst samples of a step -> fresh completions of their prompts, with the present weights -> the policy scores them as
in training, alone, with other sampling parameters, dtypes and attention; weights and settings are compared
-> `Evidence` -> `name_cause` -> `Diagnosis`

Tokens stay with the workers: rollout workers draw the completions, policy workers score them, and numbers come here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang, first_line
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.inspection import (
    RowErrors,
    Variant,
    VariantLogprobs,
    compute_with_other_attention,
    describe_model,
    routed_otherwise,
    row_errors,
)
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.refit.layout import RefitError, WeightComparison
from nemo_rl.refit.sync import WeightSync
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.probe import ProbeRequest, draw_probe
from nemo_rl.types import BatchPlan, GroupHandle, MicroBatch, PlannedSample, RankPlan, SamplingParams
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger

NUM_PICKED = 4  # samples of each kind and rank, at least
MAX_NEW_TOKENS = 64  # of a fresh completion
MAX_PLAIN_TOKENS = 4096  # of a row for plain attention, whose memory is quadratic
COLUMN = "disagreement"  # of the rows on the policy's workers
EXPLAINED = 0.25  # an explanation leaves at most this share of the error
MOST = 0.5  # more tensors than this share differ: the engine has other weights altogether
EXPECTED = {"float32": 1.0001, "float16": 1.01, "bfloat16": 1.03}
"""`token_mult_prob_error` that the rounding of different kernels explains, by the dtype they compute in."""

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
HEAD_DTYPES = ("bfloat16", "float16")
POSITION_SETTINGS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq"),
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types"),
)


class NothingToCompare(ValueError):
    """No sample tells how far training and generation are apart."""


class Cause(StrEnum):
    """Why training and generation disagree."""

    STALE_WEIGHTS = "stale weights"
    GATHER = "the gather of the policy's shards"
    TENSOR = "a tensor differs after the refit"
    SAMPLING = "sampling parameters are not applied on one side"
    TOKENIZER = "the tokenizer's round trip changes tokens"
    BATCHING = "padding or packing"
    ATTENTION = "attention backend"
    HEAD_DTYPE = "dtype of the head"
    ROUTING = "routing of experts"
    POSITIONS = "RoPE or context length"
    ROUNDING = "rounding of kernels"
    KERNELS = "kernels other than attention"
    NOT_REPRODUCED = "not reproduced"


@dataclass(frozen=True)
class Error:
    """Differences between the logprobs of training and of generation, over sampled tokens."""

    mult: float  # mean exp(|difference|), as `token_mult_prob_error`
    mean: float  # mean |difference|, which a few tokens do not decide

    @classmethod
    def of(cls, rows: Sequence[RowErrors], number: int = 0) -> Error:
        """Over all tokens of the rows, for one of the numbers of each token."""
        total = sum(row.num_tokens for row in rows)
        return cls(
            mult=sum(row.num_tokens * row.mult_errors[number] for row in rows) / total,
            mean=sum(row.num_tokens * row.mean_errors[number] for row in rows) / total,
        )

    def __str__(self) -> str:
        return f"{self.mult:.5f}" if self.mult < 100 else f"{self.mult:.3g}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurements of an investigation."""

    recorded_error: Error  # of the worst samples of the step, under the present weights
    recorded_versions: tuple[int, int]  # oldest and newest weights that sampled them
    trained_version: int  # weights that the step began with
    policy_version: int  # present
    fresh_version: int  # oldest weights that sampled the fresh completions
    together_error: Error  # of fresh completions, padded or packed together as in training
    alone_error: Error  # the same completions, each in a micro-batch of its own
    first_token_alone: float  # mean |difference| of the first token after one token, where attention has no choice
    last_quarter: float  # mean |difference| over the last tokens of completions
    own: Variant  # sampling parameters of training
    variants: Mapping[Variant, Error]  # errors of the completions alone, under other settings of the head
    other_attention_error: Error | None = None  # with a second implementation; None: none, or too long rows
    weights: WeightComparison
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # that differ: (training, generation)
    routed_otherwise: float | None = None  # share of tokens with other experts; None: unknown
    recorded_changed: int = 0  # recorded samples whose tokens change when decoded and tokenised again
    fresh_changed: int = 0  # fresh completions that do
    num_picked: int = 0
    precision: str = "float32"

    @property
    def expected(self) -> float:
        """The error that rounding explains."""
        return EXPECTED[self.precision]

    def explains(self, error: Error | None, base: Error | None = None) -> bool:
        """Whether a changed computation with this `error` removes the error `base` (default: alone)."""
        base = self.alone_error if base is None else base
        return error is not None and error.mean <= max(EXPLAINED * base.mean, (self.expected - 1.0) / 10)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause, why it is named, and what to do."""

    cause: Cause
    finding: str
    advice: str
    evidence: Evidence

    def __str__(self) -> str:
        e, title = self.evidence, f"training and generation disagree: {self.cause}"
        if self.cause is Cause.ROUNDING:
            title = "training and generation agree, to the rounding of their kernels"
        return (
            f"{title}\n  found  {self.finding}\n  do     {self.advice}\n"
            f"  error  worst samples of the step {e.recorded_error}; fresh completions as in training "
            f"{e.together_error}, alone {e.alone_error}; {e.precision} explains {e.expected:g}"
        )

    def to_json(self) -> str:
        """All of it, for the log folder."""
        evidence: dict[str, Any] = dataclasses.asdict(replace(self.evidence, variants={}))
        evidence["variants"] = [
            {**dataclasses.asdict(variant), **dataclasses.asdict(error)}
            for variant, error in self.evidence.variants.items()
        ]
        text = {"cause": self.cause, "finding": self.finding, "advice": self.advice, "evidence": evidence}
        return json.dumps(text, indent=2, default=str)


def name_cause(e: Evidence) -> Diagnosis:
    """The first explanation that the evidence supports, the most specific first."""
    explanations = chain(_in_weights(e), _in_recorded(e), _in_scoring(e), _by_elimination(e))
    cause, finding, advice = next(explanations)
    return Diagnosis(cause=cause, finding=finding, advice=advice, evidence=e)


_Explanations = Iterator[tuple[Cause, str, str]]
"""Cause, finding and advice of each explanation."""


def _in_weights(e: Evidence) -> _Explanations:
    """Generation has other weights than the policy."""
    if e.fresh_version != e.policy_version:
        yield (
            Cause.STALE_WEIGHTS,
            f"generation samples with weights of version {e.fresh_version}, the policy has version {e.policy_version}",
            "the last weight sync did not reach every engine: look for its errors in the log, and restart the run",
        )
    if e.weights.gather:
        yield (
            Cause.GATHER,
            f"{e.weights.gather}; generation has what was gathered",
            "collectives between the policy's ranks deliver wrong bytes: check their devices and network "
            "(NCCL_DEBUG=INFO; nccl-tests), and report it with the layout of the policy",
        )
    different = sorted(e.weights.different.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} (by up to {value:.3g})" for name, value in different[:5])
    found = f"{len(different)} of {e.weights.num_tensors} tensors of generation differ from the policy's"
    if len(different) > MOST * e.weights.num_tensors:
        yield (
            Cause.STALE_WEIGHTS,
            f"{found}, although it calls them version {e.fresh_version}: {shown}",
            "the weight sync did not take effect: check that one engine process serves one run, and restart the run",
        )
    if different:
        yield (
            Cause.TENSOR,
            f"{found}: {shown}",
            "these weights change after they are received: look at what the engine derives from them (fused, tied, "
            "padded or quantised layers), and report it with the model's name",
        )


def _in_recorded(e: Evidence) -> _Explanations:
    """Fresh completions agree: the fault is in the recorded samples, or there is none."""
    if e.together_error.mult > e.expected or e.alone_error.mult > e.expected:
        return
    oldest, newest = e.recorded_versions
    if e.recorded_error.mult <= e.expected:
        yield (
            Cause.ROUNDING,
            f"errors are up to {max(e.recorded_error.mult, e.together_error.mult):.6f}, and kernels in {e.precision} "
            f"differ by up to {e.expected:g}",
            "nothing; a threshold below this size cannot hold (logger.alarms.disagreement)",
        )
    if oldest < e.trained_version:
        yield (
            Cause.STALE_WEIGHTS,
            f"the worst samples are from weights of version {oldest} to {newest} and were trained at version "
            f"{e.trained_version}; fresh completions agree",
            "lower max_trajectory_age_steps or the learning rate, or correct with "
            "loss_fn.use_importance_sampling_correction",
        )
    if e.recorded_changed == 0 < e.fresh_changed:
        yield (
            Cause.TOKENIZER,
            f"{e.fresh_changed} of {e.num_picked} fresh completions change when they are decoded and tokenised again, "
            "and no recorded sample does: these were made from text, and their logprobs belong to other tokens",
            "keep the token ids that the engine sampled; do not build samples from the text of answers",
        )
    yield (
        Cause.NOT_REPRODUCED,
        "fresh completions of the same prompts agree, from the same weights, and the samples were kept as sampled",
        "look at the samples of this step; if it comes again, record rollouts (rollout_record) and compare",
    )


def _in_scoring(e: Evidence) -> _Explanations:
    """Training would agree with generation if it scored the fresh completions in another way."""
    if e.explains(e.alone_error, e.together_error):
        yield (
            Cause.BATCHING,
            f"completions that are scored together have error {e.together_error}, each one alone {e.alone_error}: "
            "neighbours in a micro-batch change each other",
            "set policy.padding_free=false and policy.sequence_packing.enabled=false, and report the model's "
            "architecture",
        )
    others = {variant: error for variant, error in e.variants.items() if variant != e.own}
    best = min(others, key=lambda variant: others[variant].mean, default=e.own)
    if e.explains(others.get(best)):
        compared = f"training computes what generation reports (error {others[best]} instead of {e.alone_error})"
        if best.head_dtype is not None:
            yield (
                Cause.HEAD_DTYPE,
                f"with a head in {best.head_dtype} {compared}",
                "let the engine compute logits in float32 (head_dtype=float32 in the overrides of its config.json)",
            )
        yield (
            Cause.SAMPLING,
            f"with {_sampling(best)} {compared}; training applies {_sampling(e.own)}",
            "make both sides use the same policy.generation.temperature, top_p and top_k; logprobs of the engine must "
            "be those of the processed distribution (logprobs_mode=processed_logprobs)",
        )
    if e.explains(e.other_attention_error):
        yield (
            Cause.ATTENTION,
            f"with the plain attention of transformers training agrees with generation (error "
            f"{e.other_attention_error} instead of {e.alone_error}): training's own attention is wrong",
            "set policy.padding_free=false, update the attention package, and report the model's architecture",
        )
    if e.routed_otherwise:
        yield (
            Cause.ROUTING,
            f"{e.routed_otherwise:.2%} of the tokens go to other experts in training than in generation",
            "replay the routing of generation (policy.router_replay.enabled), which needs megatron_cfg.enabled",
        )


def _by_elimination(e: Evidence) -> _Explanations:
    """The causes that remain when weights, batches, head, training's attention and routing are ruled out."""
    positions = {key: value for key, value in e.settings.items() if key in POSITION_SETTINGS}
    first = f"the first token after a prompt of one token differs by {e.first_token_alone:.2g}, late tokens by "
    first += f"{e.last_quarter:.2g}"
    if positions:
        shown = "; ".join(f"{key}: training {own}, generation {other}" for key, (own, other) in positions.items())
        yield (
            Cause.POSITIONS,
            f"settings of positions differ: {shown} ({first})",
            "set them only in policy.hf_config_overrides, and in no argument of the engine",
        )
    if e.first_token_alone <= EXPLAINED * e.last_quarter:
        compared = "two implementations of attention agree in training, so it is generation's attention,"
        if e.other_attention_error is None:
            compared = "training's attention has not been compared with another, so it is either side's attention,"
        yield (
            Cause.ATTENTION,
            f"{first}: what differs mixes tokens, and {compared} its KV cache or its positions",
            "choose another attention backend in the engine's further arguments, and kv_cache_dtype=auto",
        )
    compared = e.weights.not_compared or "weights are equal"
    yield (
        Cause.KERNELS,
        f"{first}, so attention is not the cause ({compared}; sampling parameters, head and batches do not explain it)",
        "try the engine with enforce_eager=true, and compare layer by layer; layers in fp8 differ by design",
    )


def _sampling(variant: Variant) -> str:
    return f"temperature {variant.temperature:g}, top-p {variant.top_p:g}, top-k {variant.top_k or 'off'}"


# -- measuring


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Training and generation, which ought to agree."""

    policy: Policy
    generation: GenerationInterface
    refit: WeightSync
    rollouts: RolloutCollector
    version: int  # of the policy's present weights
    sampling: SamplingParams  # in training
    val_sampling: SamplingParams  # which generation might have used by mistake


def investigate(sides: Sides, groups: Sequence[GroupHandle], *, trained_version: int) -> Diagnosis:
    """Find out why the loaded rows, which are samples of `groups`, disagree with generation, after a weight sync.

    Nothing of the run changes but the rows that the policy holds.
    """
    policy, sampling, config = sides.policy, sides.sampling, sides.policy.config
    policy.compute(Logprobs(), COLUMN)
    where = {s.sample_id: (n, i) for n, group in enumerate(groups) for i, s in enumerate(group.samples)}
    recorded = [row for row in _row_errors(policy) if row.sample_id in where]
    if not recorded:
        raise NothingToCompare("no sample of the step has sampled tokens")
    size = policy.data_parallel_size * 2 * config.backend_cfg.micro_batch_multiple
    num = -(-NUM_PICKED // size) * size
    worst = sorted(recorded, key=lambda row: -row.mult_errors[0])[:num]
    picks = [where[worst[index % len(worst)].sample_id] for index in range(num)]
    numbers = sorted({number for number, _ in picks})
    probe = draw_probe(
        sides.rollouts,
        ProbeRequest(
            group_id=f"probe/{sides.version}",
            picks=[(numbers.index(number), index) for number, index in picks * 2],
            num_whole=num,
            sampling=replace(sampling, max_new_tokens=min(MAX_NEW_TOKENS, sampling.max_new_tokens)),
        ),
        [groups[number] for number in numbers],
    )
    versions = [groups[number].samples[index].weight_version for number, index in picks]
    measured = _measure(policy, probe.handle, sampling, sides.val_sampling)
    settings = policy.inspect(describe_model)[0]
    try:
        weights = sides.refit.compare()
    except RefitError as error:
        weights = WeightComparison(not_compared=str(error))
    return name_cause(
        Evidence(
            recorded_error=Error.of(worst),
            recorded_versions=(min(versions), max(versions)),
            trained_version=trained_version,
            policy_version=sides.version,
            fresh_version=min(sample.weight_version for sample in probe.handle.samples),
            own=_variant(sampling),
            weights=weights,
            settings=_differences(settings, sides.generation.describe_model()),
            recorded_changed=probe.num_recorded_changed,
            fresh_changed=probe.num_fresh_changed,
            num_picked=len(picks),
            precision=config.precision,
            **measured,
        )
    )


def _row_errors(policy: Policy) -> list[RowErrors]:
    return [found for part in policy.inspect(row_errors, COLUMN) for found in part]


def _measure(policy: Policy, probe: GroupHandle, sampling: SamplingParams, other: SamplingParams) -> dict[str, Any]:
    """Score fresh completions, of which the second half follows prompts of one token.

    `other`: what generation might have used instead of `sampling`.
    """
    half = len(probe.samples) // 2
    long, short = (range(half), range(half, 2 * half))
    own = _variant(sampling)

    def score(samples: range, size: int) -> list[RowErrors]:
        policy.load(plan_probe(policy.data_parallel_size, probe, samples, size=size))
        policy.compute(Logprobs(), COLUMN)
        return _row_errors(policy)

    found: dict[str, Any] = {"together_error": Error.of(score(long, 2))}
    firsts = [row.first_token for row in score(short, 1)]
    found["first_token_alone"] = sum(firsts) / len(firsts)
    rows = score(long, 1)
    found |= {"alone_error": Error.of(rows), "last_quarter": sum(row.last_quarter for row in rows) / len(rows)}
    other_heads = [replace(own, head_dtype=dtype) for dtype in HEAD_DTYPES]
    variants = tuple(dict.fromkeys([own, *_sampling_variants(sampling, other), *other_heads]))
    policy.compute(VariantLogprobs(variants), COLUMN)
    rows = _row_errors(policy)
    found["variants"] = {variant: Error.of(rows, number) for number, variant in enumerate(variants)}
    is_short = max(probe.samples[index].length for index in long) <= MAX_PLAIN_TOKENS
    has_other = is_short and all(policy.inspect(compute_with_other_attention, Logprobs(), COLUMN))
    found["other_attention_error"] = Error.of(_row_errors(policy)) if has_other else None
    found["routed_otherwise"] = policy.inspect(routed_otherwise, Logprobs())[0]
    return found


def plan_probe(num_ranks: int, probe: GroupHandle, samples: range, *, size: int) -> BatchPlan:
    """Samples dealt to the ranks, in micro-batches of `size`."""
    ranks = []
    for rank in range(num_ranks):
        own = [
            PlannedSample(group=0, index=i, lengths=(probe.samples[i].length,), advantage=0.0, mask=1.0)
            for i in samples[rank::num_ranks]
        ]
        batches: list[MicroBatch] = [own[start : start + size] for start in range(0, len(own), size)]
        ranks.append(RankPlan(train=[], logprobs=batches))
    return BatchPlan(groups=[(probe.ref, probe.place)], ranks=ranks)


def _variant(sampling: SamplingParams) -> Variant:
    return Variant(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)


def _sampling_variants(own: SamplingParams, other: SamplingParams) -> list[Variant]:
    """The parameters with one of them not applied, other parameters of the run, and a range of temperatures."""
    plain = replace(own, top_k=None, top_p=1.0)
    partly = [replace(own, temperature=1.0), plain, replace(own, top_k=None), replace(own, top_p=1.0), other]
    return [_variant(each) for each in (*partly, *(replace(plain, temperature=value) for value in TEMPERATURES))]


def _differences(training: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that both sides have, with different values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(training.keys() & generation.keys()):
        one, other = training[key], generation[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found |= {key: (one, other)} if _differences(one, other) else {}
        elif one != other:
            found[key] = (one, other)
    return found


def look_into(
    sides: Sides, groups: Sequence[GroupHandle], *, step: int, console: RunConsole, run_logger: Logger
) -> None:
    """`investigate` in the middle of a run: the cause goes to the console and into `disagreement_step_N.json`.

    The run was sound before, so an investigation that fails is a warning, unless a worker died or hangs.
    """
    try:
        diagnosis = investigate(sides, groups, trained_version=step - 1)
    except (WorkerDied, WorkerHang):
        raise
    except (WorkerError, NothingToCompare) as error:
        console.warn(f"training and generation disagree; no cause found: {first_line(error)}")
        return
    path = run_logger.log_text(diagnosis.to_json(), f"disagreement_step_{step}.json")
    console.warn(f"{diagnosis}\n  all    {path}")
