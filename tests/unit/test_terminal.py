"""What a file, a model or a data set says is shown on the terminal, and cannot control it."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from examples import report, show_rollouts, watch
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.data_preview import PreviewInputs, show_rows
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.evals.metrics import show_results
from nemo_rl.rollouts import records
from nemo_rl.types import Example, ExampleMeta, Prompt
from nemo_rl.utils.console import RunConsole
from tests.unit.report.runs import append, write_run
from tests.unit.rollouts.test_record import group, index

EVIL = "\x1b]0;taken\x07\x9b31m"  # the title of the window, a bell, red letters
SHOWN = r"\x1b]0;taken\x07\x9b31m"
MESSAGES = [{"role": EVIL, "content": EVIL}]


def of_console(_: Path, console: Console) -> None:
    RunConsole(num_steps=1, file=console.file, force_terminal=False).show_samples([MESSAGES], [1.0], title=EVIL)


def of_watch(folder: Path, console: Console) -> None:
    run = write_run(folder / f"exp_000{EVIL}")
    (run / "run.json").write_text(json.dumps({"host": EVIL}))
    append(run / "metrics.jsonl", **{"step": 13, "timing/train/total_step_time": 1.0, f"timing/train/{EVIL}": 1.0})
    append(run / "events.jsonl", time=1.0, step=EVIL, kind="warning", text=EVIL)
    sample = {"step": EVIL, "id": EVIL, "reward": 1.0, "messages": MESSAGES}
    (run / "samples").mkdir()
    (run / "samples" / "policy-0_000001.js").write_text(f"nemo_rl_sample({json.dumps(sample)});\n")
    assert watch.main([str(run)], console) == 0


def of_report(folder: Path, console: Console) -> None:
    assert report.main([str(write_run(folder / f"exp_000{EVIL}"))], console) == 0


def of_rollouts(folder: Path, console: Console) -> None:
    groups = [group(f"1/0/{EVIL}:0", None, 0.0)]
    groups[0].samples[0].meta.failure = EVIL
    groups[0].samples[1].messages = [*MESSAGES, *groups[0].samples[1].messages]
    records.write_step(folder, index(1, groups), groups, [EVIL], None)
    assert show_rollouts.main([str(folder), "--list"], console) == 0
    assert show_rollouts.main([str(folder)], console) == 0
    assert show_rollouts.main([str(folder), "--sample", "9"], console) == 2


def of_preview(_: Path, console: Console) -> None:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([EVIL])
    ids = np.array(tokenizer(EVIL, add_special_tokens=False)["input_ids"])

    def make(prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
        problem = {"problem": EVIL, "problem_kind": EVIL} if prompt.idx else {}
        meta = ExampleMeta(prompt_id=EVIL, index=0, lengths=(len(ids),), num_loss_tokens=0, **problem)
        return [Example(sample_id=EVIL, token_ids=ids, token_mask=np.zeros(len(ids), dtype=bool))], meta

    prompts = [Prompt(prompt_id=EVIL, row={}, idx=i, task_name="t") for i in range(2)]
    show_rows(console, PreviewInputs(prompts=prompts, total=2, make=make, tokenizer=tokenizer, note=""), 2)


def of_evaluation(_: Path, console: Console) -> None:
    numbers = ("score", "score_ci95", "mean", "mean_ci95", "mean_length", "truncated_rate", "failed_rate")
    row = {"num_prompts": 1} | dict.fromkeys(numbers)
    results = {"config": {"eval": {"num_tests_per_prompt": 1}}, "model": EVIL, "metric": "pass@k"}
    show_results({**results, "datasets": {f"[/{EVIL}": row}}, console.file)  # not the end of a style either


def of_configuration(folder: Path, console: Console) -> None:
    (folder / "run.yaml").write_text(json.dumps({EVIL: EVIL, "grpo": {"max_num_steps": EVIL}}))
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOMasterConfig, folder / "run.yaml", [])
    console.file.write(str(caught.value))


@pytest.mark.parametrize(
    ("show", "times"),
    [
        (of_console, 3),
        (of_watch, 9),  # folder, host, phase, step and text of an event, step, id, role and content of a sample
        (of_report, 1),
        (of_rollouts, 10),
        (of_preview, 7),
        (of_evaluation, 2),
        (of_configuration, 1),
    ],
)
def test_control_characters_are_shown_escaped(
    show: Callable[[Path, Console], Any], times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=1000)
    show(tmp_path, console)
    out, err = capsys.readouterr()
    text = console.file.getvalue() + out + err  # type: ignore[attr-defined]
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert text.count(SHOWN) >= times, text
