"""Sequences of one row stay apart: against each sequence alone, in transformers' own eager attention."""

import copy
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.attention import ATTENTION, CuSeqlens, attention_implementation, unpackable_reason
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.token_mixers import isolate_sequences
from tests.unit.policy import models
from tests.unit.policy.families import family_config
from tests.worlds import run_world

SHAPE = models.SHAPE | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "bos_token_id": 1}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "qwen2": AutoConfig.for_model("qwen2", **SHAPE),
    "qwen2 with a window": AutoConfig.for_model("qwen2", **SHAPE, use_sliding_window=True, **MIXED),
    "llama": AutoConfig.for_model("llama", **SHAPE),
    "gemma3": AutoConfig.for_model("gemma3_text", **SHAPE, **MIXED),
    "mistral": AutoConfig.for_model("mistral", **SHAPE, sliding_window=5),
    "gemma2": AutoConfig.for_model("gemma2", **SHAPE, **MIXED, attn_logit_softcapping=2.0),  # is not packed
    **{name: family_config(name) for name in ("gpt_oss", "glm4_moe", *attention.OTHER_MIXERS)},
}
LENGTHS = [19, 1, 2, 70, 7, 7, 7, 30, 1, 1, 4]


def build(config: PretrainedConfig, implementation: str) -> PreTrainedModel:
    """The same weights every time, none of them hidden behind 0 or 1. No head: a model that sees may have none."""
    torch.manual_seed(0)
    # A copy: the model writes the name of the implementation into its configuration.
    model = AutoModel.from_config(copy.deepcopy(config), attn_implementation=implementation, dtype=torch.float32)
    models.perturb(model, 0.1)
    return model.eval()


def sequences(lengths: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, models.VOCAB, (length,), generator=random) for length in lengths]
    return [(own, torch.ones(len(own), dtype=torch.bool)) for own in ids]


def states_alone(model: PreTrainedModel, lengths: list[int]) -> torch.Tensor:
    """States that predict a token, each sequence in a forward of its own. [N, H]"""
    alone = [model.base_model(input_ids=ids[None], use_cache=False) for ids, _ in sequences(lengths)]
    return torch.cat([out.last_hidden_state[0, :-1] for out in alone])


def states_together(model: PreTrainedModel, batch: ModelBatch, *, drop_segments: bool = False) -> torch.Tensor:
    segments = None if drop_segments else batch.cu_seqlens
    how = {"position_ids": batch.position_ids, "cu_seqlens": segments, "use_cache": False}
    return model.base_model(input_ids=batch.input_ids, **how).last_hidden_state.flatten(0, 1)[batch.states]


def packed(lengths: list[int], divisible_by: int = 1) -> ModelBatch:
    return RowLayout(padding_free=True, divisible_by=divisible_by).build(sequences(lengths))


