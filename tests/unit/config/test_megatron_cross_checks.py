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
CFG.tensor_model_parallel_size=3 & GPUS=8 -> 3 does not divide the 8 training ranks; these would: 1, 2, 4, 8
CFG.expert_model_parallel_size=8 & CFG.pipeline_model_parallel_size=2 & GPUS=8
    -> expert_model_parallel_size=8 does not divide the 4 ranks of a pipeline stage ... these would: 1, 2, 4
CFG.context_parallel_size=2 & policy.max_total_sequence_length=510 & GPUS=2
    -> CFG.context_parallel_size ... 2 ranks hold 4 equal chunks of every sequence ... 508 and 512 are
CFG.pipeline_model_parallel_size=4 & CFG.virtual_pipeline_model_parallel_size=2 & policy.train_micro_batch_size=1
    & policy.train_global_batch_size=2 & GPUS=4 -> policy.train_global_batch_size ... is a multiple of 4
GPUS=0 & CFG.attention_backend=flash -> CFG.attention_backend ... set it to auto
CFG.recompute_modules=[attention] -> CFG.recompute_modules.0 ... 'core_attn'
CFG.moe_shared_expert_overlap=true & CFG.moe_token_dispatcher_type=allgather
    -> CFG.moe_token_dispatcher_type ... needs alltoall
IN_FP8 & policy.precision=float32 -> CFG.fp8_cfg.enabled ... set that to bfloat16
IN_FP8 & CFG.fp8_cfg.fp8_param=true -> CFG.fp8_cfg.fp8_param ... still multiplies in FP8
IN_FP8 & CFG.moe_token_dispatcher_type=allgather -> CFG.moe_token_dispatcher_type ... set it to alltoall
IN_FP8 & CFG.fp8_cfg.fp8_recipe=delayed & CFG.activation_checkpointing=true
    & CFG.recompute_granularity=selective & CFG.recompute_modules=[layernorm]
    -> CFG.fp8_cfg.fp8_recipe ... set tensorwise or blockwise
IN_FP8 & GENERATION.backend=megatron -> products in FP8 where the policy's own workers generate
checkpointing.model_save_format=safetensors -> checkpointing.model_save_format ... set it to torch_save
GENERATION.backend=hf -> set policy.dtensor_cfg.enabled=true and CFG.enabled=false, or
GENERATION.backend=megatron & GENERATION.vllm_cfg.tensor_parallel_size=2 -> cut as CFG says
GENERATION.backend=megatron & CFG.pipeline_model_parallel_size=2 & GPUS=2
    -> pipeline stages where the policy's own workers generate
policy.router_replay.enabled=true & GENERATION.backend=megatron
    -> does not say which experts a token went through; set it to false, or GENERATION.backend=vllm
policy.router_replay.enabled=true & GENERATION.vllm_cfg.enable_prefix_caching=false
    -> only with a prefix cache; set it to true
policy.router_replay.enabled=true & GENERATION.vllm_cfg.pipeline_parallel_size=2 & GPUS=2
    -> engines of one stage alone return the experts of tokens
GENERATION.backend=megatron & +GENERATION.mcore_generation_config.num_speculative_tokens=2 -> not supported yet
policy.logprob_chunk_size=1024 & CFG.linear_ce_fusion_chunk_size=512 -> is not policy.logprob_chunk_size=1024
GPUS=8 & CFG.tensor_model_parallel_size=4 & CFG.pipeline_model_parallel_size=3
    -> command line: CFG.pipeline_model_parallel_size=3:
       ... with tensor_model_parallel_size=4, pipeline_model_parallel_size may be 1, 2
"""
SHORT = {
    "IN_FP8": "CFG.fp8_cfg.enabled=true",
    "CFG": "policy.megatron_cfg",
    "GENERATION": "policy.generation",
    "GPUS": "cluster.gpus_per_node",
}


@pytest.mark.parametrize(("overrides", "said"), cases(REFUSED, SHORT))
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


@pytest.mark.slow
def test_what_vllm_is_told_of_fp8(tmp_path: Path) -> None:
    from nemo_rl.models.generation.interfaces import EngineSettings
    from nemo_rl.models.generation.vllm.startup import engine_args

    save_model("deep", tmp_path)
    cfg = generation_config(64, vllm_cfg={"precision": "fp8", "kv_cache_dtype": "fp8_per_token_head"})
    settings = EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path), cfg=cfg, device="cuda", seed=0)
    told = engine_args(settings, {})
    assert (told.dtype, told.quantization, told.kv_cache_dtype) == ("bfloat16", "fp8_per_block", "fp8_per_token_head")
