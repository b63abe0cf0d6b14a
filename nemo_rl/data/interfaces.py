"""The rows of a dataset, and the prompt texts of a task."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
"""{"problem": str, "expected_answer": str, ...} or {"messages": [{"role", "content"}, ...], ...}. Rows to learn from
may also be {"input_ids", "labels"} or {"prompt", "chosen", "rejected"}."""

BAD_ROW = "\0bad row"
"""The only key of a row that stands for one that could not be read or converted; its value is the reason."""


class Rows(Protocol):
    """A dataset: anything with a length and integer indexing; rows may be made when they are indexed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


@dataclass(frozen=True, kw_only=True)
class StreamedTable:
    """A dataset that is read front to back, as rows are needed."""

    table: Any  # datasets.IterableDataset of the rows as they are stored
    convert: Callable[[Row], Row]  # a stored row to the row of a `Prompt`


class LazyRows(Sequence[Row]):
    """Rows that are made when they are indexed."""

    def __iter__(self) -> Iterator[Row]:
        # By length: the iterator of `Sequence` ends at an IndexError, which a conversion may raise.
        return (self[i] for i in range(len(self)))


@dataclass(eq=False, repr=False)
class IndexedRows(LazyRows):
    """Some rows of a dataset, by index."""

    rows: Rows
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.indices[index]]


@dataclass
class TaskDataSpec:
    """A task and its prompt texts, which are read from their files when the object is made.

    `prompt` is a template in which `{}` stands for the problem (`{{` and `}}` are literal braces). `tools` describe
    functions in OpenAI's format.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if the prompt file is not a template with one `{}`, or the tools file is not a list of tools.
    """

    task_name: str | None = None
    prompt_file: str | Path | None = None
    system_prompt_file: str | Path | None = None
    tools_file: str | Path | None = None
    prompt: str | None = field(init=False, default=None)
    system_prompt: str | None = field(init=False, default=None)
    tools: list[dict[str, Any]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt = _read(self.prompt_file, "prompt_file")
        self.system_prompt = _read(self.system_prompt_file, "system_prompt_file")
        if self.prompt is not None:
            place = f"prompt_file {str(self.prompt_file)!r}"
            try:
                filled = self.fill("<problem>")
            except (ValueError, IndexError, KeyError) as error:
                raise ValueError(
                    f"{place} is not a template with one {{}} for the problem ({error!r}): write literal braces twice, "
                    "e.g. \\boxed{{}}"
                ) from error
            if filled.count("<problem>") != 1:
                raise ValueError(f"{place} must have exactly one {{}}, where the problem goes")
        tools = _read(self.tools_file, "tools_file")
        if tools is not None:
            self.tools = as_tools(tools, f"tools_file {str(self.tools_file)!r}")

    def fill(self, problem: str) -> str:
        """The user's message for a problem: the template with the problem in it, or only the problem."""
        return problem if self.prompt is None else self.prompt.format(problem)


def one_turn(question: Any, answer: Any, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a question and its answer, after the system prompt if there is one."""
    turn = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turn if system is None else [{"role": "system", "content": system}, *turn]


def row_tools(row: Row, spec: TaskDataSpec) -> list[dict[str, Any]] | None:
    """The tools that the chat template shows: the row's column `tools`, else the tools of the task.

    Raises ValueError if the column holds no list of tools.
    """
    return as_tools(row.get("tools"), "column 'tools'") or spec.tools


def as_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """A list of tools from a list or from JSON; None for an empty one. ValueError, naming `where`, for anything else.

    Keys without a value are removed: a table that holds several kinds of tools gives each the keys of all.
    """
    if isinstance(tools, str):
        tools = from_json(tools, where) if tools.strip() else None
    if tools is None or tools in ([], (), {}):
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(
            f"{where} must hold a list of tools like {{type: function, function: {{name, description, parameters}}}}, "
            f"not {str(tools)[:80]!r}"
        )
    return [without_none(tool) for tool in tools]


def from_json(text: str, where: str) -> Any:
    """The value of a JSON text. ValueError, naming `where`, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter of thousands of brackets
        raise ValueError(f"{where} has a text that is no JSON ({error}): {text[:80]!r}") from error


def call_arguments(given: Any, where: str) -> Any:
    """The arguments of a tool call as templates take them. A text is JSON, as in OpenAI's API.

    Nothing, null and an empty list are no arguments, `{}`. Raises ValueError, naming `where`, for a text that is no
    JSON.
    """
    value = from_json(given.strip() or "{}", where) if isinstance(given, str) else given
    return {} if value in (None, [], "") else value


def without_none(value: Any) -> Any:
    """The value without the keys that have no value, at every depth."""
    if isinstance(value, Mapping):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read(path: str | Path | None, key: str) -> str | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{key} {str(path)!r} does not exist (looked in {Path.cwd()}). Give the path of a text file, or "
            "null for none"
        )
    return Path(path).read_text(encoding="utf-8").strip()
