"""Values that do not fit together, or not to the devices: each is refused with what would work, and that is tried."""

from pathlib import Path

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from tests.tables import FINE, cases, said_once
from tests.unit.config.run_configs import MEGATRON, MINIMAL, build, misleading, problems_of, problems_of_run
from tests.unit.generation.configs import engine_settings, generation_config
from tests.unit.policy.models import save_model

CASES = """
policy.dynamic_batching={enabled: false, train_mb_tokens: 5} & loss_fn.force_on_policy_ratio=true & grpo.val_period=5
    & checkpointing.save_period=10 & checkpointing.checkpoint_must_save_by='00:03:45:00' & GENERATION.top_k=-1
    & checkpointing.metric_name=train:reward & +env.code={} & grpo.env_step_timeout_s=11 & +env.it={type: composit}
    & policy.scheduler=[{name: a.B},{name: a.C},{milestones: [5]}] -> fine
MICRO=3 & policy.sequence_packing.enabled=true & loss_fn.reference_policy_kl_penalty=0
    & grpo.skip_reference_policy_logprobs_calculation=true & grpo.batch_multiplier=1.5 & grpo.use_dynamic_sampling=true
    & checkpointing.metric_name=train:filtered_reward & +policy.draft.enabled=true & EAGLE3}
    & +env.python_tools={sandbox: {time_limit_s: 300}, tools: [calculator]} -> fine
ALONE & grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false} & EAGLE3, model: a}
    & checkpointing.metric_name=train:max_seq_mult_prob_error & grpo.seq_logprob_error_threshold=2
    & policy.sequence_packing={enabled: true, train_mb_tokens: 511, logprob_mb_tokens: 511}
    & policy.max_total_sequence_length=511 -> fine
checkpointing.metric_name=val:pass_at_4 & grpo.val_num_generations_per_prompt=6 & grpo.val_period=4
    & checkpointing.keep_top_k=null & +policy.draft={enabled: true, model_name: a} & EAGLE3, model: a} -> fine
BATCH=500 -> these would: 16, 32, 64, 128, 256, 512
BATCH=2 & GPUS=4 & MICRO=1 -> 2 cannot be shared by 4 training ranks; these would: 4, 8, 16
GPUS=3 & DTENSOR.pipeline_parallel_size=3 & DTENSOR.pipeline={schedule: interleaved_1f1b, stages_per_rank: 2}
    -> BATCH ... is a multiple of 3
GPUS=0 & cluster.cpu_workers_per_node=3 -> BATCH ... by 3 training ranks; make it and grpo.num_prompts_per_step (now
MICRO=3 & GPUS=2 & NODES=2
    -> 3 does not divide the 128 samples of each of 4 training rank(s) ... these would: 1, 2, 4, 8, 16, 32
ENGINE.tensor_parallel_size=3 & GPUS=8 -> 3 does not divide the 8 GPUs of the cluster; these would: 1, 2, 4, 8
ENGINE.tensor_parallel_size=4 & GPUS=2 & NODES=4 -> fine
ENGINE.tensor_parallel_size=4 & ENGINE.pipeline_parallel_size=2 & GPUS=2 & NODES=4 -> fine
ENGINE.tensor_parallel_size=6 & GPUS=4 & NODES=3 -> an engine of 6 does not fill nodes of 4 GPUs; make it a multiple
DTENSOR.tensor_parallel_size=3 & GPUS=8 -> 3 does not divide the 8 training ranks; these would: 1, 2, 4, 8
DTENSOR.tensor_parallel_size=4 & DTENSOR.context_parallel_size=2 & DTENSOR.pipeline_parallel_size=2 & GPUS=8
    -> tensor_parallel_size=4 x context_parallel_size=2 x pipeline_parallel_size=2 = 16 does not divide the 8
       ... with context_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size may be 1, 2
DTENSOR.dp_replicate_size=3 & GPUS=8 -> 3 does not divide the 8 data-parallel ranks; these would: 1, 2, 4, 8
DTENSOR.dp_replicate_size=2 & DTENSOR.expert_parallel_size=8 & GPUS=8
    -> 8 does not divide the 4 ranks that shard the parameters (data x context parallel); these would: 1, 2, 4
DTENSOR.activation_checkpointing=some -> must be 'full' or 'selective', or a valid boolean (got some)
DTENSOR.sequence_parallel=true -> DTENSOR.sequence_parallel ... splits over tensor-parallel ranks
policy.deterministic=true & GENERATION.top_p=0.9 & loss_fn.reference_policy_kl_penalty=0
    -> policy.deterministic ... set GENERATION.top_p=1, or policy.deterministic=false
policy.sequence_packing={enabled: true, train_mb_tokens: 500}
    -> policy.sequence_packing.train_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
policy.dynamic_batching={enabled: true, logprob_mb_tokens: 500}
    -> policy.dynamic_batching.logprob_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
GENERATION.max_new_tokens=1024 -> 1024 is more than policy.max_total_sequence_length=512
data.max_input_seq_length=600 -> set data.max_input_seq_length=512
loss_fn.force_on_policy_ratio=true & BATCH=128 -> loss_fn.force_on_policy_ratio ... set BATCH=512
loss_fn.ratio_clip_c=1.1 -> must be above 1 + ratio_clip_max = 1.2
grpo.skip_reference_policy_logprobs_calculation=true -> (it is 0.01); set loss_fn.reference_policy_kl_penalty=0, or
GENERATION.temperature=0 -> needs a temperature above 0
GENERATION.top_p=0.9 & GENERATION.top_k=50 -> fine
GENERATION.bad_words=[no] & ENGINE.logprobs_mode=raw_logprobs -> fine
ENGINE.logprobs_mode=raw_logprobs & GENERATION.temperature=0.7 -> before the temperature ... GENERATION.temperature=1
ENGINE.logprobs_mode=raw_logprobs & GENERATION.top_p=0.9 -> before top_p, which training applies to its own
GENERATION.bad_words=[no] & GENERATION.backend=hf -> not supported yet: texts that are never sampled
GENERATION.top_p=0.9 & loss_fn.use_kl_in_reward=true & grpo.adv_estimator.name=reinforce_plus_plus
    -> loss_fn.use_kl_in_reward ... not supported yet: the KL in the reward
grpo.adv_estimator.reward_weights=[1, 2] -> weighs several rewards, which only gdpo tells apart
grpo.adv_estimator={name: gdpo, reward_weights: [1, 2]} -> fine
ALONE -> grpo.num_generations_per_prompt ... a group of 1 has no advantage; set grpo.num_generations_per_prompt=2, or
ALONE & grpo.use_leave_one_out_baseline=false -> grpo.num_generations_per_prompt ... a group of 1 has no advantage
ALONE & grpo.adv_estimator.name=reinforce_plus_plus
    -> group of 1 is 0; set grpo.num_generations_per_prompt=2, or grpo.adv_estimator.minus_baseline=false
grpo.reward_shaping={enabled: true, max_response_length: 9} -> overlong_buffer_length: 128 is more than max_resp
grpo.reward_shaping={enabled: true, max_response_length: 9, stop_properly_penalty_coef: 0} -> fine
grpo.reward_shaping.enabled=true & grpo.adv_estimator.name=gdpo
    -> grpo.reward_shaping.enabled ... gdpo takes each of several rewards
grpo.reward_shaping.enabled=true & data.default.env_name=it & +env.it={type: agent, run: 'json:loads', credit: branch}
    -> grpo.reward_shaping.enabled ... each row of env.it has its own
grpo.reward_shaping.enabled=true & data.default.env_name=it & +env.it={type: agent, run: 'json:loads'} -> fine
grpo.batch_multiplier=1.01 & grpo.use_dynamic_sampling=true -> not a whole number
data.default.env_name=mth -> data.train.env_name: no section env.mth; did you mean math?
data.train={dataset_name: gsm8k, split_validation_size: 0.0}
    -> or set grpo.val_period=0 and checkpointing.metric_name=null
data.train={split_validation_size: 0.0} & grpo.val_period=0 & checkpointing.metric_name=null
    & grpo.replay_from=/tmp & grpo.val_at_end=false -> fine
grpo.val_period=0 -> checkpointing.metric_name ... set grpo.val_period=10, or checkpointing.metric_name=null
grpo.val_period=0 & checkpointing.enabled=false & +ENGINE.env_vars.OMP_NUM_THREADS='4' -> fine
grpo.val_period=4 & checkpointing.save_period=10 -> set checkpointing.save_period=12, or grpo.val_period=2
checkpointing.metric_name=train:max_seq_mult_prob_error -> no run with this configuration
checkpointing.metric_name=accuracy -> must be "val:<metric>"
checkpointing.metric_name=val:acuracy -> did you mean val:accuracy?
checkpointing.metric_name=val:pass_at_4 -> grpo.val_num_generations_per_prompt decides
checkpointing.metric_name=val:pass_k -> grpo.val_num_generations_per_prompt decides
checkpointing.metric_name=val:best_of_6 & grpo.val_num_generations_per_prompt=6 -> fine
checkpointing.checkpoint_must_save_by=3h -> 00:03:45:00
grpo.replay_from=/nope & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null
    -> grpo.replay_from ... there is no folder '/nope'
data.train.weight=3 -> one dataset has all the prompts
grpo.adv_estimator.name=reinforce_plus_plus & loss_fn.use_kl_in_reward=true
    & loss_fn.use_on_policy_kl_approximation=true -> loss_fn.use_on_policy_kl_approximation ... weights the KL
data.train=[{dataset_name: gsm8k, weight: 3, split_validation_size: 0.1},{dataset_name: a, weight: 1}]
    & data.custom_dataloader=a:b -> data.custom_dataloader ... sets with weights have an order of their own
data.validation={dataset_name: gsm8k, split_validation_size: 0.1} -> these are to validate on
+env.code={} & grpo.env_step_timeout_s=10 -> env.code.sandbox.time_limit_s ... below env_step_timeout_s=10
+env.python_tools={sandbox: {time_limit_s: 300}}
    -> env.python_tools.sandbox.time_limit_s ... 300 s must be below env_step_timeout_s=300
policy.scheduler=[{name: a.B},{name: a.C}] -> need one item {milestones: [...]} with 1
policy.scheduler=[{name: a.B},{name: a.C},{name: a.D},{milestones: [5,5]}] -> milestones must increase
policy.scheduler=[{name: a.B},{milestones: [5]}] -> at least two schedulers
GENERATION.top_k=0 -> greater than or equal to 1
EAGLE3} -> GENERATION.vllm_kwargs.speculative_config.model ... (policy.draft of a training run trains it)
+policy.draft.enabled=true -> GENERATION.vllm_kwargs.speculative_config ... needs {method: eagle3
+policy.draft.enabled=true & EAGLE3, model: a} -> policy.draft.model_name decides it
GENERATION.backend=megatron
    -> set GENERATION.backend=hf, or GENERATION.backend=vllm
policy.router_replay.enabled=true -> needs policy.megatron_cfg.enabled=true
policy.freeze=[vision_tower] & DTENSOR.lora_cfg.enabled=true -> policy.freeze ... DTENSOR.lora_cfg.target_modules or
GPUS=0 & policy.precision=float32 & ENGINE.precision=fp8 -> set ENGINE.precision=float32
GPUS=0 & policy.precision=float32 & ENGINE.kv_cache_dtype=fp8 -> set ENGINE.kv_cache_dtype=auto
ENGINE.kv_cache_dtype=int8 -> fp8_per_token_head
+ENGINE.env_vars.TMPDIR=/scratch -> ENGINE.env_vars.TMPDIR ... for the whole run
GPUS=0 & policy.precision=float32 & +ENGINE.env_vars.OMP_NUM_THREADS='4' -> ENGINE.env_vars.OMP_NUM_THREADS ... on CPUs
+GENERATION.vllm_kwargs.quantization=fp8 -> ENGINE.precision decides it
+GENERATION.vllm_kwargs.kv_cache_memory_bytes=9 -> gpu_memory_utilization (on CPUs vllm_cfg.cpu_kv_cache_space_gb)
+GENERATION.vllm_kwargs.seed=1 -> the run sets it; remove the key
+GENERATION.vllm_kwargs.max_num_seq=64 -> GENERATION.vllm_kwargs.max_num_seq ... the nearest is max_num_seqs
+GENERATION.vllm_kwargs.load_format=auto -> the library decides it; remove the key
HF & DTENSOR.context_parallel_size=2 -> sequences cut over ranks
HF & DTENSOR.pipeline_parallel_size=2 -> pipeline stages
HF & DTENSOR.expert_parallel_size=2 -> experts on different ranks
HF & DTENSOR.tensor_parallel_size=2 & DTENSOR.sequence_parallel=true -> single tokens cut over ranks
GENERATION.backend=vlm -> unknown generation backend 'vlm'; did you mean vllm? An import path
+GENERATION.sglang_kwargs.max_prefill_tokens=9 -> backend=vllm takes none of SGLang
GENERATION.sglang_cfg.expose_http_server=true -> backend=vllm reads vllm_cfg; set ... expose_http_server=false
SGLANG & +GENERATION.sglang_kwargs.attention_backend=triton -> the library decides it on CPUs; remove the key
SGLANG & +GENERATION.sglang_kwargs.context_length=9 -> sglang_cfg.context_length decides it
HF & GENERATION.vllm_cfg.tensor_parallel_size=2 -> cut as policy.dtensor_cfg says
HF & GENERATION.vllm_cfg.precision=bfloat16 -> in policy.precision=float32
HF & +GENERATION.vllm_kwargs.block_size=32 -> know none of {'block_size': 32}
HF & grpo.async_grpo.enabled=true -> nothing samples while the policy trains
RESOURCES.num_nodes=1 -> RESOURCES ... num_nodes only count for generation on its own resources; leave
APART & GPUS=8 -> RESOURCES.gpus_per_node ... is required: how many of the node's 8 GPUs generate, 1 to 7
APART & GPUS=1 -> policy.generation.colocated.enabled ... cannot both train and generate on its own; set
APART & GPUS=0 & cluster.cpu_workers_per_node=2 & RESOURCES.gpus_per_node=1
    -> RESOURCES.gpus_per_node ... the cluster has no GPUs; set RESOURCES.cpu_workers_per_node instead
APART & GPUS=2 & RESOURCES.cpu_workers_per_node=1
    -> RESOURCES.cpu_workers_per_node ... the cluster uses GPUs; set RESOURCES.gpus_per_node instead
APART & GPUS=2 & RESOURCES={gpus_per_node: 1, num_nodes: 2}
    -> RESOURCES.num_nodes ... 2 of one node (NODES=1) leaves none to train; leave it out
APART & NODES=2 & RESOURCES.num_nodes=2
    -> RESOURCES.num_nodes ... 2 of the 2 nodes leaves none to train; raise NODES, or set RESOURCES.num_nodes=1
APART & NODES=2 & GPUS=8 & RESOURCES={num_nodes: 1, gpus_per_node: 4}
    -> RESOURCES.gpus_per_node ... whole ones generate, with all their 8 GPUs; leave it out
SERVER & GENERATION.backend=hf -> GENERATION.backend=vllm
SERVER & grpo.replay_from=somewhere & grpo.val_period=0 & grpo.val_at_start=false -> no engine is started with
SERVER & GPUS=2 & policy.precision=bfloat16 -> GENERATION.colocated.enabled=false
SERVER & ENGINE.http_server.port=70000 -> http_server.port
SERVER & ENGINE.http_server_serving_chat_kwargs.tool_parser=pythonic -> tool_parser
SERVER & ENGINE.http_server_serving_chat_kwargs.reasoning_parser=r1 -> reasoning_parser
+env.it={type: composit} & DATASET=gsm8k -> env.it.type: no environment 'composit'; did you mean composite?
+env.it={type: python_tools} & DATASET=gsm8k
    -> grpo.max_rollout_turns: 1 leaves no turn to read the result of a tool of env.it
+env.it={type: sliding_puzzle_game} & DATASET=sliding_puzzle & grpo.max_rollout_turns=29
    -> 29 cuts games of env.it off before their 30 moves are made
+env.it={type: sliding_puzzle_game} & DATASET=sliding_puzzle & +data.train.kwargs.max_moves=40
    & grpo.max_rollout_turns=30 -> set grpo.max_rollout_turns=40
"""
# The last row has keys of NeMo RL that ask for nothing.
OF_MEGATRON = """
policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}} -> policy.optimizer ... megatron_cfg.optimizer
CFG.expert_model_parallel_size=8 & CFG.pipeline_model_parallel_size=2 & GPUS=8
    -> expert_model_parallel_size=8 does not divide the 4 ranks of a pipeline stage ... these would: 1, 2, 4
CFG.context_parallel_size=2 & policy.max_total_sequence_length=510 & GPUS=2
    -> CFG.context_parallel_size ... 4 equal chunks of every sequence ... =508, or policy.max_total_sequence_length=512
CFG.pipeline_model_parallel_size=4 & CFG.virtual_pipeline_model_parallel_size=2 & MICRO=1
    & BATCH=2 & GPUS=4 -> BATCH ... is a multiple of 4
GPUS=0 & CFG.attention_backend=flash -> CFG.attention_backend ... set CFG.attention_backend=auto
CFG.recompute_modules=[attention] -> CFG.recompute_modules.0 ... 'core_attn'
CFG.optimizer.clip_grad=0.5 -> which training clips; set policy.max_grad_norm=0.5, or CFG.optimizer.clip_grad=null
CFG.moe_shared_expert_overlap=true & CFG.moe_token_dispatcher_type=allgather
    -> CFG.moe_token_dispatcher_type ... needs alltoall
IN_FP8 & policy.precision=float32 -> CFG.fp8_cfg.enabled ... set policy.precision=bfloat16
IN_FP8 & CFG.fp8_cfg.fp8_param=true -> CFG.fp8_cfg.fp8_param ... still multiplies in FP8
IN_FP8 & CFG.moe_token_dispatcher_type=allgather -> FP8 need; set CFG.moe_token_dispatcher_type=alltoall
IN_FP8 & CFG.fp8_cfg.fp8_recipe=delayed & CFG.activation_checkpointing=true
    & CFG.recompute_granularity=selective & CFG.recompute_modules=[layernorm]
    -> CFG.fp8_cfg.fp8_recipe ... set CFG.fp8_cfg.fp8_recipe=tensorwise, or
IN_FP8 & GENERATION.backend=megatron -> products in FP8 where the policy's own workers generate
checkpointing.model_save_format=safetensors
    -> set checkpointing.model_save_format=torch_save
GENERATION.backend=hf -> set GENERATION.backend=megatron, or
GENERATION.backend=megatron & CFG.pipeline_model_parallel_size=2 & GPUS=2
    -> pipeline stages where the policy's own workers generate
policy.router_replay.enabled=true & GENERATION.backend=megatron
    -> a token went through; set policy.router_replay.enabled=false, or GENERATION.backend=vllm
policy.router_replay.enabled=true & GENERATION.vllm_cfg.enable_prefix_caching=false
    -> only with a prefix cache; set ENGINE.enable_prefix_caching=true
policy.router_replay.enabled=true & GENERATION.vllm_cfg.pipeline_parallel_size=2 & GPUS=2
    -> only engines of one stage return the experts of tokens
GENERATION.backend=megatron & +GENERATION.mcore_generation_config.num_speculative_tokens=2 -> not supported yet
policy.logprob_chunk_size=1024 & CFG.linear_ce_fusion_chunk_size=512 -> is not policy.logprob_chunk_size=1024
GPUS=8 & CFG.tensor_model_parallel_size=4 & CFG.pipeline_model_parallel_size=3
    -> command line: CFG.pipeline_model_parallel_size=3:
       ... with tensor_model_parallel_size=4, pipeline_model_parallel_size may be 1, 2
policy.router_replay.enabled=true & GPUS=0 & GENERATION.vllm_cfg.enable_prefix_caching=false -> fine
GENERATION.backend=megatron & +GENERATION.mcore_generation_config={buffer_size_gb: 10, num_cuda_graphs: 4}
    & ++GENERATION.mcore_generation_config={max_tokens: 16384, enable_prefix_caching: false} -> fine
"""
SHORT = {
    "IN_FP8": "CFG.fp8_cfg.enabled=true",
    "CFG": "policy.megatron_cfg",
    "SERVER": "GPUS=0 & policy.precision=float32 & ENGINE.expose_http_server=true",
    "DATASET": "data.default.env_name=it & data.train.dataset_name",
    "SGLANG": "GENERATION.backend=sglang & GPUS=0 & cluster.cpu_workers_per_node=2 & policy.precision=float32",
    "HF": "GENERATION.backend=hf & GPUS=0 & cluster.cpu_workers_per_node=2 & policy.precision=float32",
    "APART": "GENERATION.colocated.enabled=false",
    "RESOURCES": "GENERATION.colocated.resources",
    "EAGLE3": "+GENERATION.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 2",
    "ENGINE": "GENERATION.vllm_cfg",
    "GENERATION": "policy.generation",
    "DTENSOR": "policy.dtensor_cfg",
    "GPUS": "cluster.gpus_per_node",
    "NODES": "cluster.num_nodes",
    "ALONE": "grpo.num_generations_per_prompt=1 & BATCH=32",
    "BATCH": "policy.train_global_batch_size",
    "MICRO": "policy.train_micro_batch_size",
}
WITH_MEGATRON = [((*MEGATRON, *overrides), said) for overrides, said in cases(OF_MEGATRON, SHORT)]


