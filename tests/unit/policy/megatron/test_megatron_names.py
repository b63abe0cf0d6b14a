"""Megatron's own GPT model of every architecture has the parameters that the mapping says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo_rl.models.policy.megatron.mapping import ParallelRanks, heads_of, is_moe_layer, padded_vocabulary, weight_map
from tests.unit.policy.megatron.hf_models import CONFIGS, MOE, NUM_EXPERTS
from tests.worlds import run_world

pytest.importorskip("megatron.core")

SIZES = [
    {},
    {"tp": 2, "ep": 2},
    pytest.param({"tp": 2, "etp": 2}, marks=pytest.mark.slow),
    pytest.param({"pp": 2}, marks=pytest.mark.slow),
]


def megatron_config(name: str, tp: int, ep: int, etp: int, pp: int) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    model: Any = CONFIGS[name]()
    heads, groups, head_dim = heads_of(model)
    values: dict[str, Any] = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.model_type == "qwen2",
        "qk_layernorm": model.model_type not in ("llama", "mistral", "qwen2", "mixtral"),
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "sequence_parallel": tp > 1,
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "pipeline_model_parallel_size": pp,
    }
    if name in MOE:
        width = model.intermediate_size if name == "mixtral" else model.moe_intermediate_size
        layers = [int(is_moe_layer(model, layer)) for layer in range(model.num_hidden_layers)]
        values |= {
            "num_moe_experts": NUM_EXPERTS,
            "moe_ffn_hidden_size": width,
            "moe_layer_freq": layers,
            "moe_token_dispatcher_type": "alltoall",
        }
    if not name.startswith("deepseek"):
        return TransformerConfig(**values, num_query_groups=groups, kv_channels=head_dim)
    if name == "deepseek_v3":
        values |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    return MLATransformerConfig(
        **values,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        rope_type="rope",
        moe_shared_expert_intermediate_size=model.moe_intermediate_size * model.n_shared_experts,
    )


def stage_of(name: str, tp: int, ep: int, etp: int, pp: int) -> Any:
    """This rank's part of the model. Needs Megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from nemo_rl.models.policy.megatron.model import layer_specs

    config = megatron_config(name, tp, ep, etp, pp)
    model: Any = CONFIGS[name]()
    return GPTModel(
        config,
        layer_specs(config, use_transformer_engine=False, vp_stage=None),
        vocab_size=padded_vocabulary(model.vocab_size, tp),
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="none" if name.startswith("deepseek") else "rope",
    )


def tensors_of(stage: Any) -> dict[str, torch.Tensor]:
    """Parameters and the biases that choose experts, with layer numbers of the whole model."""
    first = stage.decoder.layers[0].layer_number - 1
    named = [*stage.named_parameters(), *((n, b) for n, b in stage.named_buffers() if n.endswith("expert_bias"))]
    return {re.sub(r"(?<=layers\.)\d+", lambda m: str(int(m[0]) + first), name, count=1): t for name, t in named}


def start_megatron(tp: int, ep: int, etp: int, pp: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    from nemo_rl.models.policy.megatron import cpu_shim

    cpu_shim.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def place_of(rank: int, tp: int, ep: int, etp: int, pp: int) -> ParallelRanks:
    inner = rank % (2 // pp)  # both ranks are one stage, or two
    return ParallelRanks(
        tp_rank=inner % tp,
        tp_size=tp,
        ep_rank=inner % ep,
        ep_size=ep,
        etp_rank=inner % etp,
        etp_size=etp,
    )


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("given", SIZES)
def test_names_and_shapes_are_those_of_megatron(given, is_latent):
    sizes = {"tp": 1, "ep": 1, "etp": 1, "pp": 1} | given
    names = [name for name in CONFIGS if name in MOE or sizes["ep"] == 1]
    names = [name for name in names if name.startswith("deepseek") == is_latent]

    def on_rank(rank: int, world_size: int) -> dict[str, list[str]]:
        start_megatron(**sizes)
        found = {}
        for name in names:
            place = place_of(rank, **sizes)
            held = weight_map(CONFIGS[name](), implementation="local").on_rank(place)
            tensors = tensors_of(stage_of(name, **sizes))
            for key, tensor in tensors.items():
                entry = held[key]
                assert tuple(tensor.shape) == entry.shard_shape(entry.rank_and_size(place)[1]), key
            found[name] = list(tensors)
        return found

    ranks = run_world(on_rank, 2 if given else 1)
    for name in names:
        mapping = weight_map(CONFIGS[name](), implementation="local")
        want = mapping.on_rank(place_of(0, **sizes)).keys()
        if mapping.is_tied and sizes["pp"] == 1:
            want = want - {"output_layer.weight"}
        assert set().union(*(rank[name] for rank in ranks)) == want
