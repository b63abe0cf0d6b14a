"""Hugging Face tensors and their parts on Megatron's ranks, without Megatron."""

import itertools

import pytest
import torch
from transformers import LlamaConfig

from nemo_rl.models.policy.megatron.mapping import OUTPUT_LAYER, ParallelRanks, WeightMap, weight_map
from tests.unit.policy.megatron.hf_models import FAMILIES, NUM_EXPERTS, config_of
from tests.unit.policy.megatron.test_weights import on_disk


def mapped(name: str, *, use_transformer_engine: bool = False) -> WeightMap:
    return weight_map(config_of(name), use_transformer_engine=use_transformer_engine)


@pytest.mark.parametrize("use_transformer_engine", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_on_disk_and_what_is_cut_joins_to_the_same_bits(saved, name, use_transformer_engine):
    mapping, stored = mapped(name, use_transformer_engine=use_transformer_engine), on_disk(saved[name])
    mapping.locate(stored)
    assert {t.name: t.shape for t in mapping.hf_tensors} == {name: tuple(t.shape) for name, t in stored.items()}
    assert len(mapping.hf_tensors) == len(stored)
    names = [entry.template.format(expert=entry.expert) for entry in mapping.entries]
    assert len(names) == len(set(names))
    for entry, size in itertools.product(mapping.entries, (1, 2, 4)):
        sources = [stored[source.name] for source in entry.sources]
        shards = [entry.shard(sources, rank, size) for rank in range(size)]
        assert all(tuple(shard.shape) == entry.shard_shape(size) for shard in shards)
        joined = [torch.empty_like(source) for source in sources]
        for rank, shard in enumerate(shards):
            for part in entry.slices(rank, size):
                held = shard.narrow(part.dim, part.at, part.length)
                joined[part.source].narrow(part.dim, part.start, part.length).copy_(held)
        assert all(map(torch.equal, sources, joined)), entry.template


def test_tokens_are_padded_with_zero_rows_and_a_rank_without_a_token_is_refused(saved):
    entry = mapped("llama").on_rank(ParallelRanks())["embedding.word_embeddings.weight"]
    embedding = on_disk(saved["llama"])["model.embed_tokens.weight"]
    last = entry.shard([embedding], 3, 4)
    assert torch.equal(last[:13], embedding[48:]) and torch.count_nonzero(last[13:]) == 0
    with pytest.raises(ValueError, match=r"5 tokens leaves the last of 4 .* lower .*tensor_model_parallel_size"):
        weight_map(config_of("llama", vocab_size=5)).on_rank(ParallelRanks())[OUTPUT_LAYER].shard_shape(4)


@pytest.mark.parametrize(("name", "theirs"), [("qwen3_moe", "gate_proj"), ("mixtral", "w1")])
def test_experts_are_numbered_per_rank(name, theirs):
    for is_grouped, ours in ((False, "local_experts.1.linear_fc1.weight"), (True, "linear_fc1.weight1")):
        mapping = weight_map(config_of(name), use_transformer_engine=True, grouped_experts=is_grouped)
        entry = mapping.on_rank(ParallelRanks(ep_rank=1, ep_size=2))[f"decoder.layers.1.mlp.experts.{ours}"]
        assert entry.expert == 3 and entry.sources[0].name.endswith(f".experts.3.{theirs}.weight")


def test_norms_are_fused_into_the_layer_behind_them_by_transformer_engine():
    attention, mlp = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
    in_front_of_experts = "decoder.layers.1.pre_mlp_layernorm.weight"
    fused = {f"{attention}.linear_qkv.layer_norm_weight", f"{mlp}.linear_fc1.layer_norm_weight", in_front_of_experts}
    latent = {f"{attention}.linear_{part}_up_proj.layer_norm_weight" for part in ("q", "kv")}
    latent.add("decoder.layers.0.input_layernorm.weight")
    for name, norms in (("qwen3_moe", fused), ("deepseek_v3", latent)):
        assert norms <= mapped(name, use_transformer_engine=True).on_rank(ParallelRanks()).keys()


def test_a_base_model_saved_alone_and_tensors_without_meaning_are_accepted(saved):
    qwen, deepseek, llama = (on_disk(saved[name]) for name in ("qwen2", "deepseek_v3", "llama"))
    mapped("qwen2").locate(name.removeprefix("model.") for name in qwen)
    mapped("qwen2").locate({*qwen, "lm_head.weight"})
    mapped("deepseek_v3").locate({*deepseek, "model.layers.2.eh_proj.weight"})
    with pytest.raises(ValueError, match=r"unknown are model\.layers\.2\.eh_proj"):
        mapped("llama").locate({*llama, "model.layers.2.eh_proj.weight"})


def test_what_has_no_mapping_or_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="attention_bias: True of a llama model"):
        weight_map(LlamaConfig(attention_bias=True))
    with pytest.raises(ValueError, match=r"q_proj\.weight: 64 rows .* 3 ranks"):
        mapped("llama").on_rank(ParallelRanks())["decoder.layers.0.self_attention.linear_qkv.weight"].shard_shape(3)
    with pytest.raises(ValueError, match=f"{NUM_EXPERTS} experts .* 3 expert parallel ranks"):
        mapped("mixtral").on_rank(ParallelRanks(ep_size=3))
