"""SIGTERM and Ctrl-C: at once or at the end of a step, within the time of grace, and twice."""

import signal
import subprocess
import sys
import time

import pytest

from nemo_rl.algorithms.interruption import Interruption

BOTH = pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
TWICE = """
import signal
from nemo_rl.algorithms.interruption import Interruption
interruption = Interruption(60.0)
with interruption.listening(), interruption.steps():
    signal.raise_signal(signal.SIGINT)
    print(interruption.name, flush=True)
    signal.raise_signal(signal.SIGTERM)
"""


@BOTH
def test_a_signal_ends_a_run_at_once_unless_the_loop_looks_at_it(number, status):
    before = signal.getsignal(number)
    interruption = Interruption(60.0)
    with pytest.raises(KeyboardInterrupt), interruption.listening():
        signal.raise_signal(number)
    assert (interruption.status, interruption.name) == (status, number.name) and signal.getsignal(number) == before

    interruption = Interruption(60.0)
    with interruption.listening(), interruption.steps():
        assert interruption.left_s() > 1e9
        signal.raise_signal(number)
        assert interruption.signal == number and 50 < interruption.left_s(keep_s=2.0) < 58


def test_the_loop_has_the_time_of_grace_less_the_last_words():
    interruption, began = Interruption(0.4), time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruption.listening(), interruption.steps():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
    assert 0.3 <= time.monotonic() - began < 30 and interruption.status == 143


def test_a_second_signal_ends_the_process():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "SIGINT\n")


def test_an_end_that_waits_for_what_is_gone_is_cut_off():
    program = TWICE.partition("    print")[0] + "with interruption.exit_after(0.1): import time; time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 130
