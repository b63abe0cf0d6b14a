"""Configuration of the policy: model, tokenizer, batch sizes, optimizer, sharding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base import Derived, NotYet, StrictModel, anything, one_of, switched_off
from nemo_rl.models.generation.config import GenerationConfig


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


class TokenizerConfig(StrictModel):
    """The tokenizer."""

    name: Annotated[str, Derived("${..model_name}")]
    """Hugging Face name or folder."""

    chat_template: str | None = "default"
    """`default`: the tokenizer's own; null: messages joined as they are; otherwise a Jinja text or a `.jinja` file."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the template, e.g. `{enable_thinking: true}`."""

    not_yet: ClassVar = (
        NotYet("audio", one_of(None)),
        NotYet("video", one_of(None)),
        NotYet("use_processor", one_of(False, None)),
        NotYet("use_fastokens", one_of(False, None), harmless=True),
    )


class OptimizerConfig(StrictModel):
    """The optimizer."""

    name: str = "torch.optim.AdamW"
    """Import path of a `torch.optim.Optimizer`."""

    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8}
    )
    """Its arguments. Given as a whole: what is left out falls back to the optimizer's own defaults."""


class SchedulerConfig(StrictModel):
    """One learning-rate scheduler of a chain, or the milestones at which one follows the other."""

    name: str | None = None
    """Import path of a `torch.optim.lr_scheduler.LRScheduler`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""

    milestones: list[int] | None = None
    """In an item of its own: the scheduler steps at which the next scheduler takes over."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if (self.name is None) == (self.milestones is None):
            yield "name", "a scheduler item has either a name (and kwargs) or milestones"


class DTensorConfig(StrictModel):
    """Training with PyTorch FSDP2."""

    enabled: bool = True
    """Train with FSDP2; the only backend so far."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the policy workers."""

    not_yet: ClassVar = (
        NotYet("_v2", one_of(True, False, None)),
        NotYet("cpu_offload", one_of(False, None)),
        NotYet("sequence_parallel", one_of(False, None)),
        NotYet("tensor_parallel_size", one_of(1), fill=1),
        NotYet("context_parallel_size", one_of(1), fill=1),
        NotYet("expert_parallel_size", one_of(1), fill=1),
        NotYet("pipeline_parallel_size", one_of(1), fill=1),
        NotYet("dp_replicate_size", one_of(1), fill=1),
        NotYet("custom_parallel_plan", one_of(None)),
        NotYet("clear_cache_every_n_steps", one_of(None), harmless=True),
        NotYet("defer_fsdp_grad_sync", one_of(None), harmless=True),
        NotYet("moe_parallelizer", one_of({}, None)),
        NotYet("automodel_kwargs", one_of({}, None)),
        NotYet("lora_cfg", switched_off),
    )

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if not self.enabled:
            yield "enabled", "no training backend is left; set policy.dtensor_cfg.enabled=true"


class PolicyConfig(StrictModel):
    """Policy: model, tokenizer, batch sizes, optimizer, sharding, generation."""

    model_name: str = Field(min_length=1)
    """Hugging Face name or folder of the model; `tiny:arithmetic` is made on first use."""

    tokenizer: TokenizerConfig
    """The tokenizer."""

    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's config.json, in training and in generation."""

    train_global_batch_size: int = Field(default=512, ge=1)
    """Samples of one optimizer step, over all ranks."""

    train_micro_batch_size: int = Field(default=4, ge=1)
    """Samples of one forward and backward pass of a rank."""

    logprob_batch_size: Annotated[int, Derived("${.train_micro_batch_size}"), Field(ge=1)]
    """Samples of one forward pass when logprobs are recomputed."""

    logprob_chunk_size: int | None = Field(default=None, ge=1)
    """Positions whose logits are in memory at a time; null: chosen by the worker."""

    max_total_sequence_length: int = Field(default=512, ge=1)
    """Tokens of the longest sample: prompt, completions and environment turns."""

    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the forward and backward pass."""

    master_precision: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the sharded weights and the optimizer state are kept."""

    make_sequence_length_divisible_by: int = Field(default=1, ge=1)
    """Padded length of a micro-batch is a multiple of this."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""

    nonfinite_action: Literal["stop", "skip"] = "stop"
    """When a loss or a gradient is not finite: end the run or skip the optimizer step. The samples are written down."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    scheduler: Annotated[list[SchedulerConfig], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Learning-rate schedulers in order, and one item `{milestones: [...]}` if there are several; empty: constant."""

    scheduler_step_per: Literal["optimizer_step", "train_call"] = "optimizer_step"
    """When the scheduler steps. `train_call`, once per training step, is what configurations of NeMo RL count on."""

    refit_buffer_size_gb: float = Field(default=1.0, gt=0)
    """GiB of the buffer through which weights pass on their way to generation."""

    dtensor_cfg: DTensorConfig = DTensorConfig()
    """Training with PyTorch FSDP2."""

    generation: GenerationConfig
    """Generation: sampling parameters and the vLLM engine."""

    not_yet: ClassVar = (
        NotYet("megatron_cfg", switched_off),
        NotYet("dynamic_batching", switched_off),
        NotYet("sequence_packing", switched_off),
        NotYet("reward_model_cfg", switched_off),
        NotYet("draft", switched_off),
        NotYet("router_replay", switched_off),
        NotYet("pretrained_checkpoint", one_of({}, None)),
        NotYet("generation_batch_size", anything),
        NotYet("offload_optimizer_for_logprob", one_of(False, None), harmless=True),
        NotYet("precision", lambda value: value != "float16"),
        NotYet("fsdp_offload_enabled", one_of(False, None)),
        NotYet("activation_checkpointing_enabled", one_of(False, None)),
    )

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from self._check_scheduler()
        if self.generation.vllm_cfg.max_model_len > self.max_total_sequence_length:
            yield (
                "generation.vllm_cfg.max_model_len",
                f"{self.generation.vllm_cfg.max_model_len} is more than policy.max_total_sequence_length="
                f"{self.max_total_sequence_length}: training could not take such samples; use at most that",
            )
        if self.generation.max_new_tokens > self.max_total_sequence_length:
            yield (
                "generation.max_new_tokens",
                f"{self.generation.max_new_tokens} is more than policy.max_total_sequence_length="
                f"{self.max_total_sequence_length}, which counts the prompt too",
            )

    def _check_scheduler(self) -> Iterator[tuple[str, str]]:
        num_schedulers = sum(item.name is not None for item in self.scheduler)
        milestones = [item.milestones for item in self.scheduler if item.milestones is not None]
        if num_schedulers > 1 and [len(m) for m in milestones] != [num_schedulers - 1]:
            yield (
                "scheduler",
                f"{num_schedulers} schedulers need one item {{milestones: [...]}} with {num_schedulers - 1} "
                f"scheduler step(s) at which the next one takes over",
            )
        if num_schedulers <= 1 and milestones:
            yield "scheduler", "milestones need at least two schedulers"
        for values in milestones:
            if any(later <= earlier for earlier, later in pairwise(values)):
                yield "scheduler", f"milestones must increase (got {values})"
