"""Whatever a file, a command line or a model's answer says, the reply is a message and never a traceback.

`HOSTILE_CASES=10000 pytest tests/unit/test_hostile_input.py` looks longer; a failure prints the input that causes it.
"""

import os
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.environments.math.verification import VERIFIERS, Verification, VerifierPool
from nemo_rl.utils.checkpoint.manifest import find_damage, seal
from tests.tables import named
from tests.unit.config.run_configs import MASTERS

CONFIGS = Path("examples/configs")
FILES = ("grpo_agent_cpu", "grpo_math_megatron_cpu", "ppo_math_cpu", "sft_cpu", "dpo_cpu")
MODELS = {f"{name}.yaml": MASTERS[name.partition("_")[0]] for name in FILES}
CASES = int(os.environ.get("HOSTILE_CASES", "20"))
pytestmark = pytest.mark.timeout(300 + CASES // 5)
hostile = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=CASES < 1000,  # the same cases in every default run
)

WORDS = ["null", "~", "1e999", ".nan", "-.inf", "0x7f", "2020-01-01", "!!python/object:os.system", "${a", "&x"]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(WORDS))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@cache
def keys(name: str) -> list[str]:
    """Dotted keys of a configuration, sections included."""
    found: list[str] = []

    def walk(node: dict[str, Any], path: str) -> None:
        for name, value in node.items():
            found.append(f"{path}{name}")
            if isinstance(value, dict):
                walk(value, f"{path}{name}.")

    walk(load_config(MODELS[name], CONFIGS / name).model_dump(), "")
    return found


def with_other_bytes(draw: st.DrawFn, content: bytes, most: int) -> bytes:
    """At no more than so many places."""
    found = bytearray(content)
    for _ in range(draw(st.integers(0, most)) if found else 0):
        found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
    return bytes(found)


def refuses_or_loads(name: str, path: Path, overrides: list[str]) -> None:
    """ConfigError is a message; any other exception fails the test."""
    try:
        load_config(MODELS[name], path, overrides)
    except ConfigError as error:
        assert str(error).strip()


@hostile
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_overrides_are_taken_or_refused(name: str, data: st.DataObject) -> None:
    sign = data.draw(st.sampled_from(["", "", "+", "++", "~"]))
    key = data.draw(st.sampled_from(keys(name)) | st.text(max_size=20))
    value = data.draw(SCALARS.map(str) | VALUES.map(str) | st.text(max_size=40))
    equals = data.draw(st.sampled_from(["=", ""]))
    refuses_or_loads(name, CONFIGS / name, [f"{sign}{key}{equals}{value}"])


@pytest.mark.parametrize("key", ["data", "data.train", "data.default", "+data.dataset_name", "env", "checkpointing"])
@pytest.mark.parametrize("value", ["1", "[a]", "[[1]]", "{a: 1}"])
def test_sections_of_another_form_are_taken_or_refused(key: str, value: str) -> None:
    refuses_or_loads("dpo_cpu.yaml", CONFIGS / "dpo_cpu.yaml", [f"{key}={value}"])


@named(
    "line",
    {
        "a date": "a: !!timestamp 2020-01-01",
        "bytes": "a: !!binary aa==",
        "no integer": "a: !!int b",
        "a long integer": f"a: {'9' * 5000}",
        "a mapping as key": "?",
        "null as key": "null: 1",
        "a number as key": "1.5: 2",
    },
)
def test_what_only_yaml_can_hold_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"sft:\n  seed: 1\n{line}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:3: .*(must be|is no int|not valid YAML: could not determine)"):
        load_config(MODELS["sft_cpu.yaml"], tmp_path / "a.yaml")


@hostile
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_files_are_loaded_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Lines of a sound file are dropped, doubled, cut, or given other values and indents; bytes are damaged."""
    lines = (CONFIGS / name).read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        key = line.partition(":")[0]
        lines[at] = data.draw(
            st.sampled_from(["", f"{line}\n{line}", line[: len(line) // 2], f" {line}", f"\t{line}", f"{key}: &a [*a]"])
            | VALUES.map(partial("{}: {}".format, key))
            | st.text(max_size=40)
        )
    path = tmp_path / "config.yaml"
    path.write_bytes(with_other_bytes(data.draw, "\n".join(lines).encode("utf-8", "surrogatepass"), most=2))
    for parent in CONFIGS.glob("*.yaml"):  # which `defaults:` may name
        if not (tmp_path / parent.name).exists():
            (tmp_path / parent.name).symlink_to(parent.resolve())
    refuses_or_loads(name, path, [])


PIECES = [
    *("\\boxed{", "\\frac{", "\\sqrt{", "{", "}", "(", "answer:", "Answer is ", "\\left(", "^{", "$", "\\[", "9"),
    *("Answer: ", "1,024", "\\text{", "\\frac12", "x = ", " = ", "\n", " ", "\u202e", "\x00", "\x1b[2J", "\\sum"),
    *(",000", "9^{9^{9}}"),
]
BOMBS = st.one_of(
    st.text(max_size=200),
    st.tuples(st.sampled_from(PIECES), st.integers(1, 3000)).map(lambda pair: pair[0] * pair[1]),
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
)
TIME_LIMIT_S = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(2, timeout_s=TIME_LIMIT_S)
    yield pool
    pool.close()


@hostile
@given(BOMBS, st.sampled_from(["42", "", "\\frac{1}{2}", "x^2", "B"]))
def test_every_answer_gets_a_verdict_in_time(pool: VerifierPool, answer: str, truth: str) -> None:
    """And the next one is judged as ever."""
    jobs = [Verification(verifier=name, response=answer, ground_truth=truth) for name in VERIFIERS]
    started = time.monotonic()
    results = pool.run(jobs)
    assert time.monotonic() - started < 4 * TIME_LIMIT_S + 60  # for processes that start again
    assert all(result.failure is None for job, result in zip(jobs, results, strict=True) if "hf" not in job.verifier)
    sound = Verification(verifier="hf_math_verify", response="so \\boxed{\\frac{1}{2}}", ground_truth="0.5")
    assert pool.run([sound])[0].correct


def test_a_megabyte_is_judged_in_seconds_or_given_up(pool: VerifierPool) -> None:
    """The parser of mathematics may be given up; rules for letters and numbers are not."""
    formulas, words = ("\\boxed{", "\\left(", "9"), ("Answer" + 60 * " ", "answer is", "\u7b54")
    jobs = [
        Verification(verifier=name, response=f"Answer: A {piece * ((1 << 20) // len(piece))}", ground_truth="A")
        for piece in (*formulas, *words)
        for name in VERIFIERS
        if "hf" not in name or piece in formulas
    ]
    for job, result in zip(jobs, pool.run(jobs), strict=True):
        allowed = (None, "timeout", "died") if "hf" in job.verifier else (None,)
        assert result.failure in allowed, (job.verifier, job.response[:100], result)


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
