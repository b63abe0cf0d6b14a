"""Configuration of training with Megatron Core: `policy.megatron_cfg`. Free of torch and Megatron.

`checks.py` compares it with the model, the installed packages and the GPUs when a run starts.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.config.rules import StrictModel, holds, remedy, value_of, written

Recomputed = Literal["core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj", "shared_experts"]
MoeBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]


class MegatronOptimizerConfig(StrictModel):
    """The optimizer and its learning rate."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = "adam"
    """Adam with decoupled weight decay, SGD with momentum, or Muon for matrices and Adam for the rest."""

    lr: float = Field(default=5.0e-6, ge=0)
    """Highest learning rate."""

    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the decay; null: lr."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices (SGD adds it to the gradient); vectors (norms, biases) have none."""

    bf16: bool | None = None
    """Train in bfloat16; null: as `policy.precision` says."""

    fp16: bool = False
    """Train in float16, which is not supported."""

    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the main parameters that the optimizer updates: always float32, of which bfloat16 weights are
    rounded copies."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""

    adam_eps: float = Field(default=1.0e-8, gt=0)
    """Added to the root of the mean of squared gradients."""

    sgd_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""

    muon_nesterov: bool = False
    """Nesterov's momentum in Muon: the update looks one gradient ahead."""

    muon_num_ns_steps: int = Field(default=5, ge=1)
    """Newton-Schulz steps of Muon."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """How Muon scales an orthogonalised update by the shape of its matrix."""

    muon_extra_scale_factor: float = Field(default=1.0, gt=0)
    """Further factor of that scale: with 0.2 and `spectral`, Muon's updates are as large as Adam's."""

    use_distributed_optimizer: bool | None = None
    """Shard the optimizer state over data-parallel ranks; null: with adam, the one that can."""

    use_precision_aware_optimizer: bool = False
    """Keep main parameters and moments in the dtypes below (Transformer Engine's Adam)."""

    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "uint8"] = "float32"
    """Data type of Adam's first moments, with the precision-aware optimizer."""

    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "uint8"] = "float32"
    """Data type of Adam's second moments, with the precision-aware optimizer."""

    clip_grad: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient over all ranks; null: `policy.max_grad_norm`."""

    optimizer_cpu_offload: bool = False
    """Keep and update a part of the optimizer state on the host."""

    optimizer_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Part of the parameters whose optimizer state is on the host."""

    checked_by_parent: ClassVar = True

    rules: ClassVar = {
        "fp16": "float16 is not supported -> fp16=false",
        "params_dtype != float32": "steps of a small learning rate are lost in bfloat16 -> params_dtype=float32",
        "min_lr > {lr}": "{min_lr} is above lr={lr} -> min_lr={lr}",
        "use_distributed_optimizer requires optimizer=adam": (
            "SGD has next to no state to shard, and Muon updates whole matrices ({section}.optimizer={optimizer}) -> "
            "use_distributed_optimizer=null | use_distributed_optimizer=false"
        ),
        "use_precision_aware_optimizer excludes use_distributed_optimizer=false": (
            "is part of use_distributed_optimizer -> use_distributed_optimizer=true | "
            "use_precision_aware_optimizer=false"
        ),
        "use_precision_aware_optimizer requires optimizer=adam": (
            "{optimizer} does not have it -> use_precision_aware_optimizer=false"
        ),
        "use_precision_aware_optimizer: optimizer_cpu_offload requires use_precision_aware_optimizer": (
            "main parameters stay on the GPU without it, even with optimizer_cpu_offload=true -> "
            "use_precision_aware_optimizer=true | optimizer_cpu_offload=false"
        ),
        "optimizer_cpu_offload requires exp_avg_dtype=float32 and exp_avg_sq_dtype=float32": (
            "moments on the host are float32 -> exp_avg_dtype=float32 and exp_avg_sq_dtype=float32"
        ),
        "optimizer_offload_fraction: optimizer_cpu_offload requires optimizer_offload_fraction > 0": (
            "0 offloads nothing -> optimizer_offload_fraction=1.0 | optimizer_cpu_offload=false"
        ),
        "use_precision_aware_optimizer=false requires exp_avg_dtype=float32 and exp_avg_sq_dtype=float32": (
            "only this optimizer keeps moments in other dtypes -> use_precision_aware_optimizer=true | "
            "exp_avg_dtype=float32 and exp_avg_sq_dtype=float32"
        ),
    }

    @property
    def shards_optimizer(self) -> bool:
        """Whether data-parallel ranks share the optimizer state."""
        chosen = self.use_distributed_optimizer
        return self.optimizer == "adam" if chosen is None else chosen


