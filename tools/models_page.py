# ruff: noqa: E501
"""Write docs/models.md from what was tried of every family of models.

python tools/models_page.py                      # write the page from tests/unit/policy/families.json
python tools/models_page.py --try [FAMILY ...]   # try the cells first, those of the engine apart (minutes)

The engine's column comes from `pytest -m families tests/unit/generation/test_families_vllm.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"

INTRO = """\
# Models

What the families of models can do, by `model_type` of config.json. Every cell was tried on a tiny random model with every kind of layer of its
family, in float32 on CPUs: `yes` says that it worked, a number leads to the reason below. What training cannot do is refused before any worker starts.
`tools/models_page.py` writes this page, and `pytest -m families` tries every cell again.

Other causal language models of transformers train too, if they name their blocks ([Adding a model](adding-a-model.md)); models that see images have
[a guide of their own](guides/vision.md).

"""
MEANINGS = """
| column | what was tried |
|---|---|
| load | logprobs equal transformers' to 2e-5; exported weights have the names and the values of the files |
| SFT | the loss after an optimizer step is the same with padded rows and with packed ones |
| GRPO | steps of the clipped loss with reference logprobs on 2 FSDP ranks: logprobs, gradient norms and new weights equal one rank's, to 1e-5 |
| packing | the same with several sequences in a row; a sequence's states equal those that it has alone, whatever stands beside it |
| TP, CP, EP, PP | the same with 2 ranks of tensor, context, expert or pipeline parallelism |
| LoRA | the same with adapters on all linear layers that are wide enough, and every other weight frozen |
| Megatron | the same with Megatron Core on one rank |
| vLLM on CPU | after weight syncs into the real engine, logprobs of its samples equal the model's: to 1e-5, in bfloat16 as nearly as transformers' |

Gated delta nets (Qwen3-Next, Qwen3.5), Mamba-2 (Nemotron-H) and the attention of Llama 4 read a row from its first token. In a packed row each
sequence gets a row of its own inside these layers (`models/policy/token_mixers.py`), and tensor-parallel ranks compute them whole. GPT-OSS's experts are
read from MXFP4 and trained as ordinary numbers; the engine gets them as such. Other quantised checkpoints are refused.
On a CPU vLLM's latent attention (DeepSeek-V3) takes `kv_lora_rank` + `qk_rope_head_dim` of 576 only, and other requests of a step may change the last bit of a logprob.
"""


def page(table: Mapping[str, Mapping[str, str]]) -> str:
    """The page of `table`: family -> column -> "yes", or the reason why not."""
    columns = list(next(iter(table.values())))
    reasons: list[str] = []

    def cell(outcome: str) -> str:
        if outcome.startswith("yes"):
            return outcome
        if outcome not in reasons:
            reasons.append(outcome)
        return f"[{reasons.index(outcome) + 1}](#why-not)"

    lines = [f"| model_type | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family, cells in table.items():
        lines.append(f"| `{family}` | {' | '.join(cell(cells[column]) for column in columns)} |")
    notes = ["\n## Why not\n", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return INTRO + "\n".join(lines) + "\n" + MEANINGS + "\n".join(notes) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tried", nargs="*", metavar="FAMILY", help="try these families first (all)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.unit.policy import family_cells

    if arguments.tried is not None:
        for family in arguments.tried or family_cells.FAMILIES:
            print(family)
            with family_cells.alone(family) as base:
                family_cells.record(family_cells.outcomes(base, family))
    PAGE.write_text(page(family_cells.recorded()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
