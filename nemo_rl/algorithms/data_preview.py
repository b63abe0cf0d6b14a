"""A preview of the data of a run: the tokens of its rows, which of them carry loss, and a summary of lengths.

Starts nothing.
"""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.config.supervised import SupervisedMasterConfig
from nemo_rl.algorithms.parts.model import image_reader
from nemo_rl.algorithms.parts.prompts import spread_rows
from nemo_rl.algorithms.parts.rows import example_maker
from nemo_rl.config.errors import ConfigError, Location, Problem
from nemo_rl.config.loader import load_config
from nemo_rl.config.sources import load_tree
from nemo_rl.config.terminal import visible
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.data.rows.dataloader import PromptDataset
from nemo_rl.data.rows.setup import PromptProcessor, StreamedRows, setup_data, setup_examples
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.models.policy.pretrained import read_model_config
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.types import PREVIEW, Example, ExampleMeta, MakeExample, Prompt
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


@dataclass(frozen=True, kw_only=True)
class PreviewInputs:
    """The rows of a preview, and the tokenizer that makes tokens of them."""

    prompts: list[Prompt]
    total: int | None  # number of rows of the dataset; None: a stream
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


def preview_inputs(config: RunConfig, kind: Literal["train", "validation"], num_rows: int) -> PreviewInputs:
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
    images = partial(image_reader, tokenizer_path if sees_images(model) else None)
    dataset: PromptDataset | Sequence[StreamedRows] | None
    if isinstance(config, SupervisedMasterConfig):
        setup = setup_examples(config.examples)
        make: MakeExample = example_maker(config, setup, tokenizer, images(config.examples.max_images))
        parts = [part for validation in setup.validation.values() for part in validation.parts]
        dataset = setup.train if kind == "train" else PromptDataset(parts) if parts else None
    else:
        data = setup_data(config.data)
        process = PromptProcessor(
            data.tasks, tokenizer, config.data.max_input_seq_length, images(config.data.max_images)
        )
        make = PromptPreview(process)
        dataset = data.train if kind == "train" else data.validation
        note = "These are prompts: the answers that are sampled to them carry the loss."
    if dataset is None:
        raise ValueError("the configuration has no validation data: set data.validation, or take --dataset train")
    if isinstance(dataset, PromptDataset):
        prompts, total = spread_rows(dataset, num_rows), len(dataset)
    else:
        rows = (prompt for batch in StreamedPrompts(dataset, 1, shuffle=False) for prompt in batch)
        prompts, total = list(islice(rows, num_rows)), None
    return PreviewInputs(prompts=prompts, total=total, make=make, tokenizer=tokenizer, note=note)


QUANTILES = {0.0: "shortest", 0.1: "10%", 0.5: "median", 0.9: "90%", 0.99: "99%", 1.0: "longest"}
CONTEXT_TOKENS = 5  # tokens decoded before a token, on which its text may depend
PART = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character
# Neighbouring tokens alternate, so that their borders are visible.
CONTEXT_STYLES = ("grey62", "grey62 on grey19")
LOSS_STYLES = ("black on green3", "black on pale_green1")
PICTURE_WIDTH = 48  # characters
SPECIAL_STYLE = " bold underline"


