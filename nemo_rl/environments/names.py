"""Which environments there are, by name. No Ray: configurations are checked against it."""

from __future__ import annotations

ENV_REGISTRY: dict[str, dict[str, str]] = {
    "python_tools": {
        "actor_class_fqn": "nemo_rl.environments.tools.python_tools.PythonToolEnvironment",
        "default_processor": "math_hf_data_processor",
    },
    "code": {
        "actor_class_fqn": "nemo_rl.environments.code.CodeEnvironment",
        "default_processor": "code_data_processor",
    },
    "composite": {
        "actor_class_fqn": "nemo_rl.environments.composite.CompositeEnvironment",
        "default_processor": "conversation_processor",
    },
    "llm_judge": {
        "actor_class_fqn": "nemo_rl.environments.llm_judge.LLMJudgeEnvironment",
        "default_processor": "conversation_processor",
    },
    "remote": {
        "actor_class_fqn": "nemo_rl.environments.remote.RemoteEnvironment",
        "default_processor": "math_data_processor",
    },
    "math": {
        "actor_class_fqn": "nemo_rl.environments.math.MathEnvironment",
        "default_processor": "math_hf_data_processor",
    },
    "retrieval": {
        "actor_class_fqn": "nemo_rl.environments.retrieval.RetrievalEnvironment",
        "default_processor": "retrieval_data_processor",
    },
    "reward_model": {
        "actor_class_fqn": "nemo_rl.environments.reward_model.RewardModelEnvironment",
        "default_processor": "conversation_processor",
    },
    "sliding_puzzle_game": {
        "actor_class_fqn": "nemo_rl.environments.games.sliding_puzzle.SlidingPuzzleEnv",
        "default_processor": "episode_processor",
    },
}
"""`type` of an environment -> its class and processor; `registry.register_env` adds to it."""
