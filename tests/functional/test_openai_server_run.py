"""A real run with the OpenAI-compatible server, and an agent outside that talks to it while the policy trains."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.functional.cli import SMALL, end, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON = "policy.generation.vllm_cfg.expose_http_server=true"


def address_of(folder: Path) -> dict[str, str]:
    """Waits for the file in which the run tells agents its address."""
    deadline = time.monotonic() + 300
    while not (found := list(folder.glob("logs/exp_*/openai_server.json"))):
        assert time.monotonic() < deadline, (folder / "out.log").read_text()[-4000:]
        time.sleep(0.1)
    assert stat.S_IMODE(found[0].stat().st_mode) == 0o600
    return json.loads(found[0].read_text())


def two_turns(client: openai.OpenAI) -> int:
    """One conversation; returns the weights' version of its second turn."""
    messages: Any = [{"role": "user", "content": "3+4"}]
    first: Any = client.chat.completions.create(model="any", messages=messages, logprobs=True)
    choice = first.choices[0]
    assert len(choice.token_ids) == len(choice.token_logprobs) == len(choice.logprobs.content)
    messages += [choice.message.model_dump(), {"role": "user", "content": "5+2"}]
    second: Any = client.chat.completions.create(model="any", messages=messages)
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before and second.retokenized_turns == 0
    assert 0 <= first.weight_version <= second.weight_version
    return second.weight_version


def test_an_agent_talks_to_the_policy_while_it_trains(tmp_path: Path):
    process = start(tmp_path, *SMALL, ON, "checkpointing.enabled=false", "grpo.max_num_steps=6")
    address = address_of(tmp_path)
    versions = set()
    with openai.OpenAI(base_url=address["base_url"], api_key=address["api_key"], max_retries=0) as client:
        greedy: Any = {"model": "any", "temperature": 0, "prompt": "3+4", "max_tokens": 8}
        of_text: Any = client.completions.create(**greedy)
        again: Any = client.completions.create(**{**greedy, "prompt": of_text.prompt_token_ids})
        if again.weight_version == of_text.weight_version:
            assert again.choices[0].token_ids == of_text.choices[0].token_ids
        parts: list[Any] = list(client.completions.create(**greedy, stream=True, logprobs=0))
        if parts[-1].weight_version == of_text.weight_version:
            assert "".join(part.choices[0].text for part in parts) == of_text.choices[0].text
            streamed = [value for part in parts for value in part.choices[0].logprobs.token_logprobs]
            assert streamed == of_text.choices[0].token_logprobs, "a stream samples the same bits"
        drawn: list[Any] = [client.completions.create(model="any", prompt="3+4", seed=3) for _ in range(2)]
        if drawn[0].weight_version == drawn[1].weight_version:
            assert drawn[0].choices[0].token_ids == drawn[1].choices[0].token_ids
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            while True:
                versions.add(two_turns(client))
    finished = end(process, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert len(versions) >= 4, versions
    assert address["base_url"] in finished.output.replace("\n", "") and address["api_key"] not in finished.output
