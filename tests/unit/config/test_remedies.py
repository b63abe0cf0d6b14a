"""A remedy that names keys and values is data: each is taken, rule by rule, and the configuration loads again."""

import re
from functools import cache
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from nemo_rl.config.errors import Problem
from nemo_rl.config.loader import build_config
from nemo_rl.config.rules import StrictModel
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor.checks import check_policy
from nemo_rl.models.policy.megatron.checks import check_megatron_layout
from tests.tables import lines
from tests.unit.config.run_configs import MASTERS, MEGATRON, MINIMAL, misleading, problems_of_run, ways_out
from tests.unit.config.test_rules import sections_of
from tests.unit.policy.megatron.hf_models import FAMILIES
from tests.unit.policy.models import SHAPE

# The smallest run of every kind, with every section that has rules.
POLICY = {"model_name": "m", "train_global_batch_size": 8}
PAIRS = {"train": {"dataset_name": "HelpSteer3"}, "validation": {"dataset_name": "HelpSteer3"}}
ENVIRONMENTS = """
math: {}
agent: {type: agent, command: [./play]}
judge: {type: llm_judge, model_name: m}
sum: {type: composite, reward_functions: [{name: exact_alnum}]}
"""
VAL_LOSS = {"checkpointing": {"metric_name": "val:val_loss"}}
BASES: dict[str, dict[str, Any]] = {
    "grpo": {**MINIMAL, "env": yaml.safe_load(ENVIRONMENTS)},
    "ppo": {**MINIMAL, "ppo": {}, "value": {}},
    "distillation": {**MINIMAL, "policy": POLICY, "teacher": {"model_name": "n"}},
    "sft": {
        **VAL_LOSS,
        "policy": POLICY,
        "data": {name: {"dataset_name": "squad"} for name in ("train", "validation")},
    },
    "dpo": {**VAL_LOSS, "policy": POLICY, "data": PAIRS, "dpo": {}},
    "rm": {**VAL_LOSS, "policy": {**POLICY, "reward_model_cfg": {"enabled": True}}, "data": PAIRS},
    "eval": {"generation": {"model_name": "m"}, "tokenizer": {}, "data": {"dataset_name": "math500"}},
}
BASES["eval"]["env"] = {"math": {}}

