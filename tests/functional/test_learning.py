"""A pretrained model learns a real task: the commands of docs/guides/pretrained.md, with a seed of their own."""

import pytest

from tests.functional.cli import ROOT, exact, example, run

LEARNED = 0.2  # what GRPO alone adds to the score of held-out items


@pytest.mark.learns
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", [1, 2])
def test_grpo_adds_a_fifth_to_the_score_of_held_out_items(smollm2, tmp_path, seed):
    prompt = f"data.default.prompt_file={ROOT / 'examples/prompts/reasoning_gym.txt'}"
    model = f"policy.model_name={smollm2}"
    run(tmp_path, prompt, model, f"sft.seed={seed}", **example("sft", "sft_pretrained"), timeout_s=2400)
    finished = run(tmp_path, prompt, f"grpo.seed={seed}", **example("grpo_math", "grpo_pretrained"), timeout_s=2400)
    score = finished.curve("validation/accuracy")
    assert score[-1] - score[0] >= LEARNED, score
    exact(finished.steps, 60)
