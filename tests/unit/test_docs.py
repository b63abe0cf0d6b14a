"""The documents name things that exist: keys, defaults, commands, YAML, links, files, metrics; and their code runs."""

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel
from transformers import AutoConfig

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig, GRPOConfig, GRPOMasterConfig
from nemo_rl.algorithms.config.loop import EarlyStoppingConfig
from nemo_rl.algorithms.config.metric_names import TASK
from nemo_rl.algorithms.config.supervised import DPOConfig, RMConfig, SFTConfig, SupervisedMasterConfig
from nemo_rl.algorithms.data_preview import load_run_config
from nemo_rl.algorithms.losses.own import chosen_loss
from nemo_rl.algorithms.plan.advantages import gdpo, grpo, reinforce_plus_plus
from nemo_rl.config.loader import known_keys, load_config
from nemo_rl.config.rules import Derived
from nemo_rl.data import config as data
from nemo_rl.data.rows.dataloader import PromptDataLoader, prompt_loader
from nemo_rl.data.rows.processors import episode_processor
from nemo_rl.data.rows.setup import PromptProcessor, setup_data
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.code.tools import import_tool
from nemo_rl.environments.composite import CompositeEnvironment
from nemo_rl.environments.config import EnvironmentConfig, RewardModelEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.models.policy.dtensor.tensor_parallel import user_plan
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.types import LossFunction, LossInputs
from nemo_rl.utils.config import AlarmsConfig, LoggerConfig, ReportConfig
from nemo_rl.utils.trackers import Tracker
from tests.conversations import answered
from tests.unit.config.run_configs import CONFIGS, MASTERS, ROOT

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))} | {
    name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")
}

SCRIPTS: dict[str, type[BaseModel]] = {f"run_{name}": master for name, master in MASTERS.items()}
SCRIPTS |= dict.fromkeys(("run_grpo_math", "run_grpo_sliding_puzzle", "collect_rollouts"), MASTERS["grpo"])
SUPERVISED = [f"docs/guides/{method}.md" for method in ("sft", "dpo", "rm")]


# -- Markdown


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of the languages; "" is a fence without one."""
    return [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if language in languages]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """(first cell of the header, rows) of every table."""
    for table in re.findall(r"(?:^\|.*\n)+", without_blocks(text), re.M):
        lines = table.splitlines()
        yield cells(lines[0])[0], [cells(line) for line in lines[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def default_file(script: str) -> Path:
    """The configuration that a script of examples/ loads without --config."""
    (name,) = re.findall(r'"(\w+\.yaml)"', (ROOT / "examples" / f"{script}.py").read_text())
    (path,) = CONFIGS.rglob(name)
    return path


# -- keys


TABLES: dict[tuple[str, str], type[BaseModel]] = {
    ("sft", "`sft`"): SFTConfig,
    ("sft", "`data`"): data.ExampleDataConfig,
    ("sft", "a dataset"): data.ExampleDatasetConfig,
    ("sft", "`sft.early_stopping`"): EarlyStoppingConfig,
    ("dpo", "`dpo`"): DPOConfig,
    ("dpo", "`data`"): data.PreferenceDataConfig,
    ("dpo", "a dataset"): data.PreferenceDatasetConfig,
    ("logging", "`logger`"): LoggerConfig,
    ("logging", "`logger.alarms`"): AlarmsConfig,
    ("report", "`logger.report`"): ReportConfig,
    ("rm", "`rm`"): RMConfig,
    ("rm", "`env.reward_model`"): RewardModelEnvironmentConfig,
}
"""(guide, section of a table `key of ...`) -> the section's class."""


@pytest.mark.parametrize(("page", "section"), TABLES, ids=map(": ".join, TABLES))
def test_a_table_has_every_key_of_its_section_with_its_default(page: str, section: str):
    model, text = TABLES[page, section], PAGES[f"docs/guides/{page}.md"]
    (rows,) = [rows for header, rows in tables(text) if header == f"key of {section}"]
    keys = [key for row in rows for key in code(row[0])]
    assert len(keys) == len(set(keys))
    of_sft = TABLES["sft", section].model_fields if page != "sft" and ("sft", section) in TABLES else ()  # told there
    assert {*keys, *of_sft} >= set(model.model_fields), "keys that are not in the guide"
    assert set(keys) <= set(model.model_fields), "keys that do not exist"
    for row in rows:
        stated = code(row[1]) if "`" in row[1] else re.findall(r"^[\d.]+$", row[1])
        for key in code(row[0]) if stated else ():
            field = model.model_fields[key]
            if not any(isinstance(mark, Derived) for mark in field.metadata):
                assert yaml.safe_load(stated[0]) == field.get_default(call_default_factory=True), key
    headers = {header for header, _ in tables(text) if header.startswith("key")}
    assert headers == {f"key of {of}" for guide, of in TABLES if guide == page}, "a table that is not checked"


