"""The calculator computes as Python does, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.environments.code.tools import calculate

expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})"
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(expressions)
def test_it_agrees_with_python(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "().__class__",
        "[x for x in (1,)]",
        "9**9**9",
        "2**-99999",
        "'a' * 9",
        "True",
        "(-8)**0.5",
        "1/0",
        "sqrt(-1)",
        "exp(9999)",
        "round(2.5, ndigits=1)",
        "1 +",
        "",
        "(" * 300 + "1" + ")" * 300,
        "1+" * 600 + "1",
        "-" * 200 + "1",
        "x",
    ],
)
def test_everything_else_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)
