"""Samples of the greatest length that a configuration allows, as many as fill a few micro-batches of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig, ScoredRolloutConfig
from nemo_rl.algorithms.config.supervised import SupervisedMasterConfig
from nemo_rl.models.policy.config import token_budgets
from nemo_rl.models.policy.layout import training_sizes
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import (
    Example,
    ExampleGroup,
    ExampleHandle,
    ExampleMeta,
    GroupHandle,
    ImageSpan,
    Pixels,
    RolloutGroup,
    Sample,
    SampleMeta,
    SampleStatus,
)
from tools.standin.trace.images import SampleImage

PROMPT_TOKENS = 16
"""Few: samples of a group compute their prompt once, and a recipe's longest samples may have little of it in common."""

MICRO_BATCHES = 3
"""Of a rank in an optimizer step: enough for gradients that wait for the last one, and for prefetching."""


@dataclass(frozen=True)
class Stored:
    """In place of a reference to Ray's object store: the value itself."""

    value: Any

    def __hash__(self) -> int:
        return id(self)


def batch_overrides(config: Any) -> list[str]:
    """Overrides that make a step as small as it can be with full micro-batches, for the same memory.

    The number of optimizer steps of a training step stays: one, or here two for any larger number.
    """
    is_supervised = isinstance(config, SupervisedMasterConfig)
    sequences = config.sequences_per_row if is_supervised else 1
    models = [("policy", config.policy, config.training_cluster)]
    if not is_supervised:
        models += [(model.key, model.config, model.cluster) for model in config.further_models if model.is_trained]
    steps, multiple = [], 1
    for _, policy, cluster in models:
        sizes = training_sizes(policy, cluster.num_workers)
        per_micro_batch = max(1, token_budgets(policy, sequences)[0] // (policy.max_total_sequence_length * sequences))
        micro_batches = max(MICRO_BATCHES, sizes.pipeline_parallel)
        micro_batches += -micro_batches % policy.backend_cfg.micro_batch_multiple
        steps.append(sizes.data_parallel * per_micro_batch * micro_batches)
    size = max(steps)
    for step in steps:
        multiple = multiple * step // gcd(multiple, step)
    if any(size % step for step in steps):
        size = multiple
    size *= 1 + size % 2
    found = [f"{name}.train_global_batch_size={size}" for name, *_ in models]
    if is_supervised:
        return found
    loop = config.rollout
    total = size * (1 if loop.num_samples_per_step <= config.policy.train_global_batch_size else 2)
    group = max(n for n in range(1, loop.num_generations_per_prompt + 1) if total % n == 0)
    section = config.section
    found += [f"{section}.num_prompts_per_step={total // group}", f"{section}.num_generations_per_prompt={group}"]
    if isinstance(loop, ScoredRolloutConfig) and loop.use_dynamic_sampling:  # here no group is better than another
        found += [f"{section}.use_dynamic_sampling=false", f"{section}.batch_multiplier=1"]
    return found


class FullLengthRollouts:
    """In place of a `RolloutCollector`: each request is answered at once, with samples of the greatest length."""

    controller_tensor_bytes = 0

    def __init__(self, config: RolloutMasterConfig, model: PretrainedConfig) -> None:
        self.length = config.policy.max_total_sequence_length
        self.texts = Texts(model)

    def next_groups(self, step: int, next_requests: Any, *, is_first: bool) -> list[GroupHandle]:
        return [self._group(request) for request in next_requests()]

    def _group(self, request: GroupRequest) -> GroupHandle:
        prompt = self.texts.num_prompt_tokens(self.length)
        mask = np.arange(self.length) >= prompt
        samples, pixels = [], {}
        for index in range(request.num_generations):
            sample_id = f"{request.group_id}/{index}"
            images, own = self.texts.images(sample_id)
            pixels |= own
            meta = SampleMeta(
                sample_id=sample_id,
                status=SampleStatus.COMPLETED,
                length=self.length,
                num_prompt_tokens=prompt,
                num_generated_tokens=self.length - prompt,
                num_turns=1,
                reward=float(index % 2),
                weight_version=0,
                images={image.digest: image.num_pixels for image in images},
            )
            zeros = np.zeros(self.length, np.float32)
            ids = self.texts.token_ids(self.length, index)
            samples.append(Sample(meta=meta, token_ids=ids, token_mask=mask, generation_logprobs=zeros, images=images))
        prompt_id, name = request.prompt.prompt_id, request.prompt.task_name
        group = RolloutGroup(group_id=request.group_id, prompt_id=prompt_id, samples=samples, pixels=pixels)
        metas = [sample.meta for sample in samples]
        return GroupHandle(
            group_id=request.group_id, prompt_id=prompt_id, task_name=name, ref=Stored([group]), samples=metas
        )

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> Any:
        return dict

    def generation_use(self) -> Any:
        from nemo_rl.utils.timer import GenerationUse

        return GenerationUse(busy_s=1.0, window_s=1.0, num_tokens=0)

    def wait_all(self) -> None:
        """Nothing is being played."""

    def replace_keeper(self) -> None:
        """There is none."""


class FullLengthExamples:
    """In place of an `ExampleLoader`: the same batch of rows, or pairs, of the greatest length each time."""

    def __init__(self, config: SupervisedMasterConfig, model: PretrainedConfig) -> None:
        self.size, self.sequences = config.policy.train_global_batch_size, config.sequences_per_row
        self.length, self.texts = config.policy.max_total_sequence_length, Texts(model)

    def next(self) -> list[ExampleHandle]:
        return [self._row(number) for number in range(self.size)]

    def _row(self, number: int) -> ExampleHandle:
        prompt = self.texts.num_prompt_tokens(self.length)
        prompt_id = f"rows:{number}"
        mask = np.arange(self.length) >= prompt
        samples, pixels, seen = [], {}, {}
        for sequence in range(self.sequences):
            sample_id = f"{prompt_id}/{sequence}"
            images, own = self.texts.images(sample_id)
            pixels |= own
            seen |= {image.digest: image.num_pixels for image in images}
            ids = self.texts.token_ids(self.length, sequence).astype(np.int32)
            samples.append(Example(sample_id=sample_id, token_ids=ids, token_mask=mask, images=images))
        loss_tokens = self.sequences * (self.length - prompt)
        meta = ExampleMeta(
            prompt_id=prompt_id,
            index=0,
            lengths=(self.length,) * self.sequences,
            num_loss_tokens=loss_tokens,
            images=seen,
        )
        return ExampleHandle(ref=Stored([ExampleGroup(samples=samples, pixels=pixels)]), rows=[meta])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing resumes here."""


class Texts:
    """The tokens of samples, and of a vision-language model the image with which each begins."""

    def __init__(self, model: PretrainedConfig) -> None:
        self.vocab_size = model.get_text_config().vocab_size
        self.image = SampleImage.of(model) if sees_images(model) else None

    def num_prompt_tokens(self, length: int) -> int:
        """ValueError where a sample of `length` tokens has no room for its image."""
        num_seen = 0 if self.image is None else self.image.num_tokens
        if num_seen + PROMPT_TOKENS > length and num_seen:
            raise ValueError(f"policy.max_total_sequence_length={length}: an image of a trace has {num_seen} tokens")
        return num_seen + min(PROMPT_TOKENS, length // 2)

    def token_ids(self, length: int, sequence: int) -> np.ndarray:
        """Int64 [length]: tokens that every model has, others in each sequence: none is computed once for two."""
        ids = np.random.default_rng(sequence).integers(2, min(500, self.vocab_size), length)
        if self.image is not None:
            ids[1 : 1 + self.image.num_tokens] = self.image.token_id
        return ids

    def images(self, sample_id: str) -> tuple[list[ImageSpan], dict[str, Pixels]]:
        """The images of a sample, and their pixels by digest. No two samples share one."""
        if self.image is None:
            return [], {}
        return [self.image.span(sample_id, 1)], {sample_id: self.image.pixels}
