"""The whole loop of GRPO (arXiv 2402.03300) in one file, for a person who wants to change everything.

uv run --extra cpu examples/grpo_by_hand.py    # a tiny model learns arithmetic on a CPU

`train` is the loop, `play` its rollout, and `start` makes the workers that both call. There is no trainer, and so no
validation, no checkpoint and no recovery: an error ends the script. `run_grpo_math.py` has all of them, and takes GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import ray

from nemo_rl.algorithms.config.grpo import AdvEstimatorConfig, ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.worker_settings import sampling_params
from nemo_rl.algorithms.plan.advantages import GroupRewards, compute_advantages
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.config.cli import Parser
from nemo_rl.config.loader import build_section
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.config import DataConfig
from nemo_rl.data.rows.dataloader import PromptDataLoader
from nemo_rl.data.rows.setup import PromptProcessor, setup_data
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray, shutdown_ray
from nemo_rl.environments.client import EnvironmentPool
from nemo_rl.environments.config import MathEnvironmentConfig
from nemo_rl.environments.registry import create_envs, end_envs
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.rollouts.engine_client import Engines
from nemo_rl.rollouts.episode import EpisodeLimits, run_episode
from nemo_rl.types import DatumSpec, GroupHandle, Prompt, RenderedObservation, RolloutGroup, Sample
from nemo_rl.utils.config import CheckpointingConfig
from nemo_rl.utils.seeds import sample_seed
from nemo_rl.utils.tokenizer import decode

SEED = 42
NUM_PROMPTS, NUM_GENERATIONS = 32, 8  # of a step
BATCH_SIZE = NUM_PROMPTS * NUM_GENERATIONS
NUM_WORKERS = 1  # ranks of the policy, and engines
LIMITS = EpisodeLimits(max_turns=1, max_total_tokens=48)
TIMEOUT_S = 600.0  # of a call to a worker

POLICY = build_section(
    "policy",
    RolloutPolicyConfig,
    {
        "model_name": "tiny:arithmetic",
        "precision": "float32",
        "max_total_sequence_length": LIMITS.max_total_tokens,
        "train_global_batch_size": BATCH_SIZE,  # one optimizer step takes all
        "train_micro_batch_size": 128,
        "optimizer": {"kwargs": {"lr": 3e-4}},
        "generation": {"max_new_tokens": 16},
    },
)
DATA = build_section("data", DataConfig, {"train": {"dataset_name": "arithmetic"}, "max_input_seq_length": 32})
ADVANTAGES = AdvEstimatorConfig(normalize_rewards=True, use_leave_one_out_baseline=True)
LOSS = ClippedPGLoss(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))


def train(num_steps: int, stack: ExitStack) -> None:
    """Train, and print a line per step. All that it starts ends with the stack."""
    model = Model.prepare(POLICY, CheckpointingConfig(enabled=False))
    data = setup_data(DATA)
    process = PromptProcessor(data.tasks, model.tokenizer, DATA.max_input_seq_length)
    loader = PromptDataLoader(data.train, NUM_PROMPTS, seed=SEED)
    batches = (prompts for _ in count() for prompts in loader)  # epoch after epoch
    sizes = Batching.of(POLICY, **model.flops.cost_weights)
    policy, refit, engines, environment = start(stack, model)
    loop = stack.enter_context(asyncio.Runner())

    for step in range(1, num_steps + 1):
        # Prompts: the next rows of the dataset.
        prompts = next(batches)

        # Rollout: a group of samples of each prompt. Here are their rewards and lengths; the tokens are in Ray's store.
        groups = loop.run(play(prompts, step, process, engines, environment))

        # Advantages: how much better a sample is than the others of its group.
        rewards = [
            GroupRewards(
                rewards=[sample.reward for sample in group.samples],
                valid=[sample.has_reward for sample in group.samples],
                num_loss_tokens=[sample.num_generated_tokens for sample in group.samples],
            )
            for group in groups
        ]
        advantages = compute_advantages(rewards, ADVANTAGES).advantages

        # Batch: which sample goes to which worker, optimizer step and micro-batch. The workers fetch their tokens.
        masks = [[1.0] * NUM_GENERATIONS] * NUM_PROMPTS  # 0.0 would leave a sample out of the loss
        plan = plan_batch(
            groups, advantages, masks, num_ranks=policy.data_parallel_size, global_batch_size=BATCH_SIZE, batching=sizes
        )
        policy.load(plan)

        # Log-probabilities of the sampled tokens before the update. They stay with the samples, on the workers.
        policy.compute(Logprobs(), "prev_logprobs")

        # Loss and optimizer step.
        result = policy.train(LOSS, Logprobs())

        # Refit: the new weights go to the engines.
        refit.sync(step)

        reward = sum(sum(group.rewards) for group in rewards) / BATCH_SIZE
        agreement = result.metrics["token_mult_prob_error"]  # of training and generation; 1 is perfect
        print(f"step {step}  reward {reward:.3f}  loss {result.losses[0]:+.4f}  agreement {agreement:.7f}", flush=True)

    [group] = loop.run(play(next(batches)[:1], num_steps + 1, process, engines, environment))
    for message in ray.get(group.ref)[0].samples[0].messages:
        print(f"{message['role']}: {message['content']}")


async def play(
    prompts: Sequence[Prompt], step: int, process: PromptProcessor, engines: Engines, environment: EnvironmentPool
) -> list[GroupHandle]:
    """Play all groups at once. EngineDied, EnvironmentFailure or RequestFailed if an episode has no end."""
    sampling = sampling_params(POLICY.generation, process.tokenizer)
    renderer = ObservationRenderer(process.tokenizer)

    async def render(observation: dict[str, Any], **known: Any) -> RenderedObservation:  # between two turns
        return renderer(observation, **known)

    async def play_episode(prompt: Prompt, datum: DatumSpec, number: int) -> Sample:
        sample_id = f"{step}/{prompt.prompt_id}/{number}"
        return await run_episode(
            datum,
            sample_id=sample_id,
            generate=engines.generate,
            env_step=partial(environment.step, sample_id=sample_id),
            decode=partial(decode, process.tokenizer),
            render=render,
            sampling=sampling,
            limits=LIMITS,
            seed_of_turn=partial(sample_seed, SEED, step, prompt.prompt_id, number),
        )

    async def play_group(prompt: Prompt) -> GroupHandle:
        datum, group_id, prompt_id = process(prompt), f"{step}/{prompt.prompt_id}", prompt.prompt_id
        samples = await asyncio.gather(*(play_episode(prompt, datum, number) for number in range(NUM_GENERATIONS)))
        ref = ray.put([RolloutGroup(group_id=group_id, prompt_id=prompt_id, samples=samples)])
        metas, task = [sample.meta for sample in samples], prompt.task_name
        return GroupHandle(group_id=group_id, prompt_id=prompt_id, task_name=task, ref=ref, samples=metas)

    playing = asyncio.gather(*map(play_group, prompts))
    await engines.wait(playing)  # alone, the episodes of a dead engine would wait for a new one
    return await playing


def start(stack: ExitStack, model: Model) -> tuple[Policy, Refit, Engines, EnvironmentPool]:
    """Start Ray, the environment, the engines and the policy. All end with the stack."""
    init_ray("logs/grpo_by_hand", forks_workers=True)
    stack.callback(shutdown_ray)
    cluster = RayVirtualCluster([NUM_WORKERS], use_gpus=False, max_colocated_worker_groups=2)  # policy and engines
    actors = create_envs({"math": MathEnvironmentConfig(num_workers=1)}, stack.enter_context(cluster))
    stack.callback(end_envs, actors)
    accelerator = Accelerator(exclusive=False)  # on CPUs nobody waits for a turn
    engine = EngineSettings(model=model.model_path, tokenizer=model.tokenizer_path, cfg=POLICY.generation, seed=SEED)
    generation = VllmGeneration(cluster, engine, accelerator=accelerator, timeout_s=TIMEOUT_S)
    stack.callback(generation.shutdown)
    settings = PolicyWorkerSettings(
        model_path=model.model_path,
        sampling=sampling_params(POLICY.generation, model.tokenizer),
        use_gpu=False,
        workers_per_node=NUM_WORKERS,
        init_reference_model=False,
        init_optimizer=True,
        seed=SEED,
    )
    policy = Policy(cluster, POLICY, model.tokenizer, accelerator, settings, timeout_s=TIMEOUT_S)
    stack.callback(policy.shutdown)
    accelerator.register_alias(REFIT, policy.name_prefix)
    refit = Refit(policy, generation, accelerator, transport=generation.transport, wire_dtype=POLICY.precision)
    refit.sync(0)  # the engines start without weights
    engines = Engines(TIMEOUT_S)
    engines.replace(generation.workers)
    return policy, refit, engines, EnvironmentPool("math", actors["math"], TIMEOUT_S)


if __name__ == "__main__":
    parser = Parser(description="The whole loop of GRPO in one file: a tiny model learns arithmetic on a CPU.")
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="training steps (default 20)")
    with ExitStack() as stack:
        train(parser.parse_args().steps, stack)
