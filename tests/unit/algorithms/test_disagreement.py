"""Why training and generation disagree: each fault is put into a real policy or a real generator, and is named."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from nemo_rl.algorithms.trainers.disagreement import Cause, Diagnosis, Sides, investigate, plan_probe
from nemo_rl.models.policy.attention import CuSeqlens
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.dtensor.generate import GeneratingPolicyWorker
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.generate import GenerationSettings
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.inspection import _logits, describe_model
from nemo_rl.refit.layout import Segment, WeightComparison
from nemo_rl.refit.transfer import largest_difference
from nemo_rl.rollouts.probe import Probe, ProbeRequest
from nemo_rl.types import BatchPlan, GenerationRequest, GroupHandle, RolloutGroup, Sample, SamplingParams
from tests.fakes import handle, sample
from tests.tables import pattern
from tests.unit.policy.models import VOCAB, save_model
from tests.unit.policy.steps import policy_config, whole_weights, worker_settings
from tests.worlds import run_world

SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.8)
BROKEN = "broken_attention"


def broken_attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Scores are a quarter larger than they should be."""
    return sdpa_attention_forward(module, query * 1.25, *args, **kwargs)


AttentionInterface.register(BROKEN, broken_attention)
AttentionMaskInterface.register(BROKEN, sdpa_mask)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3-moe"):
        save_model(family, path / family)
    return path


@dataclass
class LocalPolicy:
    """A policy of one rank in this process."""

    worker: DTensorPolicyWorker
    data_parallel_size: int = 1

    def load(self, plan: BatchPlan) -> None:
        stored = [ref for ref, _ in plan.groups]
        self.worker.load(plan.ranks[0], {n: (0, n) for n in range(len(stored))}, stored)

    def compute(self, task: HeadTask, column: str) -> None:
        self.worker.compute(task, column)

    def inspect(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(self.worker, *args)]


@dataclass
class LocalEngine:
    """A generator in this process: what generation, weight sync and rollouts are to an investigation."""

    worker: GeneratingPolicyWorker
    policy: DTensorPolicyWorker
    version: int = 3
    ignores: dict[str, Any] = field(default_factory=dict)  # sampling parameters it uses whatever a request says
    chosen: Callable[[Sample], np.ndarray] | None = None  # the experts it reports
    gather: str = ""  # how the policy's shards were gathered wrongly

    def draw(self, prompts: Sequence[list[int]], sampling: SamplingParams, name: str) -> RolloutGroup:
        request = partial(GenerationRequest, sampling=replace(sampling, **self.ignores))
        requests = [request(request_id=f"{name}/{i}", prompt_token_ids=ids, seed=i) for i, ids in enumerate(prompts)]
        answers: Any = {a.request_id: a.completion for a in self.worker.generate(requests, self.version)}
        samples = []
        for request in requests:
            made, size = answers[request.request_id], len(request.prompt_token_ids)
            ids = np.array(request.prompt_token_ids + made.token_ids)
            how: Any = {"version": made.weight_version, "sample_id": request.request_id}
            logprobs = np.array([0.0] * size + made.logprobs, dtype=np.float32)
            tokens: Any = {"token_ids": ids, "token_mask": np.arange(len(ids)) >= size, "generation_logprobs": logprobs}
            samples.append(Sample(meta=sample(prompt=size, generated=len(made.token_ids), **how), **tokens))
            if self.chosen is not None:
                samples[-1].routed_experts = self.chosen(samples[-1])
        return RolloutGroup(group_id=name, prompt_id=name, samples=samples)

    def track(self, handle: GroupHandle) -> None:
        pass

    def inspect(self, function: Any, request: ProbeRequest, *, groups: Sequence[GroupHandle]) -> Probe:
        picked = [groups[number].ref.samples[index] for number, index in request.picks]
        ends = [s.meta.num_prompt_tokens if i < request.num_whole else 1 for i, s in enumerate(picked)]
        prompts = [s.token_ids[:end].tolist() for s, end in zip(picked, ends, strict=True)]
        fresh = self.draw(prompts, request.sampling, request.group_id)
        whole = slice(0, request.num_whole)
        return Probe(
            handle=handle_of(fresh),
            num_recorded_changed=sum(not survives_text(s) for s in picked[whole]),
            num_fresh_changed=sum(not survives_text(s) for s in fresh.samples[whole]),
        )

    def describe_model(self) -> dict[str, Any]:
        return describe_model(self.worker)

    def compare(self) -> WeightComparison:
        ours, theirs = whole_weights(self.policy), whole_weights(self.worker)
        found = {n: largest_difference(t, [Segment(tuple(t.shape), t.stride(), 0, theirs[n])]) for n, t in ours.items()}
        different = {name: value for name, value in found.items() if value > 0}
        return WeightComparison(num_tensors=len(ours), different=different, gather=self.gather)


