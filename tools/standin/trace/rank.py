"""Ranks of a run over the stand-in, each in a process of its own, started by `tools/trace_recipe.py`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.parts.placement import phases_of
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.memory import Machine, ModelShape
from nemo_rl.models.policy.pretrained import load_config as load_shape
from nemo_rl.utils.registry import import_object
from tools.config_cli import MODELS
from tools.standin.trace import neighbours, world
from tools.standin.trace.phases import Phases, in_allocator


def where(error: BaseException) -> str:
    """File and line in this project where an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/nemo_rl/" in frame.filename and "site-packages" not in frame.filename]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"


def trace(task: dict[str, Any]) -> dict[str, Any]:
    """Run a rank. `task`: see `tools/trace_recipe.py`. Returns what it did, and where it stopped if it did."""
    config = load_config(import_object(MODELS[task["section"]], "model"), task["config"], task["overrides"])
    size = config.training_cluster.num_workers
    os.environ |= {"RANK": str(task["rank"]), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "NODE_RANK": "0"}
    objects = None if task["objects"] is None else Path(task["objects"])
    neighbours.join(task["rank"], size, objects)
    torch.cuda.init()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN has no stand-in; FlashAttention takes as much memory
    how = {name: task[name] for name in ("has_indices", "observed_from")}
    phases = Phases(torch.device("cuda", 0), **how)
    # The refit of sharded weights needs the tables of all ranks.
    world.LocalRun.syncs = size == 1 or not config.policy.megatron_cfg.enabled or objects is not None
    world.LocalRun.only_starts, world.LocalRun.most_buckets = task["only_starts"], task["most_buckets"]
    report: dict[str, Any] = {"rank": task["rank"], "world_size": size, "stop": None, "syncs": world.LocalRun.syncs}
    with tempfile.TemporaryDirectory() as folder:
        world.install(phases, Path(folder))
        try:
            world.RUNS[task["section"]](config)
        except Exception as error:
            if not task["only_starts"]:
                traceback.print_exc()
            report["stop"] = {"error": f"{type(error).__name__}: {error}"[:2000], "at": where(error)}
    memory = torch.cuda.get_device_properties(0).total_memory
    model = ModelShape.of(load_shape(config.policy.model_name, dict(config.policy.hf_config_overrides)))
    report |= {
        "gpu": torch.cuda.get_device_name(0),
        "memory": memory,
        "phases": phases.as_json(),
        "predicted": {
            phase.name: in_allocator(phase)
            for phase in phases_of(config, model, Machine(is_gpu=True, memory=memory), task["rank"])
        },
        "messages": [[list(ranks), [str(m) for m in found]] for ranks, found in phases.observer.messages.items()],
    }
    return report


def main() -> None:
    """Each rank in a fork, before CUDA is initialised: modules are imported once for all.

    The report takes the place of the task in its file, whose path is then printed.
    """
    parser = argparse.ArgumentParser(description="Ranks of a recipe, for tools/trace_recipe.py, which starts them.")
    parser.add_argument("tasks", type=Path, nargs="+", help="files of JSON that say what to trace")
    for path in parser.parse_args().tasks:
        task = json.loads(path.read_text(encoding="utf-8"))
        if (child := os.fork()) == 0:
            os.environ["STANDIN_WRITES"] = str(task["writes"])
            path.write_text(json.dumps(trace(task)), encoding="utf-8")
            sys.stdout.flush()
            os._exit(0)  # libraries for a GPU have nothing to give back here
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(f"rank {task['rank']} ended with status {status}")
        print(path, flush=True)


if __name__ == "__main__":
    main()
