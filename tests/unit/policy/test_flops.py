"""Counted operations against formulas from papers and torch's own counter, and seconds predicted from them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.data.chat.images import process_image
from nemo_rl.data.datasets.shapes import draw
from nemo_rl.data.tiny_model import build_processor, build_untrained_model
from nemo_rl.models.policy import flops as counts
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig
from nemo_rl.models.policy.dtensor.lora import frozen_parts
from nemo_rl.models.policy.flops import GENERATION, LOGPROBS, SYNC, TRAINING, Gpu, Layout, ModelFlops, Work, predict
from nemo_rl.models.policy.layout import Share
from tests.tables import cases
from tests.unit.config.run_configs import CONFIGS
from tests.unit.policy.models import SHAPE
from tests.unit.policy.steps import policy_config
from tests.unit.policy.test_vision import shapes

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def flops_of(model_type: str, **settings: Any) -> ModelFlops:
    return ModelFlops.of(AutoConfig.for_model(model_type, **SHAPE | settings))


def test_linear_layers_are_what_torch_counts() -> None:
    config, length = AutoConfig.for_model("llama", **SHAPE), 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.int64), use_cache=False)
    counted = ModelFlops.of(config)
    attention = counted.per_pair * len(counted.windows) * length**2  # torch computes, and counts, all pairs
    assert counter.get_total_flops() == counted.per_token * length + attention


DEVICES = {  # of data sheets: dense bfloat16 operations per second, GB
    "H100 80GB HBM3": (989.4e12, 80),
    "A100-SXM4-80GB": (312e12, 80),
    "A100-SXM4-40GB": (312e12, 40),
    "L40S": (362e12, 48),
    "L4": (121e12, 24),
}


@pytest.mark.parametrize("name", DEVICES)
def test_known_devices(name: str) -> None:
    gpu = counts.find_gpu(f"NVIDIA {name}")
    assert gpu is not None and (gpu.flops, gpu.memory_gb) == DEVICES[name]


@pytest.mark.parametrize("name", ["a CPU", "NVIDIA L40", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"])
def test_devices_that_only_sound_like_known_ones(name: str) -> None:
    assert counts.find_gpu(name) is None


def test_a_known_model_has_the_parameters_of_its_card_and_a_cache() -> None:
    shape = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    qwen = flops_of("qwen2", **shape, num_attention_heads=28, num_key_value_heads=4)
    assert qwen.num_parameters == 7_615_616_512  # as its card says: 7.61 billion
    assert qwen.cache_size == 28 * 2 * 4 * 128
    assert flops_of("deepseek_v3", kv_lora_rank=16, qk_rope_head_dim=8).cache_size == 2 * (16 + 8)


def test_the_tower_and_the_projector_count_by_pixels_of_the_images() -> None:
    recipe, tokenizer = shapes()
    model = build_untrained_model(recipe, tokenizer)
    made, _ = process_image(build_processor(recipe, tokenizer), draw("red circle 0"))  # 36 patches
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.get_image_features(**{name: torch.from_numpy(value) for name, value in made.items()})
    flops = ModelFlops.of(model.config)
    tower, patches = flops.tower, 36
    assert tower is not None and tower.patch_pixels == 8 * 8
    assert counter.get_total_flops() == tower.per_patch * patches  # torch does not count this kernel of attention
    seen = tower.forward(patches * 64)
    assert seen == tower.per_patch * patches + tower.per_pair * patches * (16 + 36)  # a window, and the whole image
    text = flops.train([50])
    assert flops.train([50], [patches * 64]) == text + 3 * seen

    def trained(**policy: Any) -> float:
        config = policy_config(**policy)
        counted = ModelFlops.of(model.config, frozen_parts(config, model.config))
        return counted.train([50], [patches * 64], has_adapters=config.adapters.enabled)

    def adapted(*layers: str) -> float:
        adapters = LoRAConfig(enabled=True, dim=4, match_all_linear=False, target_modules=list(layers))
        return trained(dtensor_cfg=DTensorConfig(lora_cfg=adapters))

    of_weights = 50 * flops.per_token  # their gradient
    assert trained(freeze=["vision_tower"]) == text + seen
    assert trained(freeze=["language_model"]) == text - of_weights + 3 * seen
    assert adapted("*language_model*") == text - of_weights + seen, "nothing goes back through the tower"
    assert adapted("*visual.blocks*") == text - of_weights + 2 * seen
    assert flops.cost_weights["pixel_weight"] == tower.per_patch / 64 / flops.per_token


def test_only_the_experts_of_a_token_count() -> None:
    def per_token(number: int, chosen: int) -> float:
        moe = EXPERTS | {"head_dim": 8, "num_local_experts": number, "num_experts_per_tok": chosen}
        return flops_of("qwen3_moe", **moe).per_token

    assert per_token(16, 2) - per_token(8, 2) == 2 * 2 * 8 * 64, "the router"
    assert per_token(8, 8) - per_token(8, 2) == 2 * 2 * 6 * 3 * 16 * 64


def test_sliding_windows_count_what_they_see() -> None:
    layers = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    for name, settings, windows in (("mistral", {}, [4, 4]), ("gemma3_text", layers, [4, None])):
        flops, length = flops_of(name, sliding_window=4, **settings), 10
        assert list(flops.windows) == windows
        pairs = {None: sum(range(1, length + 1)), 4: sum(min(i, 4) for i in range(1, length + 1))}
        expected = flops.per_token * length + sum(flops.per_pair * pairs[window] for window in flops.windows)
        assert flops.forward(length) == expected


def test_a_squared_token_has_its_weight_and_frozen_weights_need_no_gradient() -> None:
    flops, length = flops_of("llama"), 4096
    approximation = flops.per_token * (length + flops.quadratic_weight * length**2)
    assert flops.forward(length) == pytest.approx(approximation, rel=1e-3)
    assert flops.train([3, 5]) == 3 * (flops.forward(3) + flops.forward(5)), "a backward pass is two forward passes"
    assert flops.train([3, 5]) - flops.train([3, 5], has_adapters=True) == 8 * flops.per_token
    assert flops.train([3, 5], forward_only_share=1.0) == flops.forward(3) + flops.forward(5)
    assert not flops.has_experts and flops_of("qwen3_moe", **EXPERTS, head_dim=8, num_local_experts=4).has_experts


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("ernie4_5_moe", {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v3", EXPERTS | {"n_routed_experts": 8}),
    ],
)
def test_architectures_that_have_names_of_their_own(model_type: str, settings: dict[str, Any]) -> None:
    assert flops_of(model_type, **settings).train([8]) > 0, model_type


def test_linear_attention_has_no_pairs_and_its_convolution_counts() -> None:
    layers = {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    layers |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    moe = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
    for model_type, settings in (("qwen3_5_text", layers), ("qwen3_next", layers | moe)):
        flops, wider = (flops_of(model_type, **settings, linear_conv_kernel_dim=width) for width in (4, 5))
        assert flops.windows == (None,) and flops.per_pair == 2 * 4 * 2 * 8
        assert flops.forward(9) - flops.forward(8) == flops.per_token + 9 * flops.per_pair
        assert wider.per_token - flops.per_token == 2 * 3 * 16  # queries, keys and values of one layer
    flops = ModelFlops.of(AutoConfig.for_model("mamba2", hidden_size=64, num_hidden_layers=2, num_heads=16, head_dim=8))
    assert (flops.windows, flops.quadratic_weight) == ((), 0) and flops.forward(8) == 8 * flops.per_token > 0


# -- seconds, against sums by hand, and in which direction each quantity moves them


# A million parameters, round rates: every time can be read off.
MODEL = ModelFlops(per_token=2e6, per_pair=0.0, windows=(None,), num_parameters=1_000_000, expert_parameters=0,
                   cache_size=100)  # fmt: skip
GPU = Gpu(flops=1e12, memory=1e10, memory_gb=10, link=1e9, host=1e8)
LAYOUT = Layout(
    training_gpus=4, generation_gpus=4, engine_gpus=1, master_bytes=4,
    share=Share(whole=1e6, own=0.25e6, optimized=0.25e6, experts=0.0),
    engine_memory=0.5, colocated=True, is_frozen=False, recomputes=False, weight_passes=2,
)  # fmt: skip
WORK = Work(lengths=[1000] * 400, generated=[500] * 400, prompts=100, logprob_passes=2, reference_passes=1)


def ideal(layout: Layout = LAYOUT, work: Work = WORK, model: ModelFlops = MODEL) -> dict[str, float]:
    return predict(model, GPU, layout, work, counts.IDEAL)


def test_every_phase_is_the_sum_by_hand():
    phases = ideal()
    # 500 engine steps; each reads 2 MB of weights, and 100 sequences a replica read 200 bytes of cache for 750 tokens.
    assert phases[GENERATION] == pytest.approx(500 * (2e6 + 100 * 200 * 750) / 1e10)
    moved = (1e6 / 4) * (4 + 8)
    swapped = (1e6 / 4) * (2 + 2 * 4)
    assert phases[LOGPROBS] == pytest.approx(2 * 400e3 * 2e6 / 4e12 + swapped / 1e8 + moved / 1e8)
    # Gathering 0.75e6 weights of 2 bytes twice for each of two micro-batches, and reducing their gradients once.
    assert phases[TRAINING] == pytest.approx(max(3 * 400e3 * 2e6 / 4e12, 0.75e6 * (8 + 4) / 1e9) + 0.25e6 * 28 / 1e10)
    assert phases[SYNC] == pytest.approx(0.75e6 * 2 / 1e9 + 6 * 2e6 / 1e10 + moved / 1e8)


def test_what_a_phase_waits_for():
    slow = replace(LAYOUT, weight_passes=1000)
    assert ideal(slow)[TRAINING] == pytest.approx(0.75e6 * (4 * 1000 + 4) / 1e9 + 0.25e6 * 28 / 1e10)
    long = replace(WORK, generated=[500] * 399 + [900])
    assert ideal(work=long)[GENERATION] > ideal()[GENERATION], "the longest sample ends generation"
    apart = ideal(replace(LAYOUT, colocated=False))
    assert apart[LOGPROBS] < ideal()[LOGPROBS] and TRAINING in apart, "nothing moves to the host and back"
    adapters = ideal(replace(LAYOUT, is_frozen=True))
    assert all(adapters[phase] < ideal()[phase] for phase in (LOGPROBS, TRAINING, SYNC))
    assert ideal(replace(LAYOUT, recomputes=True))[TRAINING] > ideal()[TRAINING]
    once = ideal(work=replace(WORK, logprob_passes=0, reference_passes=0))
    assert LOGPROBS not in once and once[TRAINING] > ideal()[TRAINING], "the first phase brings weights and optimizer"


LAYOUTS = """
grpo.seed=0 -> 80 10 10 4 10
policy.dtensor_cfg.dp_replicate_size=2 & policy.master_precision=bfloat16 -> 80 20 20 2 10
policy.dtensor_cfg.expert_parallel_size=4 -> 35 10 10 4 10
policy.dtensor_cfg.pipeline_parallel_size=2 & policy.dtensor_cfg.tensor_parallel_size=2 -> 35 17.5 17.5 4 40
policy.sequence_packing={enabled: false, train_mb_tokens: 1024}
    & policy.dynamic_batching={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192} -> 80 10 10 4 10
policy.dtensor_cfg.enabled=false & policy.optimizer=null & policy.scheduler=null
    & policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 2} -> 70 70 10 2 20
policy.dtensor_cfg.enabled=false & policy.optimizer=null & policy.scheduler=null
    & policy.megatron_cfg={enabled: true, expert_model_parallel_size: 4} -> 35 35 10 2 10
"""


@pytest.mark.parametrize(("overrides", "numbers"), cases(LAYOUTS))
def test_a_configuration_gives_shares_of_weights_and_optimizer_bytes_of_a_weight_and_passes(overrides, numbers):
    """Of 80 weights, 60 of them in experts."""
    recipe = CONFIGS / "recipes/llm/grpo-qwen2.5-7b-instruct-1n8g.yaml"
    model = replace(MODEL, num_parameters=80, expert_parameters=60)
    layout = Layout.of(load_config(GRPOMasterConfig, recipe, overrides).policy, model, 8, 8, 8192 * 80)
    assert (layout.training_gpus, layout.generation_gpus, layout.colocated) == (8, 8, True)
    share = layout.share
    found = share.whole, share.own, share.optimized, layout.master_bytes, layout.weight_passes
    assert numbers == " ".join(f"{number:g}" for number in found)