def handle_of(group: RolloutGroup) -> GroupHandle:
    return handle(*(sample.meta for sample in group.samples), name=group.group_id, ref=group)


def survives_text(sample: Sample) -> bool:
    """The text of token n is n % 60 "a"s, so that each of two tokens has the text of the other, and one wins."""
    return bool((sample.token_ids[sample.token_mask] < 60).all())


def examine(
    model: Path, fault: Any = None, after: Any = None, *, theirs: Any = None, trained_version: int = 3, **ours: Any
) -> Diagnosis:
    """Draw samples and investigate them. `fault` comes before they are drawn, `after` may change them or the pair.

    `ours` and `theirs` are settings of the policy and of the engine.
    """

    def rank_main(rank: int, world: int) -> Diagnosis:
        settings = worker_settings(model, sampling=SAMPLING, init_optimizer=False)
        policy = DTensorPolicyWorker(policy_config(**ours), settings)
        engine: Any = LocalEngine(GeneratingPolicyWorker(policy_config(**(theirs or {})), settings), policy)
        if fault is not None:
            fault(engine)
        limits = {"max_model_len": 64, "max_batch_size": 8, "end_token_ids": set(), "special_token_ids": frozenset()}
        engine.worker.prepare_generation(GenerationSettings(**limits, decode=str))
        generator = np.random.default_rng(0)
        prompts = [generator.integers(2, VOCAB, 4 + 2 * i).tolist() for i in range(8)]
        group = engine.draw(prompts, SAMPLING, "0")
        drawn = handle_of(group if after is None else after(engine, group))
        local: Any = LocalPolicy(policy)
        local.load(plan_probe(1, drawn, range(len(drawn.samples)), size=2))
        local.config = policy_config()
        asked: Any = dict.fromkeys(("sampling", "val_sampling"), SAMPLING)
        sides = Sides(policy=local, generation=engine, refit=engine, rollouts=engine, version=3, **asked)
        return investigate(sides, [drawn], trained_version=trained_version)

    return run_world(rank_main, 1)[0]


@torch.no_grad()
def change(worker: DTensorPolicyWorker, only: str = "") -> None:
    for name, parameter in worker.stages[0].named_parameters():
        if only in name:
            local = parameter.to_local()
            local.add_(torch.randn(local.shape, generator=torch.Generator().manual_seed(1)) * 0.1)


@dataclass(frozen=True, kw_only=True)
class LeakyLayout(RowLayout):
    """Sequences that lie end to end see each other."""

    def build(self, *args: Any, **kwargs: Any) -> ModelBatch:
        batch = super().build(*args, **kwargs)
        assert batch.cu_seqlens is not None
        return replace(batch, cu_seqlens=CuSeqlens.of([batch.input_ids.numel()]))


def leak(engine: LocalEngine) -> None:
    engine.policy.layout = LeakyLayout(padding_free=True)


def break_head(engine: LocalEngine) -> None:
    def next_logits(self: Any, input_ids: Any, position_ids: Any, temperature: float, **how: Any) -> torch.Tensor:
        states = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **how)
        head = replace(self.output_head(), temperature=1.0)
        return _logits(states.last_hidden_state[:, -1], head, "bfloat16") / temperature

    [stage] = engine.worker.stages
    stage.next_logits = MethodType(next_logits, stage)


def break_mlp(engine: LocalEngine) -> None:
    layer = engine.worker.parts[0].model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, output: output * 1.1)


def train_both(engine: LocalEngine, group: RolloutGroup) -> RolloutGroup:
    """The sync comes after the samples were drawn."""
    change(engine.policy)
    change(engine.worker)
    return group


def write_as_text(engine: LocalEngine, group: RolloutGroup) -> RolloutGroup:
    for made in group.samples:
        made.token_ids = np.where(made.token_mask, made.token_ids % 60, made.token_ids)
    return group


