"""What a user can get wrong, and what they are told: one message with what to change, early, and nothing lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.grpo_setup import USER_ERRORS, Inputs, prepare
from nemo_rl.config.loader import load_config
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointIdentityError, CheckpointManager
from nemo_rl.utils.checkpoint_manifest import find_damage
from tests.functional.cli import CPU_CONFIG, ROOT, SCRIPT, SMALL

MINE = "data.default.env_name=mine"


def prepared(*overrides: str) -> Inputs:
    """Everything up to the start of Ray, in this process."""
    return prepare(load_config(GRPOMasterConfig, CPU_CONFIG, list(overrides)))


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """In an empty folder, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("content", "overrides", "told"),
    [
        (None, (), r"dataset file '.*rows\.jsonl' does not exist"),
        ("", (), "is empty"),
        ('{"question": "1+1=", "output": "2"}', (), r"no column 'input' \(input_key\); its columns are: question, out"),
        ('{"input": "1+1=", "output": "2"}\n{"inp', (), "cannot be read as .jsonl"),
        ("\n".join(['{"input": "1+1=", "output": null}'] * 4), (), "a row has nothing in column 'output'"),
        ('{"input": "1+1=", "output": "2"}', (), r"has 1 prompts, fewer than one step takes: set grpo\.num_prompts"),
        (
            "\n".join(['{"input": "1+1=", "output": "2"}'] * 4),
            ("data.max_input_seq_length=3",),
            r"all prompts .* training data are longer than data.max_input_seq_length=3 tokens: 4 of them have \d+ to",
        ),
        ("\n".join(['{"input": "1+1=", "output": "2"}'] * 4), ("data.default.prompt_file=no.txt",), "'no.txt' does no"),
    ],
)
def test_training_data(tmp_path, content, overrides, told):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        prepared(*SMALL, f"data.train.dataset_name={path}", *overrides)


def test_a_file_with_a_header_alone_is_empty(tmp_path):
    (tmp_path / "rows.csv").write_text("input,output\n")
    with pytest.raises(ValueError, match=r"rows\.csv' is empty: it has no rows"):
        prepared(f"data.train.dataset_name={tmp_path}/rows.csv")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("data.train.dataset_name=arithmetics",), "Did you mean arithmetic"),
        (("data.train={dataset_name: arithmetic, kwargs: {samples: 3}}",), "num_samples, max_operand, operators; samp"),
        (("data.default.processor=math_processor",), "Did you mean 'math_data_processor'"),
        (("env.math.type=maths",), "Did you mean 'math'"),
        (("+env.mine={type: nowhere.envs:MyEnv}", MINE), "no module 'nowhere' can be imported"),
        (("policy.model_name=tiny:arithmetics",), "Did you mean 'tiny:arithmetic'"),
        (("policy.model_name=./no/such",), r"policy\.model_name: directory './no/such' does not exist"),
        (("policy.max_total_sequence_length=4096",), r"the 2048 positions .* policy.max_total_sequence_length=2048 or"),
        (
            (
                "cluster.cpu_workers_per_node=8",
                "policy.train_micro_batch_size=32",
                "policy.generation.vllm_cfg.tensor_parallel_size=8",
            ),
            "does not divide the 4 attention heads of 'tiny:arithmetic'; these would: 1, 2, 4",
        ),
        (("policy.optimizer.name=torch.optim.Adamm",), r"policy\.optimizer\.name: cannot import"),
        (("policy.optimizer.kwargs.lr=abc",), r"policy\.optimizer\.kwargs: AdamW refuses .*'lr': 'abc'"),
        (("checkpointing.checkpoint_dir=taken/c",), r"checkpointing\.checkpoint_dir: cannot write to '.*taken/c'"),
        (("logger.log_dir=taken",), r"logger\.log_dir: cannot write to 'taken'"),
    ],
)
def test_names_sizes_and_folders(tmp_path, overrides, told):
    (tmp_path / "taken").touch()
    with pytest.raises(USER_ERRORS, match=told):
        prepared(*overrides)


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def edited(file: str, **changes: object) -> Callable[[Path], None]:
    """`None` removes a key."""

    def edit(model: Path) -> None:
        content = json.loads((model / file).read_text()) | changes
        (model / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def cut_in_half(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (without("config.json"), "no model directory: it has no config.json"),
        (without("model.safetensors"), "has no weights"),
        (cut_in_half, r"model\.safetensors is damaged"),
        (without("chat_template.jinja"), "no chat template: set policy.tokenizer.chat_template"),
        (edited("config.json", model_type="vit"), "a 'vit' model, not a causal language model"),
        (edited("config.json", vocab_size=100), "has 264 tokens, more than the 100 of"),
        (edited("tokenizer_config.json", pad_token=None), r"does not know .* tokenizer_config\.json does not name"),
    ],
)
def test_model_directories(tmp_path, spoil, told):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny:arithmetic"), model)
    assert prepared(f"policy.model_name={model}").model_path == str(model)
    spoil(model)
    with pytest.raises(ValueError, match=told):
        prepared(f"policy.model_name={model}")


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(tmp_path):
    config = load_config(GRPOMasterConfig, CPU_CONFIG, [])
    info = {"identity": prepare(config).identity}

    def write(directory: Path) -> None:
        (directory / "policy" / "optimizer").mkdir(parents=True)

    written = CheckpointManager(config.checkpointing).save(10, write, info, "", {})
    prepared()
    with pytest.raises(
        CheckpointIdentityError, match=r"(?s)data\.train.*grpo\.seed: the checkpoint has 42, this run 7"
    ):
        prepared("grpo.seed=7", "data.train={dataset_name: arithmetic, kwargs: {num_samples: 500}}")
    assert find_damage(written) is None


def test_a_checkpoint_without_its_optimizer_is_not_continued_in_silence(tmp_path):
    config = load_config(GRPOMasterConfig, CPU_CONFIG, [])
    info = {"identity": prepare(config).identity}
    CheckpointManager(config.checkpointing).save(10, lambda directory: None, info, "", {})
    with pytest.raises(
        CheckpointError, match=r"step_10 was saved without the optimizer \(checkpointing\.save_optimizer"
    ):
        prepared()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--config examples/configs/grpo_math_cpu.yaml"),
        (("--config", str(CPU_CONFIG), "grpo.num_prompt=4"), "nearest valid key is grpo.num_prompts_per_step"),
        (
            ("--config", str(CPU_CONFIG), "policy.model_name=nobody/nothing"),
            "ERROR policy.model_name: 'nobody/nothing'",
        ),
    ],
)
def test_the_command_ends_with_status_2_and_one_message(tmp_path, monkeypatch, arguments, told):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - started < 30
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert told in text and "Traceback" not in text
    assert not (tmp_path / "logs").exists()
