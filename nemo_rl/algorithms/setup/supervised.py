"""From a configuration to a running SFT, DPO or reward-model training: the only place that knows the concrete parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.supervised import (
    DPOMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
    SupervisedMasterConfig,
)
from nemo_rl.algorithms.dpo import DPOTrainer, ReferenceSums
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.model_inputs import ModelInputs, digest, prepare_model
from nemo_rl.algorithms.setup.preflight import check_checkpoint_dir, check_saved_weights, check_writable
from nemo_rl.algorithms.setup.workers import start_cluster, start_policy
from nemo_rl.algorithms.trainers.supervised import SupervisedParts, SupervisedTrainer, plan_examples
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.data.rows.dataloader import PromptDataLoader, PromptDataset, PromptSource
from nemo_rl.data.rows.examples import ExampleLoader, ExampleMaker, check_examples
from nemo_rl.data.rows.setup import ExampleSetup, setup_examples
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.data.rows.token_cache import TokenCache, check_cache_dir
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool
from nemo_rl.types import ExampleHandle, LossFunction, Prompt
from nemo_rl.utils.seeds import seed_everything

# -- From the configuration of a run that learns from rows to what makes tokens of them.


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


logger = logging.getLogger(__name__)

GROUPS_PER_BUNDLE = 1


@dataclass(frozen=True, kw_only=True)
class SupervisedInputs:
    """What a run that learns from rows is made from, checked."""

    model: ModelInputs
    data: ExampleSetup
    make: ExampleMaker
    prompts: PromptSource
    identity: dict[str, Any]


def run_sft(config: SFTMasterConfig) -> int:
    """The whole run; returns the exit status (see `launch`)."""
    build = partial(_build, loss_fn=NLLLoss(), task=Logprobs(filtered=False))
    return launch(config, prepare=prepare, build=build, num_steps=config.sft.max_num_steps)


def run_rm(config: RMMasterConfig) -> int:
    """The whole run; returns the exit status (see `launch`)."""
    build = partial(_build, loss_fn=PreferenceLoss(config.rm), task=Scalars())
    return launch(config, prepare=prepare, build=build, num_steps=config.rm.max_num_steps)


def run_dpo(config: DPOMasterConfig) -> int:
    """The whole run; returns the exit status (see `launch`)."""
    return launch(config, prepare=prepare, build=_build_dpo, num_steps=config.dpo.max_num_steps)


def prepare(config: SupervisedMasterConfig) -> SupervisedInputs:
    """Load what needs no worker, and find what is wrong with it.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    loop = config.loop
    seed_everything(loop.seed)
    model = prepare_model(config.policy, config.checkpointing)
    setup = setup_examples(config.examples)
    make = example_maker(config, setup, model.tokenizer)
    check_examples(make, setup.train, "data.train")
    for name, dataset in setup.validation.items() if loop.validates else ():
        check_examples(make, dataset, f"validation set {name!r}")
    prompts = _prompt_source(config, setup)
    identity = {
        **model.identity,
        "data.train": prompts.fingerprint(),
        "data.tokens": make.settings(),
        config.section: {"seed": loop.seed, "train_global_batch_size": config.policy.train_global_batch_size},
    }
    if config.examples.cache_tokens:
        check_cache_dir()
    check_checkpoint_dir(config.checkpointing, identity)
    check_saved_weights(config.checkpointing, config.policy, model.config)
    check_writable(Path(config.logger.log_dir), "logger.log_dir")
    return SupervisedInputs(model=model, data=setup, make=make, prompts=prompts, identity=identity)


def _prompt_source(config: SupervisedMasterConfig, setup: ExampleSetup) -> PromptSource:
    batch, data = config.policy.train_global_batch_size, config.examples
    order = {"shuffle": data.shuffle, "seed": config.loop.seed, "size_key": "policy.train_global_batch_size"}
    if isinstance(setup.train, PromptDataset):
        return PromptDataLoader(setup.train, batch, **order)
    return StreamedPrompts(setup.train, batch, **order)


@dataclass(frozen=True, kw_only=True)
class _Running:
    parts: SupervisedParts
    pool: TokenizerPool


def _build(
    config: SupervisedMasterConfig,
    stack: ExitStack,
    tools: RunTools,
    inputs: SupervisedInputs,
    *,
    loss_fn: LossFunction,
    task: HeadTask,
) -> SupervisedTrainer:
    running = _start(config, stack, inputs, init_reference_model=False)
    trainer = SupervisedTrainer(config, tools, running.parts, loss_fn, task)
    trainer.start()
    return trainer


