"""An environment behind HTTP gives the same as in this process, and names the server that failed."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.remote import EnvironmentServer, RemoteEnvironment, check_address, serve
from tests.conversations import answered as log
from tests.tables import named
from tests.unit.environments.http_servers import Scripted, answering, post, served


class Counting(EnvironmentInterface[Any]):
    """Several turns; the metadata count them. Some answers are trouble."""

    def __init__(self, *, may_repeat_step: bool = True) -> None:
        self.calls: list[int] = []
        self.may_repeat_step = may_repeat_step
        self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        self.calls.append(len(metadata))
        said = [log[-1]["content"] for log in message_log_batch]
        if "slow" in said:
            time.sleep(0.4)
        if "raise" in said:
            raise RuntimeError("no such move")
        for text, state in zip(said, metadata, strict=True):
            state |= {"turn": state["turn"] + 1, **({"bad": {1}} if text == "set" else {})}
        return EnvironmentReturn(
            observations=[{"role": "tool", "content": text.upper()} for text in said],
            metadata=metadata,
            next_stop_strings=[["</a>"] if state["turn"] < 2 else None for state in metadata],
            rewards=torch.tensor([float("nan") if text == "nan" else float(len(text)) for text in said]),
            terminateds=torch.tensor([state["turn"] >= 2 for state in metadata]),
            answers=[text if text.isdigit() else None for text in said],
            metrics=[{"length": float(len(text))} for text in said],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, Any]:
        return batch, {"mean": batch["rewards"].float().mean().item(), "n": len(batch["message_log"])}


@contextmanager
def serving(environment: Any, token: str | None = None, **options: Any) -> Iterator[RemoteEnvironment]:
    with served(EnvironmentServer(environment, "env", token).app()) as url:
        yield RemoteEnvironment({"base_url": url, "backoff_s": 0.01, "start_timeout_s": 5.0, **options})


def test_an_episode_of_several_turns_keeps_its_state_in_the_metadata():
    with serving(Counting()) as remote:
        first = remote.step([log("12"), log("b")], [{"turn": 0}, {"turn": 1}])
        assert first.metadata == [{"turn": 1}, {"turn": 2}]
        assert first.terminateds.tolist() == [False, True] and first.next_stop_strings == [["</a>"], None]
        assert first.answers == ["12", None] and first.rewards.tolist() == [2.0, 1.0]
        assert first.metrics == [{"length": 2.0}, {"length": 1.0}]
        assert first.observations[0] == {"role": "tool", "content": "12"} and first.failures == [None, None]
        assert remote.step([log("x")], first.metadata[:1]).terminateds.tolist() == [True]
        batch = {"message_log": [log("12"), log("b")], "rewards": first.rewards}
        assert remote.global_post_process_and_metrics(batch)[1] == {"mean": 1.5, "n": 2}


def test_one_conversation_fails_alone_and_says_why():
    with serving(Counting(), batch_size=2) as remote:
        for trouble, more, message in (
            ("raise", {}, "/step: environment 'env' raised RuntimeError('no such move') (in the conversation"),
            ("nan", {}, "rewards must be finite"),
            ("set", {}, "no JSON: metadata['bad'] is a set"),
            ("a", {"image": b"x"}, "metadata must be JSON, and metadata['image'] is a bytes"),
        ):
            states: list[Any] = [{"turn": 0}, {"turn": 0, **more}, {"turn": 0}]
            returned = remote.step([log("ab"), log(trouble), log("c")], states)
            assert returned.failures[::2] == [None, None] and returned.rewards.tolist() == [2.0, 0.0, 1.0]
            assert message in returned.failures[1] and remote.connection.url in returned.failures[1]


def test_a_request_that_took_too_long_is_sent_again_and_not_stepped_twice():
    environment = Counting()
    with serving(environment, timeout_s=0.15, max_retries=100) as remote:
        returned = remote.step([log("slow")], [{"turn": 0}])
        assert returned.failures == [None] and returned.metadata == [{"turn": 1}]
    assert environment.calls == [1], "the second attempt waited for the answer to the first"


def test_a_step_that_may_not_be_repeated_is_not_sent_again_once_the_server_may_have_it():
    environment = Counting(may_repeat_step=False)
    with serving(environment, max_retries=3) as remote:
        assert not remote.may_repeat_step
        failures = remote.step([log("a"), log("raise")], [{"turn": 0}, {"turn": 0}]).failures
        assert environment.calls == [2] and all("no such move" in failure for failure in failures)
        url = remote.connection.url
    assert environment.num_shutdowns == 1, "with the server"
    [failure] = remote.step([log("a")], [{"turn": 0}]).failures
    assert f"POST {url}/step: ClientConnectorError" in failure and "(tried 4 times)" in failure, "it was never sent"
    for may_repeat_step, tries in ((False, 1), (True, 2)):
        server = Scripted([503, json.dumps(GOOD)])
        with answering(server.handle, backoff_s=0.01, health={"may_repeat_step": may_repeat_step}) as remote:
            [failure] = remote.step([log("a")], [None]).failures
        assert len(server.requests) == tries and (failure is None) is may_repeat_step


def test_a_server_without_an_answer_in_time_fails_the_conversations_and_is_named():
    with serving(Counting(), timeout_s=0.05, max_retries=1) as remote:
        [failure] = remote.step([log("slow")], [{"turn": 0}]).failures
        told = f"POST {remote.connection.url}/step: no answer within 0.05 s (tried 2 times)"
        assert told in failure and "'slow'" in failure
    with serving(Counting(), time_limit_s=0.1) as remote:
        [failure] = remote.step([log("slow")], [{"turn": 0}]).failures
        assert "time_limit_s=0.1" in failure
        time.sleep(0.5)


def test_the_token_is_asked_for_and_a_server_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"no environment server answers at http://127.*: .*environment_server"):
        RemoteEnvironment({"base_url": "http://127.0.0.1:9", "start_timeout_s": 0.2})
    monkeypatch.setenv("TOKEN", "sesame")
    with serving(Counting(), "sesame", token_env="TOKEN") as remote:
        assert remote.step([log("a")], [{"turn": 0}]).failures == [None]
        monkeypatch.setenv("TOKEN", "other")
        for keys in ({"token_env": "TOKEN"}, {}):
            with pytest.raises(ValueError, match=r"status 401.*token"):
                RemoteEnvironment({"base_url": remote.connection.url, **keys})


@named(
    "host, token",
    {
        "all": ("0.0.0.0", None),
        "private": ("10.0.0.1", ""),
        "name": ("example.org", None),
        "all of IPv6": ("::", None),
    },
)
def test_nothing_is_served_to_others_without_a_token(host, token):
    with pytest.raises(ValueError, match="--token-env"):
        asyncio.run(serve(Counting(), name="env", host=host, token=token))
    check_address(host, "sesame")


def test_this_machine_is_served_without_a_token():
    for own in ("127.0.0.1", "::1", "localhost"):
        check_address(own, None)


@named(
    "kind, change, status, message",
    {
        "text": ("text/plain", {}, 415, "application/json"),
        "protocol": ("application/json", {"protocol": 7}, 400, "protocol 7"),
        "request": ("application/json", {"request_id": None}, 400, "request_id None"),
        "empty batch": ("application/json", {"batch": []}, 400, "batch []"),
        "no metadata": ("application/json", {"batch": [{"messages": log("a")}]}, 400, "batch[0].metadata"),
        "no messages": ("application/json", {"batch": [{"messages": "hi", "metadata": 1}]}, 400, "batch[0]"),
    },
)
def test_the_server_refuses_what_is_no_request(kind, change, status, message):
    good = {"protocol": 1, "request_id": "a", "batch": [{"messages": log("a"), "metadata": {"turn": 0}}]}
    with served(EnvironmentServer(Counting(), "env", None).app()) as url:
        found, answer = post(url, "/step", json.dumps({**good, **change}).encode(), {"Content-Type": kind})
    assert found == status and message in answer["error"]


GOOD = {
    **{key: [None] for key in ("metadata", "next_stop_strings", "answers", "failures")},
    **{"protocol": 1, "rewards": [1], "terminateds": [True]},
    "observations": [{"role": "environment", "content": "ok"}],
}


def test_a_wrong_answer_of_a_server_fails_the_conversation():
    wrong: dict[str, dict[str, Any]] = {
        "'rewards' must be a list of 1, got a list of 2": {"rewards": [1, 2]},
        "reward[1] None": {"rewards": [[1, None]]},
        "observation 'ok'": {"observations": ["ok"]},
        "metrics.score 'high'": {"metrics": [{"score": "high"}]},
        "protocol 3": {"protocol": 3},
        "fell over": {"failures": ["fell over"]},
    }
    server = Scripted([json.dumps({**GOOD, **change}) for change in wrong.values()])
    with answering(server.handle) as remote:
        for message in wrong:
            [failure] = remote.step([log("a")], [None]).failures
            assert message in failure and remote.connection.url in failure
    assert set(server.requests[0]) == {"protocol", "request_id", "batch"}