# A line: the kind of run and a section that begins with @, and what violates one of its rules. Then @ is the section.
VIOLATED = """
grpo @ -> loss_fn.use_kl_in_reward=true & REINFORCE & policy.generation.top_p=0.9
grpo @ -> grpo.skip_reference_policy_logprobs_calculation=true
grpo @ -> loss_fn.use_kl_in_reward=true & loss_fn.reference_policy_kl_penalty=0 & REINFORCE
grpo @ -> loss_fn.use_kl_in_reward=true
grpo @ -> HF & grpo.async_grpo.enabled=true & IS
grpo @ -> grpo.async_grpo.enabled=true & IS
grpo @ -> grpo.async_grpo.enabled=true & APART
grpo @ -> policy.generation.backend=megatron
grpo @ -> MEGATRON & policy.generation.backend=hf
grpo @ -> HF & CPUS & policy.dtensor_cfg.pipeline_parallel_size=2
grpo @ -> HF & CPUS & policy.dtensor_cfg.context_parallel_size=2
grpo @ -> HF & CPUS & policy.dtensor_cfg.expert_parallel_size=2
grpo @ -> HF & CPUS & policy.dtensor_cfg.tensor_parallel_size=2 & policy.dtensor_cfg.sequence_parallel=true
grpo @ -> BY_MEGATRON & CPUS & policy.megatron_cfg.pipeline_model_parallel_size=2
grpo @ -> BY_MEGATRON & CPUS & policy.megatron_cfg.context_parallel_size=2
grpo @ -> BY_MEGATRON & CPUS & policy.megatron_cfg.expert_model_parallel_size=2
grpo @ -> BY_MEGATRON & CPUS & policy.megatron_cfg.expert_tensor_parallel_size=2
grpo @ -> BY_MEGATRON & policy.megatron_cfg.fp8_cfg.enabled=true
grpo @ -> BY_MEGATRON & CPUS & policy.megatron_cfg.tensor_model_parallel_size=2
    & policy.megatron_cfg.sequence_parallel=true
grpo @ -> HF & policy.generation.vllm_cfg.precision=float32
grpo @ -> HF & policy.generation.vllm_cfg.tensor_parallel_size=2 & CPUS
grpo @ -> HF & policy.generation.bad_words=[no]
grpo @ -> HF & policy.generation.colocated.enabled=false
grpo @ -> policy.generation.backend=sglang & policy.generation.sglang_cfg.pp_size=2
grpo @ -> policy.generation.backend=sglang & policy.generation.sglang_cfg.dp_size=2
grpo @ -> SGLANG & policy.generation.sglang_cfg.tp_size=2
grpo @ -> SGLANG & policy.generation.bad_words=[no]
grpo @ -> MEGATRON & SGLANG & policy.router_replay.enabled=true
grpo @ -> SGLANG & policy.generation.sglang_cfg.dtype=bfloat16
grpo @ -> SGLANG & policy.generation.sglang_cfg.context_length=64 & data.max_input_seq_length=100
grpo @ -> CPUS & policy.generation.vllm_cfg.precision=fp8
grpo @ -> CPUS & policy.generation.vllm_cfg.kv_cache_dtype=fp8
grpo @ -> policy.generation.vllm_cfg.expose_http_server=true & REPLAY
grpo @ -> policy.generation.vllm_cfg.expose_http_server=true & HF
grpo @ -> policy.generation.vllm_cfg.expose_http_server=true
grpo @ -> BY_MEGATRON & policy.router_replay.enabled=true
grpo @ -> MEGATRON & policy.router_replay.enabled=true & policy.generation.vllm_cfg.pipeline_parallel_size=2
    & cluster.gpus_per_node=2
grpo @ -> MEGATRON & policy.router_replay.enabled=true & policy.generation.vllm_cfg.enable_prefix_caching=false
grpo @ -> policy.generation.temperature=0
grpo @ -> policy.deterministic=true & policy.generation.top_p=0.9
grpo @ -> data.max_input_seq_length=600
grpo @ -> grpo.replay_from=/tmp
grpo @ -> REPLAY & grpo.rollout_record.enabled=true
grpo @ -> MEGATRON & checkpointing.model_save_format=safetensors
grpo @ -> MEGATRON & policy.megatron_cfg.optimizer.optimizer_cpu_offload=true & OFFLOADS & policy.precision=float32
    & policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true
grpo @policy -> @.draft.enabled=true & @.megatron_cfg.enabled=true & @.dtensor_cfg.enabled=false & EAGLE3
grpo @policy -> SGLANG & @.generation.sglang_cfg.context_length=9999
grpo @policy -> DRAFT & @.dtensor_cfg.tensor_parallel_size=2
grpo @policy -> DRAFT & @.dtensor_cfg.context_parallel_size=2
grpo @policy -> DRAFT & @.dtensor_cfg.pipeline_parallel_size=2
grpo @policy -> DRAFT & @.dtensor_cfg.expert_parallel_size=2
grpo @policy -> DRAFT & @.dtensor_cfg.torch_compile=true
grpo @policy -> @.draft.enabled=true & @.generation.backend=hf
grpo @policy -> DRAFT & @.generation.vllm_cfg.precision=fp8
grpo @policy -> DRAFT & @.generation.vllm_cfg.pipeline_parallel_size=2
grpo @policy -> @.reward_model_cfg.enabled=true
grpo @policy -> @.generation.vllm_cfg.max_model_len=600
grpo @policy -> @.generation.max_new_tokens=600
grpo @policy -> @.dynamic_batching.enabled=true & @.sequence_packing.enabled=true
grpo @policy -> @.padding_free=false & @.sequence_packing.enabled=true
grpo @policy -> @.megatron_cfg.enabled=true
grpo @policy -> @.dtensor_cfg.enabled=false
grpo @policy -> @.router_replay.enabled=true
grpo @policy -> @.freeze=[vision_tower] & @.dtensor_cfg.lora_cfg.enabled=true
grpo @policy -> MEGATRON & @.scheduler=[{name: a.B}]
grpo @policy -> MEGATRON & @.padding_free=false
grpo @policy -> MEGATRON & @.master_precision=bfloat16
grpo @policy -> MEGATRON & @.megatron_cfg.optimizer.bf16=true & @.precision=float32
grpo @policy -> MEGATRON & @.megatron_cfg.optimizer.bf16=false
grpo @policy -> MEGATRON & @.megatron_cfg.pipeline_dtype=float32
grpo @policy -> MEGATRON & @.megatron_cfg.optimizer.clip_grad=0.5
grpo @policy -> MEGATRON & @.logprob_chunk_size=1024 & @.megatron_cfg.linear_ce_fusion_chunk_size=512
grpo @policy -> MEGATRON & @.megatron_cfg.fp8_cfg.enabled=true & @.precision=float32
grpo @policy.dtensor_cfg -> @.sequence_parallel=true
grpo @policy.dtensor_cfg -> @.custom_parallel_plan=a.b
grpo @policy.dtensor_cfg -> @.pipeline={schedule: interleaved_1f1b, stages_per_rank: 2}
grpo @policy.dtensor_cfg -> @.pipeline_parallel_size=2 & @.defer_fsdp_grad_sync=false & cluster.gpus_per_node=2
grpo @policy.dtensor_cfg.pipeline -> @.schedule=interleaved_1f1b & @@.pipeline_parallel_size=2 & cluster.gpus_per_node=2
grpo @policy.dtensor_cfg.pipeline -> @.stages_per_rank=2 & @@.pipeline_parallel_size=2 & cluster.gpus_per_node=2
grpo @policy.dtensor_cfg.lora_cfg -> @.adapter_path=a
grpo @policy.dtensor_cfg.lora_cfg -> @.enabled=true & @.target_modules=[a]
grpo @policy.dtensor_cfg.lora_cfg -> @.enabled=true & @.match_all_linear=false
grpo @policy.megatron_cfg -> MEGATRON & @.sequence_parallel=true
grpo @policy.megatron_cfg -> MEGATRON & @.virtual_pipeline_model_parallel_size=2
grpo @policy.megatron_cfg -> MEGATRON & @.num_layers_in_first_pipeline_stage=2
grpo @policy.megatron_cfg -> MEGATRON & @.num_layers_in_last_pipeline_stage=2
grpo @policy.megatron_cfg -> MEGATRON & @.distributed_data_parallel_config.overlap_param_gather=true
    & @.distributed_data_parallel_config.overlap_grad_reduce=true & @.optimizer.optimizer=sgd
grpo @policy.megatron_cfg -> MEGATRON & @.scheduler.lr_decay_style=cosine & @.optimizer.min_lr=1
grpo @policy.megatron_cfg -> MEGATRON & @.recompute_granularity=full & @.activation_checkpointing=false
grpo @policy.megatron_cfg -> MEGATRON & @.activation_checkpointing=true & @.recompute_granularity=selective
    & @.recompute_modules=[]
grpo @policy.megatron_cfg -> MEGATRON & @.attention_backend=local & @.transformer_impl=transformer_engine
grpo @policy.megatron_cfg -> MEGATRON & @.moe_token_dispatcher_type=allgather & @.expert_model_parallel_size=2
    & cluster.gpus_per_node=2
grpo @policy.megatron_cfg -> MEGATRON & @.moe_token_dispatcher_type=allgather & @.expert_tensor_parallel_size=2
    & cluster.gpus_per_node=2
grpo @policy.megatron_cfg -> MEGATRON & @.moe_token_dispatcher_type=allgather & @.fp8_cfg.enabled=true
grpo @policy.megatron_cfg -> MEGATRON & @.moe_token_dispatcher_type=allgather & @.moe_shared_expert_overlap=true
grpo @policy.megatron_cfg -> MEGATRON & @.moe_aux_loss_coeff=0.1 & @.moe_router_load_balancing_type=none
grpo @policy.megatron_cfg -> MEGATRON & @.fp8_cfg.enabled=true & @.fp8_cfg.fp8_param=true
grpo @policy.megatron_cfg -> MEGATRON & @.fp8_cfg.enabled=true & @.fp8_cfg.fp8_recipe=delayed
    & @.activation_checkpointing=true & @.recompute_granularity=selective & @.recompute_modules=[layernorm]
grpo @policy.megatron_cfg.optimizer -> MEGATRON & @.fp16=true
grpo @policy.megatron_cfg.optimizer -> MEGATRON & @.min_lr=1
grpo @policy.megatron_cfg.optimizer -> MEGATRON & @.optimizer=sgd & @.use_distributed_optimizer=true
grpo @policy.megatron_cfg.optimizer -> MEGATRON & PRECISE & @.use_distributed_optimizer=false
grpo @policy.megatron_cfg.optimizer -> MEGATRON & PRECISE & @.optimizer=sgd
grpo @policy.megatron_cfg.optimizer -> MEGATRON & @.optimizer_cpu_offload=true & @.optimizer_offload_fraction=1.0
grpo @policy.megatron_cfg.optimizer -> MEGATRON & PRECISE & @.optimizer_cpu_offload=true & @.exp_avg_dtype=bfloat16
    & @.optimizer_offload_fraction=1.0
grpo @policy.megatron_cfg.optimizer -> MEGATRON & PRECISE & @.optimizer_cpu_offload=true
    & @.optimizer_offload_fraction=0
grpo @policy.megatron_cfg.optimizer -> MEGATRON & @.exp_avg_dtype=bfloat16
grpo @policy.megatron_cfg.scheduler -> MEGATRON & @.lr_decay_style=WSD & @.lr_wsd_decay_iters=null & @.lr_decay_iters=9
grpo @policy.megatron_cfg.scheduler -> MEGATRON & @.end_weight_decay=0.5
grpo @policy.megatron_cfg.distributed_data_parallel_config -> MEGATRON & @.overlap_param_gather=true
grpo @policy.generation -> @.vllm_cfg.logprobs_mode=raw_logprobs & @.temperature=0.7
grpo @policy.generation -> @.vllm_cfg.logprobs_mode=raw_logprobs & @.top_p=0.7
grpo @policy.generation -> @.vllm_cfg.logprobs_mode=raw_logprobs & @.top_k=7
grpo @policy.draft -> DRAFT & @.aux_layer_indices=[1] & @.model_name=a
grpo @env.agent -> @.network=false & @.isolate=false
grpo @env.agent -> @.paths=[a] & @.isolate=false
grpo @env.agent -> @.credit=discounted & @.roles={a: null}
grpo @env.agent -> @.discount=0.5
grpo @env.judge -> @.num_votes=2 & @.temperature=0
grpo @grpo -> @.adv_estimator.name=gdpo & ALONE
grpo @grpo -> @.adv_estimator.name=gdpo & @.reward_shaping={enabled: true, max_response_length: 512}
grpo @grpo -> ALONE
grpo @grpo -> ALONE & @.adv_estimator.name=reinforce_plus_plus
grpo @grpo -> ALONE & @.adv_estimator={name: reinforce_plus_plus, minus_baseline: false} & @.use_dynamic_sampling=true
grpo @grpo -> @.batch_multiplier=2
grpo @grpo.reward_shaping -> @.enabled=true & @.max_response_length=9
grpo @grpo.adv_estimator -> @.reward_weights=[1,2]
grpo @grpo.adv_estimator -> @.std=leave_one_out & @.name=reinforce_plus_plus
grpo @grpo.async_grpo -> @.recompute_kv_cache_after_weight_updates=true
grpo @loss_fn -> @.length_normalizer=9 & @.token_level_loss=false
grpo @loss_fn -> @.sequence_level_importance_ratios=true
grpo @loss_fn -> @.use_on_policy_kl_approximation=true & @.use_kl_in_reward=true & REINFORCE
grpo @loss_fn -> @.use_cispo=true & @.disable_ppo_ratio=true
grpo @loss_fn -> @.use_cispo=true & GSPO
grpo @loss_fn -> @.disable_ppo_ratio=true & GSPO
grpo @loss_fn -> @.use_cispo=true & @.ratio_clip_c=3
grpo @loss_fn -> @.disable_ppo_ratio=true & @.ratio_clip_c=3
grpo @loss_fn -> @.truncated_importance_sampling_ratio=2
grpo @loss_fn -> IS & @.truncated_importance_sampling_ratio=2 & @.truncated_importance_sampling_type=null
grpo @loss_fn -> IS & @.truncated_importance_sampling_ratio=2 & @.truncated_importance_sampling_type=seq-mask-tis & GSPO
ppo @ -> value.reward_model_cfg.enabled=false
ppo @ -> value.nonfinite_action=skip
ppo @ -> ppo.skip_reference_policy_logprobs_calculation=true
ppo @ -> VALUE_BY_MEGATRON & checkpointing.model_save_format=safetensors
ppo @ -> VALUE_BY_MEGATRON & value.megatron_cfg.optimizer.optimizer_cpu_offload=true
    & value.megatron_cfg.optimizer.optimizer_offload_fraction=1.0 & value.precision=float32
    & value.megatron_cfg.optimizer.use_precision_aware_optimizer=true
distillation @ -> policy.generation.top_p=0.9
distillation @ -> distillation.topk_logits_k=null & teacher=null & teachers={a: {model_name: a}, b: {model_name: b}}
    & distillation.task_to_teacher={x: a, y: b}
distillation @ -> distillation.topk_logits_k=null & loss_fn.zero_outside_topk=true
distillation @teacher -> @.reward_model_cfg.enabled=true
sft @ -> policy.reward_model_cfg.enabled=true
sft @ -> data.max_input_seq_length=600
sft @ -> policy.router_replay.enabled=true & MEGATRON
sft @data.train -> data.train={dataset_name: squad, streaming: true, max_samples: 5}
sft @data.train -> data.train={dataset_name: squad, streaming: true, repeat: 2}
dpo @dpo -> @.preference_loss=robust
dpo @dpo -> @.preference_loss=ipo & @.label_smoothing=0.1
dpo @dpo -> @.reference_policy_kl_penalty=0
dpo @dpo -> @.reference_policy_kl_penalty=0 & @.sft_loss_weight=1 & @.preference_loss=ipo
dpo @dpo -> @.preference_loss_weight=0
rm @ -> policy.reward_model_cfg.enabled=false
eval @ -> cluster.gpus_per_node=0 & generation.vllm_cfg.kv_cache_dtype=fp8
eval @ -> generation.backend=sglang & generation.sglang_cfg.pp_size=2
eval @ -> generation.backend=sglang & generation.sglang_cfg.dp_size=2
eval @ -> generation.backend=sglang & generation.sglang_cfg.dtype=float32 & cluster.gpus_per_node=0
    & cluster.cpu_workers_per_node=2 & generation.sglang_cfg.tp_size=2
eval @ -> generation.backend=sglang & cluster.gpus_per_node=0
eval @ -> generation.backend=sglang & generation.sglang_cfg.dtype=float32 & cluster.gpus_per_node=0
    & generation.bad_words=[no]
eval @ -> generation.temperature=0 & eval.num_tests_per_prompt=4
eval @ -> data.max_input_seq_length=99999
eval @ -> eval.k_value=4
eval @data -> @.datasets=[{dataset_name: aime2024}]
eval @generation -> @.num_prompts_per_step=0
eval @generation -> @.vllm_cfg.expose_http_server=true
eval @generation -> @.backend=hf
eval @generation -> @.colocated.enabled=false
eval @generation -> @.val_temperature=0.5
eval @generation -> @.val_top_p=0.5
eval @generation -> @.val_top_k=5
"""
SHORT = {
    "BY_MEGATRON": "MEGATRON & policy.generation.backend=megatron",
    "VALUE_BY_MEGATRON": " & ".join(MEGATRON).replace("policy.", "value."),
    "MEGATRON": " & ".join(MEGATRON),
    "REINFORCE": "grpo.adv_estimator={name: reinforce_plus_plus, std: group}",
    "IS": "loss_fn.use_importance_sampling_correction=true",
    "GSPO": "loss_fn.sequence_level_importance_ratios=true & loss_fn.token_level_loss=false",
    "APART": "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}} & cluster.gpus_per_node=2",
    "HF": "policy.generation.backend=hf",
    "SGLANG": "policy.generation.backend=sglang & policy.precision=float32 & CPUS",
    "CPUS": "cluster.gpus_per_node=0 & cluster.cpu_workers_per_node=2 & policy.precision=float32",
    "REPLAY": "grpo.replay_from=/tmp & grpo.val_period=0 & grpo.val_at_end=false & checkpointing.metric_name=null",
    "EAGLE3": "policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 2}",
    "DRAFT": "policy.draft.enabled=true & cluster.gpus_per_node=2 & EAGLE3",
    "OFFLOADS": "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0",
    "PRECISE": "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true",
    "ALONE": "grpo.num_generations_per_prompt=1 & policy.train_global_batch_size=32",
}


