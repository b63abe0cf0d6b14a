import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nemo_rl.config.errors import ConfigError
from nemo_rl.data.datasets import lookup
from nemo_rl.environments import retrieval
from nemo_rl.environments.client import split_return
from nemo_rl.environments.config import RetrievalEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.retrieval import PassageIndex, RetrievalEnvironment, load_corpus, mentions, score
from nemo_rl.utils.task_formats import STOP_STRINGS, Action, find_action
from tests.conversations import answered
from tests.unit.config.run_configs import build


def corpus(name, **keys):
    return RetrievalEnvironmentConfig(dataset_name=str(name), **keys)


def test_passages_are_ranked_by_bm25_and_equal_ones_by_number(tmp_path):
    texts = ["red fox", "dog", "fox fox red", "the fox of the dog", "red fox"]

    def search(query, number=9, **parameters):
        return PassageIndex(texts, corpus("nowhere.jsonl", **parameters), tmp_path).search(query, number)

    assert search("fox", k1=0.0) == [0, 2, 3, 4], "neither count nor length"
    assert search("fox", k1=1.2, b=0.0) == [2, 0, 3, 4], "not the length"
    assert search("Fox", k1=1.2, b=1.0) == [2, 0, 4, 3]
    assert search("fox", 2, k1=1.2, b=1.0) == [2, 0]
    assert search("dog fox", k1=0.0) == [3, 1, 0, 2, 4], "a rare word says more"
    assert search("the", stopwords="en") == search("unheard") == []


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_corpus_from_a_file(tmp_path, suffix):
    path = tmp_path / f"corpus{suffix}"
    rows = [{"title": "a", "body": "red fox"}, {"title": "b", "body": "dog"}]
    lines = [json.dumps(row) for row in rows] if suffix == ".jsonl" else ["title,body", "a,red fox", "b,dog"]
    path.write_text("\n".join(lines) + "\n")
    found = load_corpus(corpus(path, text_column="body"))
    assert list(found) == [found[0], found[1]] == ["red fox", "dog"]
    with pytest.raises(ValueError, match=r"no column 'text' \(text_column\); its columns are: title, body"):
        load_corpus(corpus(path))


def test_what_a_turn_asks_for():
    assert find_action("let me see <retrieve> red fox </retrieve>") == Action(query="red fox")
    assert find_action("<answer>9</answer><retrieve>x</retrieve>") == Action(answer="9")
    assert find_action("<retrieve>x</retrieve><answer>9</answer>") == Action(query="x")
    assert find_action("so \\boxed{1}, no: \\boxed{2}") == Action(answer="2")
    assert find_action("<answer>cut of") == Action()


def test_answers_are_compared_by_their_words():
    assert score("The  Beatles!", "beatles", "exact_match") == 1.0
    assert score("beatles band", "the beatles", "exact_match") == 0.0
    assert score("beatles band", "the beatles", "f1") == pytest.approx(2 / 3)
    assert score("", "x", "f1") == 0.0
    assert mentions("The code is 482.", "482") and not mentions("The code is 4820.", "482")
    with pytest.raises(ValueError, match="no right answer"):
        retrieval.accepted_answers([])


def play(env: Any, turns: Sequence[str], state: Any) -> tuple[list[tuple[str, float, bool]], EnvironmentReturn[Any]]:
    """(observation, reward, ended) of each turn of one conversation, and what the environment returns for the last."""
    told = []
    for turn in turns:
        returned = env.step([answered(turn)], [json.loads(json.dumps(state))])  # it travels, and holds data alone
        [step] = split_return(returned, 1, "mine")
        state = step.metadata
        told.append((step.observation["content"], step.reward, step.terminated))
    return told, returned


def test_an_episode_searches_reads_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path))
    settings = {"dataset_name": "nemo_rl.data.datasets.lookup:corpus", "num_results": 2, "max_searches": 2}
    env = RetrievalEnvironment(settings)
    code = lookup.code_of("Lima", lookup.DEFAULT_SEED)
    turns = ["<retrieve>code Lima</retrieve>", "<retrieve>Atlantis</retrieve>", "hm", "<retrieve>Oslo</retrieve>"]
    told, last = play(env, [*turns, f"<answer>{code}.</answer>"], {"ground_truth": code})
    accra = lookup.fact("Accra", lookup.code_of("Accra", lookup.DEFAULT_SEED))
    assert told == [
        (f"[1] The code of Lima is {code}.\n[2] {accra}", 0.0, False),
        (retrieval.NOTHING_FOUND, 0.0, False),
        (retrieval.NEITHER, 0.0, False),
        (retrieval.NO_SEARCHES_LEFT, 0.0, False),
        ("right", 1.0, True),
    ]
    assert last.next_stop_strings == [STOP_STRINGS]
    silent, first = play(env, ["<answer>1</answer>"], {"ground_truth": ["2", "3"]})
    assert silent == [("not right", 0.0, True)]
    _, metrics = env.global_post_process_and_metrics({"rewards": torch.tensor([1.0, 0.0]), "is_end": torch.ones(2)})
    assert metrics == {"correct_rate": 0.5, "fraction_of_samples_properly_ended": 1.0}
    assert last.metrics == [{"searches_per_sample": 2.0, "hit_rate": 0.5}]
    assert first.metrics == [{"searches_per_sample": 0.0}]


def test_one_turn_is_refused_for_it_leaves_none_to_answer():
    data = "data.train={dataset_name: lookup, env_name: retrieval, split_validation_size: 0.1}"
    env = "+env.retrieval={type: retrieval, dataset_name: 'nemo_rl.data.datasets.lookup:corpus'}"
    with pytest.raises(ConfigError, match=r"max_rollout_turns: 1 leaves no turn .* set grpo.max_rollout_turns=5"):
        build(data, env)
    with pytest.raises(ConfigError, match=r"4 leaves .* set grpo.max_rollout_turns=5, or env.retrieval.max_searches=3"):
        build(data, env, "grpo.max_rollout_turns=4")
    build(data, env, "grpo.max_rollout_turns=5")
