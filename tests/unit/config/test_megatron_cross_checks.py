"""Settings of Megatron that do not fit together or to the devices: each is refused with what would work."""

from pathlib import Path

import pytest

from tests.tables import cases, said_once
from tests.unit.config.run_configs import build, problems_of
from tests.unit.generation.configs import generation_config
from tests.unit.policy.models import save_model

ON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.optimizer=null")
CPU = "cluster.gpus_per_node=0"
REPLAY = "policy.router_replay.enabled=true"


def test_the_minimal_run_with_megatron_is_fine() -> None:
    assert build(*ON).policy.backend_key == "megatron_cfg"
    assert build(*ON, CPU).policy.backend_key == "megatron_cfg"


REFUSED = """
policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}} -> policy.optimizer ... megatron_cfg.optimizer
policy.megatron_cfg.tensor_model_parallel_size=3 & cluster.gpus_per_node=8
    -> policy.megatron_cfg.tensor_model_parallel_size
       ... 3 does not divide the 8 training ranks; these would: 1, 2, 4, 8
policy.megatron_cfg.expert_model_parallel_size=8 & policy.megatron_cfg.pipeline_model_parallel_size=2
    & cluster.gpus_per_node=8
    -> policy.megatron_cfg.expert_model_parallel_size
       ... expert_model_parallel_size=8 does not divide the 4 ranks of a pipeline stage (data x context x tensor
       ... parallel); these would: 1, 2, 4
policy.megatron_cfg.context_parallel_size=2 & policy.max_total_sequence_length=510 & cluster.gpus_per_node=2
    -> policy.megatron_cfg.context_parallel_size
       ... 2 ranks hold 4 equal chunks of every sequence, and policy.max_total_sequence_length=510 is no multiple
       ... of that; 508 and 512 are
policy.megatron_cfg.pipeline_model_parallel_size=4 & policy.megatron_cfg.virtual_pipeline_model_parallel_size=2
    & policy.train_micro_batch_size=1 & policy.train_global_batch_size=2 & cluster.gpus_per_node=4
    -> policy.train_global_batch_size ... is a multiple of 4
cluster.gpus_per_node=0 & policy.megatron_cfg.attention_backend=flash
    -> policy.megatron_cfg.attention_backend ... set it to auto
policy.megatron_cfg.recompute_modules=[attention] -> policy.megatron_cfg.recompute_modules.0 ... 'core_attn'
policy.megatron_cfg.moe_shared_expert_overlap=true & policy.megatron_cfg.moe_token_dispatcher_type=allgather
    -> policy.megatron_cfg.moe_token_dispatcher_type ... needs alltoall
IN_FP8 & policy.precision=float32 -> policy.megatron_cfg.fp8_cfg.enabled ... set that to bfloat16
IN_FP8 & policy.megatron_cfg.fp8_cfg.fp8_param=true
    -> policy.megatron_cfg.fp8_cfg.fp8_param ... still multiplies in FP8
IN_FP8 & policy.megatron_cfg.moe_token_dispatcher_type=allgather
    -> policy.megatron_cfg.moe_token_dispatcher_type ... set it to alltoall
IN_FP8 & policy.megatron_cfg.fp8_cfg.fp8_recipe=delayed & policy.megatron_cfg.activation_checkpointing=true
    & policy.megatron_cfg.recompute_granularity=selective & policy.megatron_cfg.recompute_modules=[layernorm]
    -> policy.megatron_cfg.fp8_cfg.fp8_recipe ... set tensorwise or blockwise
IN_FP8 & policy.generation.backend=megatron
    -> policy.megatron_cfg.fp8_cfg.enabled
       ... not supported yet: products in FP8 where the policy's own workers generate
checkpointing.model_save_format=safetensors -> checkpointing.model_save_format ... set it to torch_save
policy.generation.backend=hf
    -> policy.generation.backend ... set policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false, or
policy.generation.backend=megatron & policy.generation.vllm_cfg.tensor_parallel_size=2
    -> policy.generation.vllm_cfg.tensor_parallel_size ... cut as policy.megatron_cfg says
policy.generation.backend=megatron & policy.megatron_cfg.pipeline_model_parallel_size=2 & cluster.gpus_per_node=2
    -> policy.megatron_cfg.pipeline_model_parallel_size
       ... not supported yet: pipeline stages where the policy's own workers generate
policy.router_replay.enabled=true & policy.generation.backend=megatron
    -> policy.router_replay.enabled
       ... does not say which experts a token went through; set it to false, or policy.generation.backend=vllm
policy.router_replay.enabled=true & policy.generation.vllm_cfg.enable_prefix_caching=false
    -> policy.generation.vllm_cfg.enable_prefix_caching ... only with a prefix cache; set it to true
policy.router_replay.enabled=true & policy.generation.vllm_cfg.pipeline_parallel_size=2 & cluster.gpus_per_node=2
    -> policy.generation.vllm_cfg.pipeline_parallel_size ... engines of one stage alone return the experts of tokens
policy.generation.backend=megatron & +policy.generation.mcore_generation_config.num_speculative_tokens=2
    -> policy.generation.mcore_generation_config.num_speculative_tokens ... not supported yet
policy.logprob_chunk_size=1024 & policy.megatron_cfg.linear_ce_fusion_chunk_size=512
    -> linear_ce_fusion_chunk_size ... is not policy.logprob_chunk_size=1024
"""


