"""From a prompt as the controller knows it (text) to what an episode needs (tokens, metadata)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import answer_text, problem_text
from nemo_rl.types import DatumSpec, ProcessorFn, Prompt


@dataclass(frozen=True, kw_only=True)
class Task:
    """How the prompts of one task are made and who answers them."""

    spec: TaskDataSpec
    processor: ProcessorFn
    env_name: str


@dataclass(frozen=True)
class PromptProcessor:
    """Picklable. Called with a `Prompt`, returns its `DatumSpec`."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerBase
    max_input_seq_length: int

    def __call__(self, prompt: Prompt) -> DatumSpec:
        """Tokenise. A prompt longer than `max_input_seq_length` tokens comes back as a stub with loss_multiplier 0.

        Raises:
            ValueError: when the row lacks what the processor needs.
        """
        task = self.tasks[prompt.task_name]
        try:
            datum = task.processor(
                both_forms(prompt.row), task.spec, self.tokenizer, self.max_input_seq_length, prompt.idx
            )
        except KeyError as error:
            raise ValueError(
                f"row {prompt.prompt_id} has no {error.args[0]!r}, which the processor of task {prompt.task_name!r} "
                f"needs; it has: {', '.join(prompt.row)}"
            ) from error
        return DatumSpec(**{**datum, "task_name": prompt.task_name})


def both_forms(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `messages` as well as `problem` and `expected_answer`, whichever it came with."""
    if "messages" in row:
        roles = {message["role"] for message in row["messages"]}
        texts = {"problem": problem_text(row)} if "user" in roles else {}
        return {**texts, **({"expected_answer": answer_text(row)} if "assistant" in roles else {}), **row}
    if "problem" in row and "expected_answer" in row:
        messages = [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["expected_answer"]},
        ]
        return {"messages": messages, **row}
    return dict(row)
