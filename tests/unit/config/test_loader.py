"""From a file and overrides to a model: defaults, interpolation, errors, and what is not supported yet."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError, Location, Problem
from nemo_rl.config.loader import build_config, dump_config, load_config
from nemo_rl.config.rules import value_of
from nemo_rl.config.sources import load_tree
from nemo_rl.environments.config import EnvironmentConfig, MathEnvironmentConfig
from tests.tables import cases, lines, named
from tests.unit.config.run_configs import CONFIGS, MASTERS, MEGATRON, MINIMAL, build, problems_of

V0_6 = Path(__file__).parent / "fixtures" / "nemo_rl_v0_6_grpo.yaml"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(GRPOMasterConfig, write(folder, "run.yaml", text))
    return str(error.value).replace(f"{folder}/", "")


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_reads_back(path: Path, tmp_path: Path) -> None:
    section = "eval" if path.parent.name == "evals" else re.split("[-_]", path.stem)[0]
    if path.parent.name == "methods" and section not in MASTERS:  # named by their method
        section = "grpo"
    config = load_config(MASTERS[section], path)
    assert load_config(MASTERS[section], write(tmp_path, "again.yaml", dump_config(config))) == config
    if isinstance(config, GRPOMasterConfig) and config.cluster.use_gpus:
        assert config.policy.sequence_packing.enabled
        cut = config.policy.dtensor_cfg
        assert not cut.torch_compile or cut.tensor_parallel_size == cut.context_parallel_size == 1, "not proven"


def test_datasets_and_environments_take_what_they_do_not_say_themselves() -> None:
    text = """
    env: {math: {num_workers: 2}, maze: {size: 5}, mine: {type: "pkg.mod:Env"}}
    data:
      default: {env_name: mine, prompt_file: p.txt}
      train: [{dataset_name: a}, {dataset_name: b, env_name: math}]
      validation: {dataset_name: c, prompt_file: null}
    """
    config = build_config(GRPOMasterConfig, {**MINIMAL, **yaml.safe_load(text)})
    assert [dataset.env_name for dataset in config.data.train] == ["mine", "math"]
    assert [rows[0].prompt_file for rows in (config.data.train, config.data.validation)] == ["p.txt", None]
    assert config.env["math"] == MathEnvironmentConfig(num_workers=2)
    assert config.env["maze"] == EnvironmentConfig.model_validate({"type": "maze", "size": 5})
    assert config.env["mine"].type == "pkg.mod:Env"


UNRESOLVED = """
${policy.nothing} -> cannot resolve ${policy.nothing}
${unknown:1} -> cannot resolve ${unknown:1}
${div:1,0} -> cannot resolve ${div:1,0}
${policy. -> not a valid interpolation
${.seed} -> cannot resolve ${.seed}
??? -> must be given
"""


@pytest.mark.parametrize(("text", "message"), lines(UNRESOLVED))
def test_interpolation_errors_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    error = error_of(tmp_path, yaml.safe_dump(MINIMAL, default_flow_style=None) + f"grpo:\n  seed: '{text}'\n")
    assert error.startswith(f"run.yaml:7: grpo.seed: {message}"), "and no other problem"


def test_all_problems_are_in_one_message_with_their_lines(tmp_path: Path) -> None:
    text = (
        "policy: {model_name: m}\n"
        "data:\n  train:\n    - dataset_name: a\n      split_validation_size: -2.0\n    - input_key: q\n"
        "env:\n  math:\n    num_worker: 3\n  maze: 5\n"
        "grpo:\n  ratio_clip_min: 0.2\n  seed: '1'\nloss_fn: {reference_policy_kl_type: k4}\nenvv: {}\n"
    )
    head, *said = error_of(tmp_path, text).splitlines()
    assert head == "8 problems:"
    want = [
        ("5: data.train.0.split_validation_size", "(got -2.0)"),
        ("6: data.train.1.dataset_name", "dataset_name: gsm8k"),
        ("9: env.math.num_worker", "env.math.num_workers"),
        ("10: env.maze", "(got 5)"),
        ("12: grpo.ratio_clip_min", "loss_fn.ratio_clip_min"),
        ("13: grpo.seed", "integer (got '1')"),
        ("14: loss_fn.reference_policy_kl_type", "'k1', 'k2' or 'k3' (got k4)"),
        ("15: envv", "nearest valid key is env"),
    ]
    for line, (place, told) in zip(said, want, strict=True):
        assert line.startswith(f"  run.yaml:{place}: ") and told in line


def test_problems_come_in_reading_order_and_once() -> None:
    late, early = (Problem(("a", str(line)), "bad", Location("f.yaml", line)) for line in (9, 2))
    told = str(ConfigError([late, Problem(("b",), "bad"), early, late])).splitlines()
    assert told == ["3 problems:", "  f.yaml:2: a.2: bad", "  f.yaml:9: a.9: bad", "  b: bad"]


MEANT = {
    "policy.generation.mcore_generation_config": "no effect",
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": "no effect",
    "policy.scheduler_step_per": "train_call",
    "grpo.adv_estimator.std": "leave_one_out",
    "env.mine": "raw_text: true",
}


def test_a_config_of_nemo_rl_v0_6_loads_and_what_it_means_loads_back(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    config = load_config(GRPOMasterConfig, V0_6, ["+env.mine={type: 'a.b:C', x: [1, {y: null}]}"])
    assert config.policy.make_sequence_length_divisible_by == 1
    assert config.policy.optimizer is not None and config.policy.optimizer.kwargs["eps"] == 1e-8
    assert config.data.train[0].seed == 42 and list(config.env) == ["math", "mine"] and config.logger.monitor_gpus
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["the configuration is in NeMo RL's form: it loads, with 7 remarks (see --remarks)"]
    first, *remarks = caplog.messages[1:]
    assert first.startswith("policy.generation_batch_size, ") and first.endswith(", data.num_workers: has no effect")
    at_this_value = remarks.pop(2)
    assert "policy.dtensor_cfg._v2, " in at_this_value and at_this_value.endswith(": asks for nothing at this value")
    for remark, (key, told) in zip(remarks, MEANT.items(), strict=True):
        assert remark.startswith(f"{key}: ") and told in remark
    assert load_config(GRPOMasterConfig, write(tmp_path, "config.yaml", dump_config(config))) == config


def test_a_value_of_a_v0_6_file_is_refused_with_its_line(tmp_path: Path) -> None:
    text = V0_6.read_text().replace('precision: "bfloat16"', "precision: float16")
    line = text[: text.index("precision: float16")].count("\n") + 1
    assert error_of(tmp_path, text).startswith(f"run.yaml:{line}: not supported yet: policy.precision=float16 (")


def test_megatron_of_a_v0_6_file_can_be_switched_on() -> None:
    on = [*MEGATRON, "policy.scheduler=null"]
    needed = "policy.megatron_cfg.scheduler.weight_decay_incr_style: constant needs equal"
    with pytest.raises(ConfigError, match=needed):
        load_config(GRPOMasterConfig, V0_6, on)
    decays = [f"policy.megatron_cfg.scheduler.{end}_weight_decay=0.01" for end in ("start", "end")]
    config = load_config(GRPOMasterConfig, V0_6, [*on, *decays])
    assert config.checkpointing.model_save_format == "torch_save"
    assert config.policy.megatron_cfg.pipeline_dtype == config.policy.precision == "bfloat16"


# -- files


def test_children_are_laid_over_parents_and_each_key_keeps_its_place(tmp_path: Path) -> None:
    """Parents are relative to the file that names them, and the later one wins; `_override_` replaces a section."""
    root = write(tmp_path, "base/root.yaml", "a:\n  x: 1\n  y: 2\nb: 1\nc: {x: 1}\nd: {x: 1}\n")
    write(tmp_path, "base/first.yaml", "defaults: root.yaml\nb: 2\n")
    write(tmp_path, "second.yaml", "b: 3\n")
    text = "defaults: [base/first.yaml, second.yaml]\na:\n  y: 20\n  z: [1, 2]\n"
    child = write(tmp_path, "child.yaml", text + "c: {_override_: true, z: 3}\nd: {_override_: false}\n")
    tree = load_tree(child)
    assert tree.values == {"a": {"x": 1, "y": 20, "z": [1, 2]}, "b": 3, "c": {"z": 3}, "d": {"x": 1}}
    assert tree.location(("a", "x")) == Location(str(root), 2)
    assert tree.location(("a", "y")) == Location(str(child), 3)
    assert ("c", "x") not in tree.locations


SCALARS = {
    **{"1e-6": 1e-6, "5.0e-6": 5e-6, "1.5": 1.5, "-3": -3, "1_000": 1000, "0": 0, "-.inf": float("-inf")},
    **{text: text for text in ("01:00:00:00", "10:00:00:00", "2024-01-01", "val:accuracy")},
    **{"true": True, "null": None, '"1"': "1"},
}


def test_scalars(tmp_path: Path) -> None:
    text = "a:\n" + "".join(f"  - {scalar}\n" for scalar in SCALARS)
    found = load_tree(write(tmp_path, "a.yaml", text)).values["a"]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in SCALARS.values()]


@named(
    "text, message",
    {
        "a key twice": ("a:\n  x: 1\n  x: 2\n", "run.yaml:3: a.x: written twice in this section, first in line 2"),
        "an open list": ("a: [1\nb: 2\n", "run.yaml:2: not valid YAML"),
        "a list in place of sections": ("- 1\n", "run.yaml:1: the file must hold sections"),
        "two documents": ("a: 1\n---\nb: 2\n", "run.yaml: the file must hold one document"),
        "a parent that is not there": ("a: 1\ndefaults: nowhere.yaml\n", "run.yaml:2: defaults: no such file"),
        "a parent with a long name": (f"defaults: {'x' * 300}\n", "run.yaml:1: defaults: no such file"),
        "a parent that is no path": (
            "defaults: true\n",
            "run.yaml:1: defaults: must be a path or a list of paths (got True)",
        ),
        "its own parent": ("defaults: run.yaml\n", "inherit from one another"),
        "an anchor in itself": ("a: &x {b: *x}\n", "run.yaml: cannot be read: an anchor contains itself"),
        "a tag of Python": ("a: !!python/object:os.system x\n", "run.yaml:1: not valid YAML"),
        "a parent that is a section": ("defaults: [{a: 1}]\n", "run.yaml:1: defaults: must be a path"),
    },
)
def test_broken_files_are_refused_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    assert message in error_of(tmp_path, text)


# -- overrides in Hydra's grammar

# A key that no file mentions may be added. The values of a mapping are merged, as in Hydra.
VALUES = """
++grpo.seed=7 -> {grpo.seed: 7}
+grpo.seed=7 -> {grpo.seed: 7}
policy.max_grad_norm=null -> {policy.max_grad_norm: null}
policy.model_name='a, b=c' -> {policy.model_name: "a, b=c"}
GENERATION.stop_strings=['</a>',b] -> {GENERATION.stop_strings: [</a>, b]}
KWARGS.lr=1e-4 -> {KWARGS: {lr: 1.0e-4, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8}}
KWARGS={lr: 1.0} -> {KWARGS: {lr: 1.0, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8}}
+KWARGS.amsgrad=true -> {KWARGS.amsgrad: true}
+policy.dtensor_cfg.env_vars.OMP_NUM_THREADS='1' -> {policy.dtensor_cfg.env_vars: {OMP_NUM_THREADS: "1"}}
data.train.split=test -> {data.train.0.split: test}
env.math.num_workers=2 -> {env.math.num_workers: 2}
+env.maze.size=3 -> {env.maze.type: maze}
data.train=[{dataset_name: a, split_validation_size: 0.1},{dataset_name: b}] & data.train.1.dataset_name=c
    -> {data.train.1.dataset_name: c}
grpo.seed=1 & grpo.seed=2 -> {grpo.seed: 2}
grpo.seed=1 & ~grpo.seed -> {grpo.seed: 42}
~KWARGS.betas & ~KWARGS.eps -> {KWARGS: {lr: 5.0e-6, weight_decay: 0.01}}
policy.max_total_sequence_length=100 -> {GENERATION.max_new_tokens: 100, GENERATION.vllm_cfg.max_model_len: 100}
policy.max_total_sequence_length=100 -> {data.max_input_seq_length: 100, grpo.reward_shaping.max_response_length: 100}
policy.train_micro_batch_size=8 -> {policy.logprob_batch_size: 8, policy.tokenizer.name: m}
policy.precision=float32 -> {GENERATION.vllm_cfg.precision: float32}
GENERATION.temperature=0.5 -> {GENERATION.val_temperature: 0.5}
grpo.normalize_rewards=false -> {grpo.adv_estimator.normalize_rewards: false}
grpo.val_num_generations_per_prompt=8 -> {grpo.val_k_values: [1, 2, 4, 8]}
grpo.val_num_generations_per_prompt=6 -> {grpo.val_k_values: [1, 2, 4, 6]}
grpo.val_num_generations_per_prompt=1 -> {grpo.val_k_values: []}
grpo.num_prompts_per_step='${div:${policy.train_global_batch_size}, ${.num_generations_per_prompt}}'
    & grpo.num_generations_per_prompt=8 -> {grpo.num_prompts_per_step: 64}
grpo.max_val_samples='${mul:${add:1, 2}, ${max:4, 5}}' & grpo.val_batch_size='${.max_val_samples}'
    -> {grpo.max_val_samples: 15, grpo.val_batch_size: 15}
"""
SHORT = {"KWARGS": "policy.optimizer.kwargs", "GENERATION": "policy.generation"}


@pytest.mark.parametrize(("overrides", "expected"), cases(VALUES, SHORT))
def test_what_overrides_interpolations_and_defaults_that_follow_other_keys_give(overrides, expected) -> None:
    config = build(*overrides)
    for key, value in yaml.safe_load(expected).items():
        found: Any = config
        for part in key.split("."):
            found = found[int(part)] if part.isdigit() else value_of(found, part)
        assert found == value, key


# The last ones are like no other key; `policy.generation.rank` has the letters of data.train, not its meaning.
MISTAKES = """
cluster.num_of_nodes=1 -> unknown key; the nearest valid key is cluster.num_nodes
policy.temperature=1 -> unknown key; the nearest valid key is policy.generation.temperature
checkpoint.enabled=true -> unknown key; the nearest valid key is checkpointing.enabled
+grpo.sed=1 -> unknown key; the nearest valid key is grpo.seed
grpo.seed=1 & +grpo.seed=2 -> already set (command line: grpo.seed=1); drop the '+'
~grpo.sed -> unknown key; the nearest valid key is grpo.seed
env.mth.num_workers=1 -> no such entry, the nearest is env.math.num_workers; to add it, write +env.mth.num
grpo.seed=1,2 -> one value at a time
~grpo.seed=3 -> is 42, not 3
policy.train_micro_batch_size=x -> must be a valid integer (got x)
policy=null -> must be a section with keys (got null)
grpo.seed -> write section.key=value
grpo.seed.x=1 -> unknown key
+grpo.seed.x=1 -> goes through a value that is not a section
data.train@x=1 -> '@' has no meaning here
policy.generation.rank=1 -> unknown key; policy.generation has backend, max_new_tokens,
data.train.0.zzz=1 -> unknown key; data.train has dataset_name, data_path,
"""


@pytest.mark.parametrize(("overrides", "message"), cases(MISTAKES))
def test_mistakes(overrides: tuple[str, ...], message: str) -> None:
    error = problems_of(*overrides)
    assert error.startswith(f"command line: {overrides[-1]}: ") and message in error


def test_all_mistakes_are_reported_together() -> None:
    assert problems_of("grpo.sed=1", "grpo.seed=x", "grpo.val_period=[").startswith("3 problems:")
