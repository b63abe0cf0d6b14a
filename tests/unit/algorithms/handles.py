"""Hand-made group handles for tests."""

from nemo_rl.types import GroupHandle, SampleMeta, SampleStatus


def sample(
    reward: float = 0.0,
    status: SampleStatus = SampleStatus.COMPLETED,
    *,
    prompt: int = 4,
    generated: int = 10,
    env: int = 0,
    turns: int = 1,
    version: int = 0,
) -> SampleMeta:
    return SampleMeta(
        sample_id="g/0",
        status=status,
        length=prompt + generated + env,
        num_prompt_tokens=prompt,
        num_generated_tokens=generated,
        num_turns=turns,
        reward=reward,
        weight_version=version,
    )


def handle(*samples: SampleMeta, name: str = "g") -> GroupHandle:
    return GroupHandle(group_id=name, prompt_id=name, task_name="math", ref=None, samples=list(samples))


def rewarded(*rewards: float, name: str = "g") -> GroupHandle:
    return handle(*(sample(reward) for reward in rewards), name=name)