class MegatronSchedulerConfig(StrictModel):
    """How learning rate and weight decay change, counted in optimizer steps (or train calls)."""

    start_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the first step; null: the optimizer's."""

    end_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the last step; null: the optimizer's."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How it moves from one to the other over `lr_decay_iters`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How the learning rate falls from lr to min_lr. WSD (warm-up, stable, decay): only in the last steps."""

    lr_decay_iters: int = Field(default=1000, ge=1)
    """Steps after which it has reached min_lr, warm-up included."""

    lr_warmup_iters: int = Field(default=0, ge=0)
    """Steps in which it rises to lr."""

    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at the beginning of the warm-up."""

    lr_wsd_decay_iters: int | None = Field(default=None, ge=1)
    """Steps before `lr_decay_iters` in which it falls, with WSD."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How it falls in these steps."""

    checked_by_parent: ClassVar = True

    rules: ClassVar = {
        "lr_warmup_iters >= {lr_decay_iters}": "must be below lr_decay_iters={lr_decay_iters}; lower it",
        "lr_wsd_decay_iters: lr_decay_style=WSD requires lr_wsd_decay_iters <= {steps_after_warmup}": (
            "WSD needs the number of steps at the end in which the learning rate falls, at most {steps_after_warmup} "
            "-> lr_wsd_decay_iters={steps_after_warmup}"
        ),
        "weight_decay_incr_style=constant requires start_weight_decay={end_weight_decay}": (
            "constant needs equal start_weight_decay and end_weight_decay -> start_weight_decay={end_weight_decay} | "
            "weight_decay_incr_style=linear"
        ),
    }

    @property
    def steps_after_warmup(self) -> int:
        return self.lr_decay_iters - self.lr_warmup_iters


class MegatronDDPConfig(StrictModel):
    """Reduction of gradients over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True
    """Add up and reduce gradients in float32."""

    overlap_grad_reduce: bool = False
    """Reduce gradients of one bucket while the backward pass computes the next."""

    overlap_param_gather: bool = False
    """Gather updated parameters while the forward pass needs the first of them."""

    bucket_size: int | None = Field(default=None, ge=1)
    """Parameters of one bucket; null: Megatron's choice."""

    checked_by_parent: ClassVar = True

    rules: ClassVar = {"overlap_param_gather requires overlap_grad_reduce": "comes with overlapped reduction"}


