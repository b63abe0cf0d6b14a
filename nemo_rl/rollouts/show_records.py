"""Displays recorded rollouts: a table of groups, and one group turn by turn. Renders with rich, prints nothing."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nemo_rl.config.terminal import visible
from nemo_rl.rollouts.records import read_groups, read_index, recorded_steps, step_folder
from nemo_rl.types import RolloutGroup, Sample, SampleMeta, SampleStatus
from nemo_rl.utils.console import message_text

Decode = Callable[[Sequence[int]], str]
LIKELY, UNLIKELY = 0.5, 0.05
"""Probabilities at which the colour of a sampled token changes."""

FILTER_FIELDS = ("status", "stop_reason", "task", "step")


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """A group, with its task and the advantages of its step."""

    step: int
    task_name: str
    group: RolloutGroup
    advantages: list[float] | None  # planned, by sample; None if the group was not trained

    @property
    def rewards(self) -> list[float]:
        return [sample.meta.reward for sample in self.group.samples if sample.meta.has_reward]

    @property
    def mean_reward(self) -> float:
        return statistics.fmean(self.rewards) if self.rewards else math.nan


def parse_filter(text: str) -> tuple[str, str]:
    """`field=value` from the command line. Raises ValueError, which lists the fields, for an unknown field."""
    field, equals, value = text.partition("=")
    if field not in FILTER_FIELDS or not equals:
        raise ValueError(f"--filter {text}: write one of {', '.join(f'{name}=...' for name in FILTER_FIELDS)}")
    return field, value


def _meets(group: RecordedGroup, sample: Sample, filters: Sequence[tuple[str, str]]) -> bool:
    found = {
        "status": {sample.meta.status.value},
        "stop_reason": {turn.stop_reason.value for row in sample.meta.rows for turn in row.turns},
        "task": {group.task_name},
        "step": {str(group.step)},
    }
    return all(value in found[field] for field, value in filters)


def recorded_groups(root: Path, filters: Sequence[tuple[str, str]] = ()) -> Iterator[RecordedGroup]:
    """The groups below `root`, step by step, with at least one sample that meets all filters (field, value).

    FileNotFoundError if there is no record.
    """
    steps = recorded_steps(root)
    if not steps:
        raise FileNotFoundError(f"{root} holds no recorded step (step_000001, ...)")
    for step in steps:
        index = read_index(root, step)
        groups, task_names = read_groups(step_folder(root, step))
        for group, task_name in zip(groups, task_names, strict=True):
            found = RecordedGroup(
                step=step, task_name=task_name, group=group, advantages=index.trained.get(group.group_id)
            )
            if any(_meets(found, sample, filters) for sample in group.samples):
                yield found


def groups_table(groups: Sequence[RecordedGroup]) -> Table:
    """A table with one line per group."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("group", overflow="fold", no_wrap=True)  # in full: --group takes it
    table.add_column("task")
    for name in ("samples", "reward", "std", "tokens", "most", "turns"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("not completed")
    for recorded in groups:
        metas = [sample.meta for sample in recorded.group.samples]
        generated = [sum(row.num_generated_tokens for row in meta.rows) for meta in metas]
        not_completed = Counter(meta.status.value for meta in metas if meta.status is not SampleStatus.COMPLETED)
        table.add_row(
            str(recorded.step),
            Text(visible(recorded.group.group_id) + ("" if recorded.advantages is not None else " (not trained)")),
            Text(visible(recorded.task_name)),
            str(len(metas)),
            f"{recorded.mean_reward:.3f}",
            f"{statistics.pstdev(recorded.rewards):.3f}" if recorded.rewards else "-",
            f"{statistics.fmean(generated):.0f}",
            str(max(generated)),
            f"{statistics.fmean([sum(row.num_turns for row in meta.rows) for meta in metas]):.1f}",
            ", ".join(f"{count} {status}" for status, count in sorted(not_completed.items())),
        )
    return table


def show_group(recorded: RecordedGroup, number: int | None = None, decode: Decode | None = None) -> RenderableType:
    """All samples of a group, or sample `number`. ValueError if the group has no such sample.

    With `decode`, also the tokens, with sampled tokens coloured by probability.
    """
    group = recorded.group
    numbers = range(len(group.samples))
    if number is not None and number not in numbers:
        raise ValueError(f"group {group.group_id} has samples 0 to {len(group.samples) - 1}, not {number}")
    head = Text(f"step {recorded.step}, group {visible(group.group_id)}, task {visible(recorded.task_name)}", "bold")
    head.append(f"\nmean reward {recorded.mean_reward:.4f} of {len(recorded.rewards)} samples", "not bold")
    return Group(head, *(_show_sample(recorded, n, decode) for n in (numbers if number is None else [number])))


def _show_sample(recorded: RecordedGroup, number: int, decode: Decode | None) -> RenderableType:
    sample = recorded.group.samples[number]
    meta = sample.meta
    title = f"sample {number}: {meta.status.value}"
    title += f", reward {meta.reward:.4f}" if meta.has_reward else ", no reward"
    if recorded.advantages is not None:
        title += f", advantage {recorded.advantages[number]:+.4f}"
    if not sample.branches:
        title += f", {meta.num_generated_tokens} of {meta.length} tokens sampled"
    title += f", weights {meta.weight_version}"
    parts: list[RenderableType] = []
    if meta.failure:
        parts.append(Text(visible(meta.failure), style="red"))
    for place, row in enumerate(sample.rows, 1):
        if sample.branches:
            parts.append(Text(_about_row(row.meta, place, len(sample.rows)), style="bold"))
        parts.append(_conversation(row))
        if decode is not None:
            parts.append(token_text(row, decode))
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _about_row(meta: SampleMeta, place: int, num_rows: int) -> str:
    """The heading of a row of an agent's episode."""
    own = f", its own reward {meta.own_reward:.4f}" if meta.own_reward is not None else ""
    role = f", role {visible(meta.role)}" if meta.role else ""
    return f"row {place} of {num_rows}{role}{own}: {meta.num_generated_tokens} of {meta.length} tokens trained here"


def _conversation(sample: Sample) -> Text:
    """The messages of a row, with statistics after each turn of the policy."""
    text = Text()
    turns = iter(sample.meta.turns)
    # Assistant messages of the prompt come first and were not sampled.
    num_given = sum(message["role"] == "assistant" for message in sample.messages) - len(sample.meta.turns)
    for message in sample.messages:
        text.append_text(message_text(message))
        if message["role"] != "assistant":
            continue
        num_given -= 1
        if num_given < 0 and (turn := next(turns, None)) is not None:
            text.append(
                f"  {turn.num_generated_tokens} tokens, stopped by {turn.stop_reason.value}, reward {turn.reward:.4f}, "
                f"{turn.generation_s:.2f} s sampling, {turn.env_s:.2f} s environment, weights {turn.weight_version}\n",
                style="dim",
            )
    text.rstrip()
    return text


def token_text(sample: Sample, decode: Decode) -> Text:
    """Every token with its id. Sampled tokens are green, yellow or red by their probability, with their logprob."""
    text = Text("tokens: ", style="bold")
    for token, is_sampled, logprob in zip(
        sample.token_ids.tolist(), sample.token_mask.tolist(), sample.generation_logprobs.tolist(), strict=True
    ):
        shown = visible(decode([token])).replace("\n", "\\n").replace("\t", "\\t")
        if not is_sampled:
            text.append(f"{shown}[{token}] ", style="dim not bold")
            continue
        probability = float(np.exp(logprob))
        style = "green" if probability >= LIKELY else "yellow" if probability >= UNLIKELY else "bold red"
        text.append(f"{shown}[{token} {logprob:.3f}] ", style=style if "bold" in style else f"not bold {style}")
    text.rstrip()
    return text


def find_group(groups: Sequence[RecordedGroup], group_id: str | None, *, worst: bool) -> RecordedGroup:
    """The group `group_id`; without an id the first group or, with `worst`, the one with the lowest mean reward.

    ValueError if there is no such group.
    """
    found = [group for group in groups if group_id in (None, group.group.group_id)]
    if not found:
        raise ValueError(
            "no group meets the conditions" if group_id is None else f"no group {group_id}; --list shows the groups"
        )
    rewarded = [group for group in found if group.rewards]
    return min(rewarded, key=lambda group: group.mean_reward) if worst and rewarded else found[0]
