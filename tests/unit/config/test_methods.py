"""Recipes of methods: each dry-runs, holds together, and has a twin that a machine without a GPU can run."""

from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.config.sources import load_tree
from tests.unit.config.run_configs import CONFIGS, ROOT
from tests.unit.config.test_recipes import dry_run

RECIPES = sorted((CONFIGS / "recipes" / "methods").glob("*.yaml"))
# Scripts of what is not a run of run_grpo_math.py, and has a twin in examples/configs.
OTHERS = {"sft-megatron-llama3.1-8b-1n8g": "run_sft", "distillation-megatron-qwen3-1.7b-1n8g": "run_distillation"}
LARGE = ("grpo-llama3.3-70b-instruct-16k-8n8g", "grpo-qwen3-235ba22b-24n8g")
GRPO = [path for path in RECIPES if path.stem not in OTHERS] + [CONFIGS / f"recipes/llm/{name}.yaml" for name in LARGE]

# The rest of a recipe is about models, machines and lengths, which a twin has from grpo_math_cpu.yaml.
METHOD_KEYS = (
    *("normalize_rewards", "use_leave_one_out_baseline", "adv_estimator", "use_dynamic_sampling", "batch_multiplier"),
    *("overlong_filtering", "reward_shaping", "reward_scaling", "async_grpo"),
)
load = cache(partial(load_config, GRPOMasterConfig))


def twin(recipe: Path) -> dict[str, Any]:
    """The method of a GRPO recipe on a tiny model: sections that go on top of grpo_math_cpu.yaml."""
    values, policy = load_tree(recipe).values, load(recipe).policy
    grpo = {key: value for key, value in values["grpo"].items() if key in METHOD_KEYS}
    loss = dict(values["loss_fn"])
    sections: dict[str, Any] = {"defaults": str(CONFIGS / "grpo_math_cpu.yaml"), "grpo": grpo, "loss_fn": loss}
    grpo["skip_reference_policy_logprobs_calculation"] = loss["reference_policy_kl_penalty"] <= 0
    if "reward_shaping" in grpo:
        grpo["reward_shaping"] |= {"max_response_length": 16, "overlong_buffer_length": 4}
    if "length_normalizer" in loss:
        loss["length_normalizer"] = 16
    axes = ("context_parallel_size", "tensor_parallel_size")
    cut = {axis: 2 for axis in axes if vars(policy.dtensor_cfg)[axis] > 1}
    if policy.megatron_cfg.enabled:  # stages and experts on four ranks, and an engine apart
        sections["defaults"] = str(CONFIGS / "grpo_math_megatron_cpu.yaml")
        cut = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
        apart = {"colocated": {"enabled": False, "resources": {"cpu_workers_per_node": 1}}}
        sections["policy"] = {"model_name": "tiny:arithmetic-moe", "megatron_cfg": cut, "generation": apart}
        sections["cluster"] = {"cpu_workers_per_node": 5}
    elif cut:
        sections["policy"] = {"dtensor_cfg": cut, "sequence_packing": {"enabled": True}}
        sections["cluster"] = {"cpu_workers_per_node": 2 ** len(cut)}
    return sections


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_dry_runs(recipe, capsys, monkeypatch) -> None:
    script = ROOT / "examples" / f"{OTHERS.get(recipe.stem, 'run_grpo_math')}.py"
    shown = dry_run(script, capsys, monkeypatch, "--config", recipe)
    assert "\ncheckpointing:\n" in shown and "layout on" in shown, "the whole configuration and the placement"


@pytest.mark.parametrize("recipe", GRPO, ids=lambda path: path.stem)
def test_a_twin_loads_with_the_method_of_its_recipe(recipe, tmp_path) -> None:
    (tmp_path / "twin.yaml").write_text(yaml.safe_dump(twin(recipe)))
    small, large = load(tmp_path / "twin.yaml"), load(recipe)
    assert small.policy.model_name.startswith("tiny:arithmetic")
    assert small.policy.megatron_cfg.enabled == large.policy.megatron_cfg.enabled
    for key in ("async_grpo", "adv_estimator", "use_dynamic_sampling"):
        assert vars(small.grpo)[key] == vars(large.grpo)[key], key
    of_small, of_large = (config.loss_fn.model_dump(exclude={"length_normalizer"}) for config in (small, large))
    assert of_small == of_large


def grpo(name: str) -> GRPOMasterConfig:
    (path,) = [path for path in RECIPES if path.stem.startswith(name)]
    return load(path)


def test_the_numbers_of_a_method_hold_together() -> None:
    stages = [grpo(f"deepscaler-1.5b-{length}k") for length in (8, 16, 24)]
    for before, after in pairwise(stages):
        folder = f"{before.checkpointing.checkpoint_dir}/step_{before.grpo.max_num_steps}/"
        assert before.checkpointing.save_consolidated and after.policy.model_name.startswith(folder)
        assert after.policy.max_total_sequence_length > before.policy.max_total_sequence_length
    dapo, dr_grpo = grpo("dapo"), grpo("dr-grpo")
    assert dapo.grpo.num_prompts_per_step == dapo.policy.train_global_batch_size, "16 optimizer steps"
    assert dapo.grpo.reward_shaping.max_response_length == 16384 + dapo.grpo.reward_shaping.overlong_buffer_length
    assert dr_grpo.loss_fn.length_normalizer == dr_grpo.policy.generation.max_new_tokens
