"""Configuration of the policy: model, tokenizer, batch sizes, optimizer, sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base import Derived, StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of, switched_off
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronPeftConfig

# -- Configuration of routing replay: `policy.router_replay`.


class RouterReplayConfig(StrictModel):
    """Training a mixture-of-experts model with the experts that generation chose for the same tokens."""

    enabled: bool = False
    """Have the engine return the experts of every token, and take these in logprob and training passes. With
    `policy.megatron_cfg`."""


# -- How `policy.optimizer` is written for Megatron Core.

_SECTION = "policy.megatron_cfg.optimizer"
_NAMES = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps", "momentum": "sgd_momentum"}


def carried_over(kwargs: Mapping[str, Any]) -> str:
    """`, and say policy.megatron_cfg.optimizer.lr=0.0003 ... instead`, for arguments that Megatron has too."""
    values = {new: kwargs[old] for old, new in _NAMES.items() if old in kwargs}
    betas = kwargs.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        values |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    if not values:
        return f", and use {_SECTION}"
    return ", and carry its values over: " + " ".join(f"{_SECTION}.{name}={value}" for name, value in values.items())


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


class LoRAConfig(StrictModel):
    """Low-rank adapters on linear layers (Hu et al. 2021, arXiv 2106.09685); the model's own weights are frozen."""

    enabled: bool = False
    """Train adapters instead of the model."""

    target_modules: list[str] = Field(default_factory=list)
    """Names of linear layers to adapt: the last part (`q_proj`) or a pattern of the full name (`*.self_attn.*`)."""

    exclude_modules: list[str] = Field(default_factory=list)
    """Names of linear layers to leave alone, written like `target_modules`."""

    match_all_linear: bool = True
    """Adapt every linear layer but the output head; `target_modules` must be empty then."""

    dim: int = Field(default=8, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / dim."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' input while training."""

    lora_A_init: Literal["xavier", "uniform", "gaussian"] = "xavier"
    """How the first matrix is drawn: Xavier normal, Kaiming uniform (PEFT's default) or normal with a standard
    deviation of 1 / dim."""

    refit: Literal["merged", "adapter"] = "merged"
    """What generation receives: whole merged weights at every sync, or, after the first one, the adapters alone, which
    it adds to a copy of the adapted weights in host memory. The latter is for engines that neither quantise nor repack
    weights."""

    adapter_path: str | None = None
    """Directory of an adapter in PEFT's format, as `policy/adapter` of a checkpoint, that training begins with and that
    is part of the reference policy; null: a new adapter, which changes nothing at first."""

    not_yet: ClassVar = (
        NotYet("dropout_position", one_of("post", "pre"), harmless=True),
        NotYet("use_triton", one_of(True, False, None), harmless=True),
    )

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.adapter_path is not None and not self.enabled:
            yield "adapter_path", "is an adapter to begin with; set enabled=true to train it, or adapter_path=null"
        if self.enabled and self.match_all_linear and self.target_modules:
            yield "target_modules", "all linear layers are adapted; set match_all_linear=false to name some"
        if self.enabled and not self.match_all_linear and not self.target_modules:
            yield (
                "target_modules",
                "names no layer; name some, for example [q_proj, v_proj], or set match_all_linear=true",
            )


class PipelineConfig(StrictModel):
    """How micro-batches flow through pipeline stages; used when `pipeline_parallel_size` is above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """GPipe, one-forward-one-backward, or the latter with several stages per rank."""

    stages_per_rank: int = Field(default=1, ge=1)
    """Pieces of the model that each rank holds; above 1 for `interleaved_1f1b` only."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if (self.schedule == "interleaved_1f1b") != (self.stages_per_rank > 1):
            yield "stages_per_rank", "is above 1 exactly when schedule is interleaved_1f1b; 2 is usual there"


class DTensorConfig(StrictModel):
    """Training with PyTorch: FSDP2, and tensor, context, expert and pipeline parallelism over one device mesh."""

    enabled: bool = True
    """Train with PyTorch; false when `policy.megatron_cfg.enabled` is true."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every layer's matrices."""

    sequence_parallel: bool = False
    """Between the matrices, split activations over the tensor-parallel ranks by position."""

    custom_parallel_plan: str | None = None
    """Import path of a tensor-parallel plan (a dict, or a function of the model that returns one)."""

    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every sequence."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the layers."""

    pipeline: PipelineConfig = PipelineConfig()
    """How micro-batches flow through pipeline stages."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks, out of those that shard the parameters, that share the experts of every mixture-of-experts layer."""

    dp_replicate_size: int = Field(default=1, ge=1)
    """Copies of the sharded model (HSDP): parameters are sharded inside each copy, gradients summed over copies."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and bring layers to the device as needed."""

    activation_checkpointing: Literal["full", "selective"] | bool = False
    """Recompute activations in the backward pass: `full` (true) all of a block, `selective` all but its matmuls."""

    torch_compile: bool = False
    """Compile each transformer block (about a minute at the first step)."""

    defer_fsdp_grad_sync: bool | None = None
    """Reduce gradients once per optimizer step instead of after every micro-batch: less traffic, but whole float32
    gradients on every rank until then. null: where these take at most a tenth of its memory. A pipeline always does."""

    clear_cache_every_n_steps: int | None = Field(default=None, ge=1)
    """Return unused memory to the device after every so many micro-batches; null: never."""

    lora_cfg: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the policy workers."""

    not_yet: ClassVar = (
        NotYet("_v2", one_of(True, False, None)),
        NotYet("moe_parallelizer", one_of({}, None)),
        NotYet("automodel_kwargs", one_of({}, None)),
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of an optimizer step is a multiple of this."""
        return self.pipeline_parallel_size if self.pipeline.schedule == "interleaved_1f1b" else 1

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield (
                "sequence_parallel",
                "splits over tensor-parallel ranks; set tensor_parallel_size above 1 or switch it off",
            )
        if self.pipeline_parallel_size > 1 and self.defer_fsdp_grad_sync is False:
            yield "defer_fsdp_grad_sync", "a pipeline reduces gradients once per optimizer step; set it to null"
        if self.custom_parallel_plan is not None and self.tensor_parallel_size == 1:
            yield "custom_parallel_plan", "is a plan for tensor-parallel ranks; set tensor_parallel_size above 1"


PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class DynamicBatchingConfig(StrictModel):
    """Micro-batches of similar lengths, as many samples as a budget of padded tokens allows."""

    enabled: bool = False
    """Size micro-batches by tokens; excludes sequence_packing."""

    train_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens, padding included, of one forward and backward pass of a rank; null: `train_micro_batch_size` samples of
    the greatest length."""

    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens, padding included, of one forward pass when logprobs are recomputed; null: `logprob_batch_size` samples of
    the greatest length."""

    sequence_length_round: int = Field(default=64, ge=1)
    """Lengths are rounded up to a multiple of this, so that few shapes occur."""


class SequencePackingConfig(StrictModel):
    """Micro-batches filled with whole sequences up to a budget of tokens, by bin packing."""

    enabled: bool = False
    """Fill micro-batches by tokens; excludes dynamic_batching."""

    train_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass of a rank; null: those of `train_micro_batch_size` samples of
    the greatest length."""

    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass when logprobs are recomputed; null: those of `logprob_batch_size` samples of the
    greatest length."""

    algorithm: Annotated[
        PackingAlgorithm, BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)
    ] = "modified_first_fit_decreasing"
    """How sequences are chosen for each other."""

    not_yet: ClassVar = (
        NotYet("sequence_length_round", anything),
        NotYet("fuse_loss", one_of(False, None)),
        NotYet("microbatch_order", one_of("packer", None), harmless=True),
    )


