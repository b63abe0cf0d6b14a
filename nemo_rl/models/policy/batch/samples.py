"""Some samples of each step with their tokens, written by the ranks that hold them: for the report of the run.

    <folder>/<worker>_000041.js      from step 41 on, a line `nemo_rl_sample({...});` per sample
    <folder>/index_<worker>.jsonl    a line per sample: step, id, block, and what samples are sorted by

A block is JavaScript, because a page that is opened from a disk may load scripts and nothing else. It is replaced whole
with every step, so that a page never loads half of one, and ends at `SampleSettings.block_bytes`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.models.policy.batch.microbatches import LoadedRow
from nemo_rl.models.policy.settings import SampleSettings
from nemo_rl.types import PREVIEW, Example, ExampleGroup, RolloutGroup, RowKey
from nemo_rl.utils.files import script_json

SAMPLE_CALL = "nemo_rl_sample"
OUTPUTS = "outputs"  # column of the loss's input: logprobs, or the scores of a reward model
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character
_DECIMALS = 4


class TokenTexts:
    """The text of single tokens. Tokens that are parts of one character have it at the first of them."""

    def __init__(self, settings: SampleSettings) -> None:
        self._decode = settings.decode
        self._anchor = settings.anchor
        self._prefix = settings.decode([settings.anchor])
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        for token in {*token_ids} - self._known.keys():
            self._known[token] = self._behind_anchor([token])
        texts = [self._known[token] for token in token_ids]
        start = 0
        while start < len(texts):
            end = start
            while end < len(texts) and _BROKEN in texts[end]:
                end += 1
            if end > start + 1:
                texts[start:end] = [self._behind_anchor(token_ids[start:end]), *[""] * (end - start - 1)]
            start = max(end, start + 1)
        return texts

    def _behind_anchor(self, token_ids: Sequence[int]) -> str:
        text = self._decode([self._anchor, *token_ids])
        return text.removeprefix(self._prefix) if text.startswith(self._prefix) else self._decode(list(token_ids))


class SampleWriter:
    """Writes the samples of one rank. `name` is the worker's."""

    def __init__(self, settings: SampleSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._texts = TokenTexts(settings)
        self._block: Path | None = None
        self._lines: list[str] = []
        self._about: dict[RowKey, dict[str, Any]] = {}

    def begin(self, keys: Sequence[RowKey], groups: Mapping[int, RolloutGroup | ExampleGroup]) -> None:
        """Remember messages, rewards and turns of a new plan, which its rows will not hold."""
        self._about = {}
        for number, index in keys:
            group = groups[number]
            sample = group.rows[index]
            pixels = [group.pixels[span.digest] for span in sample.images]
            jpegs = [base64.b64encode(made[PREVIEW].tobytes()).decode() for made in pixels if PREVIEW in made]
            pictures = [f"data:image/jpeg;base64,{jpeg}" for jpeg in jpegs]
            shown = {"pictures": pictures} if pictures else {}
            if isinstance(sample, Example):
                self._about[number, index] = {"id": sample.sample_id, **shown}
                continue
            assert isinstance(group, RolloutGroup)
            meta = asdict(sample.meta)
            of_episode = [i for i, row in enumerate(group.rows) if row.sample_id == sample.sample_id]
            place = f", row {of_episode.index(index) + 1} of {len(of_episode)}" if len(of_episode) > 1 else ""
            del meta["branches"]
            self._about[number, index] = {
                "id": meta.pop("sample_id") + place,
                "group": group.group_id,
                "prompt": group.prompt_id,
                **{name: value for name, value in meta.items() if value or name in ("reward", "own_reward")},
                "messages": sample.messages,
                "metrics": {name: _finite(value) for name, value in sample.metrics.items()},
                **shown,
            }

    def write(self, step: int, rows: Mapping[RowKey, LoadedRow]) -> str | None:
        """Write the remembered samples, whose tokens and columns are in `rows`, once.

        Returns why it cannot be done.
        """
        remembered, self._about = self._about, {}
        if not remembered:
            return None
        folder = self._settings.folder
        if not folder.parent.is_dir():
            return f"{socket.gethostname()} does not see {folder.parent}; keep logger.log_dir where all nodes see it"
        try:
            folder.mkdir(exist_ok=True)
            if self._block is None or sum(map(len, self._lines)) > self._settings.block_bytes:
                self._block, self._lines = _unused(folder / f"{self._name}_{step:06d}.js"), []
            summaries = []
            for key, about in remembered.items():
                sample = self._sample(step, about, rows[key])
                self._lines.append(f"{SAMPLE_CALL}({script_json(sample)});\n")
                summaries.append(_summary(sample, self._block.name))
            unfinished = self._block.with_suffix(".tmp")
            unfinished.write_text("".join(self._lines), encoding="ascii")
            os.replace(unfinished, self._block)
            with (folder / f"index_{self._name}.jsonl").open("a", encoding="ascii") as file:
                file.writelines(json.dumps(summary) + "\n" for summary in summaries)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return None

    def _sample(self, step: int, about: Mapping[str, Any], row: LoadedRow) -> dict[str, Any]:
        length, limit = len(row.token_ids), self._settings.max_tokens
        head, tail = (length, 0) if length <= limit else (limit - limit // 2, limit // 2)
        kept = [*range(head), *range(length - tail, length)]
        ids = row.token_ids[kept].tolist()
        sample: dict[str, Any] = {"step": step, **about, "length": length, "in_loss": row.mask}
        if tail:
            sample["left_out"] = [head, length - tail]
        sample |= {
            "ids": ids,
            "texts": self._texts(ids),
            "mask": "".join("01"[m] for m in row.token_mask[kept].tolist()),
        }
        for name, column in row.columns.items():
            if column.ndim == 0:
                sample[name] = _rounded(column.item())
            elif column.shape == row.token_ids.shape:
                values = [_rounded(value) for value in column[kept].tolist()]
                of_loss = column[row.token_mask]
                is_constant = name == "advantages" and len(of_loss) > 0 and bool((of_loss == of_loss[0]).all())
                sample[name] = _rounded(of_loss[0].item()) if is_constant else values
        return sample | disagreement(row)


def _unused(path: Path) -> Path:
    """The path, with a number if it exists: a worker that was replaced has written the same step before."""
    if not path.exists():
        return path
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(1))
    return next(other for other in numbered if not other.exists())


def disagreement(row: LoadedRow) -> dict[str, float]:
    """`error`: mean exp(|train - generation logprob|) over the loss tokens; `worst`: the largest of them."""
    train = row.columns.get("prev_logprobs", row.columns.get(OUTPUTS))
    generated = row.columns.get("generation_logprobs")
    if train is None or generated is None or not row.token_mask.any():
        return {}
    ratios = (train - generated)[row.token_mask].double().abs().exp()
    return {"error": _finite(ratios.mean().item()), "worst": _finite(ratios.max().item())}


def _summary(sample: Mapping[str, Any], block: str) -> dict[str, Any]:
    advantages = sample.get("advantages")
    if isinstance(advantages, list):
        of_loss = [value for value, mask in zip(advantages, sample["mask"], strict=True) if mask == "1"]
        advantages = _rounded(sum(of_loss) / len(of_loss)) if of_loss else 0.0
    of_loss = [value for value, mask in zip(sample.get(OUTPUTS, ()), sample["mask"], strict=False) if mask == "1"]
    mean = {"output": _rounded(sum(of_loss) / len(of_loss))} if of_loss else {}
    keys = ("step", "id", "group", "prompt", "status", "reward", "length", "num_generated_tokens", "num_turns", "error")
    return {"block": block, **{key: sample[key] for key in keys if key in sample}, "advantage": advantages, **mean}


def _rounded(value: float) -> float:
    return round(_finite(value), _DECIMALS) if abs(value) < 1e6 else _finite(value)


def _finite(value: float) -> float:
    """JSON has no infinity and no NaN; both are shown as a number that no logprob has."""
    return value if math.isfinite(value) else math.copysign(1e30, value)