@pytest.mark.parametrize(("overrides", "said"), [*cases(CASES, SHORT), *WITH_MEGATRON])
def test_cross_checks(overrides: tuple[str, ...], said: str) -> None:
    problems = problems_of_run(GRPOMasterConfig, MINIMAL, overrides)
    assert (said == FINE) == (not problems)
    if problems:
        said_once(said, str(ConfigError(problems)))
        wrong = misleading(GRPOMasterConfig, MINIMAL, overrides, problems)
        assert not wrong, "\n".join(wrong)


def test_a_wrong_env_name_is_said_once_and_nothing_of_what_follows_from_it() -> None:
    lookup = "data.validation={dataset_name: lookup}"
    train = ("data.train.dataset_name=lookup", "data.train.split_validation_size=0", lookup)
    metric = ("+env.code={}", "checkpointing.metric_name=val:reward")
    build(*train, *metric)
    text = problems_of(*train, "checkpointing.metric_name=val:lookup/accuracy", "data.train.env_name=maths")
    assert "no section env.maths" in text and "lookup#2" not in text and "metric_name" not in text


# -- Megatron


def test_a_run_that_replays_routing_reports_it() -> None:
    names = {"moe/replayed_fraction", "moe/replay_agreement"}
    assert not names & build(*MEGATRON).train_metrics
    assert names <= build(*MEGATRON, "policy.router_replay.enabled=true").train_metrics


