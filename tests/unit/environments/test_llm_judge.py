"""The judge against a fake OpenAI-compatible server on loopback, and against a tiny model."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.tiny_model import TinyModelRecipe, build_tiny_tokenizer, build_untrained_model
from nemo_rl.environments.config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.judge import LLMJudgeEnvironment, ModelJudge, Reply, Vote
from nemo_rl.utils.task_formats import fence, fill, find_score
from tests.conversations import answered, user
from tests.tables import named
from tests.unit.environments.http_servers import Scripted, served

LOG: list[Any] = answered("2", asked="<|user|>1+1?")
KNOWN: dict[str, Any] = {"messages": [user("1+1?")]}


def completion(text: str) -> str:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 7}})


def ask(
    script: list[Any], metadata: list[Any] | None = None, wrap: Any = completion, **options: Any
) -> tuple[Any, Scripted, Any]:
    """What a step returns for the answer "2" to each row when the server follows the script; the server; the judge."""
    server = Scripted(script, wrap)
    metadata = metadata or [KNOWN]
    with served({"/v1/chat/completions": server.handle}) as url:
        keys = {"backoff_s": 0.01, "max_retries": 2, **options}
        environment = LLMJudgeEnvironment({"base_url": f"{url}/v1", "model": "judge", **keys})
        return environment.step([LOG] * len(metadata), metadata), server, environment


def test_the_score_of_the_reply_is_the_reward_after_trouble_with_the_server_too(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    script = [429, 503, 500, 60.0, "Good. Score: 7"]  # busy, broken, slow
    how = {"api_key_env": "JUDGE_KEY", "extra_body": {"top_p": 0.5}, "timeout_s": 2.0, "max_retries": 4}
    returned, server, environment = ask(script, **how)
    assert returned.failures == [None]
    assert (returned.rewards.tolist(), returned.terminateds.tolist()) == ([0.7], [1.0])
    *earlier, request = server.requests
    assert len(earlier) == 4
    assert request["model"] == "judge" and request["temperature"] == 0.0 and request["top_p"] == 0.5
    prompt = request["messages"][0]["content"]
    assert fence("2") in prompt and "1+1?" in prompt and "<|user|>" not in prompt, "the question as the row has it"
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    [metrics] = returned.metrics
    assert metrics["score"] == 0.7 and metrics["tokens"] == 7.0 and "spread_of_votes" not in metrics
    _, counts = environment.global_post_process_and_metrics({})
    assert (counts["num_failed"], counts["num_request_retries"]) == (0.0, 4.0)


@named(
    "answer, message, requests",
    {
        "busy for good": (429, r"POST http://127\.0\.0\.1:\d+/v1/chat/completions: status 429.*tried 3 times", 3),
        "refused": (400, r"status 400: 'no, 400 to Bearer \*\*\*'", 1),
        "malformed": ("not json at all", r"the answer is no JSON: 'not json at all'", 3),
        "wrong shape": ('{"choices": []}', r"no chat completion but \{'choices': \[\]\}", 1),
        "silent": (1.0, r"no answer within 0\.05 s", 3),
    },
)
def test_a_judge_that_cannot_be_asked_fails_the_sample_and_gives_no_zero(answer, message, requests, monkeypatch):
    """Its key is never repeated."""
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    limit = {"timeout_s": 0.05} if answer == 1.0 else {}
    returned, server, _ = ask([answer], None, lambda text: text, api_key_env="JUDGE_KEY", **limit)
    [failure] = returned.failures
    assert failure is not None and "that ends '2'" in failure and "sesame" not in failure
    assert len(server.requests) == requests and re.search(message, failure), failure


def test_a_reply_without_a_score_is_asked_for_again_hotter_and_then_fails():
    returned, server, environment = ask(["I like it", "Score: 99", "Score: 4"], max_score_retries=2)
    assert returned.rewards.tolist() == [0.4]
    assert [request["temperature"] for request in server.requests] == [0.0, 0.7, 0.7]
    assert len({request["seed"] for request in server.requests}) == 3
    _, metrics = environment.global_post_process_and_metrics({})
    assert metrics["num_replies_without_score"] == 2.0
    returned, _, _ = ask(["I like it"], max_score_retries=1)
    assert "no score from 0 to 10 in 2 replies of the judge; the last is 'I like it'" in returned.failures[0]


def test_votes_are_averaged_and_one_that_fails_fails_the_sample():
    returned, server, _ = ask(["Score: 2", "Score: 4", "Score: 9"], num_votes=3, temperature=1.0, concurrency=1)
    assert returned.rewards.tolist() == [pytest.approx(0.5)]
    assert len({request["seed"] for request in server.requests}) == 3, "equal seeds would be one vote three times"
    [metrics] = returned.metrics
    assert metrics["spread_of_votes"] == pytest.approx(0.7) and metrics["tokens"] == 21.0
    returned, _, _ = ask(["Score: 2", 400], num_votes=2, temperature=1.0, concurrency=1)
    assert returned.failures[0] is not None


def test_what_the_row_lacks_fails_its_sample_with_what_to_change(tmp_path):
    (tmp_path / "prompt.txt").write_text("{question} / {reference} / {answer}")
    more = [{}, {"ground_truth": 2}, {"num_images": 1}, {"num_images": 1, "ground_truth": 2}]
    metadata = [{}, *({**KNOWN, **keys} for keys in more)]
    returned, server, _ = ask(["Score: 10"], metadata, prompt_file=str(tmp_path / "prompt.txt"))
    no_messages, no_reference, sound, of_images, with_reference = returned.failures
    assert "processor: conversation_processor" in no_messages and "{reference}" in no_reference
    assert "the row has 1 image(s)" in of_images and sound is with_reference is None and returned.rewards[2] == 1.0
    prompts = [request["messages"][0]["content"] for request in server.requests]
    assert prompts == [f"1+1? / 2 / {fence('2')}"] * 2


@settings(max_examples=60, deadline=None)
@given(answer=st.text(max_size=40), question=st.text(max_size=10), reference=st.text(max_size=10))
def test_an_answer_cannot_leave_its_fence_nor_fill_a_placeholder(answer, question, reference):
    template = "Q {question}\n{answer}\nR {reference}"
    for text in (answer, answer + "{reference}{question}", "\n".join([answer, fence(answer).splitlines()[0]])):
        prompt = fill(template, question=question, answer=text, reference=reference)
        assert prompt == f"Q {question}\n{fence(text)}\nR {reference}"
        assert fence(text).split("\n", 1)[0] not in text


SCORES = {"Score: 7": 0.7, "**Score:** 10/10": 1.0, "score = 0": 0.0, "It says Score: 10.\nScore: 2.5": 0.25}
NO_SCORES = ("Score: -1", "Score: 11", "Score: high", "")


@pytest.mark.parametrize("reply", [*SCORES, *NO_SCORES])
def test_the_last_score_of_a_reply_counts_where_it_is_in_range(reply):
    pattern = LLMJudgeEnvironmentConfig(base_url="http://x", model="m").score_pattern
    assert find_score(reply, pattern, 0.0, 10.0) == SCORES.get(reply)


def test_replies_of_a_model_do_not_depend_on_what_they_are_batched_with(tmp_path):
    tokenizer = build_tiny_tokenizer()
    build_untrained_model(TinyModelRecipe(max_position_embeddings=96), tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    keys = {"model_name": str(tmp_path), "precision": "float32", "max_new_tokens": 8}
    judges = [ModelJudge(LLMJudgeEnvironmentConfig(**keys, batch_size=size)) for size in (4, 1)]
    votes = [Vote("x" * size, seed=0) for size in (3, 20, 1, 7)]
    together, alone = (judge.ask(votes, 0.0, 60.0) for judge in judges)
    assert [reply.text for reply in together] == [reply.text for reply in alone]
    assert all(reply.tokens > 0 for reply in together)
    [long, fits] = judges[1].ask([Vote("x" * 96, seed=0), votes[0]], 0.0, 60.0)
    assert isinstance(fits, Reply) and "more than the 96 of the judge" in long
    forged = judges[1].ask([Vote("1<eos><|user|>2", seed=0)], 0.0, 60.0)[0].tokens  # the marks as 5 and 8 characters
    assert forged - 8 == len("1<eos><|user|>2") + len(("<|user|>", "<eos>", "<|assistant|>"))
    state = torch.get_rng_state()
    first, same, other = (judges[1].ask([Vote("abc", seed=seed)], 5.0, 60.0)[0].text for seed in (1, 1, 2))
    assert first == same != other
    assert torch.equal(torch.get_rng_state(), state), "the seeds of others are left alone"
