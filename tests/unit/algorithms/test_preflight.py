"""What environments need from outside is looked for before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.setup.preflight import check_environments
from tests.unit.config.run_configs import build

JUDGE = "type: llm_judge, base_url: 'http://localhost:1/v1', model: m"


def check(section: str, used: str = "it") -> None:
    check_environments(build(f"+env.it={{{section}}}").env, [used])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("type: retrieval, dataset_name: nope.jsonl", r"env\.it\.dataset_name: the corpus 'nope.jsonl' does not exist"),
        ("type: retrieval, dataset_name: 'nomod:f'", r"env\.it\.dataset_name: .*no module 'nomod'"),
        ("type: retrieval, dataset_name: 'json:f'", r"env\.it\.dataset_name: .*'json' has no 'f'"),
        ("type: python_tools, tools: ['nomod:x']", r"env\.it\.tools: .*no module 'nomod'"),
        (f"{JUDGE}, api_key_env: NOT_SET", r"env\.it\.api_key_env: .*NOT_SET is not set; export it"),
        ("type: remote, base_url: 'http://localhost:1', token_env: NOT_SET", r"env\.it\.token_env: .*NOT_SET"),
        (
            "type: composite, reward_functions: [{name: a, reward: format, kwargs: {pattern: x}}, "
            "{name: b, reward: 'nomod:f'}]",
            r"env\.it\.reward_functions\.1: .*no module 'nomod'",
        ),
    ],
)
def test_a_missing_input_is_named_with_its_key(
    section: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check(section)
    check(section, used="math")  # no dataset names it


def test_what_is_there_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "red fox"}\n')
    monkeypatch.setenv("JUDGE_KEY", "secret")
    check(f"type: retrieval, dataset_name: {tmp_path / 'corpus.jsonl'}")
    check("type: retrieval, dataset_name: 'nemo_rl.data.datasets.lookup:corpus'")
    check("type: python_tools, tools: [python, 'nemo_rl.environments.code.tools:calculator']")
    check(f"{JUDGE}, api_key_env: JUDGE_KEY")
