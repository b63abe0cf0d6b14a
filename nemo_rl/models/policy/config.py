"""Configuration of the policy: model, tokenizer, batch sizes, optimizer, sharding."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.rules import Derived, StrictModel, divisors, remedy, round_up
from nemo_rl.models.generation.config import GenerationConfig, policy_rules
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronPeftConfig


class RouterReplayConfig(StrictModel):
    """Training a mixture-of-experts model with the experts that generation chose for the same tokens."""

    enabled: bool = False
    """The engine returns the experts of every token, and logprob and training passes use them. Needs
    `policy.megatron_cfg`."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [] if value is None else [value]


class TokenizerConfig(StrictModel):
    """The tokenizer."""

    _path: str = "policy.tokenizer"

    name: Annotated[str, Derived("${..model_name}")]
    """Hugging Face name or folder."""

    chat_template: str | None = "default"
    """`default`: the tokenizer's own; null: messages joined as they are; otherwise a Jinja text or a `.jinja` file."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the template, e.g. `{enable_thinking: true}`."""

    control_tokens_in_messages: Literal["text", "tokens"] = "text"
    """The meaning of `<|im_end|>` in a message that the assistant did not write: `text`, or `tokens`, which end the
    turn. With `chat_template: null` they are tokens."""


class OptimizerConfig(StrictModel):
    """The optimizer."""

    _path: str = "policy.optimizer"

    name: str = "torch.optim.AdamW"
    """Import path of a `torch.optim.Optimizer`."""

    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8}
    )
    """Its arguments, which replace the default ones as a whole; the others have the optimizer's own defaults."""


class SchedulerConfig(StrictModel):
    """One learning-rate scheduler of a chain, or the milestones at which one follows the other."""

    name: str | None = None
    """Import path of a `torch.optim.lr_scheduler.LRScheduler`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""

    milestones: list[int] | None = None
    """In an item of its own: the scheduler steps at which the next scheduler takes over."""

    rules: ClassVar = {
        "name=null excludes milestones=null": "a scheduler item has either a name (and kwargs) or milestones; give one",
        "name != null excludes milestones": "a scheduler item has either a name (and kwargs) or milestones; give one",
    }


class LoRAConfig(StrictModel):
    """Low-rank adapters on linear layers (Hu et al. 2021, arXiv 2106.09685); the model's own weights are frozen."""

    _path: str = "policy.dtensor_cfg.lora_cfg"

    enabled: bool = False
    """Train adapters instead of the model."""

    target_modules: list[str] = Field(default_factory=list)
    """Names of linear layers to adapt: the last part (`q_proj`) or a pattern of the full name (`*.self_attn.*`)."""

    exclude_modules: list[str] = Field(default_factory=list)
    """Names of linear layers that get no adapter, written like `target_modules`."""

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
    """The weights that generation receives: whole merged weights at every sync, or, after the first one, the adapters
    alone, which it adds to a copy of the adapted weights in host memory. The latter is for engines that neither
    quantise nor repack weights."""

    adapter_path: str | None = None
    """Directory of an adapter in PEFT's format, as `policy/adapter` of a checkpoint, that training begins with and that
    is part of the reference policy; null: a new adapter, which changes nothing at first."""

    rules: ClassVar = {
        "adapter_path requires enabled": (
            "is an adapter to begin with, that adapters train from -> enabled=true | adapter_path=null"
        ),
        "target_modules: enabled and match_all_linear excludes target_modules": (
            "all linear layers are adapted -> match_all_linear=false | target_modules=[]"
        ),
        "target_modules: enabled and not match_all_linear requires target_modules": (
            "names no layer -> target_modules=[q_proj, v_proj] | match_all_linear=true"
        ),
    }


