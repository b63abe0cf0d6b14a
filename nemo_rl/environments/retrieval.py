"""Questions answered after searching a corpus: the model asks for passages, reads them, and answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.retrieval_config import RetrievalEnvironmentConfig
from nemo_rl.environments.retrieval_index import PassageIndex, load_corpus
from nemo_rl.environments.sample_values import SampleValues
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils import retrieval_tags
from nemo_rl.utils.cache import cache_root
from nemo_rl.utils.retrieval_tags import STOP_STRINGS, find_action

NOTHING_FOUND = "Nothing was found."
NO_SEARCHES_LEFT = "No searches are left: give the answer in <answer> </answer>."
NEITHER = "Search with <retrieve> </retrieve>, or give the answer in <answer> </answer>."


class RetrievalMetadata(TypedDict):
    """What a row gives, and what an episode carries from turn to turn."""

    ground_truth: str | list[str]  # the answer, or all that are right
    searches: NotRequired[int]
    hits: NotRequired[int]  # searches of which a shown passage has the answer


class RetrievalEnvironment(EnvironmentInterface[RetrievalMetadata]):
    """`<retrieve>words</retrieve>` is answered with numbered passages; `<answer>text</answer>` ends the episode.

    The reward compares the answer with `metadata["ground_truth"]`; searches are not rewarded. A turn with neither is
    told what there is.

    Raises:
        ValueError, FileNotFoundError: for a corpus that cannot be read.
    """

    def __init__(self, cfg: RetrievalEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, RetrievalEnvironmentConfig) else RetrievalEnvironmentConfig(**cfg)
        corpus = load_corpus(
            self.cfg.dataset_name,
            split=self.cfg.dataset_split,
            text_column=self.cfg.text_column,
            kwargs=self.cfg.dataset_kwargs,
        )
        self.index = PassageIndex(
            corpus, k1=self.cfg.k1, b=self.cfg.b, stopwords=self.cfg.stopwords, cache=cache_root() / "retrieval"
        )
        self.values = SampleValues()

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[RetrievalMetadata]
    ) -> EnvironmentReturn[RetrievalMetadata]:
        """Search, or judge the answer, as the last turn of each conversation asks."""
        turns = [self._turn(log, state) for log, state in zip(message_log_batch, metadata, strict=True)]
        for log, (_, state, _, _) in zip(message_log_batch, turns, strict=True):
            searches, hits = state.get("searches", 0), state.get("hits", 0)
            values = {"searches_per_sample": float(searches)}
            if searches:
                values["hit_rate"] = hits / searches
            self.values.remember(log, values)
        answers = [answer for _, _, answer, _ in turns]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text, _, _, _ in turns],
            metadata=[state for _, state, _, _ in turns],
            next_stop_strings=[STOP_STRINGS for _ in turns],
            rewards=torch.tensor([reward for _, _, _, reward in turns]),
            terminateds=torch.tensor([answer is not None for answer in answers]),
            answers=answers,
        )

    def _turn(
        self, log: LLMMessageLogType, state: RetrievalMetadata
    ) -> tuple[str, RetrievalMetadata, str | None, float]:
        """(observation, new state, answer, reward)."""
        truths = accepted_answers(state["ground_truth"])
        action = find_action(str(log[-1]["content"]))
        if action.answer is not None:
            reward = max(score(action.answer, truth, self.cfg.reward) for truth in truths)
            return ("right" if reward == 1 else "not right"), state, action.answer, reward
        if action.query is None:
            return NEITHER, state, None, 0.0
        searches = state.get("searches", 0)
        if searches >= self.cfg.max_searches:
            return NO_SEARCHES_LEFT, state, None, 0.0
        shown = self._passages(action.query)
        hit = any(mentions(text, truth) for text in shown for truth in truths)
        state = {**state, "searches": searches + 1, "hits": state.get("hits", 0) + hit}
        return retrieval_tags.passages(shown) or NOTHING_FOUND, state, None, 0.0

    def _passages(self, query: str) -> list[str]:
        """What a search shows, within the limits."""
        room = self.cfg.max_observation_characters
        shown: list[str] = []
        for number in self.index.search(query, self.cfg.num_results):
            text = str(self.index.corpus[number])[: min(room, self.cfg.max_passage_characters)]
            if not text:
                break
            shown.append(text)
            room -= len(text)
        return shown

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Metrics of a batch with `rewards` [B], `is_end` [B] (an answer was given) and `message_log`, a list.

        searches_per_sample  mean number of searches
        hit_rate             share of a sample's searches that showed the answer, mean over samples that searched
        """
        return batch, {
            "correct_rate": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            **self.values.means(batch["message_log"]),
        }


def accepted_answers(truth: str | Sequence[str]) -> list[str]:
    """The answers that are right, one at least."""
    answers = [truth] if isinstance(truth, str) else [str(one) for one in truth]
    if not answers:
        raise ValueError("the row has no right answer: its ground_truth is an empty list")
    return answers


def normalised(text: str) -> str:
    """Without case, punctuation, articles and further spaces, as SQuAD compares answers (Rajpurkar et al. 2016)."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def score(answer: str, truth: str, kind: str) -> float:
    """1.0 for the same words in the same order, else 0.0; with `kind` "f1" how well the words agree, from 0 to 1."""
    given, expected = normalised(answer), normalised(truth)
    if kind == "exact_match" or not given or not expected:
        return float(given == expected)
    words, wanted = given.split(), expected.split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def mentions(text: str, truth: str) -> bool:
    """Whether a passage has the words of the answer, in their order."""
    return f" {normalised(truth)} " in f" {normalised(text)} "
