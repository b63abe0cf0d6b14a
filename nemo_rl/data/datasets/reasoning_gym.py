"""Generated items of the tasks of reasoning-gym: puzzles, sums, games and more, each with a scorer of its own.

The package is in a Python of its own, which makes the items (`reasoning_gym_items.py`). A hash of the question alone
chooses the held-out fifth, so training and validation never share an item, whatever seeds and settings are.
"""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import xxhash
from pydantic import BeforeValidator, ConfigDict, Field

from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import ExampleDatasetConfig, TableConfig
from nemo_rl.data.datasets.arithmetic import HELD_OUT_ONE_IN, generated_options, in_split
from nemo_rl.data.interfaces import one_turn
from nemo_rl.distributed.own_python import made_python, python_of
from nemo_rl.utils.registry import MissingPackage
from nemo_rl.utils.task_formats import REASONING_GYM, answer

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("reasoning_gym_items.py")
CHUNK = 64  # items from one seed on: some tasks need a second to begin, and some make all their items then
_KEY = "kwargs.py_executable of dataset reasoning_gym"
MAX_TRIES = 40 * CHUNK  # items in a row that belong to the other split
LONG_S = 30.0  # after which the log says how far it is


class _Task(StrictModel):
    """A task in a mixture. All other keys are settings of the task."""

    model_config = ConfigDict(extra="allow")

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def _named(tasks: Any) -> Any:
    """A single name, or names in a list, as a mapping; and a name without settings."""
    names = [tasks] if isinstance(tasks, str) else tasks
    if isinstance(names, list):
        return {name: {} for name in names}
    return {name: entry or {} for name, entry in tasks.items()} if isinstance(tasks, Mapping) else tasks


class _Options(StrictModel):
    tasks: Annotated[dict[str, _Task], BeforeValidator(_named)] = Field(min_length=1)
    num_samples: int | None = Field(default=None, ge=1)
    py_executable: str | list[str] | None = REASONING_GYM


def load_reasoning_gym(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows {"problem", "extra_env_info": {"task", "settings", "item"}}, and {"expected_answer"} if the task has one.

    Rows to learn from (SFT) also have `messages`, with the answer between `<answer>` and `</answer>`.

    `kwargs` are {tasks, num_samples, py_executable}; `split` and `seed` come from the section. `tasks` is a name, a
    list of names, or a mapping of each name to its settings and its `weight`: every beginning of the rows has each task
    in proportion to its weight. `num_samples` defaults to 1000 for training and otherwise to 256; items of a task with
    few of them repeat. Raises ValueError for an unknown task or setting, a setting that the task refuses, a task
    without items of the split or, to learn from, without answers; VenvBuildError without the package.
    """
    options = generated_options(cfg, _Options)
    split = cfg.split or "train"
    num_samples = options.num_samples or (1000 if split == "train" else 256)
    with item_maker(options.py_executable) as items:
        streams = {
            name: _of_split(items.of(name, task.model_extra or {}, cfg.seed), name, split)
            for name, task in options.tasks.items()
        }
        rows: list[dict[str, Any]] = []
        began = said = time.monotonic()
        for name in _in_proportion({name: task.weight for name, task in options.tasks.items()}, num_samples):
            rows.append(_row(cfg, name, options.tasks[name].model_extra or {}, next(streams[name])))
            if time.monotonic() > said + LONG_S:
                said = time.monotonic()
                logger.info("reasoning_gym: %d of %d items in %.0f s", len(rows), num_samples, said - began)
    return rows


def check_tasks(cfg: TableConfig) -> None:
    """Check tasks and settings as `load_reasoning_gym` does, by one item of each, and make no rows.

    Raises ValueError as that does; MissingPackage if the package is not installed in its Python yet.
    """
    options = generated_options(cfg, _Options)
    python = made_python(options.py_executable, _KEY)
    if python is None:
        raise MissingPackage("the tasks of reasoning_gym are not checked: the first run installs its package")
    with item_maker(python) as items:
        for name, task in options.tasks.items():
            next(items.of(name, task.model_extra or {}, cfg.seed))


def _in_proportion(weights: Mapping[str, float], count: int) -> Iterator[str]:
    """`count` names, of which every beginning has each in proportion to its weight, as far as whole numbers can."""
    whole, given = sum(weights.values()), dict.fromkeys(weights, 0)
    for number in range(1, count + 1):
        name = max(weights, key=lambda name: weights[name] / whole * number - given[name])
        given[name] += 1
        yield name


def _of_split(items: Iterator[dict[str, Any]], task: str, split: str) -> Iterator[dict[str, Any]]:
    num_tries = 0
    for item in items:
        num_tries = 0 if in_split(item["question"], split) else num_tries + 1
        if num_tries == 0:
            yield item
        elif num_tries == MAX_TRIES:
            raise ValueError(
                f"reasoning_gym: {MAX_TRIES} items of {task} and none of split {split!r} (one in {HELD_OUT_ONE_IN} is "
                "held out): change the settings of the task, so that it has more items, or set split=all"
            )


def _row(cfg: TableConfig, task: str, settings: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, Any]:
    info = {"task": task, "settings": dict(settings), "item": item["item"]}
    row = {"problem": item["question"], "extra_env_info": info}
    if item["answer"] is not None:
        row["expected_answer"] = item["answer"]
    if not isinstance(cfg, ExampleDatasetConfig):
        return row
    if item["answer"] is None:
        raise ValueError(
            f"reasoning_gym: {task} has items without an answer, only a scorer, and nothing can be learned from them "
            "here; choose another task, or train on it with GRPO"
        )
    return {**row, "messages": one_turn(item["question"], answer(item["answer"]))}


@contextmanager
def item_maker(py_executable: str | list[str] | None) -> Generator[ItemMaker]:
    """The process that makes items, for a `with` block. VenvBuildError if its Python cannot be made."""
    python = python_of(py_executable, _KEY)
    # -P: not the folder of the program, which has a module of the package's name. One order of sets in all runs.
    command = [python, "-P", "-W", "ignore", str(PROGRAM)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, env={"PYTHONHASHSEED": "0", "PATH": ""}, **pipes)
        try:
            yield ItemMaker(process, errors)
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class ItemMaker:
    """Asks the process for items."""

    process: subprocess.Popen[str]
    errors: IO[str]

    def of(self, task: str, settings: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
        """The items of a task, without end. ValueError for what the task does not know or refuses."""
        for number, index in (divmod(position, CHUNK) for position in itertools.count()):
            drawn = xxhash.xxh32_intdigest(f"{seed}/{task}/{number}".encode())
            asked = {"task": task, "settings": settings, "seed": drawn, "size": CHUNK, "index": index}
            reply = self._ask(asked)
            if name := reply.get("unknown_task"):
                raise ValueError(f"reasoning_gym has no task {name!r}; {did_you_mean(name, reply['known'])}")
            if name := reply.get("unknown_setting"):
                known = ["weight", *reply["known"]]
                raise ValueError(f"reasoning_gym: {task} has no setting {name!r}; {did_you_mean(name, known)}")
            if problem := reply.get("refused"):
                raise ValueError(f"reasoning_gym: {task} refuses its settings: {problem}")
            yield reply

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["no message"]
        if "No module named 'reasoning_gym'" in said[-1]:
            raise ValueError(
                f"{self.process.args[0]} has no package reasoning-gym: install it there (uv pip install "  # pyrefly: ignore[bad-index]
                "reasoning-gym), or leave kwargs.py_executable out, and it is installed at first use"
            )
        raise ValueError(f"reasoning_gym: {request['task']} has made no item: {said[-1]}")
