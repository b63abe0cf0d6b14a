"""When the engines may be offered to agents outside, and how those find them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.setup.preflight import http_server_token
from nemo_rl.algorithms.setup.serve import is_loopback, write_address
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.models.generation.config import HttpServerConfig
from tests.unit.rollouts.test_openai_worker import settings

CPU_CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "grpo_math_cpu.yaml"
VLLM = "policy.generation.vllm_cfg"
ON = f"{VLLM}.expose_http_server=true"
GPUS = ("cluster.gpus_per_node=2", "policy.precision=bfloat16")


def load(*overrides: str) -> GRPOMasterConfig:
    return load_config(GRPOMasterConfig, CPU_CONFIG, list(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy.generation.backend=hf",), "policy.generation.backend=vllm"),
        (("grpo.replay_from=somewhere", "grpo.val_period=0", "grpo.val_at_start=false"), "replay_from"),
        (GPUS, "policy.generation.colocated.enabled=false"),
        ((f"{VLLM}.http_server.port=70000",), "http_server.port"),
        ((f"{VLLM}.http_server_serving_chat_kwargs.tool_parser=pythonic",), "tool_parser"),
        ((f"{VLLM}.http_server_serving_chat_kwargs.reasoning_parser=r1",), "reasoning_parser"),
    ],
)
def test_what_does_not_work_is_refused_before_anything_starts(overrides: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        load(ON, *overrides)


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


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.3", False), ("box", False)],
)
def test_who_else_reaches_an_address(host: str, expected: bool):
    assert is_loopback(host) is expected
