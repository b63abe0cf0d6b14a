"""The rows of SFT, DPO and reward models: datasets, their order, and the workers that make tokens of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.supervised import SFTMasterConfig, SupervisedMasterConfig
from nemo_rl.algorithms.parts.model import Model, image_reader
from nemo_rl.algorithms.run import Run
from nemo_rl.data.chat.images import ImageReader
from nemo_rl.data.rows.dataloader import PromptDataLoader, PromptDataset, PromptSource, prompt_loader
from nemo_rl.data.rows.examples import ExampleLoader, ExampleMaker, check_examples
from nemo_rl.data.rows.setup import ExampleSetup, setup_examples
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.data.rows.token_cache import TokenCache
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool
from nemo_rl.types import ExampleHandle


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Training and validation rows. `make` makes tokens and masks of a row; `prompts` gives batches of rows."""

    data: ExampleSetup
    make: ExampleMaker
    prompts: PromptSource

    @classmethod
    def prepare(cls, config: SupervisedMasterConfig, model: Model) -> Self:
        """Load the datasets, and try some of their rows.

        Raises:
            ValueError, FileNotFoundError: with what to change.
        """
        loop, data, batch_size = config.loop, config.examples, config.policy.train_global_batch_size
        setup = setup_examples(data)
        make = example_maker(config, setup, model.tokenizer, image_reader(model.processor_path, data.max_images))
        check_examples(make, setup.train, "data.train")
        for name, dataset in setup.validation.items() if loop.validates else ():
            check_examples(make, dataset, f"validation set {name!r}")
        order = {"shuffle": data.shuffle, "seed": loop.seed, "size_key": "policy.train_global_batch_size"}
        prompts: PromptSource
        if isinstance(setup.train, PromptDataset):
            prompts = prompt_loader(data.custom_dataloader, setup.train, batch_size, **order)
        else:
            prompts = StreamedPrompts(setup.train, batch_size, **order)
        if data.cache_tokens:
            TokenCache(make.fingerprint()).close()  # one that cannot be used is reported before anything starts
        return cls(data=setup, make=make, prompts=prompts)

    def identity(self, config: SupervisedMasterConfig) -> dict[str, Any]:
        """The values that decide which tokens a step learns."""
        size = config.policy.train_global_batch_size
        return {
            "data.train": self.prompts.fingerprint(),
            "data.tokens": self.make.settings(),
            config.section: {"seed": config.loop.seed, "train_global_batch_size": size},
        }

    def start_tokenizers[ConfigT: SupervisedMasterConfig](self, run: Run[ConfigT]) -> TokenizerPool:
        """Start the tokenising workers. They end with the run."""
        data = run.config.examples
        pool = TokenizerPool(
            self.make,
            num_workers=data.num_workers,
            open_cache=partial(TokenCache, self.make.fingerprint()) if data.cache_tokens else None,
            timeout_s=run.config.cluster.worker_timeout_s,
        )
        run.stack.callback(pool.shutdown)
        return pool

    def batches_of_all(self, pool: TokenizerPool, size: int) -> Iterator[Sequence[ExampleHandle]]:
        """All training rows in the order of the dataset, tokenised a batch ahead."""
        assert isinstance(self.data.train, PromptDataset)
        source = PromptDataLoader(self.data.train, min(size, len(self.data.train)), shuffle=False, drop_last=False)
        loader = ExampleLoader(source, pool, max_num_epochs=1)
        while (batch := loader.next()) is not None:
            yield batch


def example_maker(
    config: SupervisedMasterConfig,
    setup: ExampleSetup,
    tokenizer: PreTrainedTokenizerFast,
    images: ImageReader | None = None,
) -> ExampleMaker:
    """The tokenisation of the rows of the run, with the masks of its algorithm."""
    data = config.examples
    masks: dict[str, Any] = {}
    if isinstance(config, SFTMasterConfig):
        masks = {"roles_to_train_on": config.sft.roles_to_train_on, "only_unmask_final": config.sft.only_unmask_final}
    return ExampleMaker(
        setup.tasks,
        tokenizer,
        data.max_input_seq_length,
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
        images=images,
        **masks,
    )
