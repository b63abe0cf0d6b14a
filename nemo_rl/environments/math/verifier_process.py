"""The process that runs one verification at a time.

Started as `python -m nemo_rl.environments.math.verifier_process <limit in s>`.

JSON lines: [verifier, response, ground truth] in, [correct, extracted answer] out; the first line out is "ready".
It ends with its standard input, and by itself when a verification outlives its limit and nobody has killed it.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from nemo_rl.environments.math.verification import VERIFIERS, hf_math_verify

MEMORY_LIMIT_BYTES = 4 << 30
# The parser stumbles over text that is not mathematics, or a number is too large to be written down: a wrong answer.
WRONG = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
GRACE_S = 2.0  # the pool kills first; this is for the case that the pool is gone


def main() -> None:
    limit_s = float(sys.argv[1])
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may get between the replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    hf_math_verify("\\boxed{1}", "1")  # imports
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        name, response, ground_truth = json.loads(line)
        verifier = VERIFIERS[name]  # outside of the try: a name that is none says nothing of the response
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # SIGALRM at its default ends the process
        try:
            verdict = verifier(response, ground_truth)
        except WRONG as error:
            logging.info("%s: %r", name, error)
            verdict = (False, None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
