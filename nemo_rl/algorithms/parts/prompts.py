"""The prompts of a run that samples: rows, their order, and how they become tokens."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.parts.model import Model, image_reader
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.rows.dataloader import PromptDataLoader, PromptDataset, prompt_loader
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor, setup_data
from nemo_rl.environments.config import raw_text
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)

NUM_TRIED_PROMPTS = 32


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Training and validation prompts. `loader` gives batches of the training prompts in the order of the run."""

    data: DataSetup
    process: PromptProcessor
    loader: PromptDataLoader
    validation: PromptDataset | None  # None: the run does not validate

    @classmethod
    def prepare(cls, config: RolloutMasterConfig, model: Model) -> Self:
        """Load the datasets, and try some of their prompts.

        Raises:
            ValueError, FileNotFoundError: with the key to change.
        """
        rollout, data = config.rollout, setup_data(config.data)
        loader = prompt_loader(
            config.data.custom_dataloader,
            data.train,
            rollout.num_prompts_per_batch,
            shuffle=config.data.shuffle,
            seed=rollout.seed,
            size_key=f"{config.section}.num_prompts_per_step",
        )
        images = image_reader(model.processor_path, config.data.max_images)
        process = PromptProcessor(data.tasks, model.tokenizer, config.data.max_input_seq_length, images)
        uses_template = not all(raw_text(config.env[name]) for name in data.task_to_env.values())
        if rollout.max_rollout_turns > 1 and uses_template:
            check_turns(model.tokenizer)
        validation = data.validation if rollout.validates else None
        longest = config.policy.key("max_total_sequence_length")
        check_prompts(process, data.train, "training", longest)
        if validation is not None:
            check_prompts(process, validation, "validation", longest)
        return cls(data=data, process=process, loader=loader, validation=validation)

    def datasets(self) -> Iterable[PromptDataset]:
        """All datasets that the configuration names, whether they are used or not."""
        return (dataset for dataset in (self.data.train, self.data.validation) if dataset is not None)

    def identity(self, config: RolloutMasterConfig) -> dict[str, Any]:
        """The values that decide which prompts a step has."""
        rollout = config.rollout
        shape = {
            "seed": rollout.seed,
            "num_prompts_per_step": rollout.num_prompts_per_step,
            "num_generations_per_prompt": rollout.num_generations_per_prompt,
        }
        return {"data.train": self.data.train.fingerprint(), config.section: shape}


def spread_rows(dataset: PromptDataset, num: int) -> list[Prompt]:
    """At most `num` rows, spread evenly over the dataset."""
    indices = np.linspace(0, len(dataset) - 1, min(len(dataset), num)).round().astype(int)
    return [dataset[int(index)] for index in indices]


def check_prompts(process: PromptProcessor, dataset: PromptDataset, label: str, longest: str) -> None:
    """Process rows from all parts of the dataset. At least one of them must be short enough.

    `longest`: the key of the longest sequence.
    """
    data = [process(prompt) for prompt in spread_rows(dataset, NUM_TRIED_PROMPTS)]
    if all(datum["loss_multiplier"] == 0.0 for datum in data):
        lengths = [datum["length"] for datum in data]
        raise ValueError(
            f"all prompts tried of the {label} data are longer than data.max_input_seq_length="
            f"{process.max_input_seq_length} tokens: {len(data)} of them have {min(lengths)} to {max(lengths)}; raise "
            f"it and {longest}, or shorten the prompts"
        )


def check_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if, after several turns, the model sees other text than its chat template would write.

    Episodes never rewrite sampled tokens. A template that writes earlier turns differently once more turns follow is
    therefore followed in the first turn only.

    Raises:
        ValueError: if the template allows no second turn.
    """
    render = ObservationRenderer(tokenizer)
    question = {"role": "user", "content": "first question"}
    plain = ["first answer", "second answer"]
    thoughtful = [f"<think>\na thought\n</think>\n\n{answer}" for answer in plain]
    for answers, what in ((plain, "earlier turns"), (thoughtful, "the thoughts of earlier turns")):
        for role in ("user", "tool"):
            observation = {"role": role, "content": "the result"}
            seen, rendered = render.seen_and_rendered([question], answers, observation)
            if seen != rendered:
                same = len(os.path.commonprefix((seen, rendered)))  # noqa: RUF071 (texts, no paths)
                logger.warning(
                    "the chat template writes %s differently once more follow (role %r). Episodes keep what was "
                    "sampled: after %r the model sees %r where the template would write %r. Fine when the model is "
                    "meant to be trained so; otherwise set policy.tokenizer.chat_template to one that keeps turns",
                    what,
                    role,
                    seen[max(0, same - 40) : same],
                    seen[same : same + 120],
                    rendered[same : same + 120],
                )
                return
