"""Values that do not fit together: each is refused with what would work."""

import pytest

from tests.tables import FINE, cases, said_once
from tests.unit.config.run_configs import build, problems_of


def test_the_minimal_run_is_fine() -> None:
    assert build().grpo.num_samples_per_step == 512


CASES = """
policy.train_global_batch_size=500 -> policy.train_global_batch_size ... these would: 16, 32, 64, 128, 256, 512
policy.train_global_batch_size=2 & cluster.gpus_per_node=4 & policy.train_micro_batch_size=1
    -> policy.train_global_batch_size ... 2 cannot be shared by 4 training ranks; these would: 4, 8, 16
cluster.gpus_per_node=0 & cluster.cpu_workers_per_node=3
    -> policy.train_global_batch_size
       ... cannot be shared by 3 training ranks; make it and grpo.num_prompts_per_step (now
policy.train_micro_batch_size=3 & cluster.gpus_per_node=2 & cluster.num_nodes=2
    -> policy.train_micro_batch_size
       ... 3 does not divide the 128 samples of each of 4 training rank(s) (train_global_batch_size=512); these
       ... would: 1, 2, 4, 8, 16, 32
policy.generation.vllm_cfg.tensor_parallel_size=3 & cluster.gpus_per_node=8
    -> policy.generation.vllm_cfg.tensor_parallel_size
       ... 3 does not divide the 8 GPUs of the cluster; these would: 1, 2, 4, 8
policy.generation.vllm_cfg.tensor_parallel_size=4 & cluster.gpus_per_node=2 & cluster.num_nodes=4
    -> policy.generation.vllm_cfg.tensor_parallel_size ... not supported yet: an engine of 4 spans nodes of 2 GPUs
policy.generation.vllm_cfg.tensor_parallel_size=3 & cluster.gpus_per_node=2 & cluster.num_nodes=3
    & grpo.num_generations_per_prompt=48 & policy.train_global_batch_size=1536
    -> policy.generation.vllm_cfg.tensor_parallel_size ... not supported yet: an engine of 3 spans nodes of 2 GPUs
policy.dtensor_cfg.tensor_parallel_size=3 & cluster.gpus_per_node=8
    -> policy.dtensor_cfg.tensor_parallel_size ... 3 does not divide the 8 training ranks; these would: 1, 2, 4, 8
policy.dtensor_cfg.tensor_parallel_size=4 & policy.dtensor_cfg.context_parallel_size=2
    & policy.dtensor_cfg.pipeline_parallel_size=2 & cluster.gpus_per_node=8
    -> policy.dtensor_cfg.tensor_parallel_size
       ... tensor_parallel_size=4 x context_parallel_size=2 x pipeline_parallel_size=2 = 16 does not divide the 8
       ... training ranks; with context_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size may be 1, 2
policy.dtensor_cfg.dp_replicate_size=3 & cluster.gpus_per_node=8
    -> policy.dtensor_cfg.dp_replicate_size ... 3 does not divide the 8 data-parallel ranks; these would: 1, 2, 4, 8
policy.dtensor_cfg.dp_replicate_size=2 & policy.dtensor_cfg.expert_parallel_size=8 & cluster.gpus_per_node=8
    -> policy.dtensor_cfg.expert_parallel_size
       ... 8 does not divide the 4 ranks that shard the parameters (data x context parallel); these would: 1, 2, 4
policy.dtensor_cfg.activation_checkpointing=some
    -> policy.dtensor_cfg.activation_checkpointing ... must be 'full' or 'selective', or a valid boolean (got some)
policy.deterministic=true & policy.generation.top_p=0.9 & loss_fn.reference_policy_kl_penalty=0
    -> policy.deterministic ... set top_p=1 or deterministic=false
policy.sequence_packing.enabled=true & policy.sequence_packing.train_mb_tokens=500
    -> policy.sequence_packing.train_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
policy.dynamic_batching.enabled=true & policy.dynamic_batching.logprob_mb_tokens=500
    -> policy.dynamic_batching.logprob_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
policy.generation.max_new_tokens=1024
    -> policy.generation.max_new_tokens ... 1024 is more than policy.max_total_sequence_length=512
data.max_input_seq_length=600 -> data.max_input_seq_length ... use at most that
loss_fn.force_on_policy_ratio=true & policy.train_global_batch_size=128
    -> loss_fn.force_on_policy_ratio ... set policy.train_global_batch_size=512
loss_fn.force_on_policy_ratio=true -> fine
loss_fn.ratio_clip_c=1.1 -> loss_fn.ratio_clip_c ... must be above 1 + ratio_clip_max = 1.2
grpo.skip_reference_policy_logprobs_calculation=true
    -> grpo.skip_reference_policy_logprobs_calculation ... set loss_fn.reference_policy_kl_penalty=0 (it is 0.01)
grpo.skip_reference_policy_logprobs_calculation=true & loss_fn.reference_policy_kl_penalty=0 -> fine
policy.generation.temperature=0 -> policy.generation.temperature ... needs a temperature above 0
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32
    -> grpo.num_generations_per_prompt ... leave-one-out baseline needs at least 2 samples
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32 & grpo.use_leave_one_out_baseline=false
    -> grpo.num_generations_per_prompt ... a group of 1 has no advantage
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32 & grpo.adv_estimator.name=reinforce_plus_plus
    -> fine
grpo.batch_multiplier=1.01 & grpo.use_dynamic_sampling=true -> grpo.batch_multiplier ... not a whole number
grpo.batch_multiplier=1.5 & grpo.use_dynamic_sampling=true -> fine
data.default.env_name=mth -> data.train.0.env_name ... no section env.mth; did you mean math?
data.train={dataset_name: gsm8k, split_validation_size: 0.0}
    -> data.validation ... switch validation off with grpo.val_period=0
data.train={split_validation_size: 0.0} & grpo.val_period=0 & checkpointing.metric_name=null -> fine
policy.sequence_packing={enabled: true, train_mb_tokens: 511, logprob_mb_tokens: 511}
    & policy.max_total_sequence_length=511
    -> fine
grpo.val_period=0 -> checkpointing.metric_name ... val:accuracy needs validation
grpo.val_period=0 & checkpointing.enabled=false -> fine
grpo.val_period=4 & checkpointing.save_period=10 -> checkpointing.save_period ... for val_period use 1, 2, 5, 10
grpo.val_period=5 & checkpointing.save_period=10 -> fine
grpo.val_period=4 & checkpointing.keep_top_k=null -> fine
checkpointing.metric_name=train:max_seq_mult_prob_error -> checkpointing.metric_name ... no run with this
checkpointing.metric_name=train:max_seq_mult_prob_error & grpo.seq_logprob_error_threshold=2 -> fine
checkpointing.metric_name=accuracy -> checkpointing.metric_name ... must be "val:<metric>"
checkpointing.metric_name=val:acuracy -> checkpointing.metric_name ... did you mean val:accuracy?
checkpointing.metric_name=train:los -> checkpointing.metric_name ... did you mean train:loss?
checkpointing.metric_name=train:reward -> fine
checkpointing.metric_name=train:filtered_reward -> checkpointing.metric_name ... no run with this configuration
checkpointing.metric_name=train:filtered_reward & grpo.use_dynamic_sampling=true -> fine
checkpointing.metric_name=val:pass_at_4 -> checkpointing.metric_name ... grpo.val_num_generations_per_prompt decides
checkpointing.metric_name=val:pass_at_4 & grpo.val_num_generations_per_prompt=6 -> fine
checkpointing.metric_name=val:best_of_6 & grpo.val_num_generations_per_prompt=6 -> fine
checkpointing.checkpoint_must_save_by=3h -> checkpointing.checkpoint_must_save_by ... 00:03:45:00
checkpointing.checkpoint_must_save_by='00:03:45:00' -> fine
grpo.replay_from=/nope & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null
    -> grpo.replay_from ... there is no folder '/nope'
grpo.replay_from=/tmp & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null -> fine
data.train.weight=3 -> data.train.0.weight ... one dataset has all the prompts
+env.code={} & grpo.env_step_timeout_s=10 -> env.code.sandbox.time_limit_s ... below env_step_timeout_s=10
+env.code={} & grpo.env_step_timeout_s=11 -> fine
+env.python_tools={sandbox: {time_limit_s: 300}}
    -> env.python_tools.sandbox.time_limit_s ... 300 s must be below env_step_timeout_s=300
+env.python_tools={sandbox: {time_limit_s: 300}, tools: [calculator]} -> fine
policy.scheduler=[{name: a.B},{name: a.C}] -> policy.scheduler ... need one item {milestones: [...]} with 1
policy.scheduler=[{name: a.B},{name: a.C},{milestones: [5]}] -> fine
policy.scheduler=null -> fine
policy.scheduler=[{name: a.B},{name: a.C},{name: a.D},{milestones: [5,5]}]
    -> policy.scheduler ... milestones must increase
policy.scheduler=[{name: a.B},{milestones: [5]}] -> policy.scheduler ... at least two schedulers
policy.generation.top_k=-1 -> fine
+policy.draft.enabled=true & EAGLE3} -> fine
+policy.draft={enabled: true, model_name: a} & EAGLE3, model: a} -> fine
EAGLE3, model: a} -> fine
EAGLE3} -> policy.generation.vllm_kwargs.speculative_config.model ... (policy.draft of a training run trains it)
+policy.draft.enabled=true -> policy.generation.vllm_kwargs.speculative_config ... needs {method: eagle3
+policy.draft.enabled=true & EAGLE3, model: a}
    -> policy.generation.vllm_kwargs.speculative_config.model ... policy.draft.model_name decides it
policy.generation.top_k=0 -> policy.generation.top_k ... greater than or equal to 1
policy.generation.backend=megatron
    -> set policy.megatron_cfg.enabled=true and policy.dtensor_cfg.enabled=false, or policy.generation.backend=vllm
policy.router_replay.enabled=true -> needs policy.megatron_cfg.enabled=true
ON_CPU & policy.generation.vllm_cfg.precision=fp8
    -> vllm_cfg.precision ... runs on GPUs only; use policy.precision=float32
ON_CPU & policy.generation.vllm_cfg.kv_cache_dtype=fp8 -> vllm_cfg.kv_cache_dtype ... runs on GPUs only; use auto
policy.generation.vllm_cfg.kv_cache_dtype=int8 -> vllm_cfg.kv_cache_dtype ... fp8_per_token_head
+policy.generation.vllm_kwargs.quantization=fp8
    -> vllm_kwargs.quantization ... policy.generation.vllm_cfg.precision decides it
+policy.generation.vllm_kwargs.seed=1 -> vllm_kwargs.seed ... engines have those of the run; remove the key
+policy.generation.vllm_kwargs.load_format=auto -> vllm_kwargs.load_format ... the library decides it; remove the key
"""
EAGLE3 = "+policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 2"
ON_CPU = "cluster.gpus_per_node=0 & policy.precision=float32"


@pytest.mark.parametrize(("overrides", "said"), cases(CASES.replace("EAGLE3", EAGLE3).replace("ON_CPU", ON_CPU)))
def test_cross_checks(overrides: tuple[str, ...], said: str) -> None:
    if said == FINE:
        build(*overrides)
    else:
        said_once(said, problems_of(*overrides))


def test_k_values_of_validation() -> None:
    assert build().grpo.val_k_values == []
    assert build("grpo.val_num_generations_per_prompt=8").grpo.val_k_values == [1, 2, 4, 8]
    assert build("grpo.val_num_generations_per_prompt=6").grpo.val_k_values == [1, 2, 4, 6]


def test_a_wrong_env_name_is_said_once_and_nothing_of_what_follows_from_it() -> None:
    lookup = "data.validation={dataset_name: lookup}"
    train = ("data.train.dataset_name=lookup", "data.train.split_validation_size=0", lookup)
    metric = ("+env.code={}", "checkpointing.metric_name=val:reward")
    build(*train, *metric)
    text = problems_of(*train, "checkpointing.metric_name=val:lookup/accuracy", "data.train.env_name=maths")
    assert "no section env.maths" in text and "lookup#2" not in text and "metric_name" not in text
