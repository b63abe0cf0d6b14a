"""`tools/nemo_rl_coverage.py`: bounds on how many files load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.nemo_rl_coverage import main

TABLES = """\
| tag | files that load | of | goal |
|---|---|---|---|
| v0.6 | 45 | 180 | 150 |
| v0.4 | 5 | 83 | 65 |

## v0.6.0

| files | key | our answer |
|---|---|---|
| 70 | `policy.megatron_cfg.peft.lora_dtype` | not supported yet: policy.megatron_cfg.peft.lora_dtype=None |
| 4 | `grpo.val_period` | must be greater than or equal to 0 (got -1) |
| 3 | `policy.generation.backend` | not supported yet: policy.generation.backend=sglang |
| 2 | `policy.draft.enabled` | not supported yet: policy.draft.enabled=true |
| 2 | `policy.generation.vllm_kwargs.speculative_config.method` | not supported yet: eagle3; set ngram or draft_model |
| 1 | `policy.generation.vllm_cfg.enable_expert_parallel` | unknown key; policy.generation.vllm_cfg has precision |
"""


def test_bounds_and_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tables.md").write_text(TABLES)
    main(str(tmp_path / "tables.md"))
    first, *reasons, last = capsys.readouterr().out.splitlines()
    assert first == "v0.6: 172 to 177 of 180 load, 174 by features (goal 150)"
    assert [reason.split(":")[0].strip() for reason in reasons] == [
        "3 engines other than vLLM",
        "2 draft models that train with the policy",
        "1 experts split over the devices of an engine",
    ]
    assert last == "v0.4: the file has no table of its keys"
