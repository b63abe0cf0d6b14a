"""CPU seconds of verifying answers, against another checkout.

    python benchmarks/verification.py OTHER_CHECKOUT [--answers 256] [--rounds 3]

Each round starts one verifier process of each checkout, in turn, with the packages of this Python, and gives it the
same answers: boxes, sentences, percentages, mixed numbers, final lines and letters, half of them behind a page of
reasoning. The last line has the ratio of the smallest CPU seconds, of this checkout over the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
FORMS = (
    ("hf_math_verify", r"so \boxed{{{a}}}", "{a}"),
    ("hf_math_verify", r"\boxed{{\frac{{{a}}}{{{b}}}}}", "{a}/{b}"),
    ("hf_math_verify", "The answer is {a}.{b}.", "{a}.{b}"),
    ("hf_math_verify", r"\boxed{{{a}\%}}", "{a}%"),
    ("hf_math_verify", "The answer is {a} 1/{b}", r"{a}\frac{{1}}{{{b}}}"),
    ("hf_math_verify", "$x^2 + {a}x + {b}$", "x(x+{a}) + {b}"),
    ("dapo_math_verify", "Answer: ${a}$", "{a}"),
    ("english_multichoice", "Answer: ({letter})", "{letter}"),
    ("multilingual_multichoice", "La respuesta: {letter}", "{letter}"),
)


def jobs(num_answers: int) -> list[str]:
    """Lines for a verifier process: every form in turn, with numbers of its own."""
    rng = random.Random(0)
    lines = []
    for i in range(num_answers):
        verifier, response, truth = FORMS[i % len(FORMS)]
        values = {"a": rng.randint(2, 999), "b": rng.randint(2, 99), "letter": rng.choice("ABCD")}
        steps = [f"Step {n}: {rng.randint(1, 99)} + {rng.randint(1, 99)} = $y_{{{n}}}$, of 1,000.\n" for n in range(40)]
        reasoning = "".join(steps) if rng.random() < 0.5 else ""
        lines.append(json.dumps([verifier, reasoning + response.format(**values), truth.format(**values)]))
    return lines


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, in steps of a clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def verify(checkout: Path, lines: list[str]) -> tuple[float, int]:
    """CPU seconds of a new process for all lines, without its start, and the number of right answers."""
    command = [sys.executable, "-m", "nemo_rl.environments.math.verification", "60"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == '"ready"\n', f"the verifier process of {checkout} did not start"
        before, num_right = cpu_s(process.pid), 0
        for line in lines:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            num_right += json.loads(process.stdout.readline())[0]
        used = cpu_s(process.pid) - before
        process.stdin.close()
    return used, num_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lines = jobs(args.answers)
    least: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, checkout in (("other", args.other.resolve()), ("this", HERE)):
            used, num_right = verify(checkout, lines)
            print(f"{name}: {used:.2f} CPU seconds, {num_right} of {len(lines)} right", flush=True)
            least[name] = min(used, least.get(name, used))
    print(f"{least['this'] / least['other']:.3f} of the CPU seconds")


if __name__ == "__main__":
    main()
