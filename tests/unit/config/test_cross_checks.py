"""Values that do not fit together: each is refused with what would work."""

import pytest

from tests.tables import FINE, cases, said_once
from tests.unit.config.run_configs import build, problems_of


def test_the_minimal_run_is_fine() -> None:
    assert build().grpo.num_samples_per_step == 512


CASES = """
policy.train_global_batch_size=500 -> these would: 16, 32, 64, 128, 256, 512
policy.train_global_batch_size=2 & GPUS=4 & policy.train_micro_batch_size=1
    -> 2 cannot be shared by 4 training ranks; these would: 4, 8, 16
GPUS=0 & cluster.cpu_workers_per_node=3
    -> policy.train_global_batch_size ... by 3 training ranks; make it and grpo.num_prompts_per_step (now
policy.train_micro_batch_size=3 & GPUS=2 & cluster.num_nodes=2
    -> 3 does not divide the 128 samples of each of 4 training rank(s) ... these would: 1, 2, 4, 8, 16, 32
ENGINE.tensor_parallel_size=3 & GPUS=8 -> 3 does not divide the 8 GPUs of the cluster; these would: 1, 2, 4, 8
ENGINE.tensor_parallel_size=4 & GPUS=2 & cluster.num_nodes=4
    -> not supported yet: an engine of 4 spans nodes of 2 GPUs
DTENSOR.tensor_parallel_size=3 & GPUS=8 -> 3 does not divide the 8 training ranks; these would: 1, 2, 4, 8
DTENSOR.tensor_parallel_size=4 & DTENSOR.context_parallel_size=2 & DTENSOR.pipeline_parallel_size=2 & GPUS=8
    -> tensor_parallel_size=4 x context_parallel_size=2 x pipeline_parallel_size=2 = 16 does not divide the 8
       ... with context_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size may be 1, 2
DTENSOR.dp_replicate_size=3 & GPUS=8 -> 3 does not divide the 8 data-parallel ranks; these would: 1, 2, 4, 8
DTENSOR.dp_replicate_size=2 & DTENSOR.expert_parallel_size=8 & GPUS=8
    -> 8 does not divide the 4 ranks that shard the parameters (data x context parallel); these would: 1, 2, 4
DTENSOR.activation_checkpointing=some -> must be 'full' or 'selective', or a valid boolean (got some)
policy.deterministic=true & GENERATION.top_p=0.9 & loss_fn.reference_policy_kl_penalty=0
    -> policy.deterministic ... set top_p=1 or deterministic=false
policy.sequence_packing={enabled: true, train_mb_tokens: 500}
    -> policy.sequence_packing.train_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
policy.dynamic_batching={enabled: true, logprob_mb_tokens: 500}
    -> policy.dynamic_batching.logprob_mb_tokens ... 500 is too little for policy.max_total_sequence_length=512
GENERATION.max_new_tokens=1024 -> 1024 is more than policy.max_total_sequence_length=512
data.max_input_seq_length=600 -> use at most that
loss_fn.force_on_policy_ratio=true & policy.train_global_batch_size=128
    -> loss_fn.force_on_policy_ratio ... set policy.train_global_batch_size=512
loss_fn.force_on_policy_ratio=true -> fine
loss_fn.ratio_clip_c=1.1 -> must be above 1 + ratio_clip_max = 1.2
grpo.skip_reference_policy_logprobs_calculation=true -> set loss_fn.reference_policy_kl_penalty=0 (it is 0.01)
grpo.skip_reference_policy_logprobs_calculation=true & loss_fn.reference_policy_kl_penalty=0 -> fine
GENERATION.temperature=0 -> needs a temperature above 0
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32
    -> grpo.num_generations_per_prompt ... leave-one-out baseline needs at least 2 samples
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32 & grpo.use_leave_one_out_baseline=false
    -> grpo.num_generations_per_prompt ... a group of 1 has no advantage
grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32 & grpo.adv_estimator.name=reinforce_plus_plus
    -> fine
grpo.batch_multiplier=1.01 & grpo.use_dynamic_sampling=true -> not a whole number
grpo.batch_multiplier=1.5 & grpo.use_dynamic_sampling=true -> fine
data.default.env_name=mth -> data.train.0.env_name ... no section env.mth; did you mean math?
data.train={dataset_name: gsm8k, split_validation_size: 0.0} -> switch validation off with grpo.val_period=0
data.train={split_validation_size: 0.0} & grpo.val_period=0 & checkpointing.metric_name=null -> fine
policy.sequence_packing={enabled: true, train_mb_tokens: 511, logprob_mb_tokens: 511}
    & policy.max_total_sequence_length=511 -> fine
grpo.val_period=0 -> checkpointing.metric_name ... val:accuracy needs validation
grpo.val_period=0 & checkpointing.enabled=false -> fine
grpo.val_period=4 & checkpointing.save_period=10 -> checkpointing.save_period ... for val_period use 1, 2, 5, 10
grpo.val_period=5 & checkpointing.save_period=10 -> fine
grpo.val_period=4 & checkpointing.keep_top_k=null -> fine
checkpointing.metric_name=train:max_seq_mult_prob_error -> no run with this configuration
checkpointing.metric_name=train:max_seq_mult_prob_error & grpo.seq_logprob_error_threshold=2 -> fine
checkpointing.metric_name=accuracy -> must be "val:<metric>"
checkpointing.metric_name=val:acuracy -> did you mean val:accuracy?
checkpointing.metric_name=train:reward -> fine
checkpointing.metric_name=train:filtered_reward & grpo.use_dynamic_sampling=true -> fine
checkpointing.metric_name=val:pass_at_4 -> grpo.val_num_generations_per_prompt decides
checkpointing.metric_name=val:pass_at_4 & grpo.val_num_generations_per_prompt=6 -> fine
checkpointing.metric_name=val:best_of_6 & grpo.val_num_generations_per_prompt=6 -> fine
checkpointing.checkpoint_must_save_by=3h -> 00:03:45:00
checkpointing.checkpoint_must_save_by='00:03:45:00' -> fine
grpo.replay_from=/nope & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null
    -> grpo.replay_from ... there is no folder '/nope'
grpo.replay_from=/tmp & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null -> fine
data.train.weight=3 -> one dataset has all the prompts
+env.code={} & grpo.env_step_timeout_s=10 -> env.code.sandbox.time_limit_s ... below env_step_timeout_s=10
+env.code={} & grpo.env_step_timeout_s=11 -> fine
+env.python_tools={sandbox: {time_limit_s: 300}}
    -> env.python_tools.sandbox.time_limit_s ... 300 s must be below env_step_timeout_s=300
+env.python_tools={sandbox: {time_limit_s: 300}, tools: [calculator]} -> fine
policy.scheduler=[{name: a.B},{name: a.C}] -> need one item {milestones: [...]} with 1
policy.scheduler=[{name: a.B},{name: a.C},{milestones: [5]}] -> fine
policy.scheduler=[{name: a.B},{name: a.C},{name: a.D},{milestones: [5,5]}] -> milestones must increase
policy.scheduler=[{name: a.B},{milestones: [5]}] -> at least two schedulers
GENERATION.top_k=-1 -> fine
GENERATION.top_k=0 -> greater than or equal to 1
+policy.draft.enabled=true & EAGLE3} -> fine
+policy.draft={enabled: true, model_name: a} & EAGLE3, model: a} -> fine
EAGLE3, model: a} -> fine
EAGLE3} -> GENERATION.vllm_kwargs.speculative_config.model ... (policy.draft of a training run trains it)
+policy.draft.enabled=true -> GENERATION.vllm_kwargs.speculative_config ... needs {method: eagle3
+policy.draft.enabled=true & EAGLE3, model: a} -> policy.draft.model_name decides it
GENERATION.backend=megatron
    -> set policy.megatron_cfg.enabled=true and DTENSOR.enabled=false, or GENERATION.backend=vllm
policy.router_replay.enabled=true -> needs policy.megatron_cfg.enabled=true
GPUS=0 & policy.precision=float32 & ENGINE.precision=fp8 -> runs on GPUs only; use policy.precision=float32
GPUS=0 & policy.precision=float32 & ENGINE.kv_cache_dtype=fp8 -> runs on GPUs only; use auto
ENGINE.kv_cache_dtype=int8 -> fp8_per_token_head
+GENERATION.vllm_kwargs.quantization=fp8 -> ENGINE.precision decides it
+GENERATION.vllm_kwargs.seed=1 -> engines have those of the run; remove the key
+GENERATION.vllm_kwargs.load_format=auto -> the library decides it; remove the key
"""
SHORT = {
    "EAGLE3": "+GENERATION.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 2",
    "ENGINE": "GENERATION.vllm_cfg",
    "GENERATION": "policy.generation",
    "DTENSOR": "policy.dtensor_cfg",
    "GPUS": "cluster.gpus_per_node",
}


@pytest.mark.parametrize(("overrides", "said"), cases(CASES, SHORT))
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
