"""The translation of a configuration that was written for NeMo RL, by the table in `translations.py`.

The loader calls `old_forms` on the tree as it was written, and `settle` on the tree with defaults and resolved values.
Both change the tree in place and remark on every change that a user should know of.
"""

import copy
import fnmatch
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel

from nemo_rl.config import translations as table
from nemo_rl.config.errors import KeyPath, Location, Problem, as_yaml, dotted
from nemo_rl.config.rules import Rules, filled, holds, value_of
from nemo_rl.config.sources import SourcedTree, walk

NUM_SHOWN = 3  # keys of a missing feature in its message
TRANSLATED = Location("NeMo RL's form")


def _split(pattern: str) -> list[tuple[list[str], list[str]]]:
    """(section, key) of a pattern, for each section of its alias; without an alias, the section is empty."""
    head, _, rest = pattern.partition(".")
    if head not in table.ALIASES:
        return [([], pattern.split("."))]
    return [(section.split("."), rest.split(".")) for section in table.ALIASES[head]]


def places(pattern: str, values: dict[str, Any]) -> list[tuple[KeyPath, KeyPath]]:
    """(section of the alias, key) of every place of the tree that `pattern` names."""
    found = [(key, *place) for section, key in _split(pattern) for place in _found(section, values, ())]
    return [(at, path) for key, at, holder in found for path, _ in _found(key, holder, at)]


def _is_dataset(written: Any) -> bool:
    """Whether it is the section of one dataset or of several, or absent."""
    sets = written if isinstance(written, list) else [written]
    return written is None or all(isinstance(one, dict) for one in sets)


