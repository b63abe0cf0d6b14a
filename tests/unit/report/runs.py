"""Log folders of runs as the library writes them."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils import files


def write_run(folder: Path, num_steps: int = 12, **config: Any) -> Path:
    """A GRPO run whose reward rises. `config` are keys of the section `grpo`."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": 0, "validation/reward": 0.1, "validation/accuracy": 0.1}]
    for step in range(1, num_steps + 1):
        reward = 1 - math.exp(-step / 4)
        train = {"reward": reward, "loss": -0.01 * step, "grad_norm": 2.0 / step, "token_mult_prob_error": 1.0001}
        times = {"generation": 0.5, "policy_training": 0.25, "total_step_time": 0.8}
        rows.append({"step": step, **{f"train/{name}": value for name, value in train.items()}})
        rows[-1] |= {f"timing/train/{name}": seconds for name, seconds in times.items()}
        if step % 5 == 0:
            rows[-1]["validation/reward"] = reward * 0.9
    (folder / "metrics.jsonl").write_text("".join(files.dumps(row) + "\n" for row in rows))
    sections = {"grpo": {"max_num_steps": num_steps, "seed": 42, **config}, "policy": {"model_name": "tiny:arithmetic"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    return folder


def append(path: Path, **line: Any) -> None:
    """One more line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
