"""Whole evaluations of the real command line: cut off, completed, compared; and what a user can get wrong."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.loader import load_config
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.evals.run import prepare, run_eval
from nemo_rl.utils.checkpoint.manager import CheckpointManager
from nemo_rl.utils.config import CheckpointingConfig
from tests.functional import cli
from tests.functional.cli import Finished, example
from tests.tables import cases

EXAMPLE = example("eval", "evals/eval_cpu")


@pytest.fixture(autouse=True)
def logs_of_its_own(alone, monkeypatch):
    """Undoes the changes that a run makes to logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    monkeypatch.setattr(logging.getLogger(), "level", logging.getLogger().level)


def run(folder: Path, *overrides: str, **how: Any) -> Finished:
    return cli.run(folder, f"eval.save_path={folder}", *overrides, **EXAMPLE | how)


def load(*overrides: str) -> EvalMasterConfig:
    return load_config(EvalMasterConfig, EXAMPLE["config"], list(overrides))


def samples(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["prompt_id"], line["sample_index"]))


ASKED = "data.kwargs.num_samples=120"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, ASKED)
    return folder


@pytest.mark.over_20s("a start of an engine")
@pytest.mark.timeout(1800)
def test_an_evaluation_and_other_metrics_of_what_is_there(whole, capsys):
    overall = json.loads((whole / "results.json").read_text())["overall"]
    assert len(samples(whole)) == 960
    assert 0.3 < overall["mean"] < 0.5 and overall["mean_ci95"][0] < overall["mean"] < overall["mean_ci95"][1]
    assert overall["pass_at"]["1"] == pytest.approx(overall["mean"]) and overall["score"] == overall["pass_at"]["4"]
    assert overall["pass_at"]["1"] < overall["pass_at"]["4"] < overall["pass_at"]["8"]
    right = [line for line in samples(whole) if line["reward"] == 1.0]
    assert all(line["answer"] == line["expected_answer"] for line in right)
    assert run_eval(load(f"eval.save_path={whole}", ASKED, "eval.metric=cons@k", "eval.k_value=8")) == 0
    output = "".join(capsys.readouterr())
    assert "cons@8" in output and "Starting Ray" not in output
    assert json.loads((whole / "results.json").read_text())["metric"] == "cons@8"


@pytest.mark.slow
def test_what_a_kill_leaves_is_completed_with_the_same_samples(whole, tmp_path):
    """The file ends in the middle of a line, as kill -9 leaves it."""
    shutil.copytree(whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    (tmp_path / "results.json").unlink()
    written = (whole / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").write_bytes(written[: len(written) // 2])
    num_left = (tmp_path / "samples.jsonl").read_bytes().count(b"\n") // 8
    output = run(tmp_path, ASKED).output
    assert f"{num_left} of 120 prompts are there already" in output and 30 < num_left < 90
    assert samples(tmp_path) == samples(whole)


@pytest.mark.slow
def test_images_are_asked_about(tmp_path):
    run(tmp_path, "data.kwargs.num_samples=60", **example("eval", "evals/eval_vlm_cpu"))
    overall = json.loads((tmp_path / "results.json").read_text())["overall"]
    assert 0.1 < overall["mean"] < 0.6 and overall["num_failed"] == 0, overall


# -- before anything starts


def told(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The message of an evaluation that cannot run, in this process; its status is 2."""
    assert run_eval(load(*overrides)) == 2
    return " ".join(capsys.readouterr().out.split())


NO_ANSWER = '{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer": null}'
WRONG = """
data.dataset_name=gms8k -> unknown dataset 'gms8k'; did you mean gsm8k
data.dataset_name=none.csv -> none.csv' does not exist
data.dataset_name=rows.jsonl -> row 1 has no answer: column
data.max_input_seq_length=3 -> all prompts tried of the evaluation
generation.model_name=./no -> generation.model_name: directory './no'
generation.vllm_cfg.max_model_len=4096 -> generation.vllm_cfg.max_model_len=4096: more than the 2048 positions
eval.save_path=rows.jsonl -> eval.save_path: cannot write to
"""


@pytest.mark.parametrize(("given", "message"), cases(WRONG))
def test_bad_input(tmp_path, capsys, given, message):
    (tmp_path / "rows.jsonl").write_text(NO_ANSWER)
    of_a_file = ("data.kwargs={}", "data.split=null") if given[0].startswith("data.dataset_name") else ()
    said = told(capsys, *of_a_file, *given)
    assert message in said and "policy." not in said
    assert not (tmp_path / "results").exists()


def test_a_folder_of_another_evaluation(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    identity = json.dumps(prepare(load("eval.save_path=mine")).identity)
    (tmp_path / "mine" / "identity.json").write_text(identity)
    on_gpus = ("cluster.gpus_per_node=1", "generation.vllm_cfg.kv_cache_dtype=fp8")
    said = told(capsys, "eval.save_path=mine", "eval.seed=7", "generation.temperature=0.5", *on_gpus)
    assert "generation.kv_cache_dtype: the folder has" in said
    assert "eval.seed: the folder has 42, this run 7" in said
    assert "generation.temperature: the folder has 1.0, this run 0.5" in said
    chat = "generation.vllm_cfg.http_server_serving_chat_kwargs.enable_auto_tools=false"
    assert json.dumps(prepare(load(chat)).identity) == identity
    agent = prepare(load(chat, "+env.it={type: agent, run: 'json:loads'}", "data.env_name=it")).identity["generation"]
    assert agent["http_server_serving_chat_kwargs"] == {"enable_auto_tools": False}
    assert "num_tests_per_prompt" not in said and (tmp_path / "mine" / "identity.json").read_text() == identity


def test_the_model_and_tokenizer_of_a_checkpoint(tmp_path, capsys):
    """As the folder of a run holds it; a damaged one is refused before anything starts."""
    tiny = Path(resolve_model("tiny:arithmetic"))

    def write(directory: Path) -> None:
        policy = directory / "policy"
        shutil.copytree(tiny, policy / "weights" / "consolidated")
        shutil.copytree(tiny, policy / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (policy / "weights" / "consolidated" / name).unlink()

    config = CheckpointingConfig(checkpoint_dir=str(tmp_path / "run"), metric_name=None)
    step = CheckpointManager(config).start_save(3, write, {}, "", {}).finish()
    inputs = prepare(load("generation.model_name=run"))
    assert inputs.model.name == str(Path("run") / "step_3")
    linked = Path(inputs.model.tokenizer_path) / "tokenizer.json"
    assert linked.resolve() == step / "policy" / "tokenizer" / "tokenizer.json"
    assert prepare(load("generation.model_name=run/step_3")).identity == inputs.identity
    weights = step / "policy" / "weights" / "consolidated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "step_3 is damaged: policy/weights/consolidated" in told(capsys, "generation.model_name=run/step_3")