def gradients(model: PreTrainedModel, states: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    (states * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_equal_those_of_each_sequence_alone_and_leak_without_segments(family):
    config, can_pack = FAMILIES[family], family != "gemma2"
    assert (unpackable_reason(config) is None) == can_pack
    alone, together = build(config, "eager"), build(config, attention_implementation(config))
    isolate_sequences(together)
    for model in (alone, together):
        # In float64, in which rounding hides no leak: in float32 some tokens amplify it to 1e-5.
        model.double().set_experts_implementation("eager")  # torch multiplies groups of matrices in float32 at most
    expected = states_alone(alone, LENGTHS)
    expected_gradients = gradients(alone, expected)
    for padding_free in {False, can_pack}:
        batch = RowLayout(padding_free=padding_free, divisible_by=16).build(sequences(LENGTHS))
        actual = states_together(together, batch)
        assert (actual - expected).abs().max() < 1e-6 * expected.abs().max()  # norms and delta nets are float32
        together.zero_grad()
        assert_same_gradients(gradients(together, actual), expected_gradients)
    if can_pack:
        leaked = states_together(together, packed(LENGTHS), drop_segments=True)
        assert (leaked - expected)[: LENGTHS[0] - 1].abs().max() < 1e-4  # the first sequence has nothing before it
        assert (leaked - expected)[LENGTHS[0] :].abs().max() > 0.01


@pytest.mark.parametrize("family", [family for family in FAMILIES if attention.can_share_prompts(FAMILIES[family])])
def test_a_shared_prompt_gives_the_states_and_gradients_of_whole_sequences(family):
    prompts = [ids for ids, _ in sequences([9, 4, 9, 6])]  # one sequence has the last for itself
    answers = iter(sequences([5, 1, 12, 5, 3, 7, 2, 6]))
    together = [(torch.cat([prompts[k], next(answers)[0]]), len(prompts[k])) for k in (0, 1, 0, 2, 1, 0, 2, 3)]
    rows = [(ids, torch.arange(len(ids)) >= length) for ids, length in together]
    found, scored = [], []
    for shares in (False, True):
        model = build(FAMILIES[family], ATTENTION)
        batch = RowLayout(padding_free=True, shares_prompts=shares, divisible_by=4).build(rows)
        states = states_together(model, batch)
        found.append((batch.input_ids.numel(), states, gradients(model, states)))
        scored.append([batch.targets.tolist(), batch.rows.tolist(), batch.positions.tolist(), batch.shape])
    assert scored[0] == scored[1]
    (whole, expected, expected_grads), (tokens, states, grads) = found
    assert (whole, tokens) == (100, 72), "each prompt is there once: 2 * 9 + 4 + 9 tokens less, and 3 of padding"
    alone = RowLayout(padding_free=True, shares_prompts=True).build(sequences([3, 1]))
    assert alone.cu_seqlens is not None and alone.cu_seqlens.key_index is None, "nothing is shared"
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert_same_gradients(grads, expected_grads)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 0, 1, 7]), st.integers(1, 3)), min_size=1, max_size=6
    ),
    window=st.sampled_from([None, 1, 2, 5, 100]),
    key_heads=st.sampled_from([1, 2, 4]),
    value_width=st.sampled_from([8, 4]),
)
def test_every_query_sees_its_keys_and_no_others(lengths, window, key_heads, value_width):
    query_lengths = [q for q, _, count in lengths for _ in range(count)]
    key_lengths = [q + more for q, more, count in lengths for _ in range(count)]
    cu_seqlens = CuSeqlens.of(query_lengths, key_lengths)
    generator = torch.Generator().manual_seed(sum(key_lengths))
    query = torch.randn(1, 4, sum(query_lengths), 8, generator=generator)
    key = torch.randn(1, key_heads, sum(key_lengths), 8, generator=generator)
    value = torch.randn(1, key_heads, sum(key_lengths), value_width, generator=generator)
    how = {"scaling": 0.3, "sliding_window": window, "cu_seqlens": cu_seqlens}
    out, _ = attention.attention(nn.Identity(), query, key, value, None, **how)

    # Softmax under one mask over all queries and keys of the row.
    blocks = []
    for q, k in zip(query_lengths, key_lengths, strict=True):
        seen = torch.ones(q, k, dtype=torch.bool).tril(k - q)
        blocks.append(seen if window is None else seen.triu(k - q - window + 1))
    keys, values = (x[0].repeat_interleave(4 // key_heads, 0) for x in (key, value))
    scores = (query[0] @ keys.mT * 0.3).masked_fill(~torch.block_diag(*blocks).bool(), float("-inf"))
    torch.testing.assert_close(out, (scores.softmax(-1) @ values).transpose(0, 1)[None], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason", "implementation"),
    [
        ("gemma2", {}, "soft-capped", "eager"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "layers of type conv", "sdpa"),
        ("jamba", {}, "a state from token to token", "sdpa"),
        ("nemotron", {}, "none of the architectures known", "sdpa"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal", "sdpa"),
    ],
)
def test_architectures_whose_tokens_meet_elsewhere_are_refused(
    model_type: str, changes: dict[str, object], reason: str, implementation: str
) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    assert reason in str(unpackable_reason(config))
    assert attention_implementation(config) == implementation


def test_a_model_with_images_is_judged_by_the_text_model_inside() -> None:
    assert unpackable_reason(AutoConfig.for_model("gemma3")) is None, "judged by the text model inside"


def frames_compiled(rank: int, world_size: int) -> list[int]:
    """After each of five batches, which have the states of a model that is not compiled."""
    model, compiled = build(FAMILIES["llama"], ATTENTION), build(FAMILIES["llama"], ATTENTION)
    counter = CompileCounter()
    for layer in cast(nn.ModuleList, compiled.base_model.layers):
        layer.compile(backend=counter)
    frames = []
    for lengths in ([5, 7, 9], [6, 6, 20, 1], [30], [8, 2, 2, 2, 2], [11, 13]):
        batch = packed(lengths)
        torch.testing.assert_close(states_together(compiled, batch), states_together(model, batch))
        frames.append(counter.frame_count)
    return frames


@pytest.mark.slow
def test_compiled_layers_do_not_compile_anew_for_other_lengths():
    # In a process of its own: a process that has compiled cannot fork ranks that train.
    [frames] = run_world(frames_compiled, 1)
    assert frames[1] == frames[-1]  # once for the first shape, once for any


def shrunk(model_type: str) -> PretrainedConfig:
    """The architecture's own configuration with every size small and every kind of its layers."""
    config_class = next(c for c in MODEL_MAPPING if c.model_type == model_type)
    usual = config_class()
    known = {**usual.to_dict(), **dict.fromkeys(config_class.attribute_map)}
    small = {
        **SHAPE,
        **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2},
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4},
        **{"ffn_dim": 48, "word_embed_proj_dim": 32},
    }
    if "qk_rope_head_dim" in known:  # latent attention
        del small["head_dim"]
        small["num_key_value_heads"] = 4
    if known.get("sliding_window") is not None:
        small["sliding_window"] = 5
    if model_type.endswith("_vl_text"):
        small["rope_parameters"] = known["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    if known.get("layer_types"):
        kinds = list(dict.fromkeys(known["layer_types"]))
        small["layer_types"] = (kinds * 2)[:2]
    return config_class(**{key: value for key, value in small.items() if key in known})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(attention.PACKABLE_ARCHITECTURES))
def test_every_architecture_that_is_let_through_keeps_sequences_apart(model_type):
    config = shrunk(model_type)
    sees = model_type.endswith("_vl_text")  # judged with the tower around it
    assert unpackable_reason(AutoConfig.for_model(model_type.removesuffix("_text")) if sees else config) is None
    with torch.no_grad():
        expected = states_alone(build(config, "eager"), LENGTHS)
        actual = states_together(build(config, ATTENTION), packed(LENGTHS, divisible_by=8))
        dropped = states_together(build(config, ATTENTION), packed(LENGTHS), drop_segments=True)
    scale = expected.abs().max()
    assert (actual - expected).abs().max() < 1e-5 * scale
    assert (dropped - expected).abs().max() > 1e-2 * scale


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_segments_equal_the_cpu_and_nothing_waits(dtype, window, sinks):
    cu_seqlens = CuSeqlens.of([19, 1, 2, 7, 7, 30], [19, 1, 12, 7, 9, 30])
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 66, 64), (1, 2, 78, 64), (1, 2, 78, 64), *([(4,)] if sinks else [])]
    *states, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, (1, 66, 4, 64)))

    def run(device: str, compute: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(device, compute, copy=True).requires_grad_() for x in states]
        segments, grads = attention.moved(cu_seqlens, lambda tensor: tensor.to(device)), grad.to(device, compute)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            how = {"scaling": 0.3, "sliding_window": window, "s_aux": inputs[3] if sinks else None}
            out, _ = attention.attention(nn.Identity(), *inputs[:3], None, cu_seqlens=segments, **how)
            out.backward(grads)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [x.float().cpu() for x in (out.detach(), *(x.grad for x in inputs if x.grad is not None))]

    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for actual, expected in zip(run("cuda", dtype), run("cpu", torch.float32), strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.gpu
def test_on_a_gpu_a_padded_batch_with_a_window_equals_the_cpu():
    query = torch.randn(3, 4, 33, 64).bfloat16()
    out, _ = attention.attention(nn.Identity(), query.cuda(), query.cuda(), query.cuda(), None, sliding_window=5)
    expected, _ = attention.attention(nn.Identity(), *[query.float()] * 3, None, sliding_window=5)
    assert (out.cpu().float() - expected).norm() <= 2e-2 * expected.norm()
