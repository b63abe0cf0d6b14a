"""A program: items of the tasks of reasoning-gym, for a Python that has this package.

A request is a line, {"task", "settings", "seed", "size", "index"}. A reply is a line, too: {"question", "answer",
"item"}, or {"unknown_task"} or {"unknown_setting"}, each with the names that are {"known"}, or {"refused": why}.
Standard library and that package only.
"""

import dataclasses
import json
import sys
from typing import Any

DRAWN = {"seed", "size"}  # settings of every task, which the rows determine


def packed(value: Any) -> Any:
    """The value for JSON; a tuple, which scorers tell from a list, as {"__tuple__": [...]}."""
    if isinstance(value, dict):
        return {key: packed(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [packed(entry) for entry in value]}
    return [packed(entry) for entry in value] if isinstance(value, list) else value


class Tasks:
    """Answers requests; `known` are the tasks of reasoning-gym, name -> (class, class of its settings)."""

    def __init__(self, known: dict[str, tuple[Any, Any]]) -> None:
        self.known = {name: classes for name, classes in known.items() if name != "composite"}
        self.started: dict[str, tuple[int, Any]] = {}  # task -> its last seed, and its items from there on

    def reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
        name, settings, seed = request["task"], request["settings"], request["seed"]
        if name not in self.known:
            return {"unknown_task": name, "known": sorted(self.known)}
        if self.started.get(name, (None,))[0] != seed:
            task, config = self.known[name]
            known = {field.name for field in dataclasses.fields(config)} - DRAWN
            if unknown := sorted(settings.keys() - known):
                return {"unknown_setting": unknown[0], "known": sorted(known)}
            try:
                self.started[name] = seed, task(config(**settings, seed=seed, size=request["size"]))
            except (AssertionError, TypeError, ValueError) as error:  # of `validate` of the settings
                return {"refused": str(error) or repr(error)}
        entry = self.started[name][1][request["index"]]
        return {"question": entry["question"], "answer": entry["answer"], "item": json.dumps(packed(entry))}


def main() -> None:
    """Answer requests until the input ends."""
    from reasoning_gym.factory import DATASETS

    replies, sys.stdout = sys.stdout, sys.stderr  # some tasks print
    tasks = Tasks(DATASETS)
    for line in sys.stdin:
        replies.write(json.dumps(tasks.reply_to(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