def _found(pattern: list[str], value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if not pattern:
        yield path, value
    elif isinstance(value, dict):
        for name in [name for name in value if fnmatch.fnmatchcase(str(name), pattern[0])]:
            yield from _found(pattern[1:], value[name], (*path, name))
    elif isinstance(value, list) and pattern[0] == "#":
        for index, entry in enumerate(value):
            yield from _found(pattern[1:], entry, (*path, index))


@dataclass
class Translator:
    """The translation of one configuration."""

    tree: SourcedTree
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """A remark for the user -> the keys it is about."""
    moves: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Old place of a key -> its place today."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Reference to a key that has moved -> to its place today."""
    decided: list[str] = field(default_factory=list)
    """Sections that a missing feature gives another meaning."""
    written: dict[str, Any] = field(init=False)
    """The values as they were written."""

    def __post_init__(self) -> None:
        self.written = copy.deepcopy(self.tree.values)

    def remark(self, path: KeyPath, text: str) -> None:
        keys = self.remarks.setdefault(text, [])
        if dotted(path) not in keys:
            keys.append(dotted(path))

    def other_algorithm(self, sections: Collection[str]) -> list[Problem]:
        """A problem if the file is for another algorithm than the one whose configuration has `sections`."""
        loops = [name for name in (*table.LOOPS, "eval") if name in self.tree.values]
        if not loops or any(name in sections for name in loops):
            return []
        text = f"this file is for another script: examples/run_{loops[0]}.py"
        return [Problem((loops[0],), text, self.tree.location((loops[0],)))]

    def is_known(self, path: KeyPath) -> bool:
        """Whether the table has a key, or a section around it."""
        tables = (table.WITHOUT_MEANING, *table.IGNORED.values(), *table.FEATURES.values())
        flat = (f"data.{key}" for key in (*table.OF_ONE_DATASET, *table.OF_ALL_DATASETS, *table.FILES))
        own = (*table.MOVED, *table.MOVED_OUT, *table.READ_IN_OTHER_KEYS, *table.FREEZES)
        patterns = (*own, *flat, *(row.key for rows in tables for row in rows))
        for parts in ([*section, *key] for pattern in patterns for section, key in _split(pattern)):
            pairs = zip(parts, path, strict=False)
            same = all(fnmatch.fnmatch(str(here), part) or (part, type(here)) == ("#", int) for part, here in pairs)
            if same and len(parts) <= len(path):
                return True
        return False

    def comes_first(self, override: str) -> bool:
        """Whether an override counts before `old_forms`, which chooses the validation set of the dataset."""
        data, (key, _, value) = self.tree.values.get("data"), override.lstrip("+~").partition("=")
        flat = (*table.OF_ONE_DATASET, *table.OF_ALL_DATASETS, *table.FILES)
        whole = ("data", "data.train", "data.train.dataset_name", "data.validation", "data.validation.dataset_name")
        is_old = isinstance(data, dict) and "dataset_name" in data and not self._is_puzzle()
        is_named = key.strip() in (*whole, *(f"data.{name}" for name in flat))
        return is_old and is_named and (key.strip() != "data.validation" or value.strip() not in ("", "null"))

    # Old forms

    def old_forms(self) -> None:
        """Bring keys that have moved to their place, and nulls and names of old to their form."""
        values = self.tree.values
        for pattern, name in table.MOVED.items():
            for _, path in places(pattern, values):
                self._move(path, (*path[:-1], *name.split(".")), f"{name} today")
        for pattern, levels in table.MOVED_OUT.items():
            for _, path in places(pattern, values):
                new = (*path[: -1 - levels], path[-1])
                self._move(path, new, f"{dotted(new)} today")
        nulls = dict.fromkeys(table.NULL_IS_THE_DEFAULT, "null means the default")
        for pattern, text in {**nulls, "env.*": "null: there is none"}.items():
            for _, path in places(pattern, values):
                if self.tree.get(path) is None:
                    self.tree.delete(path)
                    self.remark(path, text)
        for pattern in table.NULL_IS_OFF:
            for _, path in places(pattern, values):
                if self.tree.get(path) is None:
                    self._put((*path, "enabled"), False)
                    self.remark(path, "null means off")
        for pattern in table.TEXTS:
            for _, path in places(pattern, values):
                number = self.tree.get(path)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    self._put(path, str(number))
                    self.remark(path, "a number is its text")
        loop = next((name for name in table.LOOPS if name in values), None)
        for _, path in places("model.megatron_cfg.scheduler.lr_decay_iters", values):
            if self.tree.get(path) is None and loop is not None:
                of_run = (loop, "max_num_steps")
                steps = self.tree.get(of_run) if of_run in self.tree else table.MANY_STEPS
                if not isinstance(steps, int) or 0 < steps < table.MANY_STEPS:
                    self._put(path, f"${{{loop}.max_num_steps}}")
                    self.remark(path, f"null means {loop}.max_num_steps, also where epochs end the run before")
        for _, path in places("checkpointing.metric_name", values):
            parts = re.fullmatch(r"(val|train)_(\w+)", str(self.tree.get(path)))
            if parts is not None:
                name = f"{parts[1]}:{'val_loss' if parts[2] == 'loss' and parts[1] == 'val' else parts[2]}"
                self.remark(path, f"{parts[0]} is {name} today")
                self._put(path, name)
        for name in table.PICTURE_ENVIRONMENTS:
            for _, path in places(f"env.{name}", values):
                if isinstance(self.tree.get(path), dict) and (*path, "type") not in self.tree:
                    self._put((*path, "type"), "vlm")
                    self.remark(path, "is of type vlm")
                    for _, part in places(f"env.{name}.reward_functions.#.name", values):
                        if self.tree.get(part) == "format" and (*part[:-1], "reward") not in self.tree:
                            self._put((*part[:-1], "reward"), "format_parts")
        data = values.get("data")
        if isinstance(data, dict):
            if "eval" in values or "generation" in values:
                if "data_paths" in data:
                    self._move(("data", "data_paths"), ("data", "dataset_name"), "dataset_name today")
            elif all(_is_dataset(data.get(name)) for name in ("train", "validation", "default")):
                self._datasets()
        for path, text in list(walk(values)):
            if isinstance(text, str) and "${" in text:
                for old, new in self.renamed.items():
                    text = text.replace(old, new)
                self.tree.get(path[:-1])[path[-1]] = text

    def place(self, path: KeyPath) -> Location:
        """The place of the key, or of a section around it."""
        return self.tree.location(path) or TRANSLATED

    def _put(self, path: KeyPath, value: Any) -> None:
        self.tree.put(path, value, self.place(path))

    def _move(self, old: KeyPath, new: KeyPath, text: str) -> None:
        """Move a key, unless its new place is taken by a key that was written after it."""
        written = {path: number for number, path in enumerate(self.tree.locations)}
        if new not in self.tree or written.get(new, -1) < written.get(old, -1):
            self.tree.put(new, self.tree.get(old), self.place(old))
            self.moves[old] = new
        self.renamed[f"${{{dotted(old)}}}"] = f"${{{dotted(new)}}}"
        self.tree.delete(old)
        self.remark(old, text)

    def _is_puzzle(self) -> bool:
        """Whether the boards of the sliding puzzle are the data, whatever `data` says."""
        env = self.tree.values.get("env")
        named = [self.tree.get(path) for _, path in places("dataset.env_name", self.tree.values)]
        return isinstance(env, dict) and "sliding_puzzle_game" in env and "sliding_puzzle_game" not in named

    def _datasets(self) -> None:
        """Keys of `data` itself become keys of `data.train`, `data.validation` and `data.default`."""
        data = self.tree.values["data"]
        if self._is_puzzle():
            for key in (*table.OF_ONE_DATASET, *table.OF_ALL_DATASETS, "train", "validation", "default"):
                if key in data:
                    self.tree.delete(("data", key))
            self._put(("data",), table.PUZZLE_DATA)
            self.remark(("env", "sliding_puzzle_game"), "its boards are data.train and data.validation today")
        for key in table.OF_ALL_DATASETS:
            if key in data:
                self._move(("data", key), ("data", "default", key), "a key of data.default today")
        whole = "a key of data.train today, beside data.validation"
        flat = [key for key in (*table.OF_ONE_DATASET, *table.FILES) if key in data]
        name = data.get("dataset_name")
        if "dataset_name" in flat and isinstance(name, str | None):
            name = table.DATASET_NAMES.get(name or "", name)
            data["dataset_name"] = name  # written where it was: a later data.train.dataset_name still counts
            columns = {key: data[key] for key in flat if key.endswith("_key")}
            self._validation_set(name, columns)
        for key in flat:
            place = table.FILES.get(key, ("train", key))
            if isinstance(data.get(place[0]), list):
                self.tree.delete(("data", key))
                self.remark(("data", key), f"does not count: data.{place[0]} lists the datasets")
            else:
                self._move(("data", key), ("data", *place), whole)
        self._defaults_of_datasets()

    def _validation_set(self, name: str | None, columns: dict[str, Any]) -> None:
        """The rows that validate, beside the training dataset `name`: as NeMo RL chose them."""
        data = self.tree.values["data"]
        train = data.get("train", {})
        if not isinstance(train, dict) or "split_validation_size" in train:
            return
        name = train.get("dataset_name", name)
        if data.get("validation") is not None or "val_data_paths" in data:
            return
        if "val_data_path" in data:
            self._put(("data", "validation"), {"dataset_name": name, **columns})
        elif name in table.VALIDATION_OF:
            self._put(("data", "validation"), table.VALIDATION_OF[name])
        elif "split_validation_size" not in data:
            self._put(("data", "train"), {"split_validation_size": 0.05})

    def _defaults_of_datasets(self) -> None:
        """Keys that one dataset may have and `data.default` may not go to the datasets that do not state them."""
        data = self.tree.values["data"]
        default = data.get("default")
        for key in [key for key in default or () if key in table.OF_ONE_DATASET]:
            for name in ("train", "validation"):
                sets = data.get(name)
                for at in [(name,)] if isinstance(sets, dict) else [(name, i) for i in range(len(sets or []))]:
                    if ("data", *at, key) not in self.tree:
                        self._put(("data", *at, key), default[key])
            self.tree.delete(("data", "default", key))
            self.remark(("data", "default", key), "is written in each dataset today")

    # Values and keys that this library lacks

    def settle(self, keys: Collection[str]) -> list[Problem]:
        """Translate values, and take keys of NeMo RL out of the tree. Returns the missing features as problems.

        `keys`: the dotted keys of this library's configuration, which rows of the table do not touch as a rule.
        """
        values = self.tree.values
        off = [
            path
            for pattern, condition in table.USED.items()
            for section, path in places(pattern, values)
            if not self._holds(condition, section)
        ]
        self._arguments_of_classes(keys)
        self._arguments_of_engines(keys, off)
        unbounded = [self._without_threshold(at, path) for at, path in places("loop.stop_at_validation_metric", values)]
        contradictions = self._same_sizes()
        is_translated = bool(self.remarks)
        self._translate_values(table.VALUES, off)
        self._freezes(off)
        dropped = [path for row in table.WITHOUT_MEANING for path in self._foreign(row, keys)]
        for path in dropped:
            self.remark(path, "has no effect")
        asking: dict[str, list[KeyPath]] = {}
        neutral: list[KeyPath] = []
        for name, rows in (*table.IGNORED.items(), *table.FEATURES.items()):
            for row in rows:
                for path in self._foreign(row, keys):
                    is_neutral = row.neutral(self.tree.get(path))
                    if not (is_neutral and row.is_ours):
                        dropped.append(path)
                    if is_neutral and not row.is_ours:
                        neutral.append(path)
                    section = next((at for at in off if path[: len(at)] == at), None)
                    if section is not None and not is_neutral:
                        self.remark(section, "has no effect: it belongs to what is switched off")
                    elif not is_neutral:
                        asking.setdefault(name, []).append(path)
        for why in table.IGNORED:
            for path in asking.get(why, ()):
                self.remark(path, f"has no effect: {why}")
        read = [path for pattern in table.READ_IN_OTHER_KEYS for _, path in places(pattern, values)]
        for path in read:
            self.remark(path, "is written in other keys today")
        dropped += [path for path in read if path not in dropped]
        said = {key for keys_of in self.remarks.values() for key in keys_of} | {dotted(at) for at in off}
        for path in neutral:
            whole = [dotted(path[:end]) for end in range(1, len(path) + 1)]
            if path not in [asked for paths in asking.values() for asked in paths] and said.isdisjoint(whole):
                self.remark(path, "asks for nothing at this value")
        lacking = [feature for feature in table.FEATURES if feature in asking]
        problems = [self._lacking(feature, asking[feature]) for feature in lacking]
        problems += [problem for problem in unbounded if problem is not None] + contradictions
        self.decided = [section for feature in lacking for section in table.DECIDES.get(feature, ())]
        if is_translated or asking or dropped:
            self._translate_values(table.VALUES_OF_THEIRS, off)
            self._translate_values(table.DEFAULTS_OF_THEIRS, off)
        if dropped or self.remarks:
            self._saves()
            self._verifier()
            self._repeats()
            for condition, (key, text) in table.DIFFERENCES.items():
                if self._holds(condition, ()):
                    self.remark(tuple(key.split(".")), text)
        for path in dropped:
            if path in self.tree:  # and not gone with the section around it
                self.tree.delete(path)
            while (path := path[:-1]) in self.tree and dotted(path) not in keys and self.tree.get(path) == {}:
                self.tree.delete(path)
        return problems

    def _arguments_of_classes(self, keys: Collection[str]) -> None:
        """Keys of a dataset that a class by its dotted path has, and this library has not, become its `kwargs`."""
        for section, path in places("dataset.dataset_name", self.tree.values):
            if not re.fullmatch(table.CLASS_BY_PATH, str(self.tree.get(path))):
                continue
            for key in list(self.tree.get(section)):
                place = (*section, key)
                names = dotted(part for part in place if isinstance(part, str))
                if names not in keys and not self.is_known(place):
                    self._put((*section, "kwargs"), {**self.tree.get((*section, "kwargs")), key: self.tree.get(place)})
                    self.tree.delete(place)
                    self.remark(place, "an argument of the class: a key of kwargs today")

    def _arguments_of_engines(self, keys: Collection[str], off: list[KeyPath]) -> None:
        """Keys of an engine's section that neither this library nor the table has become arguments of the engine."""
        of_gpus = [row.key for row in table.IGNORED[table.DECIDED_ON_CPUS]] if self._has_gpus() else []
        for pattern, name in table.ARGUMENTS.items():
            for _, path in places(pattern, self.tree.values):
                section = self.tree.get(path)
                for key in list(section) if isinstance(section, dict) else ():
                    today = table.ARGUMENTS_TODAY.get(str(key), str(key))
                    place, new = (*path, key), (*path[:-1], name, today)
                    is_of_gpus = any(fnmatch.fnmatch(f"{pattern}.{key}", row) for row in of_gpus)
                    is_argument = (is_of_gpus and section[key] is not None) or not self.is_known(place)
                    if dotted(place) in keys or not is_argument or isinstance(section[key], dict):
                        continue
                    if path in off:
                        self.tree.delete(place)
                        self.remark(path, "has no effect: it belongs to what is switched off")
                    else:
                        self._move(place, new, f"an argument of the engine: {dotted(new)} today")

    def _has_gpus(self) -> bool:
        cluster = self.tree.values.get("cluster")
        return isinstance(cluster, dict) and bool(cluster.get("gpus_per_node"))

    def _same_sizes(self) -> list[Problem]:
        """Give a key the value of others that say the same. Returns contradictions as problems."""
        problems = []
        for pattern, others in table.SAME_SIZES.items():
            stated = [path for _, path in places(pattern, self.written)]
            for _, path in places(pattern, self.tree.values):
                own = self.tree.get(path) if path in stated else None
                for other in ((*path[:-1], *name.split(".")) for name in others):
                    value = self.tree.get(other) if other in self.tree else None
                    if value is None or value == own:
                        continue
                    if own is not None:
                        text = f"{value} contradicts {dotted(path)}={own}; keep one of them"
                        problems.append(Problem(other, text, self.tree.location(other)))
                    else:
                        own = value
                        self._put(path, value)
        return problems

    def _without_threshold(self, section: KeyPath, path: KeyPath) -> Problem | None:
        """The problem of a metric that would end the run at no value; the metric is taken out then."""
        threshold = (*section, "stop_at_validation_threshold")
        if self.tree.get(path) is None or (threshold in self.tree and self.tree.get(threshold) is not None):
            return None
        self.tree.put(path, None, self.place(path))
        text = f"needs {dotted(threshold)}, the value at which the run ends; give it, or set {dotted(path)}=null"
        return Problem(path, text, self.tree.location(path))

    def _translate_values(self, rules: Rules, off: list[KeyPath]) -> None:
        for rule, reason in rules.items():
            key, _, change = rule.partition(": ")
            condition, _, value = change.partition(" -> ")
            for section, path in places(key, self.tree.values):
                is_stated = rules is table.DEFAULTS_OF_THEIRS and path in self.tree.locations
                if not is_stated and self._holds(condition, section):
                    here = self.tree.get(section)
                    is_key = re.fullmatch(r"\{[\w.]+\}", value)
                    self._put(path, value_of(here, value[1:-1]) if is_key else yaml.safe_load(filled(value, here)))
                    if not any(path[: len(at)] == at for at in off):
                        self.remark(path, reason)

    def _freezes(self, off: list[KeyPath]) -> None:
        """Switches of parts without gradient become names in `freeze`."""
        for pattern, part in table.FREEZES.items():
            for section, path in places(pattern, self.tree.values):
                value, freeze = self.tree.get(path), (*section, "freeze")
                if any(path[: len(at)] == at for at in off):
                    continue
                if part is None:
                    self.remark(path, "has no effect: no model here has such a part")
                elif value is not True:
                    self.remark(path, "the part is trained, as parts are that freeze does not name")
                else:
                    named = self.tree.get(freeze)
                    self._put(freeze, [*named, part] if part not in named else named)
                    self.remark(path, f"{part} of {dotted(freeze)} today")
                self.tree.delete(path)
                if path[-2] == "freeze_config" and not self.tree.get(path[:-1]):
                    self.tree.delete(path[:-1])

    def differences_of(self, section: Any, path: KeyPath = ()) -> None:
        """Remark on what sections say of themselves in `in_nemo_rl`, unless the file states the key."""
        if isinstance(section, BaseModel):
            for rule, text in vars(type(section)).get("in_nemo_rl", {}).items():
                key = rule.removeprefix("not ")
                if holds(rule, section) and (*path, key) not in self.tree.locations:
                    self.remark(path, text)
        named = section.items() if isinstance(section, dict) else section if isinstance(section, BaseModel) else ()
        for name, entry in named:
            self.differences_of(entry, (*path, name))

    def _repeats(self) -> None:
        """Sets that some versions of NeMo RL read several times by default."""
        for _, path in places("dataset.dataset_name", self.tree.values):
            times = table.READ_SEVERAL_TIMES.get(str(self.tree.get(path)))
            if times is not None and (*path[:-1], "repeat") not in self.tree.locations:
                self.remark(path, f"is read once; NeMo RL v0.6 and v0.7 read it {times} times: repeat: {times}")

    def _saves(self) -> None:
        """NeMo RL saves at any step and ranks checkpoints by any metric, those without a validation, too."""
        saves = self.tree.values.get("checkpointing")
        loop = next((self.tree.values[name] for name in table.LOOPS if name in self.tree.values), None)
        if not isinstance(saves, dict) or not isinstance(loop, dict) or not saves.get("enabled"):
            return
        ranks = str(saves["metric_name"]).startswith("val:")
        save_period, val_period = saves["save_period"], loop.get("val_period")
        if not ranks or not isinstance(save_period, int) or not isinstance(val_period, int):
            return
        if val_period == 0:
            self._put(("checkpointing", "metric_name"), None)
            self.remark(("checkpointing", "metric_name"), "null: without validation checkpoints are ranked by age")
        elif save_period % val_period and saves["keep_top_k"] is not None:
            period = -(-save_period // val_period) * val_period
            self._put(("checkpointing", "save_period"), period)
            text = f"{period} in place of {save_period}: a checkpoint is ranked by the validation of its step"
            self.remark(("checkpointing", "save_period"), text)

    def _verifier(self) -> None:
        """An evaluation has one math environment, which judges the dataset, whatever its `verifier_type`."""
        values = self.tree.values
        data = values.get("data")
        if "eval" not in values or not isinstance(data, dict):
            return
        name = str(data.get("dataset_name"))
        kind = next((kind for start, kind in table.MULTIPLE_CHOICE.items() if name.startswith(start)), "math")
        judges = [path for _, path in places("environment.verifier_type", values)]
        if len(judges) == 1 and self.tree.get(judges[0]) != kind:
            self._put(judges[0], kind)
            self.remark(judges[0], f"{kind}: the answers of {name}")

    def _foreign(self, row: table.Foreign, keys: Collection[str]) -> Iterator[KeyPath]:
        for _, path in places(row.key, self.tree.values):
            is_name = path[:-1] == ("env",)  # sections of `env` have names of the user's, all of which are keys
            if row.is_ours or is_name or dotted(part for part in path if isinstance(part, str)) not in keys:
                yield path

    def _lacking(self, feature: str, paths: list[KeyPath]) -> Problem:
        paths = [(*path, "enabled") if (*path, "enabled") in self.tree else path for path in paths]
        shown = [f"{dotted(path)}={as_yaml(self.tree.get(path))}" for path in paths[:NUM_SHOWN]]
        more = f" and {len(paths) - NUM_SHOWN} keys more" if len(paths) > NUM_SHOWN else ""
        since = f", NeMo RL {table.SINCE[feature]}" if feature in table.SINCE else ""
        text = f"not supported yet: {', '.join(shown)}{more} ({feature}{since})"
        return Problem(paths[0], text, self.tree.location(paths[0]))

    def newer(self) -> list[Problem]:
        """A line to go with unknown keys, if the file has keys that NeMo RL has only after v0.7."""
        signs = [dotted(path) for pattern in table.SIGNS_OF_MAIN for _, path in places(pattern, self.written)]
        if not signs or not self.remarks:  # some of them are keys of this library, too
            return []
        return [Problem((), f"the file is for NeMo RL after v0.7 ({', '.join(signs)}), so unknown keys may be new")]

    def _holds(self, condition: str, section: KeyPath) -> bool:
        try:
            return holds(condition, self.tree.get(section))
        # A key of the condition is missing, or the section around it, or something stands there that is no section.
        except (KeyError, TypeError, AttributeError):
            return False

    def is_decided(self, problem: Problem) -> bool:
        """Whether a problem follows from a feature that the library lacks."""
        return any(f"{dotted(problem.path)}.".startswith(f"{section}.") for section in self.decided)