# -- commands and YAML


def commands(text: str) -> list[list[str]]:
    """The words of every `uv run` command, up to a comment."""
    lines = [line for block in blocks(text, "", "sh", "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("uv run ")]


ALL_COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]


@pytest.mark.parametrize(("page", "words"), ALL_COMMANDS, ids=[" ".join(words) for _, words in ALL_COMMANDS])
def test_a_command_runs_with_this_configuration(page: str, words: list[str], tmp_path: Path):
    files = [word for word in words if re.match(r"(examples|benchmarks|tools|tests)/", word)]
    for file in files:
        assert (ROOT / file).exists(), file
    overrides = [word for word in words if re.match(r"\+?[\w.]+=", word)]
    for number, (key, _, value) in enumerate(word.partition("=") for word in overrides):
        if key.endswith(".replay_from"):  # a folder that another command of the page makes
            assert f".rollout_record.save_dir={value}\n" in PAGES[page], value
            overrides[number] = f"{key}={tmp_path}"
    script = next((Path(file).stem for file in files if file.endswith(".py")), "")
    given = words[words.index("--config") + 1] if "--config" in words else None
    if given is not None and f"<!-- {given} -->" in PAGES[page]:
        return  # a file that the page itself makes, below
    if script in SCRIPTS:
        load_config(SCRIPTS[script], ROOT / given if given else default_file(script), overrides)
    elif script == "preview_data":
        assert given is not None
        load_run_config(ROOT / given, overrides)


README = PAGES["README.md"]
[TRAINS] = [rows for header, rows in tables(README) if header == "what"]


@pytest.mark.parametrize("row", TRAINS, ids=[row[0] for row in TRAINS])
def test_a_line_of_the_readme_names_a_script_and_its_configurations(row: list[str]):
    _, script, *names, _ = row
    name = code(script)[0].removesuffix(".py").replace("vlm_", "")
    for file in [found for cell in names for found in code(cell)]:
        master = EvalMasterConfig if name == "run_eval" else SCRIPTS[name]
        load_config(master, CONFIGS / file, [])


def test_the_program_of_the_readme_trains_with_its_configuration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    [program] = [block for block in blocks(README, "python") if "run_grpo" in block]
    before, call = program.split("status = run_grpo(config)")
    names: dict[str, Any] = {}
    exec(before, names)
    assert call.startswith("  #")
    assert isinstance(names["config"], GRPOMasterConfig) and names["config"].grpo.max_num_steps == 20


GUIDES_WITH_YAML = ("agents", "environments", "eval", "megatron", "multi-turn", "training-backends")
OF_ENVIRONMENTS = sorted(page for page in PAGES if page.startswith("docs/environments/"))
YAML_PAGES = [*SUPERVISED, "docs/adding-a-dataset.md", *(f"docs/guides/{name}.md" for name in GUIDES_WITH_YAML)]
YAML_PAGES += OF_ENVIRONMENTS
YAML_BLOCKS = [(page, block) for page in YAML_PAGES for block in blocks(PAGES[page], "yaml")]


@pytest.mark.parametrize(("page", "block"), YAML_BLOCKS, ids=[f"{page} {i}" for i, (page, _) in enumerate(YAML_BLOCKS)])
def test_a_piece_of_yaml_loads_on_top_of_the_default_file(page: str, block: str, tmp_path: Path):
    script = "run_sft" if block.startswith("defaults: examples/configs/sft") else f"run_{Path(page).stem}"
    if script not in SCRIPTS or "env" in yaml.safe_load(block):
        script = "run_grpo_math"
    base = CONFIGS / "grpo_math_1B_megatron.yaml" if page == "docs/guides/megatron.md" else default_file(script)
    whole = block if block.startswith("defaults:") else f"defaults: {base}\n{block}"
    file = tmp_path / "piece.yaml"
    file.write_text(whole.replace("defaults: examples/configs", f"defaults: {CONFIGS}"))
    load_config(SCRIPTS[script], file, [])


def test_the_guide_to_megatron_names_every_key():
    page = PAGES["docs/guides/megatron.md"]
    named = set(re.findall(r"\w+", " ".join([*code(without_blocks(page)), *blocks(page, "yaml")])))
    assert set(MegatronConfig.model_fields) - named == set()


METHODS = PAGES["docs/guides/grpo.md"].split("## From paper to keys")[1].split("\n## ")[0]
[ROWS] = [rows for _, rows in tables(METHODS)]


@pytest.mark.parametrize(("method", "keys"), [row[:2] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_keys_of_every_method_of_the_guide_to_grpo_load(method: str, keys: str):
    relative = {"normalize_rewards": True, "use_leave_one_out_baseline": True}
    grpo = {"adv_estimator": relative, "reward_shaping": {"max_response_length": 512}}
    # "the same, with": the row above comes first
    loss = {"use_importance_sampling_correction": True} if "IcePop" in method else {}
    sections = OmegaConf.create({"grpo": grpo, "loss_fn": loss})
    for key, text in re.findall(r"`([\w.]+): ([^`]+)`", keys):
        value = 512 if text.startswith("<") else yaml.safe_load(text)
        OmegaConf.update(sections, key if "." in key else f"loss_fn.{key}", value)
    whole: Any = OmegaConf.to_container(sections)
    ClippedPGLossConfig.model_validate(whole["loss_fn"])
    GRPOConfig.model_validate(whole["grpo"])


COMING = PAGES["docs/coming-from-nemo-rl.md"]


def test_our_keys_and_variables_on_the_page_for_newcomers_exist():
    known = {key for master in MASTERS.values() for key in known_keys(master, {"env": {"<name>": {}}})}
    known |= {f"env.<name>.{key}" for key in EnvironmentConfig.model_fields}
    sections = {key.partition(".")[0] for key in known}
    ours = [cell for header, rows in tables(COMING) if header != "module" for row in rows for cell in row[1:]]
    named = {text.partition(":")[0].strip() for cell in ours for text in code(cell)}
    keys = {name for name in named if name.partition(".")[0] in sections and "." in name}
    assert keys - known == set() and len(keys) > 30
    sources = "".join(path.read_text() for path in (ROOT / "nemo_rl").rglob("*.py"))
    [variables] = [rows for _, rows in tables(COMING) if any("HF_HOME" in row[0] for row in rows)]
    for row in variables:
        is_read = row[1].startswith("the same") and "cfg" not in row[0]
        assert all(
            (f'"{name}"' in sources) == is_read for name in code(row[0]) if name.startswith(("NRL_", "NEMO_RL_"))
        )
    script = (ROOT / "ray.sub").read_text()
    [of_slurm] = [rows for _, rows in tables(COMING) if any("GPUS_PER_NODE" in row[0] for row in rows)]
    for row in of_slurm:
        assert all((f"${{{name}" in script) == ("not read" not in row[2]) for name in code(row[0])), row[0]


# -- links, files, metrics


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_are_there(page: str):
    text = without_blocks(PAGES[page])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target
    for name in re.findall(r"`([\w/]+/\w+\.(?:py|yaml|md))`", text):
        found = any((folder / name).exists() for folder in (ROOT, CONFIGS))
        assert found or any((ROOT / "nemo_rl").rglob(name)), name


@pytest.mark.parametrize("page", SUPERVISED)
def test_metrics_are_reported(page: str):
    method = Path(page).stem
    config = load_config(MASTERS[method], CONFIGS / f"{method}_cpu.yaml", [])
    assert isinstance(config, SupervisedMasterConfig)
    known = {f"train/{name}" for name in config.train_metrics} | {f"validation/{name}" for name in config.val_metrics}
    sources = "".join(path.read_text() for path in (ROOT / "nemo_rl/algorithms").rglob("*.py"))
    named = [name for header, rows in tables(PAGES[page]) if header == "name" for row in rows for name in code(row[0])]
    assert named
    measured = {name for name in named if name.startswith(("timing/", "performance/"))}
    assert set(named) - measured <= known
    assert all(f'"{Path(name).name}"' in sources for name in measured)


def test_guides_name_every_reason_to_leave_a_row_out():
    sources = "".join(path.read_text() for path in (ROOT / "nemo_rl/data/rows").glob("*.py"))
    kinds = set(re.findall(r'(?:Problem\(\s*|problem_kind=)"(\w+)"', sources))
    found = [table for method in ("sft", "dpo") for table in tables(PAGES[f"docs/guides/{method}.md"])]
    named = {name for header, rows in found if header == "metric" for row in rows for name in code(row[0])}
    assert named == {f"train/num_{kind}" for kind in kinds}


# -- code


ADDING = PAGES["docs/adding-an-environment.md"]


def files(page: str) -> dict[str, str]:
    """Name -> text; blocks of the same file follow one another."""
    found: dict[str, str] = {}
    for name, body in re.findall(r"<!-- (\w+\.\w+) -->\n```\w+\n(.*?)^```", PAGES[page], re.M | re.S):
        found[name] = found.get(name, "") + ("\n\n" if name in found else "") + body
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the pages about own code, as the root of the repository is for their readers."""
    for page in (
        "docs/adding-an-environment.md",
        "docs/adding-a-dataset.md",
        "docs/customization.md",
        *OF_ENVIRONMENTS,
    ):
        for name, text in files(page).items():
            (tmp_path / name).write_text(text)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_episode_by_hand_goes_as_the_page_says(folder, capsys):
    exec(compile((folder / "try_second_chance.py").read_text(), "try_second_chance.py", "exec"), {})
    assert f"\nprints\n\n```text\n{capsys.readouterr().out}```" in ADDING


def test_the_table_of_fields_is_that_of_the_interface():
    rows = re.findall(r"^\| `(\w+)` \|", ADDING.split("## Try it")[0], re.M)
    assert tuple(rows) == EnvironmentReturn._fields


def test_dataset_processor_and_configuration_fit_together(folder):
    config = load_config(GRPOMasterConfig, folder / "second_chance.yaml", ["policy.tokenizer.name=tiny:arithmetic"])
    setup = setup_data(config.data)
    assert setup.validation is not None
    process = PromptProcessor(setup.tasks, build_tiny_tokenizer(), config.data.max_input_seq_length)
    datum = process(setup.train[0])
    metadata = datum["extra_env_info"]
    assert (
        metadata is not None and set(metadata) == {"task_name", "problem", "answer", "tries"} and metadata["tries"] == 0
    )
    assert datum["message_log"][0]["content"].count(metadata["problem"]) == 1
    trained = {setup.train[i].row["problem"] for i in range(len(setup.train))}
    held_out = {setup.validation[i].row["problem"] for i in range(len(setup.validation))}
    assert len(trained) + len(held_out) == 100 and not trained & held_out
    assert f"(sample 12/3/{setup.train[41].prompt_id}/0)" in ADDING


def test_several_datasets_with_weights_load_and_have_the_metrics_that_are_named(folder):
    [block] = [body for body in re.findall(r"^```yaml\n(.*?)^```", ADDING, re.M | re.S) if "weight" in body]
    piece = yaml.safe_load(block)
    (folder / "piece.yaml").write_text(f"defaults: second_chance.yaml\n{block}")
    config = load_config(GRPOMasterConfig, folder / "piece.yaml", ["policy.tokenizer.name=tiny:arithmetic"])
    assert [dataset.weight for dataset in config.data.train] == [3.0, 1.0] and len(piece["data"]["train"]) == 2
    setup = setup_data(config.data)
    process = PromptProcessor(setup.tasks, build_tiny_tokenizer(), config.data.max_input_seq_length)
    metadata = [process(setup.train[number])["extra_env_info"] for number in (0, len(setup.train) - 1)]
    assert ["ground_truth" in known for known in metadata if known] == [True, False], "each environment gets its own"
    named = ADDING.split("metrics, e.g. ")[1].split(" in training;")[0]
    assert {*TASK, "num_samples"} <= set(re.findall(r"`(\w+)`", named))
    assert "arithmetic/reward" in config.train_metrics


def test_the_dataset_processor_and_reward_of_the_guide_run(folder: Path):
    section = {"dataset_name": "my_data:capitals", "processor": "my_data:in_one_word", "env_name": "math"}
    setup = setup_data(data.DataConfig.model_validate({"train": section, "max_input_seq_length": 100}))
    datum = PromptProcessor(setup.tasks, build_tiny_tokenizer(), 100)(setup.train[1])
    assert "Capital of Japan? Answer in one word." in datum["message_log"][0]["content"]
    assert datum["extra_env_info"] == {"ground_truth": "Tokyo"}
    part = {"name": "polite", "reward": "my_rewards:polite", "kwargs": {"word": "thanks"}}
    environment = CompositeEnvironment({"reward_functions": [part], "num_workers": 1})
    assert environment.step([answered("Thanks!"), answered("please")], [{}, {}]).rewards.tolist() == [1.0, 0.0]


# -- what can be plugged in


CUSTOM = PAGES["docs/customization.md"]
INTERFACES: dict[str, dict[str, Sequence[Callable[..., Any]]]] = {
    "environment": {
        "step": [EnvironmentInterface.step],
        "global_post_process_and_metrics": [EnvironmentInterface.global_post_process_and_metrics],
    },
    "processor of prompts": {"process": [episode_processor]},
    "order of the rows": {"order": [PromptDataLoader.order]},
    "loss": {"__call__": [LossFunction.__call__]},
    "advantage estimator": {"estimate": [grpo, gdpo, reinforce_plus_plus]},
    "tracker": {
        "log": [Tracker.log],
        "log_hyperparams": [Tracker.log_hyperparams],
        "log_samples": [Tracker.log_samples],
        "close": [Tracker.close],
    },
}
"""Row of the page -> names of functions there, and functions with their arguments."""


@pytest.mark.parametrize("what", INTERFACES)
def test_the_page_of_what_can_be_plugged_in_gives_each_signature(what: str):
    [row] = [row for _, rows in tables(CUSTOM) for row in rows if row[0] == what]
    stated = {name: arguments.split(", ") for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", " ".join(row))}
    for name, functions in INTERFACES[what].items():
        for function in functions:
            parameters = list(inspect.signature(function, follow_wrapped=False).parameters)
            assert stated[name] in (parameters, parameters[1:]), "with or without self"


def test_every_plug_of_the_page_works(folder: Path):
    own = importlib.import_module("mine")
    environment = own.Vowels({"goal": 2})
    assert environment.step([answered("aeiou"), answered("b")], [{}, {}]).rewards.tolist() == [1.0, 0.0]
    part = {"name": "brief", "reward": "mine:brief", "kwargs": {"limit": 2}}
    composite = CompositeEnvironment({"reward_functions": [part], "num_workers": 1})
    assert composite.step([answered("one two"), answered("one two three")], [{}, {}]).rewards.tolist() == [1.0, 0.0]
    tool = import_tool("mine:reversed_text")
    assert tool.name == "reversed_text" and tool.run({"text": "abc"}, {}) == "cba"

    section = {
        "dataset_name": "mine:words",
        "env_name": "math",
        "processor": "mine:loudly",
        "kwargs": {"letters": "xyz"},
    }
    cfg = data.DataConfig.model_validate(
        {"train": section, "max_input_seq_length": 100, "custom_dataloader": "mine:Backwards"}
    )
    setup = setup_data(cfg)
    prompt = PromptProcessor(setup.tasks, build_tiny_tokenizer(), 100)(setup.train[0])
    assert "A WORD WITH X?" in prompt["message_log"][0]["content"] and prompt["extra_env_info"]["letter"] == "x"
    assert prompt_loader(cfg.custom_dataloader, setup.train, 1).order().tolist() == [2, 1, 0]

    loss = chosen_loss(None, ClippedPGLossConfig(type="mine:Squared"))
    assert loss is not None
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[0.0, 1.0]])
    inputs = LossInputs(input_ids=ids, token_mask=mask, sample_mask=torch.ones(1))
    assert loss(torch.tensor([[5.0, -2.0]]), inputs, torch.tensor(1.0), torch.tensor(1.0))[0] == 4.0
    model = build_on_meta(AutoConfig.for_model("llama", num_hidden_layers=1), torch.float32)
    assert set(user_plan(model, "mine:plan", "key").values()) == {"colwise", "rowwise"}
