"""Bounds on how many configuration files of NeMo RL load: `python tools/nemo_rl_coverage.py TABLES.md`.

The Markdown file has a table `| files | key | our answer |` under a heading for each release, and a table
`| tag | files that load | of | goal |`. Every key is tried alone, in the smallest configuration of its algorithm, with
the value that the answer shows; where it shows none, with `null` for the upper bound and with `true` for the others.
A file is taken to fail if and only if one of its keys is refused. The table does not say which keys stand in the same
files: the lower bound takes all refused keys to be in different files, the upper bound takes all to be in the same, and
the estimate takes keys of one missing feature to be in the same.
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from config_cli import MODELS

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.config.translations import PICTURE_ENVIRONMENTS
from nemo_rl.utils.registry import import_object

POLICY = {"model_name": "m", "train_global_batch_size": 32, "generation_batch_size": 32}
SAMPLED: dict[str, Any] = {
    "policy": POLICY,
    "data": {"train": {"dataset_name": "gsm8k", "split_validation_size": 0.1}},
    "env": {"math": {}},
    "checkpointing": {"metric_name": None},
}
BASES: dict[str, dict[str, Any]] = {
    "grpo": {**SAMPLED, "grpo": {}},
    "ppo": {**SAMPLED, "ppo": {}},
    "distillation": {
        **SAMPLED,
        "distillation": {"num_prompts_per_step": 32},
        "teacher": {"model_name": "t", "generation_batch_size": 32},
    },
    "sft": {**{key: SAMPLED[key] for key in ("policy", "data", "checkpointing")}, "sft": {}},
    "dpo": {**{key: SAMPLED[key] for key in ("policy", "data", "checkpointing")}, "dpo": {}},
    "eval": {
        "eval": {},
        "generation": {"model_name": "m", "vllm_cfg": {"async_engine": False}},
        "tokenizer": {},
        "data": {"dataset_name": "gpqa"},
        "env": {"math": {}},
    },
}
SHOWN: dict[str, Any] = {
    "data.dataset_name": "OpenMathInstruct-2",
    "data.prompt_file": "examples/prompts/cot.txt",
    "data.system_prompt_file": None,
    "data.processor": "math_hf_data_processor",
    "data.split": "train_1M",
    "data.output_key": "expected_answer",
    "data.seed": 42,
    "data.default.dataset_name": "NemoGymDataset",
    "data.data_paths": "a.csv",
    "data.env_name": "math",
    "data.train.data_path": "a.jsonl",
    "data.validation.data_path": "a.jsonl",
    "loss_fn.kl_type": "forward",
    "loss_fn.mixed_kl_weight": 0.5,
    "loss_fn.zero_outside_topk": False,
    "teacher": {"model_name": "t"},
    "distillation": {"num_prompts_per_step": 32},
    "policy.generation.vllm_cfg.env_vars": {"NAME": "value"},
    "eval.pass_k_value": 1,
    "ppo.adv_estimator.length_adaptive_alpha": 0.05,
    "ppo.adv_estimator.gae_lambda_policy": 0.95,
    "ppo.adv_estimator.gae_lambda_value": 1.0,
    "ppo.policy_training_start_step": 50,
    "policy.sequence_packing.algorithm": "modified_ffd",
    "policy.dtensor_cfg.lora_cfg.target_modules": [],
    "policy.megatron_cfg.optimizer.min_lr": 5.0e-6,
    "value_loss_fn.cliprange": 0.2,
    "grpo.num_val_generations_per_prompt": 4,
    "data.train.max_samples": 1000,
    **{f"env.{name}.type": "vlm" for name in PICTURE_ENVIRONMENTS},  # what the section is by its name
}
"""Values that the answers leave out, and that the key or the answer lets no doubt about."""
HINTS: dict[str, Any] = {
    "splits over": True,
    "comes with": True,
    "only for dynamic": 2,
    "not supported yet: flex": "flex",
    "not supported yet: a KL": 0.01,
    "logprobs always": False,
    "must be greater than 0": 0.0,
    "safetensors hold": "safetensors",
}
"""Beginning of an answer -> the value that it is about."""
BESIDE: dict[str, dict[str, Any]] = {
    "policy.megatron_cfg": {"policy": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}},
    "policy.optimizer": {"policy": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}},
    "policy.scheduler": {"policy": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}},
    "teacher.optimizer": {"teacher": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}},
    "teacher.scheduler": {"teacher": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}},
    "policy.megatron_cfg.peft": {"policy": {"megatron_cfg": {"peft": {"enabled": True}}}},
    "policy.megatron_cfg.optimizer.min_lr": {
        "policy": {"megatron_cfg": {"scheduler": {"lr_decay_style": "linear"}, "optimizer": {"lr": 5.0e-6}}}
    },
    "policy.dtensor_cfg.lora_cfg.target_modules": {
        "policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "match_all_linear": False, "exclude_modules": ["x"]}}}
    },
    "env.reward_model": {"env": {"reward_model": {"model_name": "r"}}},
    **{
        f"env.{name}.type": {"env": {name: {"reward_functions": [{"name": "format", "weight": 1.0}]}}}
        for name in PICTURE_ENVIRONMENTS
    },
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws": {
        "policy": {"generation": {"vllm_cfg": {"precision": "fp8"}}}
    },
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs": {
        "policy": {
            "generation": {
                "vllm_cfg": {"expose_http_server": True},
                "colocated": {"enabled": False, "resources": {"gpus_per_node": 1}},
            }
        },
        "cluster": {"gpus_per_node": 2},
    },
    "checkpointing.save_period": {"grpo": {"val_period": 15}, "checkpointing": {"metric_name": "val:accuracy"}},
    "checkpointing.metric_name": {"checkpointing": {}},
    "loss_fn.reference_policy_kl_penalty": {"policy": {"generation": {"top_p": 0.9}}},
}
"""Prefix of a key -> what stands beside it in the files."""


def merged(tree: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`tree` with `change` written over it."""
    result = copy.deepcopy(tree)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def algorithm(key: str, answer: str) -> str:
    """The algorithm in whose files a key stands."""
    head = key.partition(".")[0]
    if head in ("ppo", "value", "value_loss_fn"):
        return "ppo"
    if head in ("teacher", "distillation") or (head == "loss_fn" and answer.startswith("unknown key")):
        return "distillation"
    if head in ("eval", "generation") or key == "data.data_paths" or "gpqa" in answer:
        return "eval"
    return "sft" if "val_loss" in answer else head if head in BASES else "grpo"