@pytest.mark.parametrize(
    ("overrides", "said"), cases(REFUSED.replace("IN_FP8", "policy.megatron_cfg.fp8_cfg.enabled=true"))
)
def test_cross_checks(overrides: tuple[str, ...], said: str) -> None:
    said_once(said, problems_of(*ON, *overrides))


def test_routing_replay_is_fine_with_vllm_and_has_metrics() -> None:
    names = {"moe/replayed_fraction", "moe/replay_agreement"}
    assert not names & build(*ON).train_metrics
    assert names <= build(*ON, REPLAY).train_metrics
    build(*ON, REPLAY, CPU, "policy.generation.vllm_cfg.enable_prefix_caching=false")  # engines on CPUs have no cache


def test_megatron_generates_with_keys_of_nemo_rl_that_ask_for_nothing() -> None:
    keys = "{buffer_size_gb: 10, num_cuda_graphs: 4, max_tokens: 16384, enable_prefix_caching: false}"
    generation = "policy.generation"
    config = build(*ON, f"{generation}.backend=megatron", f"+{generation}.mcore_generation_config={keys}")
    assert config.policy.generation.mcore_generation_config.max_batch_size == 64


def test_the_values_of_another_optimizer_are_carried_over() -> None:
    kwargs = "policy.optimizer.kwargs={lr: 0.0003, weight_decay: 0.1, betas: [0.9, 0.95], eps: 0.5}"
    said = problems_of(*ON[:2], kwargs)
    for value in ("lr=0.0003", "weight_decay=0.1", "adam_beta1=0.9", "adam_beta2=0.95", "adam_eps=0.5"):
        assert f"policy.megatron_cfg.optimizer.{value}" in said


@pytest.mark.parametrize(("name", "shards"), [("adam", True), ("sgd", False), ("muon", False), ("dist_muon", False)])
def test_the_state_is_sharded_where_the_optimizer_can(name: str, shards: bool) -> None:
    chosen = f"policy.megatron_cfg.optimizer.optimizer={name}"
    assert build(*ON[:2], chosen).policy.megatron_cfg.optimizer.shards_optimizer == shards
    if not shards:
        said = problems_of(*ON[:2], chosen, "policy.megatron_cfg.optimizer.use_distributed_optimizer=true")
        assert f"policy.megatron_cfg.optimizer.optimizer={name}); set it to null or false" in said


def test_sizes_that_do_not_divide_the_ranks_are_told_what_the_others_leave() -> None:
    sizes = [f"policy.megatron_cfg.{axis}_model_parallel_size={n}" for axis, n in (("tensor", 4), ("pipeline", 3))]
    said = problems_of(*ON[:2], "cluster.gpus_per_node=8", *sizes)
    assert "with tensor_model_parallel_size=4, pipeline_model_parallel_size may be 1, 2" in said
    assert said.startswith("command line: policy.megatron_cfg.pipeline_model_parallel_size=3: "), "tensor=4 can stay"


@pytest.mark.slow
def test_what_vllm_is_told_of_fp8(tmp_path: Path) -> None:
    from nemo_rl.models.generation.interfaces import EngineSettings
    from nemo_rl.models.generation.vllm.startup import engine_args

    save_model("deep", tmp_path)
    cfg = generation_config(64, vllm_cfg={"precision": "fp8", "kv_cache_dtype": "fp8_per_token_head"})
    settings = EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path), cfg=cfg, device="cuda", seed=0)
    told = engine_args(settings, {})
    assert (told.dtype, told.quantization, told.kv_cache_dtype) == ("bfloat16", "fp8_per_block", "fp8_per_token_head")
