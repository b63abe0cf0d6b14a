"""Predict the seconds of a step of GRPO from operations, bandwidths and bytes, before anything has run.

    uv run tools/predict_step.py --config examples/configs/recipes/llm/grpo-qwen2.5-7b-instruct-1n8g.yaml \\
        --gpu "NVIDIA H100" --model-config path/to/folder --prompt-tokens 200 --completion-tokens 800

`--config` gives the layout, the batch and the passes; further arguments are overrides, as for the script that trains.
`--model-config` is a folder with the model's config.json; without it the configuration's own model is looked up. The
lengths of completions are drawn log-normal around the mean with the same seed each time, cut at the configuration's
greatest length: the longest of a batch decides when generation ends. `ideal` is the hardware's own rates. With
`--metrics` a column shows what a run measured. The last line is the input of `tools/simulate_schedule.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.cli import Parser
from nemo_rl.config.loader import load_config
from nemo_rl.config.terminal import visible
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.models.policy.flops import (
    EXPECTED,
    GENERATION,
    GPUS,
    IDEAL,
    SYNC,
    Layout,
    ModelFlops,
    Work,
    find_gpu,
    predict,
)

SPREAD = 0.6
"""Standard deviation of the logarithm of a completion's length."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="of a run of GRPO")
    parser.add_argument("--gpu", required=True, help=f"a name that begins like one of {', '.join(GPUS)}")
    parser.add_argument("--model-config", type=Path, help="folder with the model's config.json")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="mean")
    parser.add_argument("--completion-tokens", type=int, default=800, help="mean")
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run, to compare with")
    parser.add_argument("overrides", nargs="*", help="key=value")
    return parser.parse_args(argv)


def work_of(config: GRPOMasterConfig, prompt_tokens: int, completion_tokens: int) -> Work:
    """The samples of a step, with the passes that the configuration asks for."""
    grpo, longest = config.grpo, config.policy.max_total_sequence_length - prompt_tokens
    if longest < 1:
        raise ValueError(f"--prompt-tokens {prompt_tokens}: policy.max_total_sequence_length leaves no completion")
    draw = np.random.default_rng(0).lognormal(-(SPREAD**2) / 2, SPREAD, grpo.num_samples_per_step)
    generated = np.clip(draw * completion_tokens, 1, longest).astype(int).tolist()
    reference = not grpo.skip_reference_policy_logprobs_calculation
    previous = grpo.num_samples_per_step > config.policy.train_global_batch_size
    return Work(
        lengths=[prompt_tokens + drawn for drawn in generated],
        generated=generated,
        prompts=grpo.num_prompts_per_step,
        logprob_passes=reference + previous,
        reference_passes=int(reference),
    )


def measured_in(path: Path, phases: Sequence[str]) -> dict[str, float]:
    """Median seconds of `phases` over the steps of a run.

    Raises:
        ValueError: the run has no step with one of them.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {phase: [row[key] for row in rows if (key := f"timing/train/{phase}") in row] for phase in phases}
    if missing := [phase for phase, values in found.items() if not values]:
        raise ValueError(f"{path} has no step with {', '.join(missing)}: it is of another algorithm or schedule")
    return {phase: float(np.median(values)) for phase, values in found.items()}


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """One line per phase, one column per prediction or measurement, and their sums."""
    phases = list(next(iter(columns.values())))
    lines = [f"{'seconds':<32}" + "".join(f"{name:>11}" for name in columns)]
    lines += [f"{phase:<32}" + "".join(f"{column[phase]:>11.2f}" for column in columns.values()) for phase in phases]
    return "\n".join([*lines, f"{'step':<32}" + "".join(f"{sum(c.values()):>11.2f}" for c in columns.values())])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        config = load_config(GRPOMasterConfig, arguments.config, arguments.overrides)
        if (gpu := find_gpu(arguments.gpu)) is None:
            raise ValueError(f"--gpu {arguments.gpu!r}: unknown; known are {', '.join(GPUS)}")
        folder = arguments.model_config or resolve_model(config.policy.model_name)
        model = ModelFlops.of(AutoConfig.from_pretrained(folder))
        work = work_of(config, arguments.prompt_tokens, arguments.completion_tokens)
        layout = Layout.of(
            config.policy,
            model,
            config.training_cluster.num_workers,
            config.generation_cluster.num_workers,
            sum(work.lengths),
        )
        columns = {
            name: predict(model, gpu, layout, work, a) for name, a in (("predicted", EXPECTED), ("ideal", IDEAL))
        }
        if arguments.metrics is not None:
            columns["measured"] = measured_in(arguments.metrics, list(columns["ideal"]))
    except (ValueError, OSError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    expected = columns["predicted"]
    training_s = sum(expected.values()) - expected[GENERATION] - expected[SYNC]
    assumed = ", ".join(f"{name}={value:g}" for name, value in dataclasses.asdict(EXPECTED).items())
    sys.stdout.write(
        f"{model.num_parameters / 1e9:.2f}e9 parameters, {len(work.lengths)} samples, {sum(work.lengths):,} tokens, "
        f"the longest completion {max(work.generated)}\nassumed of {arguments.gpu}: {assumed}\n\n{table(columns)}\n\n"
        f"tools/simulate_schedule.py --generation-s {expected[GENERATION]:.3g} --training-s {training_s:.3g} "
        f"--sync-s {expected[SYNC]:.3g} --groups {work.prompts} --devices {layout.training_gpus}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