def values_of(key: str, answer: str) -> list[Any]:
    """The value that the answer shows; [null, true] if it shows none."""
    if key in SHOWN:
        return [SHOWN[key]]
    for pattern in (rf"not supported yet: {re.escape(key)}=(.+)", r"\(got (.+?)\)", r"^([\d.]+) is no multiple"):
        if found := re.search(pattern, answer):
            text = found[1].removesuffix("...")
            try:
                return [yaml.safe_load(text)] if text != "None" else ["None"]
            except yaml.YAMLError:
                return [{"cut": "off"}]  # the table shows the beginning of a section
    if key.endswith("optimizer"):
        return [{"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-6}}]
    if key.endswith("scheduler"):
        return [[{"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}]]
    for start, value in HINTS.items():
        if answer.startswith(start):
            return [value]
    if answer.startswith("no environment"):
        return [key.split(".")[1]]
    return [None, True]


def refusal(key: str, value: Any, answer: str) -> str | None:
    """What is missing, or else the key, if a configuration with this value of the key, alone, is refused."""
    name = algorithm(key, answer)
    tree = BASES[name]
    for prefix, beside in BESIDE.items():
        if f"{key}.".startswith(f"{prefix}."):
            tree = merged(tree, beside)
    change: Any = value
    for part in reversed(key.split(".")):
        change = {part: change}
    tree = merged(tree, change)
    section = key.removeprefix("data.").partition(".")[0]
    if key == "data.validation.data_path":
        tree["data"]["validation"]["dataset_name"] = "ResponseDataset"
    if key.startswith("data.") and section not in ("train", "validation", "default") and name != "eval":
        tree["data"].pop("train")  # the form in which one dataset stood for all
        tree["data"].setdefault("dataset_name", "OpenMathInstruct-2")
    try:
        build_config(import_object(MODELS[name], "the algorithm"), tree)
    except ConfigError as error:
        feature = re.search(r"not supported yet: .*? \((.+)\)$", str(error), re.MULTILINE)
        return feature[1] if feature else key
    return None


def rows(text: str) -> Iterator[tuple[str, int, str, str]]:
    """(release, files, key, answer) of every row of the tables of keys."""
    release = ""
    for line in text.splitlines():
        if heading := re.match(r"## (v\d\.\d)", line):
            release = heading[1]
        elif row := re.match(r"\| (\d+) \| `([^`]+)` \| (.*) \|$", line):
            yield release, int(row[1]), row[2], row[3]


def main(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    for release, total, goal in re.findall(r"\| (v\d\.\d) \| \d+ \| (\d+) \| (\d+) \|", text):
        if all(tag != release for tag, *_ in rows(text)):
            sys.stdout.write(f"{release}: the file has no table of its keys\n")
            continue
        surely, likely = [0], []
        for tag, number, key, answer in rows(text):
            if tag != release or answer == "is required":  # what is required stands under its old name
                continue
            values = values_of(key, answer)
            if (reason := refusal(key, values[-1], answer)) is not None:
                likely.append((reason, number, key))
            if refusal(key, values[0], answer) is not None:
                surely.append(number)
        largest = {reason: max(n for other, n, _ in likely if other == reason) for reason, _, _ in likely}
        low, high = int(total) - sum(number for _, number, _ in likely), int(total) - max(surely)
        estimate = int(total) - sum(largest.values())
        sys.stdout.write(f"{release}: {max(low, 0)} to {high} of {total} load, {estimate} by features (goal {goal})\n")
        for reason, number in largest.items():
            keys = ", ".join(f"{key} {count}" for other, count, key in likely if other == reason)
            sys.stdout.write(f"    {number:4} {reason}: {keys}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLES.md")
    tables = parser.parse_args().tables
    logging.disable(logging.WARNING)
    main(tables)
