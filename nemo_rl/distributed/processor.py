"""The abilities of this machine's processor."""

from collections.abc import Collection
from pathlib import Path

# Instructions that multiply matrices of bfloat16: of x86, and of Arm.
BFLOAT16_FLAGS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm's BF16"}


def processor_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The flags (x86) or features (Arm) that Linux names, of the first core. Empty if it names none."""
    for line in file.read_text(errors="replace").splitlines():
        name, _, flags = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(flags.split())
    return frozenset()


def lacks_bfloat16(flags: Collection[str]) -> bool:
    """Whether products of bfloat16 are computed by other instructions, as far as the flags are known."""
    return bool(flags) and BFLOAT16_FLAGS.keys().isdisjoint(flags)
