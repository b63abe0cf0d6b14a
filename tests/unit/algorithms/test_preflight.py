"""Checks before anything starts: models, environments, servers, and the identity of a checkpoint."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.setup.preflight import check_environments, http_server_token, prepare_model
from nemo_rl.algorithms.setup.serve import write_address
from nemo_rl.models.generation.config import HttpServerConfig
from nemo_rl.utils.checkpoint.manager import CheckpointIdentityError, check_identity
from tests.tables import lines, pattern
from tests.unit.config.run_configs import build
from tests.unit.rollouts.test_openai_server import settings

JUDGE = "type: llm_judge, base_url: 'http://localhost:1/v1', model: m"


def check(section: str, used: str = "it") -> None:
    check_environments(build(f"+env.it={{{section}}}").env, [used])


REMOTE = "type: remote, base_url: 'http://localhost:1'"
FORMAT = "{name: a, reward: format, kwargs: {pattern: x}}"
MISSING = f"""
type: retrieval, dataset_name: nope.jsonl -> env.it.dataset_name: the corpus 'nope.jsonl' does not exist
type: retrieval, dataset_name: 'nomod:f' -> env.it.dataset_name: ... no module 'nomod'
type: retrieval, dataset_name: 'json:f' -> env.it.dataset_name: ... 'json' has no 'f'
type: python_tools, tools: ['nomod:x'] -> env.it.tools: ... no module 'nomod'
{JUDGE}, api_key_env: NOT_SET -> env.it.api_key_env: ... NOT_SET is not set; export it
{REMOTE}, token_env: NOT_SET -> env.it.token_env: ... NOT_SET
type: composite, reward_functions: [{FORMAT}, {{name: b, reward: 'nomod:f'}}]
    -> env.it.reward_functions.1: ... no module 'nomod'
"""


@pytest.mark.parametrize(("section", "told"), lines(MISSING))
def test_a_missing_input_is_named_with_its_key(section: str, told: str, alone: None, monkeypatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises((ValueError, FileNotFoundError), match=pattern(told)):
        check(section)
    check(section, used="math")  # no dataset names it


def identity_of(model: Path, *overrides: str) -> dict[str, Any]:
    config = build(f"policy.model_name={model}", *overrides)
    return json.loads(json.dumps(prepare_model(config.policy, config.checkpointing).identity))


def test_adapters_of_another_kind_are_another_run(tiny_model_dir: Path) -> None:
    lora = "policy.dtensor_cfg.lora_cfg."
    saved = identity_of(tiny_model_dir, f"{lora}enabled=true")
    for changes, told in (
        (("dim=16", "alpha=16"), "dim: the checkpoint has 8, this run 16 ... alpha: the checkpoint has 32.0"),
        (
            ("match_all_linear=false", "target_modules=[q_proj,v_proj]", "exclude_modules=[o_proj]"),
            "exclude_modules: the checkpoint has [], ... target_modules: the checkpoint has 'all'",
        ),
        (("enabled=false",), "enabled: the checkpoint has True, this run '(absent)'"),
    ):
        current = identity_of(tiny_model_dir, f"{lora}enabled=true", *(lora + change for change in changes))
        with pytest.raises(CheckpointIdentityError) as refusal:
            check_identity(saved, current)
        assert all(part in str(refusal.value) for part in told.split(" ... "))


def test_another_model_or_tokenizer_is_another_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    before, after = identity_of(tiny_model_dir), identity_of(copy)
    assert before["policy.model"]["config_hash"] != after["policy.model"]["config_hash"]
    assert before["policy.tokenizer"] == after["policy.tokenizer"]
    other = identity_of(tiny_model_dir, "policy.tokenizer.chat_template='{{ messages }}'")
    assert before["policy.tokenizer"]["vocabulary_hash"] == other["policy.tokenizer"]["vocabulary_hash"]
    assert before["policy.tokenizer"]["chat_template_hash"] != other["policy.tokenizer"]["chat_template_hash"]


def test_a_model_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    there = tmp_path / "policy.model_name"
    config = build(f"policy.model_name={there}")
    with pytest.raises(ValueError, match=rf"^value\.model_name: .*{re.escape(str(there))}"):
        prepare_model(config.policy.at("value"), config.checkpointing)


def test_the_token_is_random_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    random, another = (http_server_token(HttpServerConfig()) for _ in range(2))
    assert len(random) >= 32 and random != another
    named = HttpServerConfig(token_env="AGENT_TOKEN")
    monkeypatch.delenv("AGENT_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"http_server\.token_env: .*AGENT_TOKEN"):
        http_server_token(named)
    monkeypatch.setenv("AGENT_TOKEN", "geheim\n")
    assert http_server_token(named) == "geheim"


def test_the_file_is_for_its_owner_alone(tmp_path: Path):
    path = write_address(tmp_path, "http://127.0.0.1:1/v1", settings())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"base_url": "http://127.0.0.1:1/v1", "api_key": "secret", "model": "tiny"}
    assert list(tmp_path.iterdir()) == [path]