TRANSLATED = "params_dtype != float32"
"""The one rule whose violation the translation of NeMo RL's files ends."""


@cache
def rules_with_values() -> list[tuple[tuple[str, str], str]]:
    """(kind of run, key of the section) and message of every rule whose remedy names values; each rule once."""
    found: dict[tuple[str, str], tuple[tuple[str, str], str]] = {}
    for kind, base in BASES.items():
        for section in sections_of(build_config(MASTERS[kind], base)):
            assert isinstance(section, StrictModel)
            place = (kind, section.key("").rstrip("."))
            for owner in type(section).__mro__:
                for rule, message in vars(owner).get("rules", {}).items():
                    if (" -> " in message or ";" not in message) and rule != TRANSLATED:
                        found.setdefault((rule, message), (place, message))
    return list(found.values())


def violations_of() -> dict[tuple[str, str], list[list[str]]]:
    """(kind of run, key of the section) -> overrides of every line about it."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for head, text in lines(VIOLATED):
        kind, section = head.split(" @")
        for word, whole in [*SHORT.items(), *SHORT.items()]:
            text = re.sub(rf"\b{word}\b", whole, text)
        text = text.replace("@@", section.rpartition(".")[0]).replace("@", section)
        found.setdefault((kind, section), []).append([f"++{override}" for override in text.split(" & ")])
    return found


ROWS = violations_of()


@pytest.mark.parametrize("place", ROWS, ids=" ".join)
def test_each_way_out_of_a_rule_loads(place: tuple[str, str]) -> None:
    said, wrong = [], []
    for overrides in ROWS[place]:
        run = (MASTERS[place[0]], BASES[place[0]], overrides)
        problems = problems_of_run(*run)
        said += [problem.message for problem in problems]
        wrong += misleading(*run, problems)
    assert not wrong, "\n".join(wrong)
    for key, message in rules_with_values():
        reason = re.sub(r"\\\{[^ ]*\\\}", ".*", re.escape(message.partition(" -> ")[0]))
        assert key != place or any(re.match(reason, text) for text in said), f"no line of VIOLATED violates {message!r}"
        assert key in ROWS, f"no line of VIOLATED is about {key}: {message!r}"


def test_words_of_a_remedy_name_no_value() -> None:
    for kind, base in BASES.items():
        for section in sections_of(build_config(MASTERS[kind], base)):
            for owner in type(section).__mro__:
                for message in vars(owner).get("rules", {}).values():
                    assert not re.search(r"; .*(\w=\w|set it to)", message), f"a remedy that is no data: {message!r}"


# -- Remedies of checks that see the model. A line: its type, and what it cannot do.
OF_MODELS = """
llama -> M.pipeline_model_parallel_size=4
llama -> M.pipeline_model_parallel_size=4 & M.virtual_pipeline_model_parallel_size=2
llama -> M.pipeline_model_parallel_size=2 & M.virtual_pipeline_model_parallel_size=2
llama -> M.pipeline_model_parallel_size=2 & M.num_layers_in_first_pipeline_stage=2
llama -> D.pipeline_parallel_size=4
llama -> D.pipeline_parallel_size=2 & D.pipeline={schedule:interleaved_1f1b,stages_per_rank:2}
gemma2 -> policy.padding_free=true
gemma2 -> policy.sequence_packing.enabled=true
gemma2 -> D.context_parallel_size=2
llama -> M.tensor_model_parallel_size=8
llama -> M.tensor_model_parallel_size=8 & M.sequence_parallel=true
llama -> M.expert_model_parallel_size=2
llama -> M.moe_router_load_balancing_type=aux_loss
llama -> M.moe_per_layer_logging=true
llama -> M.recompute_modules=[core_attn,mla_up_proj] & SELECTIVE
llama -> M.recompute_modules=[moe] & SELECTIVE
llama -> MEGATRON & policy.router_replay.enabled=true
llama -> M.peft.enabled=true & M.peft.dim=1000
qwen3_moe -> M.expert_model_parallel_size=8
qwen3_moe -> M.expert_tensor_parallel_size=16 & cluster.gpus_per_node=16
qwen3_moe -> M.tensor_model_parallel_size=2
qwen3_moe -> M.moe_router_bias_update_rate=0.001 & M.freeze_moe_router=false
qwen3_moe -> M.moe_shared_expert_overlap=true
qwen3_moe -> M.peft.enabled=true & M.freeze_moe_router=false
qwen3_moe -> M.peft.enabled=true & M.peft.target_modules=['*.linear_fc1']
deepseek_v3 -> M.peft.enabled=true & M.moe_shared_expert_overlap=true
gpt_oss -> M.expert_tensor_parallel_size=2
qwen3_next -> M.context_parallel_size=2
qwen3_next -> MEGATRON & policy.generation.backend=megatron
gemma3_text -> M.bias_activation_fusion=true
llama -> MEGATRON & policy.hf_config_overrides={rope_parameters:{rope_theta:1.0,rope_type:dynamic,factor:2.0}}
llama -> D.tensor_parallel_size=8
llama -> D.tensor_parallel_size=8 & D.sequence_parallel=true
llama -> D.expert_parallel_size=2
llama -> D.lora_cfg.enabled=true & D.lora_cfg.dim=1000
qwen2 -> D.pipeline_parallel_size=2
qwen2 -> D.pipeline_parallel_size=2 & D.pipeline={schedule:interleaved_1f1b,stages_per_rank:2}
qwen3_moe -> D.expert_parallel_size=8
qwen3_next -> D.context_parallel_size=2
qwen3_next -> policy.generation.backend=hf
gpt_oss -> D.expert_parallel_size=2
"""
OF_BACKENDS = {
    "SELECTIVE": "policy.megatron_cfg.activation_checkpointing=true & "
    "policy.megatron_cfg.recompute_granularity=selective",
    r"M\.(?=\w)": "policy.megatron_cfg.",
    r"D\.(?=\w)": "policy.dtensor_cfg.",
}


def refused(policy: PolicyConfig, model: Any) -> str | None:
    """The message of the check that a run makes of its model; None if it trains."""
    model.update(policy.hf_config_overrides)
    try:
        if policy.megatron_cfg.enabled:
            check_megatron_layout(policy, model)
        else:
            check_policy(policy, model, "")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("kind", "text"), lines(OF_MODELS))
def test_each_way_out_of_what_a_model_cannot_do(kind: str, text: str) -> None:
    is_megatron = "M." in text or "MEGATRON" in text
    for word, whole in OF_BACKENDS.items():
        text = re.sub(rf"\b{word}", whole, text)
    asked = [f"++{way}" for way in text.replace("MEGATRON & ", "").split(" & ")]
    overrides = ["++cluster.gpus_per_node=8", *(f"++{way}" for way in MEGATRON if is_megatron), *asked]

    def message(more: list[str]) -> str | None:
        policy = build_config(MASTERS["grpo"], BASES["grpo"], [*overrides, *more]).policy
        return refused(policy, AutoConfig.for_model(kind, **SHAPE | FAMILIES.get(kind, {})))

    said = message([])
    assert said is not None, "it trains"
    key = re.match(r"[\w.]+", said)
    assert key is not None
    ways = ways_out(Problem(tuple(key[0].split(".")), said))
    assert ways, f"no way out that is data: {said}"
    for way in ways:
        assert message([f"++{one}" for one in way]) is None, f"{said}\n  {way}"