def lose_in_gather(engine: LocalEngine) -> None:
    change(engine.worker)
    engine.gather = LOST


def break_attention(engine: LocalEngine) -> None:
    engine.policy.parts[0].config._attn_implementation = BROKEN


def case(cause: Cause, said: str, fault: Any = None, **how: Any) -> tuple[Cause, str, dict[str, Any]]:
    return cause, said, {"fault": fault, **how}


HOTTER = "with temperature 1.3, top-p 1, top-k off ... applies temperature 0.8"
ONE_TENSOR = "1 of 21 tensors ... model.layers.1.mlp.up_proj.weight (by up to 0."
LOST = "ranks [1] did not get their own parts back"
MISSED = "samples with weights of version 2, the policy has version 3"
OLDER = "were trained at version 4; fresh completions agree"
DECODED = "change when they are decoded and tokenised again, and no recorded sample does"
OTHER_ROPE = "rope_parameters: training {'rope_theta': 10000.0 ... 100.0"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
CASES = {
    "a temperature not applied": case(Cause.SAMPLING, HOTTER, lambda e: e.ignores.update(temperature=1.3)),
    "a tensor that differs": case(Cause.TENSOR, ONE_TENSOR, lambda e: change(e.worker, "layers.1.mlp.up_proj")),
    "other weights": case(Cause.STALE_WEIGHTS, "21 of 21 tensors ... version 3", lambda e: change(e.worker)),
    "a gather that loses bytes": case(Cause.GATHER, f"{LOST}; generation has what was gathered", lose_in_gather),
    "a missed sync": case(Cause.STALE_WEIGHTS, MISSED, lambda e: setattr(e, "version", 2)),
    "samples of older weights": case(Cause.STALE_WEIGHTS, OLDER, after=train_both, trained_version=4),
    "tokens made from text": case(Cause.TOKENIZER, DECODED, after=write_as_text),
    "neighbours that leak": case(Cause.BATCHING, "each one alone 1.00000: neighbours", leak, padding_free=True),
    "wrong attention": case(Cause.ATTENTION, "training's own attention is wrong", break_attention, padding_free=False),
    "a head in another dtype": case(Cause.HEAD_DTYPE, "with a head in bfloat16", break_head),
    "other positions": case(Cause.POSITIONS, OTHER_ROPE, theirs={"hf_config_overrides": ROPE}),
    "kernels that mix no tokens": case(Cause.KERNELS, "so attention is not the cause", break_mlp),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(models, name):
    cause, said, how = CASES[name]
    found = examine(models / "llama", **how)
    assert found.cause == cause and re.search(pattern(said), found.finding), found.finding


def test_a_sound_pair_differs_by_rounding_only(models):
    found = examine(models / "llama")
    assert found.cause == Cause.ROUNDING
    assert found.evidence.together_error.mult < 1.00001 and found.evidence.settings == {}
    assert found.evidence.weights.num_tensors > 10 and not found.evidence.weights.different


def test_tokens_that_go_to_other_experts_are_counted_and_named(models):
    """The engine's router takes the next expert where it is sure of its first."""
    num_experts = 4

    def fault(engine: LocalEngine) -> None:
        chosen: list[torch.Tensor] = []

        def reroute(router: Any, args: Any, output: Any) -> Any:
            logits, weights, experts = output
            is_sure = logits.view(-1, num_experts).softmax(dim=-1).amax(dim=-1, keepdim=True) > 0.6
            experts = torch.where(is_sure, (experts + 1) % num_experts, experts)
            chosen.append(experts)
            return logits, weights, experts

        for layer in engine.worker.parts[0].model.layers:
            layer.mlp.gate.register_forward_hook(reroute)

        @torch.no_grad()
        def report(made: Sample) -> np.ndarray:
            chosen.clear()
            ids = torch.from_numpy(made.token_ids)[None]
            model = engine.worker.parts[0]
            with engine.worker.decoding():
                model.model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
            return torch.stack(chosen, dim=1).numpy().astype(np.uint8)[:-1]

        engine.chosen = report

    found = examine(models / "qwen3-moe", fault)
    assert found.cause == Cause.ROUTING and "of the tokens go to other experts" in found.finding
    assert 0.0 < found.evidence.routed_otherwise < 1.0