class MegatronPeftConfig(StrictModel):
    """Low-rank adapters on Megatron's linear layers (Hu et al. 2021, arXiv 2106.09685)."""

    _path: str = "policy.megatron_cfg.peft"

    enabled: bool = False
    """Train adapters instead of the model."""

    target_modules: list[str] = Field(default_factory=list)
    """Names of Megatron's linear layers (`linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`) or patterns of the
    full name; empty: all four."""

    exclude_modules: list[str] = Field(default_factory=list)
    """Names or patterns of layers that get no adapter."""

    dim: int = Field(default=8, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / dim."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' input while training."""

    lora_A_init_method: Literal["xavier", "uniform", "gaussian"] = "xavier"
    """How the first matrix is drawn; the second begins at zero."""


class Fp8Config(StrictModel):
    """Training in 8-bit floating point with Transformer Engine."""

    enabled: bool = False
    """Multiply in FP8."""

    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Format: e4m3 everywhere, or e5m2 for gradients (hybrid)."""

    fp8_recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8"] = "blockwise"
    """One scale per block of 128 (Hopper) or per tensor; `delayed` takes the scales of past steps."""

    fp8_param: bool = False
    """Keep the parameters of linear layers in FP8 too, which is not supported yet."""


class MegatronConfig(StrictModel):
    """Training with Megatron Core: tensor, pipeline, context, sequence and expert parallelism."""

    _path: str = "policy.megatron_cfg"

    enabled: bool = False
    """Train with Megatron Core, in place of `dtensor_cfg`."""

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of torch (`local`) or of Transformer Engine. `auto`: Transformer Engine's, if it is installed, has the
    layers of the model, and there are GPUs."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every layer's matrices."""

    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the layers."""

    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    """Pieces of the model that each pipeline rank holds (interleaved schedule); null: one."""

    num_layers_in_first_pipeline_stage: int | None = Field(default=None, ge=1)
    """Layers of the first stage; null: as many as of the others."""

    num_layers_in_last_pipeline_stage: int | None = Field(default=None, ge=1)
    """Layers of the last stage; null: as many as of the others."""

    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every sequence."""

    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the experts of every mixture-of-experts layer."""

    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every expert's matrices."""

    sequence_parallel: bool = False
    """Between the matrices, split activations over the tensor-parallel ranks by position."""

    pipeline_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of what stages hand over; null: `policy.precision`."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: whole layers, unless `recompute_granularity` says less."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """`full`: whole layers; `selective`: `recompute_modules` of each layer. null: full."""

    recompute_modules: list[Recomputed] = Field(default_factory=lambda: ["core_attn"])
    """Modules that selective recomputation computes again."""

    empty_unused_memory_level: Literal[0, 1, 2] = 1
    """Return unused device memory: 0 never, 1 after a training step, 2 after logprob passes too."""

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Attention of Transformer Engine."""

    apply_rope_fusion: bool = False
    """Rotary embeddings in one kernel (Transformer Engine)."""

    bias_activation_fusion: bool = False
    """Bias and activation in one kernel (CUDA)."""

    gradient_accumulation_fusion: bool = False
    """Weight gradients added in place by the kernel that computes them (APEX or Transformer Engine)."""

    linear_ce_fusion_chunk_size: int | None = Field(default=None, ge=1)
    """Positions whose logits are in memory at a time; null: `policy.logprob_chunk_size`."""

    freeze_moe_router: bool = True
    """Do not train the weights of the routers. Their biases still move if `moe_router_bias_update_rate` is above 0."""

    moe_router_dtype: Literal["float32", "fp32", "fp64"] | None = "fp64"
    """Data type of the routers; null: the model's."""

    moe_router_load_balancing_type: MoeBalancing = "none"
    """How routers are kept from favouring experts."""

    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the balancing loss, for the `aux_loss` types."""

    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    """By how much the bias that chooses experts moves after each step towards those with fewer tokens (DeepSeek-V3)."""

    moe_permute_fusion: bool = False
    """Sort tokens by expert in one kernel (Transformer Engine)."""

    moe_grouped_gemm: bool = False
    """Multiply all experts of a rank in one kernel (Transformer Engine)."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens travel to their experts."""

    moe_shared_expert_overlap: bool = False
    """Compute shared experts while tokens travel (CUDA)."""

    moe_per_layer_logging: bool = False
    """Log the load of the experts of every layer."""

    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    """The optimizer."""

    scheduler: MegatronSchedulerConfig = MegatronSchedulerConfig()
    """How learning rate and weight decay change."""

    distributed_data_parallel_config: MegatronDDPConfig = MegatronDDPConfig()
    """Reduction of gradients."""

    peft: MegatronPeftConfig = MegatronPeftConfig()
    """Low-rank adapters."""

    fp8_cfg: Fp8Config = Fp8Config()
    """Training in FP8."""

    env_vars: dict[str, str] | None = None
    """Environment variables of the policy workers."""

    ignored_when_off: ClassVar = True

    rules: ClassVar = {
        "sequence_parallel requires tensor_model_parallel_size > 1": (
            "splits over tensor-parallel ranks -> sequence_parallel=false"
        ),
        "virtual_pipeline_model_parallel_size: stages_per_rank > 1 requires pipeline_model_parallel_size > 1": (
            "needs pipeline_model_parallel_size above 1 -> virtual_pipeline_model_parallel_size=null"
        ),
        "num_layers_in_first_pipeline_stage requires pipeline_model_parallel_size > 1": (
            "there is one stage -> num_layers_in_first_pipeline_stage=null"
        ),
        "num_layers_in_last_pipeline_stage requires pipeline_model_parallel_size > 1": (
            "there is one stage -> num_layers_in_last_pipeline_stage=null"
        ),
        "distributed_data_parallel_config.overlap_param_gather requires optimizer.shards_optimizer": (
            "gathers the shares that the distributed optimizer updates -> "
            "distributed_data_parallel_config.overlap_param_gather=false"
        ),
        # learning rate
        "optimizer.min_lr: scheduler.lr_decay_style != constant requires optimizer.min_lr < {optimizer.lr}": (
            "scheduler.lr_decay_style={scheduler.lr_decay_style} falls from lr={optimizer.lr} to it -> "
            "optimizer.min_lr=0"
        ),
        "scheduler.lr_warmup_init > {optimizer.lr}": (
            "{scheduler.lr_warmup_init} is above optimizer.lr={optimizer.lr}; lower it"
        ),
        # layers
        "activation_checkpointing: recompute_granularity requires activation_checkpointing": (
            "recompute_granularity is for recomputation -> activation_checkpointing=true | recompute_granularity=null"
        ),
        "recompute_modules: recompute_granularity=selective requires recompute_modules": (
            "names nothing to compute again -> recompute_modules=[core_attn] | recompute_granularity=full"
        ),
        "recompute_modules has moe_act requires moe_grouped_gemm": (
            "moe_act is a part of grouped experts; leave it out"
        ),
        "attention_backend=local requires transformer_impl=local": (
            "local is for transformer_impl=local -> transformer_impl=local | attention_backend=auto"
        ),
        # experts
        "moe_token_dispatcher_type=allgather and expert_model_parallel_size > 1": (
            "allgather needs micro-batches of one width, and those of ranks that share experts "
            "(expert_model_parallel_size={expert_model_parallel_size}) differ -> moe_token_dispatcher_type=alltoall"
        ),
        "moe_token_dispatcher_type=allgather and expert_tensor_parallel_size > {tensor_model_parallel_size}": (
            "allgather needs micro-batches of one width, and those of ranks that share an expert "
            "(expert_tensor_parallel_size={expert_tensor_parallel_size}, more than tensor_model_parallel_size) "
            "differ -> moe_token_dispatcher_type=alltoall"
        ),
        "moe_token_dispatcher_type=allgather and fp8_cfg.enabled": (
            "allgather cannot pad the tokens of an expert, which products in FP8 need -> "
            "moe_token_dispatcher_type=alltoall"
        ),
        "moe_token_dispatcher_type: moe_shared_expert_overlap requires moe_token_dispatcher_type=alltoall": (
            "moe_shared_expert_overlap=true needs alltoall -> moe_token_dispatcher_type=alltoall"
        ),
        "moe_router_load_balancing_type: moe_aux_loss_coeff > 0 excludes "
        "moe_router_load_balancing_type=[none, sinkhorn]": (
            "moe_aux_loss_coeff is for aux_loss types -> moe_router_load_balancing_type=aux_loss | moe_aux_loss_coeff=0"
        ),
        # FP8
        "fp8_cfg.fp8_param and fp8_cfg.enabled": (
            "not supported yet: weights that are FP8 themselves (false still multiplies in FP8) -> "
            "fp8_cfg.fp8_param=false"
        ),
        "fp8_cfg.fp8_recipe=delayed and fp8_cfg.enabled excludes recomputes_quantized": (
            "delayed scales do not go with recomputing layernorm and moe_act -> fp8_cfg.fp8_recipe=tensorwise | "
            "fp8_cfg.fp8_recipe=blockwise"
        ),
    }

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def stages_per_rank(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def recomputes_quantized(self) -> bool:
        """Whether selective recomputation repeats products whose FP8 scales come from past steps."""
        is_selective = self.activation_checkpointing and self.recompute_granularity == "selective"
        return is_selective and not {"layernorm", "moe_act"}.isdisjoint(self.recompute_modules)

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of an optimizer step is a multiple of this."""
        return self.pipeline_model_parallel_size if self.stages_per_rank > 1 else 1

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        ends = (self.scheduler.start_weight_decay, self.scheduler.end_weight_decay)
        start, end = (self.optimizer.weight_decay if value is None else value for value in ends)
        if start > end:
            yield "scheduler.end_weight_decay", f"{end} is below {start}, where it begins; it can only grow"


NEEDS_TRANSFORMER_ENGINE = {
    "transformer_impl=transformer_engine": "local",
    "fp8_cfg.enabled": "false",
    "optimizer.use_precision_aware_optimizer": "false",
    "attention_backend=[flash, fused, unfused]": "auto",
    "apply_rope_fusion": "false",
    "gradient_accumulation_fusion": "false",
    "moe_grouped_gemm": "false",
    "moe_permute_fusion": "false",
}
"""Settings that need Transformer Engine, and the values that do without."""

NEEDS_GPUS = NEEDS_TRANSFORMER_ENGINE | {
    "optimizer.optimizer_cpu_offload": "false",
    "bias_activation_fusion": "false",
    "moe_shared_expert_overlap": "false",
}
"""Settings that need GPUs, and the values that do without."""


def switched_on(settings: MegatronConfig, conditions: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(key, value, value that does without) of every condition that holds."""
    for condition, neutral in conditions.items():
        if holds(condition, settings):
            key = condition.partition("=")[0]
            yield key, written(value_of(settings, key)), neutral


def device_problems(settings: MegatronConfig, *, use_gpus: bool) -> Iterator[tuple[str, str]]:
    """(dotted key, what would work) for settings that the kind of devices rules out."""
    reason, others = "runs on GPUs only, and cluster.gpus_per_node is 0", []
    if use_gpus:
        reason = "needs Transformer Engine, and transformer_impl is local"
        others = [f"{settings.key('transformer_impl')}=transformer_engine"]
    for key, value, neutral in switched_on(settings, NEEDS_TRANSFORMER_ENGINE if use_gpus else NEEDS_GPUS):
        if not use_gpus or settings.transformer_impl == "local":
            yield settings.key(key), f"{value} {reason}; {remedy(f'{settings.key(key)}={neutral}', *others)}"