def test_the_values_of_another_optimizer_are_carried_over() -> None:
    kwargs = "{lr: 0.0003, weight_decay: 0.1, betas: [0.9, 0.95], eps: 0.5}"
    said = problems_of(*MEGATRON[:2], f"policy.optimizer.kwargs={kwargs}")
    for value in ("lr=0.0003", "weight_decay=0.1", "adam_beta1=0.9", "adam_beta2=0.95", "adam_eps=0.5"):
        assert f"policy.megatron_cfg.optimizer.{value}" in said


@pytest.mark.parametrize(("name", "shards"), [("adam", True), ("sgd", False), ("muon", False), ("dist_muon", False)])
def test_the_state_is_sharded_where_the_optimizer_can(name: str, shards: bool) -> None:
    chosen = f"policy.megatron_cfg.optimizer.optimizer={name}"
    assert build(*MEGATRON[:2], chosen).policy.megatron_cfg.optimizer.shards_optimizer == shards
    if not shards:
        said = problems_of(*MEGATRON[:2], chosen, "policy.megatron_cfg.optimizer.use_distributed_optimizer=true")
        section = "policy.megatron_cfg.optimizer"
        assert f"{section}.optimizer={name}); set {section}.use_distributed_optimizer=null" in said


@pytest.mark.slow
def test_what_vllm_is_told_of_fp8(tmp_path: Path) -> None:
    from nemo_rl.models.generation.vllm.startup import engine_args

    save_model("deep", tmp_path)
    cfg = generation_config(64, vllm_cfg={"precision": "fp8", "kv_cache_dtype": "fp8_per_token_head"})
    told = engine_args(engine_settings(tmp_path, cfg, device="cuda"), {})
    assert (told.dtype, told.quantization, told.kv_cache_dtype) == ("bfloat16", "fp8_per_block", "fp8_per_token_head")
