"""Mistakes of a user of SFT, DPO and reward models, and their messages before anything starts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.setup.launch import USER_ERRORS, launch
from nemo_rl.algorithms.setup.supervised import SupervisedInputs, prepare
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from tests.tables import cases, pattern
from tests.unit.config.run_configs import CONFIGS, MASTERS

pytestmark = pytest.mark.usefixtures("alone")

FOUR = ("policy.train_global_batch_size=4", "policy.train_micro_batch_size=4")

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
# Templates that know the roles user and assistant: one refuses others, one leaves them out.
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
DEAF = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{{ eos_token }}{% endfor %}"


def config(kind: str, *overrides: str) -> Any:
    return load_config(MASTERS[kind], CONFIGS / f"{kind}_cpu.yaml", list(overrides))


def prepared(kind: str, *overrides: str) -> SupervisedInputs:
    """Everything up to the start of Ray, in this process."""
    return prepare(config(kind, *overrides))


def turns(*roles: str, content: str = "2") -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role in roles]}


TEACHER = turns("user", "teacher", "assistant")


def rows(folder: Path, *content: object) -> str:
    """The override that trains on these rows, of a file rows.jsonl."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in content))
    return "data.train.dataset_name=rows.jsonl"


# -- rows


TEMPLATE = '+policy.tokenizer.chat_template="{}"'.format
BAD_ROWS: list[tuple[str, dict[str, object], tuple[str, ...], str]] = [
    ("sft", turns("assistant", "user"), (), "data.train: not one of the 4 rows ... 4 ends_with_user): row rows:0, col"),
    ("sft", turns("user", "assistant"), ("+sft.roles_to_train_on=[helper]",), "no_loss_tokens) ... ['helper']"),
    ("sft", TEACHER, (TEMPLATE(STRICT),), "row rows:0:  ... no role teacher"),
    ("sft", TEACHER, (TEMPLATE(DEAF),), "row rows:0:  ... 'teacher'"),
    ("sft", {"question": "1"}, (), "dataset 'rows' has no column 'input' (input_key); its columns are: q"),
    ("rm", {**PAIR, "rejected": "2"}, (), "(4 identical_answers): row rows:0, column 'rejected': the same answer as"),
    ("rm", {**PAIR, "rejected": "3" * 60}, (), "(4 too_long): row rows:0, column 'rejected': ... tokens, more than"),
    ("rm", {"prompt": "1", "chosen": "2"}, (), "has no column 'rejected' (rejected_key); its columns are: pr"),
]


@pytest.mark.parametrize(("kind", "row", "overrides", "told"), BAD_ROWS)
def test_conversations_and_pairs(tmp_path, kind, row, overrides, told):
    with pytest.raises(ValueError, match=pattern(told)):
        prepared(kind, *FOUR, rows(tmp_path, *[row] * 4), *overrides)


