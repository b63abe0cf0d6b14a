"""The same command as run_grpo_math.py, under its name in newer NeMo RL."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("run_grpo_math.py")), run_name="__main__")
