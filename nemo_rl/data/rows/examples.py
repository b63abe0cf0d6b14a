"""Rows -> batches of tokenised examples, for SFT, DPO and reward models.

`ExampleMaker` makes the tokens and the loss mask of a row. `ExampleLoader` gives batches of them to the training.
"""

import copy
import hashlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
import transformers

from nemo_rl.data.chat.images import images_of_log
from nemo_rl.data.chat.messages import add_loss_mask_to_message_log
from nemo_rl.data.datasets.examples import both_preference_forms
from nemo_rl.data.rows.dataloader import PromptDataset, PromptSource
from nemo_rl.data.rows.example_processors import DIFFERENT_QUESTIONS, Problem
from nemo_rl.data.rows.processors import FLAGS, NUM_STUB_TOKENS
from nemo_rl.data.rows.setup import RowReader, StreamedRows
from nemo_rl.types import Example, ExampleHandle, ExampleMeta, LLMMessageLogType, Prompt
from nemo_rl.utils.tokenizer import TEMPLATE_TIME

logger = logging.getLogger(__name__)

PAIR = ("chosen", "rejected")
NUM_TRIED_ROWS = 32


@dataclass(frozen=True)
class ExampleMaker(RowReader):
    """Tokenises a row: the `MakeExample` of conversations and of preferences. Picklable.

    `roles_to_train_on`: roles of the messages whose tokens carry loss, in a preference only within the answers; "all":
    every token. `only_unmask_final`: only the last message carries loss. The first token of a sequence never does,
    because nothing predicts it.
    """

    roles_to_train_on: Sequence[str] | Literal["all"] = ("assistant",)
    only_unmask_final: bool = False
    add_bos: bool = True
    add_eos: bool = True
    add_generation_prompt: bool = True

    @property
    def flags(self) -> dict[str, bool]:
        """Arguments of every processor of examples."""
        return {flag: getattr(self, flag) for flag in FLAGS}

    def __call__(self, prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
        """The sequence of a row, or chosen and rejected, with the metadata for the controller; see `MakeExample`.

        A row that cannot be used has a `problem` in its metadata. No content of a row raises.
        """
        try:
            return self.make(prompt)
        except ValueError as error:
            names = PAIR if self.tasks[prompt.task_name].sequences_per_row == 2 else ("",)
            nothing = np.zeros(1, dtype=np.int32)
            ids = [_sample_id(prompt, name) for name in names]
            examples = [Example(sample_id=sample_id, token_ids=nothing, token_mask=nothing) for sample_id in ids]
            return _made(prompt, examples, str(error), problem_kind="bad_row")

    def make(self, prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
        """As a call, but an unusable row raises.

        Raises ValueError, naming row and column, for a missing column, a role that the chat template refuses, or a
        token that the tokenizer does not have.
        """
        task = self.tasks[prompt.task_name]
        datum, pixels = self.process(prompt, both_preference_forms, **self.flags)
        names = PAIR if "message_log_chosen" in datum else ("",)
        logs = [datum[f"message_log_{name}" if name else "message_log"] for name in names]
        examples = [self._example(_sample_id(prompt, name), log) for name, log in zip(names, logs, strict=True)]
        examples[0].margin, examples[0].pixels = float(datum.get("margin", 0.0)), pixels
        lengths = {name or "messages": int(datum[f"length_{name}" if name else "length"]) for name in names}
        problem = datum.get("problem") or self._problem(logs, examples, lengths)
        if problem is None:
            return _made(prompt, examples)
        text = task.in_terms_of_table(f"row {prompt.prompt_id}, column {problem.column!r}: {problem.text}")
        return _made(prompt, examples, text, problem_kind=problem.kind)

    def _example(self, sample_id: str, log: LLMMessageLogType) -> Example:
        learns_all = self.roles_to_train_on == "all"
        roles = [message["role"] for message in log] if learns_all else self.roles_to_train_on
        masked = [dict(message) for message in log]
        for message in masked if learns_all else ():
            message.pop("loss_spans", None)  # headers carry loss, too
        add_loss_mask_to_message_log([masked], roles, self.only_unmask_final)
        # A mask of the message's own comes first.
        masks = [own.get("token_loss_mask", made["token_loss_mask"]) for own, made in zip(log, masked, strict=True)]
        token_ids = torch.cat([torch.as_tensor(message["token_ids"]) for message in log])
        token_mask = torch.cat([torch.as_tensor(mask) for mask in masks]).bool()
        token_mask[:1] = False
        return Example(
            sample_id=sample_id,
            token_ids=token_ids.numpy().astype(np.int32),
            token_mask=token_mask.numpy(),
            images=images_of_log(log),
        )

    def _problem(
        self, logs: list[LLMMessageLogType], examples: list[Example], lengths: Mapping[str, int]
    ) -> Problem | None:
        for log, example, (column, length) in zip(logs, examples, lengths.items(), strict=True):
            last = log[-1]["role"]
            if last == "user" and self.roles_to_train_on != "all" and last not in self.roles_to_train_on:
                return Problem("ends_with_user", column, "the conversation ends with the user: there is no answer")
            if length > self.max_input_seq_length:
                reason = f"{length} tokens, more than data.max_input_seq_length={self.max_input_seq_length}"
                return Problem("too_long", column, reason)
            if not example.token_mask.any():
                roles = ", ".join(dict.fromkeys(str(message["role"]) for message in log))
                reason = f"no token carries loss: roles {roles}, roles_to_train_on {self.roles_to_train_on}"
                return Problem("no_loss_tokens", column, reason)
        return None

    def settings(self) -> dict[str, Any]:
        """The settings that determine tokens and masks, without the tokenizer. A resumed run must have the same."""
        roles = self.roles_to_train_on
        return {
            "max_input_seq_length": self.max_input_seq_length,
            "roles_to_train_on": roles if isinstance(roles, str) else list(roles),
            "only_unmask_final": self.only_unmask_final,
            **self.flags,
            "tasks": {
                name: {
                    "processor": task.processor_name,
                    "prompt": task.spec.prompt,
                    "system_prompt": task.spec.system_prompt,
                    "columns": dict(task.columns),
                    **({"tools": task.spec.tools} if task.spec.tools else {}),
                }
                for name, task in self.tasks.items()
            },
        }

    def fingerprint(self) -> str:
        """A hash of everything that determines the tokens of a row except the row: 32 hexadecimal digits.

        Tokenizer, template, settings, versions of the libraries and the source files that make the tokens are in it.
        """
        digest = hashlib.sha256()

        def add(*values: Any) -> None:
            digest.update(repr(values).encode() + b"\0")

        add(self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template, self.tokenizer.special_tokens_map)
        add(transformers.__version__, tokenizers.__version__, TEMPLATE_TIME)
        add(json.dumps(self.settings(), sort_keys=True))
        modules = {inspect.getsourcefile(inspect.unwrap(task.processor)) for task in self.tasks.values()}
        data = Path(__file__).parents[1]
        own = map(str, [data / "interfaces.py", *data.glob("chat/*.py"), *data.glob("rows/*.py")])
        for path in sorted({*filter(None, modules), *own}, key=lambda path: Path(path).name):
            add(Path(path).name, Path(path).read_bytes())
        return digest.hexdigest()[:32]


def _sample_id(prompt: Prompt, answer: str) -> str:
    return f"{prompt.prompt_id}/{answer}" if answer else prompt.prompt_id


def _made(
    prompt: Prompt, examples: list[Example], problem: str | None = None, *, problem_kind: str = ""
) -> tuple[list[Example], ExampleMeta]:
    """The examples with their metadata. With a problem they become stubs: a few tokens without loss."""
    for example in examples if problem is not None else ():
        kept = example.token_ids[:NUM_STUB_TOKENS]
        example.token_ids = kept if len(kept) else np.zeros(1, dtype=np.int32)
        example.token_mask = np.zeros(len(example.token_ids), dtype=bool)
        example.images, example.pixels = [], {}
    return examples, ExampleMeta(
        prompt_id=prompt.prompt_id,
        index=0,
        lengths=tuple(len(example.token_ids) for example in examples),
        num_loss_tokens=sum(int(example.token_mask.sum()) for example in examples),
        problem=problem,
        problem_kind=problem_kind,
        images={image.digest: image.num_pixels for example in examples for image in example.images},
    )


def check_examples(make: ExampleMaker, dataset: PromptDataset | Sequence[StreamedRows], label: str) -> None:
    """Tokenise a few rows, to find mistakes of the whole dataset before anything starts.

    `label` names the dataset, e.g. "data.train". Raises ValueError if a row lacks what the processor needs, or has two
    questions, or none of the rows can be trained on; it lists why.
    """
    metas = [make.make(prompt)[1] for prompt in _tried_rows(dataset)]
    require_same_questions(metas, f"{label}, rows tried")
    bad = [meta for meta in metas if meta.problem is not None]
    if not bad:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(meta.problem_kind for meta in bad).most_common())
    examples = "; ".join(str(meta.problem) for meta in {meta.problem_kind: meta for meta in reversed(bad)}.values())
    if len(bad) == len(metas):
        raise ValueError(f"{label}: not one of the {len(metas)} rows tried can be trained on ({kinds}): {examples}")
    logger.warning(
        "%s: %d of the %d rows tried are left out of training (%s): %s", label, len(bad), len(metas), kinds, examples
    )


def require_same_questions(rows: Sequence[ExampleMeta], where: str) -> None:
    """ValueError if chosen and rejected of a row answer different questions, of which neither is preferred."""
    different = [row for row in rows if row.problem_kind == DIFFERENT_QUESTIONS]
    if different:
        raise ValueError(
            f"{where}: in {len(different)} of {len(rows)} rows chosen and rejected answer different questions; the "
            f"first: {different[0].problem}. Give both the same question, or remove the rows"
        )


def _tried_rows(dataset: PromptDataset | Sequence[StreamedRows]) -> list[Prompt]:
    """Up to 32 rows: spread over the dataset, or the first of its streams."""
    if isinstance(dataset, PromptDataset):
        indices = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), NUM_TRIED_ROWS)).astype(int))
        return [dataset[int(index)] for index in indices]
    return [
        stream.prompt(row, number, number)
        for stream in dataset
        # A copy: iterating a table moves the position in its state.
        for number, row in enumerate(islice(copy.deepcopy(stream.table), max(1, NUM_TRIED_ROWS // len(dataset))))
    ]


class ExampleLoader:
    """Batches of a `PromptSource` as handles to tokenised rows, for `max_num_epochs` epochs.

    While one batch trains, the next is tokenised. `state_dict` does not count it: it is the state after the last batch
    that `next` returned. Nothing else may use the source.

    `pool` (`TokenizerPool`) tokenises: `start(prompts)` returns at once, `finish(started)` waits for the rows of all
    prompts, in their order.
    """

    def __init__(self, prompts: PromptSource, pool: Any, *, max_num_epochs: int) -> None:
        self.prompts = prompts
        self.pool = pool
        self.max_num_epochs = max_num_epochs
        self.load_state_dict(prompts.state_dict())

    def next(self) -> list[ExampleHandle] | None:
        """The next batch; None after the last epoch. After an error the loader stands after the last batch returned."""
        ahead = self._ahead if self._ahead is not None else self._start()
        if ahead is None:
            return None
        try:
            pending, state = ahead
            handles = self.pool.finish(pending)
            following = self._start()
        except BaseException:
            self.load_state_dict(self._state)
            raise
        self._state, self._ahead = state, following
        return handles

    def _start(self) -> tuple[Any, dict[str, Any]] | None:
        prompts = next(self._batches, None)
        return None if prompts is None else (self.pool.start(prompts), self.prompts.state_dict())

    def _remaining(self) -> Iterator[list[Prompt]]:
        while self.prompts.epoch < self.max_num_epochs:
            yield from self.prompts

    def state_dict(self) -> dict[str, Any]:
        """The state of the source after the last batch that `next` returned; JSON-able."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. A batch tokenised ahead is dropped.

        Raises ValueError if a setting that determines the order has changed.
        """
        self.prompts.load_state_dict(state)
        self._state = state
        self._batches = self._remaining()
        self._ahead: tuple[Any, dict[str, Any]] | None = None  # a started batch, and the state of the source after it
