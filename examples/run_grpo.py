"""The same command as run_grpo_math.py, under its name in newer NeMo RL."""

from __future__ import annotations

import sys

from run_grpo_math import main

if __name__ == "__main__":
    sys.exit(main())
