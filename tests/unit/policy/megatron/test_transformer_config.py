"""What of a model's configuration has no equal in Megatron is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.transformer_config import transformer_config
from nemo_rl.models.policy.megatron.worker import uses_transformer_engine
from tests.unit.policy.megatron.hf_models import CONFIGS
from tests.unit.policy.steps import policy_config


def policy() -> PolicyConfig:
    megatron = MegatronConfig(enabled=True)
    return policy_config(
        dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=megatron, optimizer=None, padding_free=None
    )


def configured(name: str, changes: dict[str, Any], *, use_transformer_engine: bool = False) -> Any:
    given = CONFIGS[name]()
    model = type(given)(**{**given.to_dict(), **changes})
    return transformer_config(model, policy(), use_transformer_engine=use_transformer_engine)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2-tied", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: chunked_attention"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: noaux_tc .* needs greedy or group"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob: False .* needs true"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1 .* needs 2 or more"),
    ],
)
def test_settings_without_an_equal_are_refused(name, changes, message):
    if "layer_types" in changes:
        changes = changes | {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ValueError, match=message):
        configured(name, changes)


def test_the_norms_of_latents_have_an_epsilon_of_their_own():
    configured("deepseek_v3", {"rms_norm_eps": 1e-5})
    with pytest.raises(ValueError, match=r"rms_norm_eps=1e-05 .*transformer_impl to local"):
        configured("deepseek_v3", {"rms_norm_eps": 1e-5}, use_transformer_engine=True)


def test_layers_without_experts_make_a_dense_model():
    assert configured("deepseek_v3", {"first_k_dense_replace": 2}).num_moe_experts is None


def test_transformer_engine_is_for_gpus():
    assert not uses_transformer_engine(MegatronConfig(), use_gpu=False)
    assert not uses_transformer_engine(MegatronConfig(transformer_impl="local"), use_gpu=True)
    with pytest.raises(ValueError, match=r"transformer_impl=transformer_engine: .* runs on GPUs only; set it to local"):
        uses_transformer_engine(MegatronConfig(transformer_impl="transformer_engine"), use_gpu=False)