class PipelineConfig(StrictModel):
    """How micro-batches flow through pipeline stages; used when `pipeline_parallel_size` is above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """GPipe, one-forward-one-backward, or the latter with several stages per rank."""

    stages_per_rank: int = Field(default=1, ge=1)
    """Pieces of the model that each rank holds; above 1 for `interleaved_1f1b` only."""

    rules: ClassVar = {
        "stages_per_rank: schedule=interleaved_1f1b requires stages_per_rank > 1": (
            "interleaved_1f1b needs more than one stage per rank -> stages_per_rank=2"
        ),
        "stages_per_rank > 1 requires schedule=interleaved_1f1b": "several stages per rank are interleaved",
    }


class DTensorConfig(StrictModel):
    """Training with PyTorch: FSDP2, and tensor, context, expert and pipeline parallelism over one device mesh."""

    _path: str = "policy.dtensor_cfg"

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

    fsdp_per_block: bool | None = None
    """Shard each transformer block by itself and gather it just before its pass; false: gather the whole model at once.
    null: for models above 32 MiB. The hooks of a block take longer than the passes of a smaller one."""

    defer_fsdp_grad_sync: bool | None = None
    """Reduce gradients once per optimizer step instead of after every micro-batch: less traffic, but whole float32
    gradients on every rank until then. null: where these take at most a tenth of its memory. A pipeline always does."""

    clear_cache_every_n_steps: int | None = Field(default=None, ge=1)
    """Return unused memory to the device after every so many micro-batches; null: never."""

    lora_cfg: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the policy workers."""

    ignored_when_off: ClassVar = True

    rules: ClassVar = {
        "sequence_parallel requires tensor_parallel_size > 1": (
            "splits over tensor-parallel ranks -> sequence_parallel=false"
        ),
        "custom_parallel_plan requires tensor_parallel_size > 1": (
            "is a plan for tensor-parallel ranks -> custom_parallel_plan=null"
        ),
        "pipeline.stages_per_rank > 1 requires pipeline_parallel_size > 1": (
            "needs {section}.pipeline_parallel_size above 1 -> pipeline.schedule=1f1b and pipeline.stages_per_rank=1"
        ),
        "defer_fsdp_grad_sync: pipeline_parallel_size > 1 excludes defer_fsdp_grad_sync=false": (
            "a pipeline reduces gradients once per optimizer step -> defer_fsdp_grad_sync=null"
        ),
    }

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of an optimizer step is a multiple of this."""
        return self.pipeline_parallel_size if self.pipeline.schedule == "interleaved_1f1b" else 1


PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class TokenBudgetConfig(StrictModel):
    """Micro-batches sized by tokens."""

    enabled: bool = False
    """Size micro-batches by tokens; dynamic_batching and sequence_packing exclude each other."""

    train_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens (with dynamic batching, padding included) of one forward and backward pass of a rank; null:
    `train_micro_batch_size` samples of the greatest length."""

    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass when logprobs are recomputed; null: `logprob_batch_size` samples of the greatest
    length."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Micro-batches of similar lengths, as many samples as a budget of padded tokens allows."""

    sequence_length_round: int = Field(default=64, ge=1)
    """Lengths are rounded up to a multiple of this, so that few shapes occur."""


class SequencePackingConfig(TokenBudgetConfig):
    """Micro-batches filled with whole sequences up to a budget of tokens, by bin packing."""

    algorithm: Annotated[
        PackingAlgorithm, BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)
    ] = "modified_first_fit_decreasing"
    """How the sequences of a micro-batch are chosen."""


