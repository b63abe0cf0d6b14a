"""From a configuration to a run of SFT, DPO or reward-model training."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.supervised import (
    DPOMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
    SupervisedMasterConfig,
)
from nemo_rl.algorithms.dpo import DPOTrainer, ReferenceSums, compute_reference_sums, load_sums, save_sums
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.algorithms.setup.launch import RunInputs, launch, start_devices, start_policy
from nemo_rl.algorithms.setup.preflight import check_outputs, image_reader, prepare_model
from nemo_rl.algorithms.trainers.supervised import SupervisedParts, SupervisedTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.data.chat.images import ImageReader
from nemo_rl.data.rows.dataloader import PromptDataLoader, PromptDataset, PromptSource, prompt_loader
from nemo_rl.data.rows.examples import ExampleLoader, ExampleMaker, check_examples
from nemo_rl.data.rows.setup import ExampleSetup, setup_examples
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.data.rows.token_cache import TokenCache
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool
from nemo_rl.types import ExampleHandle, LossFunction
from nemo_rl.utils.files import digest
from nemo_rl.utils.seeds import seed_everything

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SupervisedInputs(RunInputs):
    """The checked parts of a run that learns from rows."""

    data: ExampleSetup
    make: ExampleMaker
    prompts: PromptSource


def run_sft(config: SFTMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    build = partial(_build, loss_fn=NLLLoss(), task=Logprobs(filtered=False))
    return launch(config, prepare=prepare, build=build)


def run_rm(config: RMMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    build = partial(_build, loss_fn=PreferenceLoss(config.rm), task=Scalars())
    return launch(config, prepare=prepare, build=build)


def run_dpo(config: DPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    return launch(config, prepare=prepare, build=_build_dpo)


def prepare(config: SupervisedMasterConfig) -> SupervisedInputs:
    """Load and check what needs no worker.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    loop, data, batch_size = config.loop, config.examples, config.policy.train_global_batch_size
    seed_everything(loop.seed)
    model = prepare_model(config.policy, config.checkpointing)
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
    identity = {
        **model.identity,
        "data.train": prompts.fingerprint(),
        "data.tokens": make.settings(),
        config.section: {"seed": loop.seed, "train_global_batch_size": batch_size},
    }
    if data.cache_tokens:
        TokenCache(make.fingerprint()).close()  # one that cannot be used is told before anything starts
    check_outputs(config, config.policy, model.config, identity)
    return SupervisedInputs(model=model, data=setup, make=make, prompts=prompts, identity=identity)


def example_maker(
    config: SupervisedMasterConfig,
    setup: ExampleSetup,
    tokenizer: PreTrainedTokenizerFast,
    images: ImageReader | None = None,
) -> ExampleMaker:
    """The tokenisation of the rows of the run, with the masks of its algorithm."""
    data, masks = config.examples, {}
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


# -- starting


def _build(
    config: SupervisedMasterConfig,
    stack: ExitStack,
    tools: RunTools,
    inputs: SupervisedInputs,
    *,
    loss_fn: LossFunction,
    task: HeadTask,
) -> SupervisedTrainer:
    parts, _ = _start(config, stack, inputs, init_reference_model=False)
    trainer = SupervisedTrainer(config, tools, parts, loss_fn, task)
    trainer.start()
    return trainer


def _build_dpo(config: DPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: SupervisedInputs) -> DPOTrainer:
    is_ahead = config.dpo.precompute_reference_logprobs
    parts, pool = _start(config, stack, inputs, init_reference_model=not is_ahead)
    trainer = DPOTrainer(config, tools, parts, None)
    if is_ahead:
        with trainer.phase("reference_logprobs"):
            trainer.known = _reference_sums(config, inputs, parts, pool, trainer)
        trainer.timer.reset()
    trainer.start()
    return trainer


def _start(
    config: SupervisedMasterConfig, stack: ExitStack, inputs: SupervisedInputs, *, init_reference_model: bool
) -> tuple[SupervisedParts, TokenizerPool]:
    """Start tokenising workers, cluster and policy. All end with the stack."""
    loop, data = config.loop, config.examples
    pool = TokenizerPool(
        inputs.make,
        num_workers=data.num_workers,
        open_cache=partial(TokenCache, inputs.make.fingerprint()) if data.cache_tokens else None,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(pool.shutdown)
    devices = start_devices(config.training_cluster, stack, 1, config.section, take_turns=False)
    validation = {}
    for name, rows in inputs.data.validation.items() if loop.validates else ():
        num = len(rows) if loop.max_val_rows is None else min(loop.max_val_rows, len(rows))
        validation[name] = pool.start([rows[index] for index in range(num)])
    policy = start_policy(
        config, config.policy, stack, inputs.model, devices, init_reference_model=init_reference_model
    )
    parts = SupervisedParts(
        policy=policy,
        loader=ExampleLoader(inputs.prompts, pool, max_num_epochs=loop.max_num_epochs),
        num_batches=inputs.prompts.num_batches,
        validation={name: partial(pool.finish, pending) for name, pending in validation.items()},
        flops=inputs.model.flops,
    )
    return parts, pool


def _reference_sums(
    config: DPOMasterConfig, inputs: SupervisedInputs, parts: SupervisedParts, pool: TokenizerPool, trainer: DPOTrainer
) -> ReferenceSums:
    """The reference logprobs that an earlier start of the same run has kept, or new ones.

    New ones are computed with the policy, which still has the weights that the run starts from.
    """
    identity = {name: value for name, value in inputs.identity.items() if name != config.section}
    sets = inputs.data.validation if config.dpo.validates else {}
    identity["validation"] = {name: dataset.fingerprint() for name, dataset in sets.items()}
    identity["how"] = (config.dpo.max_val_rows, config.policy.precision, inputs.make.fingerprint())
    model = inputs.model
    identity["weights"] = weights_identity(config.policy.model_name, model.model_path, model.config)
    name = f"reference_logprobs_{digest(repr(sorted(identity.items())))}.npz"
    path = Path(config.checkpointing.checkpoint_dir) / name if config.checkpointing.enabled else None
    if path is not None and path.is_file():
        return load_sums(path)
    plan = partial(trainer.plan_rows, batching=trainer.batching)
    batches = _every_batch(inputs.data, parts, pool, config.policy.train_global_batch_size)
    sums = compute_reference_sums(parts.policy, batches, plan)
    if path is not None:
        try:
            save_sums(sums, path)
        except OSError as error:  # this run has them in memory
            logger.warning("the reference logprobs cannot be kept for further runs in %s: %s", path, error)
    return sums


def _every_batch(
    data: ExampleSetup, parts: SupervisedParts, pool: TokenizerPool, size: int
) -> Iterator[Sequence[ExampleHandle]]:
    """All rows of validation and training, tokenised a batch ahead."""
    yield from (tokenise() for tokenise in parts.validation.values())
    assert isinstance(data.train, PromptDataset)
    source = PromptDataLoader(data.train, min(size, len(data.train)), shuffle=False, drop_last=False)
    loader = ExampleLoader(source, pool, max_num_epochs=1)
    while (batch := loader.next()) is not None:
        yield batch