def test_some_bad_rows_are_a_counted_warning(tmp_path, caplog):
    bad = [{**PAIR, "rejected": "2"}, {**PAIR, "rejected": "2"}, {**PAIR, "chosen": ""}]
    with caplog.at_level(logging.WARNING):
        prepared("dpo", *FOUR, rows(tmp_path, *[PAIR] * 5, *bad))
    (warning,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "data.train: 3 of the 8 rows tried are left out of training (2 identical_answers, 1 empty_answer)" in warning
    assert "row rows:5, column 'rejected'" in warning and "row rows:7, column 'chosen'" in warning


def test_a_validation_set_is_tried_too(tmp_path):
    sets = "[{dataset_name: arithmetic, split: validation}, {name: mine, dataset_name: rows.jsonl}]"
    rows(tmp_path, *[turns("user")] * 3)
    with pytest.raises(ValueError, match=r"validation set 'mine': not one of the 3 rows tried .*\(3 ends_with_user\)"):
        prepared("sft", f"data.validation={sets}")


# -- the configuration


REFUSED = """
dpo & data.train.dataset_name=helpsteer3 -> did you mean HelpSteer3
dpo & data.train.dataset_name=arithmetic -> row arithmetic:0 has no column 'chosen', which processor 'pref
sft & data.train.dataset_name=arithmetic_preference -> holds preferences: it is for the section data of DPO
sft & +data.default.processor=sft_procesor -> did you mean sft_processor
dpo & +data.default.processor=sft_processor -> has no column 'messages', which processor 'sft_processor'
dpo & +data.train.streaming=true -> dataset 'arithmetic_preference' cannot be streamed: it is generated
sft & policy.train_global_batch_size=20000 -> set policy.train_global_batch_size (now 20000) to at most
sft & +policy.reward_model_cfg={enabled: true} -> policy.reward_model_cfg.enabled: is for reward models
rm & policy.reward_model_cfg.enabled=false -> policy.reward_model_cfg: a reward model is trained with
rm & policy.reward_model_cfg.reward_model_type=regression -> reward_model_type: bradley_terry}
sft & data.validation=null -> off with sft.val_period=0 and sft.val_at_start=false
sft & +data.max_input_seq_length=96 -> 96 is more than policy.max_total_sequence_length=48; use at most
sft & cluster.cpu_workers_per_node=2 & policy.train_global_batch_size=33
    -> 33 cannot be shared by 2 training ranks; make it a multiple of 2
dpo & policy.sequence_packing.train_mb_tokens=64
    -> 64 is too little ... pairs of the longest sequences would fit into no micro-batch; use at least 96
sft & policy.sequence_packing.train_mb_tokens=32 -> the longest sequences would fit into no micro-batch
dpo & dpo.precompute_reference_logprobs=true & +data.train.streaming=true
    -> needs all rows before the first step; set it to fal
sft & sft.max_steps=3 -> unknown key; the nearest valid key is sft.max_num_steps
sft & checkpointing.metric_name=val:val_los -> produces val:val_los; did you mean val:val_loss?
sft & checkpointing.metric_name=train:num_too_long -> no run with this configuration produces train:num_to
dpo & checkpointing.metric_name=val:accuracy -> there are: val_loss, validation-default_accuracy,
rm & checkpointing.metric_name=val:validation-default_preference_loss -> no run with this configuration
sft & +sft.early_stopping={metric_name: 'val:val_los'} -> did you mean val:val_loss?
sft & +sft.early_stopping={metric_name: val_loss} -> must be "val:<metric>" or null, e.g. "val:val_loss"
dpo & +dpo.early_stopping={metric_name: 'val:val_loss', patience: null} -> so nothing would stop the run
sft & sft.val_period=0 & checkpointing.metric_name=null & +sft.early_stopping={metric_name: 'val:val_loss'}
    -> val:val_loss needs validation; set sft.val_period above 0, or metric_name=null
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_names_and_combinations(given, told):
    """A case begins with the algorithm; the overrides follow."""
    kind, *overrides = given
    with pytest.raises((*USER_ERRORS, ConfigError), match=pattern(told)):
        prepared(kind, *overrides)


def test_the_set_that_is_split_off_has_metrics_beside_named_ones():
    """`split_validation_size` makes the set `default`, whatever other sets there are."""
    more = "[{name: more, dataset_name: arithmetic, split: validation}]"
    sets = ("+data.train.split_validation_size=0.1", f"data.validation={more}")
    for name in ("default", "more"):
        config("sft", *sets, f"checkpointing.metric_name=val:validation-{name}_loss")


# -- the command


def test_the_run_ends_with_status_2_and_one_message(tmp_path, capsys):
    bad = config("dpo", *FOUR, rows(tmp_path, *[{**PAIR, "rejected": "2"}] * 4))

    def build(*_: object) -> None:
        raise AssertionError("nothing may start")

    status = launch(bad, prepare=prepare, build=build)  # type: ignore[arg-type,return-value]
    text = "".join(capsys.readouterr())
    assert status == 2
    assert "ERROR data.train: not one of the 4 rows tried" in text.replace("\n", " ") and "Traceback" not in text
    assert not (tmp_path / "logs").exists() or not list((tmp_path / "logs").iterdir())
