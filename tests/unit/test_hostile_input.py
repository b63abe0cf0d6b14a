"""Whatever a file, a command line or a model's answer says, the reply is a message and never a traceback.

`HOSTILE_CASES=10000 pytest tests/unit/test_hostile_input.py` looks longer; a failure prints the input that causes it.
"""

import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.environments.math.verification import dapo_math_verify, exact_integer
from nemo_rl.utils.checkpoint.manifest import find_damage, seal

CONFIG = Path("examples/configs/grpo_math_cpu.yaml")
CASES = int(os.environ.get("HOSTILE_CASES", "20"))
hostile = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=CASES < 1000,  # the same cases in every default run
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["null", "~", "1e999", ".nan", "-.inf", "0x7f", "2020-01-01", "!!python/object:os.system", "${a", "&x"]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@cache
def keys() -> list[str]:
    """Dotted keys of the configuration, sections included."""
    found: list[str] = []

    def walk(node: dict[str, Any], path: str) -> None:
        for name, value in node.items():
            found.append(f"{path}{name}")
            if isinstance(value, dict):
                walk(value, f"{path}{name}.")

    walk(load_config(GRPOMasterConfig, CONFIG).model_dump(), "")
    return found


def refuses_or_loads(path: Path, overrides: list[str]) -> None:
    """ConfigError is a message; any other exception fails the test."""
    try:
        load_config(GRPOMasterConfig, path, overrides)
    except ConfigError as error:
        assert str(error).strip()


@hostile
@given(st.data())
def test_overrides_are_taken_or_refused(data: st.DataObject) -> None:
    sign = data.draw(st.sampled_from(["", "", "+", "++", "~"]))
    key = data.draw(st.sampled_from(keys()) | st.text(max_size=20))
    value = data.draw(SCALARS.map(str) | VALUES.map(str) | st.text(max_size=40))
    refuses_or_loads(CONFIG, [f"{sign}{key}={value}" if data.draw(st.booleans()) else f"{sign}{key}{value}"])


@hostile
@given(st.data())
def test_files_are_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Lines of a sound file are dropped, doubled, cut, or given other values and indents; bytes are damaged."""
    lines = CONFIG.read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        name = line.partition(":")[0]
        lines[at] = data.draw(
            st.sampled_from(
                ["", f"{line}\n{line}", line[: len(line) // 2], f" {line}", f"\t{line}", f"{name}: &a [*a]"]
            )
            | VALUES.map(partial("{}: {}".format, name))
            | st.text(max_size=40)
        )
    content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "config.yaml"
    path.write_bytes(bytes(content))
    refuses_or_loads(path, [])


BOMBS = st.one_of(
    st.text(max_size=200),
    st.tuples(
        st.sampled_from(["\\boxed{", "\\frac{", "{", "answer:", "\\left(", "^{", "$", "\x00", "\x1b[2J", "9", ",000"]),
        st.integers(1, 3000),
    ).map(lambda pair: pair[0] * pair[1]),
    st.lists(
        st.sampled_from(["Answer: ", "\\boxed{", "}", "1,024", "\\text{", "\\frac", " = ", "\n", "\u202e", "x"]),
        max_size=60,
    ).map("".join),
)


@hostile
@given(BOMBS, st.sampled_from(["42", "", "\\frac{1}{2}", "x^2"]))
def test_verdicts_take_no_time_and_raise_nothing(answer: str, truth: str) -> None:
    verifiers: tuple[Callable[[str, str], Any], ...] = (exact_integer, dapo_math_verify)
    for verify in verifiers:
        started = time.process_time()
        verify(answer, truth)
        assert time.process_time() - started < 2.0, verify


@hostile
@given(st.data())
def test_a_changed_byte_of_a_checkpoint_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """In its files and in its manifest; what the manifest does not mean, such as white space, may change."""
    folder = tmp_path_factory.mktemp("step")
    files = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.binary(min_size=1, max_size=64), min_size=1))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    seal(folder)
    assert find_damage(folder) is None
    victim = folder / data.draw(st.sampled_from([*sorted(files), "manifest.json"]))
    content = bytearray(victim.read_bytes())
    before = content.decode("utf-8", "replace").split()
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(bytes(content))
    is_white = victim.name == "manifest.json" and content.decode("utf-8", "replace").split() == before
    assert find_damage(folder) is not None or is_white, (victim.name, at)
