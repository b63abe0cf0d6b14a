"""Alarms on learning: what goes wrong in the curves of a run, with the evidence and what people do about it.

An alarm compares steps with the first ones that this process saw, and speaks once until its cause is over.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from nemo_rl.utils.config import AlarmsConfig

REWARD = "train/reward"
MIXED = "train/baseline_reward/pct_mixed"
GRAD_NORM = "train/grad_norm"
VALIDATION = "validation/accuracy"
_SPIKE_HISTORY = 20  # steps


class _Trend(NamedTuple):
    """An alarm on the medians of a metric: of the latest steps, `now`, and of the first ones, `first`."""

    metric: str
    text: str
    sounds: Callable[[float, float, float], bool] = lambda now, first, most: now > most  # most: the value of the key
    while_unsolved: bool = False  # a solved task may look like this


_TRENDS = {
    "entropy_collapse": _Trend(
        "train/approx_entropy",
        "the entropy fell from {first:.3g} to {now:.3g} while the reward is {reward:.3g}: samples of a group become "
        "equal. Raise the temperature or loss_fn.ratio_clip_max (clip-higher), lower the learning rate, or mix in "
        "harder prompts",
        lambda now, first, share: now < share * first,
        while_unsolved=True,
    ),
    "length_explosion": _Trend(
        "train/mean_gen_tokens_per_sample",
        "answers grew from {first:.0f} to {now:.0f} tokens. Penalise overlong answers, use a loss per token instead of "
        "per sequence, and read samples for repetition",
        lambda now, first, factor: now > factor * first,
    ),
    "length_collapse": _Trend(
        "train/mean_gen_tokens_per_sample",
        "answers shrank from {first:.0f} to {now:.0f} tokens while the reward is {reward:.3g}. Look for a reward that "
        "short answers earn, and for a length normalisation that favours them",
        lambda now, first, share: now < share * first,
        while_unsolved=True,
    ),
    "mixed_groups": _Trend(
        MIXED,
        "{now:.0%} of the groups have different rewards, the others teach nothing (reward {reward:.3g}). Take prompts "
        "of other difficulty, more samples per prompt, or dynamic sampling",
        lambda now, first, least: now < least,
        while_unsolved=True,
    ),
    "kl_blowup": _Trend(
        "train/kl_penalty",
        "the KL from the reference policy is {now:.3g} per token. Lower the learning rate, raise "
        "loss_fn.reference_policy_kl_penalty, or go back to an earlier checkpoint",
    ),
    "clip_fraction": _Trend(
        "train/clip_fraction",
        "{now:.0%} of the tokens are clipped: most of the batch gives no gradient. Take fewer optimizer "
        "steps per batch, a smaller learning rate, or fresher samples",
    ),
    "truncation": _Trend(
        "train/truncation_rate",
        "{now:.0%} of the answers are cut at the length limit. Raise policy.generation.max_new_tokens "
        "and policy.max_total_sequence_length, or read samples for repetition",
    ),
    "repetition_loops": _Trend(
        "train/repetition_loop_rate",
        "{now:.0%} of the answers end in a loop of the same tokens. Read samples in report.html; raise the "
        "temperature, give cut answers no reward or mask them (overlong filtering), or lower the learning rate",
    ),
}
"""By key of `AlarmsConfig`."""
_WATCHED = {REWARD, GRAD_NORM, *(trend.metric for trend in _TRENDS.values())}


class LearningAlarms:
    """Watches the metrics of a run, which come step by step."""

    def __init__(self, cfg: AlarmsConfig) -> None:
        self._cfg = cfg
        self._first: dict[str, float] = {}  # the first level of each metric
        self._latest: dict[str, deque[float]] = {}
        self._norms: deque[float] = deque(maxlen=_SPIKE_HISTORY)
        self._best: tuple[float, float] | None = None  # best validation, and the reward of that time
        self._speaking: set[str] = set()

    @property
    def max_disagreement(self) -> float | None:
        """`token_mult_prob_error` above which every step is to warn; None: no step is."""
        return self._cfg.disagreement if self._cfg.enabled else None

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        """The alarms of a step that did not sound before it. `metrics` are by logged name."""
        if not self._cfg.enabled:
            return []
        for name in _WATCHED & metrics.keys():
            self._latest.setdefault(name, deque(maxlen=self._cfg.window)).append(metrics[name])
            if (first := self._level(name)) is not None:
                self._first.setdefault(name, first)
        found = dict([*self._of_trends(), *self._of_spikes(metrics), *self._of_validation(metrics)])
        if (scaled := _scaled_norm(metrics)) is not None:
            self._norms.append(scaled)
        new = [f"{key}: {text}" for key, text in found.items() if key not in self._speaking]
        self._speaking = set(found) if _WATCHED & metrics.keys() else self._speaking | set(found)
        return new

    def _of_trends(self) -> Iterator[tuple[str, str]]:
        """(key of `AlarmsConfig`, message)."""
        reward = self._level(REWARD)
        is_solved = reward is None or reward >= self._cfg.solved_reward  # all groups have equal, good answers
        for key, trend in _TRENDS.items():
            limit, now = vars(self._cfg)[key], self._level(trend.metric)
            if limit is None or now is None or (trend.while_unsolved and is_solved):
                continue
            first = self._first[trend.metric]
            if trend.sounds(now, first, limit):
                yield key, trend.text.format(now=now, first=first, reward=reward)

    def _of_spikes(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        factor, scaled = self._cfg.gradient_spike, _scaled_norm(metrics)
        if factor is None or scaled is None or len(self._norms) < _SPIKE_HISTORY // 2:
            return
        usual = statistics.median(self._norms)
        if scaled > factor * usual > 0:
            norm = metrics[GRAD_NORM]
            yield (
                "gradient_spike",
                f"the gradient norm is {norm:.3g}, usually {usual * norm / scaled:.3g} with as many groups that teach. "
                "Lower policy.max_grad_norm or the learning rate, and look at the samples of this step",
            )

    def _of_validation(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        drop, value, reward = self._cfg.reward_hacking, metrics.get(VALIDATION), self._level(REWARD)
        if drop is None or value is None or reward is None:
            if "reward_hacking" in self._speaking and value is None:
                yield "reward_hacking", ""  # until the next validation
            return
        if self._best is None or value >= self._best[0]:
            self._best = (value, reward)
        elif value < self._best[0] - drop and reward > self._best[1]:
            yield (
                "reward_hacking",
                f"validation fell from {self._best[0]:.3g} to {value:.3g} while the training reward rose from "
                f"{self._best[1]:.3g} to {reward:.3g}. Read training samples with high rewards; stop, or go back to "
                "the checkpoint of the best validation",
            )

    def _level(self, name: str) -> float | None:
        """Median of the latest values; None before `window` steps."""
        values = self._latest.get(name, ())
        return statistics.median(values) if len(values) == self._cfg.window else None


def _scaled_norm(metrics: Mapping[str, float]) -> float | None:
    """The gradient norm that a step would have if all its groups had different rewards; None if none has.

    Gradients of groups are about independent: the norm of their mean grows with the root of the share that have one.
    """
    norm, mixed = metrics.get(GRAD_NORM), metrics.get(MIXED, 1.0)
    return norm / mixed**0.5 if norm is not None and mixed > 0 else None