class RewardModelConfig(StrictModel):
    """A head with one number per sequence or token in place of the language model's."""

    enabled: bool = False
    """The model is a reward or value model: its head is one linear layer with one output (`score`)."""

    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry`: a score for each sequence, from the state of its last token; `regression`: a value for each
    token, from the state before it."""


class PolicyConfig(StrictModel):
    """Policy: model, tokenizer, batch sizes, optimizer, sharding."""

    _path: str = "policy"

    model_name: str = Field(min_length=1)
    """Hugging Face name or folder of the model; `tiny:arithmetic` is made on first use."""

    tokenizer: TokenizerConfig
    """The tokenizer."""

    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace values of the model's config.json, in training and in generation."""

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

    precision: Literal["float32", "bfloat16"] = "bfloat16"
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
    """When the scheduler steps. Configurations of NeMo RL expect `train_call`: once per training step."""

    override_opt_param_scheduler: bool = False
    """Whose hyperparameters of the optimizer and whose schedule a resumed run has where the two differ: true for those
    of its configuration, false for those of the checkpoint."""

    refit_buffer_size_gb: float = Field(default=1.0, gt=0)
    """GiB of the buffer through which weights pass on their way to generation."""

    dtensor_cfg: DTensorConfig = DTensorConfig()
    """Training with PyTorch: FSDP2, and tensor, context, expert and pipeline parallelism."""

    megatron_cfg: MegatronConfig = MegatronConfig()
    """Training with Megatron Core, when `megatron_cfg.enabled`; `dtensor_cfg.enabled` must be false then."""

    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Training with the experts that generation chose, of mixture-of-experts models with Megatron."""

    freeze: list[Literal["vision_tower", "projector", "language_model"]] = Field(default_factory=list)
    """Parts of a vision-language model that training leaves as they are."""

    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    """A head with one number per sequence or token in place of the language model's."""

    rules: ClassVar = {
        "dynamic_batching.enabled excludes sequence_packing.enabled": (
            "excludes {section}.sequence_packing.enabled: both fill micro-batches by tokens"
        ),
        "padding_free=false excludes sequence_packing.enabled": (
            "packed sequences have no padding -> padding_free=null | sequence_packing.enabled=false and "
            "dynamic_batching.enabled=true"
        ),
        # backends
        "megatron_cfg.enabled excludes dtensor_cfg.enabled": "excludes {section}.dtensor_cfg.enabled=true",
        "dtensor_cfg.enabled: not megatron_cfg.enabled requires dtensor_cfg.enabled": (
            "no training backend is left -> dtensor_cfg.enabled=true | megatron_cfg.enabled=true"
        ),
        "optimizer=null requires megatron_cfg.enabled": (
            "null leaves training with PyTorch without an optimizer; give a name and kwargs"
        ),
        "router_replay.enabled requires megatron_cfg.enabled": (
            "needs {section}.megatron_cfg.enabled=true -> router_replay.enabled=false"
        ),
        "freeze excludes dtensor_cfg.lora_cfg.enabled": (
            "adapters leave the weights of all parts as they are; {section}.dtensor_cfg.lora_cfg.target_modules or "
            "exclude_modules choose the layers to adapt -> freeze=[]"
        ),
        "scheduler excludes megatron_cfg.enabled": (
            "is for training with PyTorch, and {section}.megatron_cfg.scheduler with Megatron -> scheduler=[]"
        ),
        "padding_free=false excludes megatron_cfg.enabled": (
            "Megatron always trains on sequences laid end to end -> padding_free=null"
        ),
        # data types and numbers that both `policy` and `megatron_cfg` state
        "master_precision != float32 excludes megatron_cfg.enabled": (
            "with Megatron, {section}.megatron_cfg.optimizer.use_precision_aware_optimizer and its dtypes decide how "
            "optimizer state is kept -> master_precision=float32"
        ),
        "megatron_cfg.optimizer.bf16=true and megatron_cfg.enabled requires precision=bfloat16": (
            "does not fit {section}.precision={precision} -> megatron_cfg.optimizer.bf16=null"
        ),
        "megatron_cfg.optimizer.bf16=false and megatron_cfg.enabled excludes precision=bfloat16": (
            "does not fit {section}.precision={precision} -> megatron_cfg.optimizer.bf16=null"
        ),
        "megatron_cfg.pipeline_dtype and megatron_cfg.enabled requires megatron_cfg.pipeline_dtype={precision}": (
            "must be {section}.precision={precision} -> megatron_cfg.pipeline_dtype=null"
        ),
        "megatron_cfg.optimizer.clip_grad and megatron_cfg.enabled requires "
        "megatron_cfg.optimizer.clip_grad={max_grad_norm}": (
            "is not {section}.max_grad_norm={max_grad_norm}, at which training clips -> "
            "max_grad_norm={megatron_cfg.optimizer.clip_grad} | megatron_cfg.optimizer.clip_grad=null"
        ),
        "megatron_cfg.linear_ce_fusion_chunk_size and logprob_chunk_size and megatron_cfg.enabled requires "
        "megatron_cfg.linear_ce_fusion_chunk_size={logprob_chunk_size}": (
            "{megatron_cfg.linear_ce_fusion_chunk_size} is not {section}.logprob_chunk_size={logprob_chunk_size}, "
            "which it repeats -> megatron_cfg.linear_ce_fusion_chunk_size=null"
        ),
        "megatron_cfg.fp8_cfg.enabled and megatron_cfg.enabled requires precision=bfloat16": (
            "FP8 is for weights in bfloat16, and {section}.precision is {precision} -> precision=bfloat16"
        ),
    }

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

    @property
    def shares_prompts(self) -> bool:
        """Whether a micro-batch computes a prompt of several sequences once, if the model can: `can_share_prompts`."""
        is_whole = self.dtensor_cfg.context_parallel_size == 1
        return is_whole and self.padding_free is not False and not self.megatron_cfg.enabled

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from self._check_scheduler()
        megatron = self.megatron_cfg
        if not megatron.enabled:
            return
        chunks, longest = sequence_chunks(self), self.max_total_sequence_length
        if left_over := longest % chunks:  # sequences shorter than the longest are padded
            yield (
                "megatron_cfg.context_parallel_size",
                f"{megatron.context_parallel_size} ranks hold {chunks} equal chunks of every sequence, and "
                f"{{section}}.max_total_sequence_length={longest} is no multiple of that; "
                + remedy(
                    f"max_total_sequence_length={longest - left_over}",
                    f"max_total_sequence_length={longest - left_over + chunks}",
                    section="{section}",
                ),
            )
        if self.optimizer is not None and self.optimizer != OptimizerConfig():
            way = " and ".join(["optimizer=null", *_as_megatron(self.optimizer.kwargs)])
            text = "is for training with PyTorch, and {section}.megatron_cfg.optimizer with Megatron"
            yield "optimizer", f"{text}; {remedy(way, section='{section}')}"

    def _check_scheduler(self) -> Iterator[tuple[str, str]]:
        num_schedulers = sum(item.name is not None for item in self.scheduler)
        milestones = [item.milestones for item in self.scheduler if item.milestones is not None]
        if num_schedulers > 1 and [len(m) for m in milestones] != [num_schedulers - 1]:
            yield (
                "scheduler",
                f"{num_schedulers} schedulers need one item {{milestones: [...]}} with {num_schedulers - 1} "
                f"scheduler step(s) at which the next one takes over",
            )
        if num_schedulers == 0 and milestones:
            yield "scheduler", "milestones need schedulers"
        elif num_schedulers == 1 and any(milestones):  # NeMo RL writes a sequence of one with `milestones: []`
            yield "scheduler", "milestones need at least two schedulers"
        for values in milestones:
            if any(later <= earlier for earlier, later in pairwise(values)):
                yield "scheduler", f"milestones must increase (got {values})"


def _as_megatron(kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments of a PyTorch optimizer as keys of Megatron's, for a remedy."""
    names = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps", "momentum": "sgd_momentum"}
    values = {new: kwargs[old] for old, new in names.items() if old in kwargs}
    match kwargs.get("betas"):
        case (beta1, beta2):
            values |= {"adam_beta1": beta1, "adam_beta2": beta2}
    return [f"megatron_cfg.optimizer.{name}={value}" for name, value in values.items()]


class SecondModelConfig(PolicyConfig):
    """A critic or a teacher, which reads the samples of the policy: keys as in `policy`."""

    train_micro_batch_size: Annotated[int, Derived("${policy.train_micro_batch_size}"), Field(ge=1)] = 4
    """Samples of one forward and backward pass of a rank; for a teacher only the default of `logprob_batch_size`."""

    max_total_sequence_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)] = 512
    """Tokens of the longest sample: prompt, completions and environment turns."""

    precision: Annotated[Literal["float32", "bfloat16"], Derived("${policy.precision}")] = "bfloat16"
    """Data type of the forward and backward pass."""


class DraftConfig(StrictModel):
    """A draft (EAGLE-3, or the policy's prediction head) that trains beside the policy, for speculative decoding."""

    _path: str = "policy.draft"

    enabled: bool = False
    """Train a draft on the hidden states of the policy's training pass, and send it to the engines with every sync."""

    model_name: str | None = Field(default=None, min_length=1)
    """Folder of the draft to begin with, as a checkpoint has it; null: a new one."""

    num_layers: Literal[1] | None = None
    """Blocks of the draft: 1."""

    aux_layer_indices: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Numbers of blocks of the policy after which the draft reads its hidden states; 0: its embeddings. null: 2, half
    of all, and all but 3; with fewer than 8 blocks 0, half and all."""

    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of the draft (AdamW, constant)."""

    ignored_when_off: ClassVar = True

    rules: ClassVar = {
        "aux_layer_indices excludes model_name": (
            "the draft of {section}.model_name decides it -> aux_layer_indices=null"
        ),
    }


_NO_DRAFT = "draft.enabled=false and generation.{generation.speculation_path}=null"


class RolloutPolicyConfig(PolicyConfig):
    """Policy: model, tokenizer, batch sizes, optimizer, sharding, generation."""

    generation: GenerationConfig
    """Generation: sampling parameters and the engine."""

    draft: DraftConfig = DraftConfig()
    """A draft model that trains beside the policy, for speculative decoding."""

    rules: ClassVar = {
        "draft.enabled excludes megatron_cfg.enabled": f"a draft trains with PyTorch only -> {_NO_DRAFT}",
        **{
            f"draft.enabled excludes dtensor_cfg.{key} > 1": f"needs whole models -> dtensor_cfg.{key}=1 | {_NO_DRAFT}"
            for key in [f"{axis}_parallel_size" for axis in ("tensor", "context", "pipeline", "expert")]
        },
        "draft.enabled excludes dtensor_cfg.torch_compile": (
            f"compiled blocks do not show a draft their states -> dtensor_cfg.torch_compile=false | {_NO_DRAFT}"
        ),
        "draft.enabled requires generation.takes_drafts": (
            "generation.backend={generation.backend} takes no draft -> draft.enabled=false"
        ),
        **policy_rules("generation"),
        "reward_model_cfg.enabled": (
            "a policy that generates needs the head of a language model -> reward_model_cfg.enabled=false"
        ),
        "generation.{generation.length_path}: generation.engine.longest_sequence > {max_total_sequence_length}": (
            "{generation.engine.longest_sequence} is more than {section}.max_total_sequence_length="
            "{max_total_sequence_length}: training could not take such samples -> "
            "generation.{generation.length_path}={max_total_sequence_length}"
        ),
        "generation.max_new_tokens > {max_total_sequence_length}": (
            "{generation.max_new_tokens} is more than {section}.max_total_sequence_length={max_total_sequence_length}, "
            "which counts the prompt too -> generation.max_new_tokens={max_total_sequence_length}"
        ),
    }

    @property
    def shares_prompts(self) -> bool:
        return super().shares_prompts and not self.draft.enabled  # a draft reads the next token beside each

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        for key, message in self.generation.draft_problems(self.draft.enabled, self.draft.model_name):
            yield f"generation.{key}", message


# -- batch sizes


def token_budgets(policy: PolicyConfig, sequences_per_sample: int = 1) -> tuple[int, int]:
    """The most tokens of a micro-batch in training and for logprobs, over all context-parallel ranks."""
    section = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
    longest = round_up(policy.max_total_sequence_length, sequence_chunks(policy)) * sequences_per_sample
    train, logprobs = (section.train_mb_tokens, section.logprob_mb_tokens) if section.enabled else (None, None)
    return (
        longest * policy.train_micro_batch_size if train is None else train,
        longest * policy.logprob_batch_size if logprobs is None else logprobs,
    )


def sequence_chunks(policy: PolicyConfig) -> int:
    """Equal chunks into which context parallelism cuts every sequence."""
    size = policy.backend_cfg.context_parallel_size
    # A rank takes chunk r and chunk 2 * size - 1 - r: causal attention gives late tokens more work than early ones.
    return 2 * size if size > 1 else 1


def check_batching(
    policy: PolicyConfig, num_ranks: int | None, *, fix: str, sequences_per_sample: int = 1
) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of batch sizes that no plan of a step can use (`algorithms/plan/batch.py`).

    `fix` is the remedy if `num_ranks` data-parallel ranks cannot share a global batch; None: the layout does not fit.
    """
    if num_ranks is None:
        return
    global_batch, micro_batch = policy.train_global_batch_size, policy.train_micro_batch_size
    multiple = policy.backend_cfg.micro_batch_multiple
    per_rank, left_over = divmod(global_batch, num_ranks)
    if left_over:
        key = policy.key("train_global_batch_size")
        yield key, f"{global_batch} cannot be shared by {num_ranks} training ranks; {fix}"
        return
    if per_rank % multiple:
        yield (
            policy.key("train_global_batch_size"),
            f"the {per_rank} samples of each of {num_ranks} training rank(s) cannot be shared by micro-batches whose "
            f"number is a multiple of {multiple}, which pipeline parallelism needs; use a multiple of "
            f"{num_ranks * multiple}",
        )
    if per_rank % micro_batch and not (policy.sequence_packing.enabled or policy.dynamic_batching.enabled):
        yield (
            policy.key("train_micro_batch_size"),
            f"{micro_batch} does not divide the {per_rank} samples of each of {num_ranks} training rank(s) "
            f"(train_global_batch_size={global_batch}); these would: {divisors(per_rank, near=micro_batch)}",
        )
    yield from check_budgets(policy, sequences_per_sample=sequences_per_sample)


def check_budgets(
    policy: PolicyConfig, *, sequences_per_sample: int = 1, is_trained: bool = True
) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of token budgets that are too small for the longest sample."""
    if not (policy.sequence_packing.enabled or policy.dynamic_batching.enabled):
        return
    section, needed = "dynamic_batching", policy.max_total_sequence_length
    if policy.sequence_packing.enabled:
        section, needed = "sequence_packing", round_up(needed, sequence_chunks(policy))
    needed *= sequences_per_sample
    what = "the longest sequences" if sequences_per_sample == 1 else "pairs of the longest sequences"
    longest = f"{policy.key('max_total_sequence_length')}={policy.max_total_sequence_length}"
    train_tokens, logprob_tokens = token_budgets(policy, sequences_per_sample)
    budgets = {"train_mb_tokens": train_tokens} if is_trained else {}
    for name, tokens in (budgets | {"logprob_mb_tokens": logprob_tokens}).items():
        if tokens < needed:
            yield (
                policy.key(f"{section}.{name}"),
                f"{tokens} is too little for {longest}: {what} would fit into no micro-batch; shorten them, or "
                + remedy(f"{policy.key(f'{section}.{name}')}={needed}"),
            )