def _build_dpo(config: DPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: SupervisedInputs) -> DPOTrainer:
    is_ahead = config.dpo.precompute_reference_logprobs
    running = _start(config, stack, inputs, init_reference_model=not is_ahead)
    trainer = DPOTrainer(config, tools, running.parts, None)
    if is_ahead:
        with trainer.phase("reference_logprobs"):
            trainer.known = _reference_sums(config, inputs, running, trainer)
        trainer.timer.reset()
    trainer.start()
    return trainer


def _start(
    config: SupervisedMasterConfig, stack: ExitStack, inputs: SupervisedInputs, *, init_reference_model: bool
) -> _Running:
    """Start cluster, tokenising workers and policy; all end with the stack."""
    pool = _start_pool(config, stack, inputs)
    cluster = start_cluster(config, stack, GROUPS_PER_BUNDLE)
    loop = config.loop
    sets = inputs.data.validation if loop.validates else {}
    validation = {name: pool.start(_first(rows, loop.max_val_rows)) for name, rows in sets.items()}
    policy = start_policy(
        config,
        config.policy,
        stack,
        inputs.model,
        cluster,
        Accelerator(exclusive=False),  # the only one there is
        seed=loop.seed,
        init_reference_model=init_reference_model,
    )
    parts = SupervisedParts(
        policy=policy,
        loader=ExampleLoader(inputs.prompts, pool, max_num_epochs=loop.max_num_epochs),
        num_batches=inputs.prompts.num_batches,
        validation={name: partial(pool.finish, pending) for name, pending in validation.items()},
        flops=inputs.model.flops,
    )
    return _Running(parts=parts, pool=pool)


def _start_pool(config: SupervisedMasterConfig, stack: ExitStack, inputs: SupervisedInputs) -> TokenizerPool:
    data = config.examples
    pool = TokenizerPool(
        inputs.make,
        num_workers=data.num_workers,
        open_cache=partial(TokenCache, inputs.make.fingerprint()) if data.cache_tokens else None,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(pool.shutdown)
    return pool


def _first(dataset: PromptDataset, num: int | None) -> list[Prompt]:
    """The first `num` rows of a dataset, all of a smaller one or without a number."""
    return [dataset[index] for index in range(len(dataset) if num is None else min(num, len(dataset)))]


def _reference_sums(
    config: DPOMasterConfig, inputs: SupervisedInputs, running: _Running, trainer: DPOTrainer
) -> ReferenceSums:
    """Those of an earlier start of the same run, or new ones; the policy has the weights the run starts from."""
    what = {name: value for name, value in inputs.identity.items() if name != config.section}
    sets = inputs.data.validation if config.dpo.validates else {}
    what["validation"] = {name: dataset.fingerprint() for name, dataset in sets.items()}
    what["how"] = (config.dpo.max_val_rows, config.policy.precision, inputs.make.fingerprint())
    model = inputs.model
    what["weights"] = weights_identity(config.policy.model_name, model.model_path, model.config)
    name = f"reference_logprobs_{digest(repr(sorted(what.items())))}.npz"
    path = Path(config.checkpointing.checkpoint_dir) / name if config.checkpointing.enabled else None
    if path is not None and path.is_file():
        return ReferenceSums.load(path)
    policy: PolicyInterface = running.parts.policy
    plan = partial(
        plan_examples,
        num_ranks=policy.data_parallel_size,
        batching=trainer.batching,
        micro_batch_multiple=config.policy.backend_cfg.micro_batch_multiple,
    )
    batches = _every_batch(inputs.data, running, config.policy.train_global_batch_size)
    sums = ReferenceSums.compute(policy, batches, plan)
    if path is not None:
        try:
            sums.save(path)
        except OSError as error:  # they are at hand for this run
            logger.warning("the reference logprobs cannot be kept for further runs in %s: %s", path, error)
    return sums


def _every_batch(data: ExampleSetup, running: _Running, size: int) -> Iterator[Sequence[ExampleHandle]]:
    """All rows of training and validation, tokenised a batch ahead."""
    yield from (tokenise() for tokenise in running.parts.validation.values())
    assert isinstance(data.train, PromptDataset)
    source = PromptDataLoader(data.train, min(size, len(data.train)), shuffle=False, drop_last=False)
    loader = ExampleLoader(source, running.pool, max_num_epochs=1)
    while (batch := loader.next()) is not None:
        yield batch