@dataclass(frozen=True)
class PromptPreview:
    """The `MakeExample` of prompts, whose tokens carry no loss."""

    process: PromptProcessor

    def __call__(self, prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
        """The tokens of a prompt. Raises ValueError if the row lacks what its processor needs."""
        datum = self.process(prompt)
        ids = np.concatenate([np.asarray(message["token_ids"], dtype=np.int32) for message in datum["message_log"]])
        is_out = datum["loss_multiplier"] == 0.0
        limit = self.process.max_input_seq_length
        meta = ExampleMeta(
            prompt_id=prompt.prompt_id,
            index=0,
            lengths=(datum["length"],),
            num_loss_tokens=0,
            problem=f"row {prompt.prompt_id} has {datum['length']} tokens, more than data.max_input_seq_length={limit}"
            if is_out
            else None,
            problem_kind="too_long" if is_out else "",
        )
        images = {"images": datum.get("images", []), "pixels": datum.get("pixels", {})}
        mask = np.zeros(len(ids), dtype=bool)
        return [Example(sample_id=prompt.prompt_id, token_ids=ids, token_mask=mask, **images)], meta


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, special tokens included; the token's name if it has none.

    A character of several tokens stands at the last of them, and each of the others has `PART` for it.
    """
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    texts = []
    for end in range(1, len(token_ids) + 1):
        begin = max(0, end - 1 - CONTEXT_TOKENS)
        before, after = (
            str(tokenizer.decode(list(token_ids[begin:stop]), clean_up_tokenization_spaces=False))
            for stop in (end - 1, end)
        )
        known = (
            before if after.startswith(before) else before.rstrip(PART)
        )  # without the parts that now have their last
        piece = after[len(known) :] if after.startswith(known) else ""
        if not piece and after.endswith(PART):  # a further part of a character
            piece = PART
        texts.append(piece or str(names[end - 1]))
    return texts


def token_text(example: Example, tokenizer: PreTrainedTokenizerBase, *, coloured: bool) -> Text:
    """A sequence token by token. Tokens that carry loss are green, or in [ ] without colours."""
    ids = example.token_ids.tolist()
    special = set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    text = Text()
    learned_before = True
    for position, (piece, number, learned) in enumerate(
        zip(token_texts(tokenizer, ids), ids, example.token_mask.tolist(), strict=True)
    ):
        shown = visible(piece).replace("\n", "↵\n")
        if coloured:
            style = (LOSS_STYLES if learned else CONTEXT_STYLES)[position % 2]
            text.append(shown, style + SPECIAL_STYLE * (number in special))
        else:
            text.append(f"[{shown}]" if learned else shown if learned_before else f"|{shown}")
        learned_before = learned
    return text


def picture(jpeg: np.ndarray) -> Text:
    """An image in colours, two pixels in each character. `jpeg`: uint8 [bytes] of the file."""
    with Image.open(io.BytesIO(jpeg.tobytes())) as image:
        width = min(PICTURE_WIDTH, image.width)
        rows = np.asarray(image.convert("RGB").resize((width, max(1, image.height * width // image.width // 2) * 2)))
    text = Text()
    for upper, lower in zip(rows[::2].tolist(), rows[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    return text


def show_summary(console: Console, metas: Sequence[ExampleMeta], total: int | None) -> None:
    """Print quantiles of the rows' lengths, and how many are left out and why. `total`: size of the dataset."""
    bad = [meta for meta in metas if meta.problem is not None]
    lengths = [length for meta in metas if meta.problem is None for length in meta.lengths]
    of_all = "" if total is None else f" of {total}"
    console.print(Text(f"{len(metas)}{of_all} rows, {len(lengths)} sequences", style="bold"))
    if lengths:
        table = Table("tokens", *QUANTILES.values(), "mean", "sum")
        values = np.quantile(lengths, list(QUANTILES), method="inverted_cdf")
        table.add_row("per sequence", *map(str, values), f"{np.mean(lengths):.1f}", str(sum(lengths)))
        console.print(table)
        num_loss_tokens = sum(meta.num_loss_tokens for meta in metas if meta.problem is None)
        console.print(Text(f"{num_loss_tokens} tokens carry loss, {num_loss_tokens / sum(lengths):.1%} of all"))
    console.print(Text(f"{len(bad)} rows are left out" + (":" if bad else "")))
    first = {meta.problem_kind: meta.problem for meta in reversed(bad)}
    for kind, number in Counter(meta.problem_kind for meta in bad).most_common():
        console.print(Text(visible(f"  {number} {kind}, e.g. {first[kind]}"), style="yellow"), soft_wrap=True)


def show_rows(console: Console, inputs: PreviewInputs, num_shown: int) -> None:
    """Print the first `num_shown` rows token by token, then a summary of all of them and the note.

    Raises:
        ValueError: a row lacks what its processor needs, and `inputs.make` does not count that as a problem.
    """
    metas = []
    for number, prompt in enumerate(inputs.prompts):
        examples, meta = inputs.make(prompt)
        metas.append(meta)
        if number >= num_shown:
            continue
        console.rule(Text(visible(f"row {meta.prompt_id}")))
        if meta.problem is not None:
            reason = visible(f"left out ({meta.problem_kind}): {meta.problem}")
            console.print(Text(reason, style="yellow"), soft_wrap=True)
            continue
        for example in examples:
            counts = f"{len(example.token_ids)} tokens, {int(example.token_mask.sum())} of them carry loss"
            margin = f", margin {example.margin:g}" if example.margin else ""
            images = f", images: {len(example.images)}" if example.images else ""
            heading = visible(f"{example.sample_id}: {counts}{margin}{images}")
            console.print(Text(heading, style="bold"), soft_wrap=True)
            for pixels in example.pixels.values() if console.is_terminal else ():
                console.print(picture(pixels[PREVIEW]))
            console.print(token_text(example, inputs.tokenizer, coloured=console.is_terminal), soft_wrap=True)
    console.rule()
    show_summary(console, metas, inputs.total)
    if inputs.note:
        console.print(Text(inputs.note))
