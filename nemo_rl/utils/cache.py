"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$NEMO_RL_CACHE`, else `~/.cache/nemo_rl`."""
    return Path(os.environ.get("NEMO_RL_CACHE") or "~/.cache/nemo_rl").expanduser()
