"""From the configuration of a run that learns from rows to what makes tokens of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.supervised_config import SFTMasterConfig, SupervisedMasterConfig
from nemo_rl.data.examples import ExampleMaker, ExampleSetup, StreamedRows
from nemo_rl.data.streaming import NamedStream


def example_maker(
    config: SupervisedMasterConfig, setup: ExampleSetup, tokenizer: PreTrainedTokenizerFast
) -> ExampleMaker:
    """What tokenises the rows of the run, with the masks that its algorithm asks for."""
    data = config.examples
    maker = partial(
        ExampleMaker,
        setup.tasks,
        tokenizer,
        data.max_input_seq_length,
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
    )
    if isinstance(config, SFTMasterConfig):
        sft = config.sft
        return maker(roles_to_train_on=sft.roles_to_train_on, only_unmask_final=sft.only_unmask_final)
    return maker()


def open_streams(rows: Sequence[StreamedRows]) -> list[NamedStream]:
    """Streamed datasets as `StreamedPrompts` reads them."""
    return [
        NamedStream(
            name=part.name,
            task_name=part.task_name,
            open_rows=partial(copy.deepcopy, part.table),
            convert=part.convert,
        )
        for part in rows
    ]
