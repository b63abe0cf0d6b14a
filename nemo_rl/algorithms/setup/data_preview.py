"""From the configuration of a run of any algorithm to the rows that a preview shows. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.config.supervised import SupervisedMasterConfig
from nemo_rl.algorithms.setup.preflight import image_reader
from nemo_rl.algorithms.setup.supervised import example_maker
from nemo_rl.config.errors import ConfigError, Location, Problem
from nemo_rl.config.loader import load_config
from nemo_rl.config.sources import load_tree
from nemo_rl.data.rows.dataloader import PromptDataset
from nemo_rl.data.rows.preview import PromptPreview
from nemo_rl.data.rows.setup import PromptProcessor, setup_data, setup_examples
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.models.policy.pretrained import read_model_config
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.types import MakeExample, Prompt
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.tokenizer import get_tokenizer

# Section of the algorithm -> class of the configuration.
CONFIGURATIONS = {
    "sft": "nemo_rl.algorithms.config.supervised:SFTMasterConfig",
    "dpo": "nemo_rl.algorithms.config.supervised:DPOMasterConfig",
    "rm": "nemo_rl.algorithms.config.supervised:RMMasterConfig",
    "grpo": "nemo_rl.algorithms.config.grpo:GRPOMasterConfig",
    "ppo": "nemo_rl.algorithms.config.ppo:PPOMasterConfig",
    "distillation": "nemo_rl.algorithms.config.distillation:DistillationMasterConfig",
}

DatasetKind = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class PreviewInputs:
    """What a preview is made from."""

    prompts: list[Prompt]
    total: int | None  # rows of the dataset; None: a stream
    make: MakeExample
    tokenizer: PreTrainedTokenizerFast
    note: str = ""  # shown below the rows


def load_run_config(path: str | Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run. The section of the algorithm that the file has decides its class.

    Raises:
        ConfigError: if the file has none of the sections, or several, or another error.
    """
    there = [section for section in CONFIGURATIONS if section in load_tree(path).values]
    if len(there) != 1:
        known = ", ".join(CONFIGURATIONS)
        found = f"several: {', '.join(there)}" if there else "none"
        message = f"of the sections {known} one says which algorithm the file is for; it has {found}"
        raise ConfigError([Problem((), message, Location(str(path)))])
    return load_config(import_object(CONFIGURATIONS[there[0]], "configuration"), path, overrides)


def preview_inputs(config: RunConfig, kind: DatasetKind, num_rows: int) -> PreviewInputs:
    """At most `num_rows` rows of the training or validation data, and what makes tokens of them.

    The rows are spread over the dataset. Of a stream, they are the first ones.

    Raises:
        ValueError, FileNotFoundError: for errors in data, tokenizer or model.
    """
    assert isinstance(config, SupervisedMasterConfig | RolloutMasterConfig)
    settings, note = config.policy.tokenizer, ""
    tokenizer_path = resolve_model(settings.name)
    tokenizer = get_tokenizer(settings.model_copy(update={"name": tokenizer_path}))
    model = read_model_config(config.policy, resolve_model(config.policy.model_name))
    processor_path = tokenizer_path if sees_images(model) else None
    dataset: PromptDataset | None
    if isinstance(config, SupervisedMasterConfig):
        setup = setup_examples(config.examples)
        make: MakeExample = example_maker(config, setup, tokenizer, image_reader(processor_path, config.examples))
        parts = [part for validation in setup.validation.values() for part in validation.parts]
        dataset = PromptDataset(parts) if parts else None
        if kind == "train" and not isinstance(setup.train, PromptDataset):
            rows = (prompt for batch in StreamedPrompts(setup.train, 1, shuffle=False) for prompt in batch)
            return PreviewInputs(prompts=list(islice(rows, num_rows)), total=None, make=make, tokenizer=tokenizer)
        if kind == "train":
            assert isinstance(setup.train, PromptDataset)
            dataset = setup.train
    else:
        data = setup_data(config.data, config.env)
        images = image_reader(processor_path, config.data)
        make = PromptPreview(PromptProcessor(data.tasks, tokenizer, config.data.max_input_seq_length, images))
        dataset = data.train if kind == "train" else data.validation
        note = "These are prompts: the answers that are sampled to them carry the loss."
    if dataset is None:
        raise ValueError("the configuration has no validation data: set data.validation, or take --dataset train")
    total = len(dataset)
    indices = np.linspace(0, total - 1, min(total, num_rows)).round().astype(int)
    prompts = [dataset[int(index)] for index in indices]
    return PreviewInputs(prompts=prompts, total=total, make=make, tokenizer=tokenizer, note=note)
