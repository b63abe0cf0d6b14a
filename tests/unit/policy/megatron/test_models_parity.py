"""Every architecture and setting of a model that the mapping knows: logprobs and a step as the other backend."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.policy.megatron.hf_models import random_model
from tests.unit.policy.megatron.parity import Layout, assert_equal, cut
from tests.unit.policy.models import VOCAB

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
GREEDY = GROUPS | {"q_lora_rank": 16, "topk_method": "group_limited_greedy"}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "window": ("mistral", {"sliding_window": 5}),
    "window-by-layer": ("qwen2", WINDOWS),
    "mixtral": ("mixtral", {"sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v2": ("deepseek_v2", {"rms_norm_eps": 1e-3, "routed_scaling_factor": 1.5}),
    "deepseek_v2-groups": ("deepseek_v2", GREEDY | {"rope_parameters": LATENT_YARN}),
    "latent-dense": ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3-groups": ("deepseek_v3", GROUPS | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN}),
    "gemma3_text": ("gemma3_text", {"final_logit_softcapping": 8.0}),
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 1.0, "rope_parameters": YARN | {"truncate": False}}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5}),
    "glm4_moe-plain": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
}
WHOLE = cut("tp2") | {"sequence_parallel": False}
TWO_RANKS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [cut("tp2")],
    "deepseek_v3": [cut("pp2"), cut("cp2")],
    "window-by-layer": [cut("tp2"), cut("pp2")],
    "deepseek_v2-groups": [cut("ep2")],
    "deepseek_v3-groups": [cut("tp2 ep2")],
    "mixtral": [cut("tp2 etp2")],
    "latent-dense": [WHOLE],
    "yarn": [WHOLE],
    "gemma3_text": [cut("tp2"), cut("cp2")],
    "gpt_oss": [cut("tp2 ep2"), cut("cp2")],
    "qwen3_next": [cut("tp2 ep2"), cut("pp2")],
    "glm4_moe": [cut("tp2 ep2")],
}
DEFAULT = ("deepseek_v3-groups", "mixtral", "window-by-layer")
SLOW = [(name, 1, {}) for name in MODELS if name not in DEFAULT]
SLOW += [(name, 2, layout) for name, layouts in TWO_RANKS.items() for layout in layouts]


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [*((name, 1, {}) for name in DEFAULT), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_step_is_that_of_the_other_backend(name: str, world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """From the same weights, on the same rollouts."""
    family, changes = MODELS[name]
    random_model(family, vocab_size=VOCAB, **changes).save_pretrained(tmp_path)
    assert_equal(tmp_path, [Layout(world=world, megatron=layout)], grad_norm=1e-4)