class RewardModelConfig(StrictModel):
    """A head with one number per sequence or token in place of the language model's."""

    enabled: bool = False
    """The model is a reward or value model: its head is one linear layer with one output (`score`)."""

    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry`: a score for each sequence, from the state of its last token; `regression`: a value for each
    token, from the state before it."""


class PolicyConfig(StrictModel):
    """Policy: model, tokenizer, batch sizes, optimizer, sharding."""

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

    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Micro-batches of similar lengths by a budget of tokens."""

    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Micro-batches filled by bin packing."""

    padding_free: bool | None = None
    """Lay the sequences of a micro-batch end to end, without padding; null: where the model's attention allows it."""

    deterministic: bool = False
    """Two runs on the same layout give the same bits; slower on GPUs."""

    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the forward and backward pass."""

    master_precision: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the sharded weights and the optimizer state are kept; frozen weights (LoRA) in `precision`."""

    make_sequence_length_divisible_by: int = Field(default=1, ge=1)
    """Padded length of a micro-batch is a multiple of this."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""

    nonfinite_action: Literal["stop", "skip"] = "stop"
    """When a loss or a gradient is not finite: end the run or skip the optimizer step. The samples are written down."""

    optimizer: OptimizerConfig | None = OptimizerConfig()
    """The optimizer; null with Megatron, which has `megatron_cfg.optimizer`."""

    scheduler: Annotated[list[SchedulerConfig], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Learning-rate schedulers in order, and one item `{milestones: [...]}` if there are several; empty: constant."""

    scheduler_step_per: Literal["optimizer_step", "train_call"] = "optimizer_step"
    """When the scheduler steps. `train_call`, once per training step, is what configurations of NeMo RL count on."""

    refit_buffer_size_gb: float = Field(default=1.0, gt=0)
    """GiB of the buffer through which weights pass on their way to generation."""

    dtensor_cfg: DTensorConfig = DTensorConfig()
    """Training with PyTorch: FSDP2, and tensor, context, expert and pipeline parallelism."""

    megatron_cfg: MegatronConfig = MegatronConfig()
    """Training with Megatron Core, when `megatron_cfg.enabled`; `dtensor_cfg.enabled` must be false then."""

    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Training with the experts that generation chose, of mixture-of-experts models with Megatron."""

    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    """A head with one number per sequence or token in place of the language model's."""

    not_yet: ClassVar = (
        NotYet("draft", switched_off),
        NotYet("pretrained_checkpoint", one_of({}, None)),
        NotYet("generation_batch_size", anything),
        NotYet("offload_optimizer_for_logprob", one_of(False, None), harmless=True),
        NotYet("precision", lambda value: value != "float16"),
        NotYet("fsdp_offload_enabled", one_of(False, None)),
        NotYet("activation_checkpointing_enabled", one_of(False, None)),
    )

    @property
    def backend_cfg(self) -> DTensorConfig | MegatronConfig:
        """The section of the backend that trains."""
        return self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg

    @property
    def backend_key(self) -> str:
        """The name of that section."""
        return "megatron_cfg" if self.megatron_cfg.enabled else "dtensor_cfg"

    @property
    def adapters(self) -> LoRAConfig | MegatronPeftConfig:
        """The low-rank adapters of the backend that trains."""
        return self.megatron_cfg.peft if self.megatron_cfg.enabled else self.dtensor_cfg.lora_cfg

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from self._check_scheduler()
        yield from self._check_backend()
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            yield (
                "dynamic_batching.enabled",
                "excludes policy.sequence_packing.enabled: both fill micro-batches by tokens",
            )

    def _check_backend(self) -> Iterator[tuple[str, str]]:
        megatron = self.megatron_cfg
        if megatron.enabled and self.dtensor_cfg.enabled:
            yield (
                "megatron_cfg.enabled",
                "excludes policy.dtensor_cfg.enabled=true; set one of them to false",
            )
        if not megatron.enabled and not self.dtensor_cfg.enabled:
            yield "dtensor_cfg.enabled", "no training backend is left; set it or policy.megatron_cfg.enabled to true"
        if not megatron.enabled and self.optimizer is None:
            yield "optimizer", "null leaves training with PyTorch without an optimizer; give a name and kwargs"
        if not megatron.enabled:
            if self.router_replay.enabled:
                yield "router_replay.enabled", "needs policy.megatron_cfg.enabled=true; set it to false"
            return
        yield from self._check_context(2 * megatron.context_parallel_size)
        if self.master_precision != "float32":
            yield (
                "master_precision",
                "with Megatron, policy.megatron_cfg.optimizer.use_precision_aware_optimizer and its dtypes say in what "
                "optimizer state is kept; set it to float32",
            )
        bf16 = megatron.optimizer.bf16
        if bf16 is not None and bf16 != (self.precision == "bfloat16"):
            yield (
                "megatron_cfg.optimizer.bf16",
                f"does not fit policy.precision={self.precision}; set it to null",
            )
        if megatron.pipeline_dtype not in (None, self.precision):
            yield "megatron_cfg.pipeline_dtype", f"must be policy.precision={self.precision}; set it to null"
        clip = megatron.optimizer.clip_grad
        if clip is not None and clip != self.max_grad_norm:
            yield (
                "megatron_cfg.optimizer.clip_grad",
                f"is not policy.max_grad_norm={self.max_grad_norm}; set it to null",
            )
        if self.optimizer is not None and self.optimizer != OptimizerConfig():
            yield "optimizer", f"is for training with PyTorch; set it to null{carried_over(self.optimizer.kwargs)}"
        if self.scheduler:
            yield "scheduler", "is for training with PyTorch; use policy.megatron_cfg.scheduler and set this to null"
        chunk = megatron.linear_ce_fusion_chunk_size
        if chunk is not None and self.logprob_chunk_size not in (None, chunk):
            yield (
                "megatron_cfg.linear_ce_fusion_chunk_size",
                f"{chunk} is not policy.logprob_chunk_size={self.logprob_chunk_size}, which it repeats; set it to null",
            )
        if self.padding_free is False:
            yield "padding_free", "Megatron always trains on sequences laid end to end; set it to null"

    def _check_context(self, chunks: int) -> Iterator[tuple[str, str]]:
        """Every sequence is cut into as many equal chunks; shorter ones than the longest are padded to that."""
        longest = self.max_total_sequence_length
        if chunks == 2 or longest % chunks == 0:
            return
        below, above = longest // chunks * chunks, -(-longest // chunks) * chunks
        yield (
            "megatron_cfg.context_parallel_size",
            f"{chunks // 2} ranks hold {chunks} equal chunks of every sequence, and "
            f"policy.max_total_sequence_length={longest} is no multiple of that; "
            f"{f'{below} and {above} are' if below else f'{above} is'}",
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


class RolloutPolicyConfig(PolicyConfig):
    """Policy: model, tokenizer, batch sizes, optimizer, sharding, generation."""

    generation: GenerationConfig
    """Generation: sampling parameters and the vLLM engine."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        if self.reward_model_cfg.enabled:
            yield (
                "reward_model_cfg.enabled",
                "a policy that generates needs the head of a language model; set it to false",
            )
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
