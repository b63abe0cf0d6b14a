"""The report as a file, and as a browser shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.report.page import script_json, write_report
from tests.chromium import Browser, chromium
from tests.unit.report.runs import append, write_run

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><!--\u2028]]>"

PLOTS = "document.querySelectorAll('#main-curves .card > svg')"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def data_of(path: Path) -> dict[str, Any]:
    """What the page holds of the runs."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_metric_of_every_step(tmp_path):
    run = write_run(tmp_path / "exp_000")
    (found,) = data_of(write_report([run]))["runs"]
    assert found["steps"] == list(range(13))
    assert found["metrics"]["train/reward"][0] is None
    assert found["metrics"]["train/reward"][12] == pytest.approx(0.9502129)
    assert found["num_steps"] == 12 and found["algorithm"] == "grpo"


def test_a_value_that_is_not_finite_is_a_text_and_a_line_in_the_making_is_left_out(tmp_path):
    run = write_run(tmp_path / "exp_000", 2)
    append(run / "metrics.jsonl", **{"step": 3, "train/loss": "NaN"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')
    (found,) = data_of(write_report([run]))["runs"]
    assert found["steps"] == [0, 1, 2, 3] and found["metrics"]["train/loss"][-1] == "nan"


def test_a_step_that_ran_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "exp_000", 3)
    append(run / "metrics.jsonl", **{"step": 2, "train/loss": 7.0})
    (found,) = data_of(write_report([run]))["runs"]
    assert found["steps"] == [0, 1, 2, 3] and found["metrics"]["train/loss"][2] == 7.0


def test_runs_of_equal_names_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name / "logs" / "exp_000") for name in ("a", "b")]
    found = data_of(write_report(runs, tmp_path / "both" / "report.html"))["runs"]
    assert [run["name"] for run in found] == ["a/logs/exp_000", "b/logs/exp_000"]


def test_json_in_a_script_ends_nothing():
    text = script_json({"answer": EVIL})
    assert "<" not in text and ">" not in text and text.isascii()
    assert json.loads(text)["answer"] == EVIL


def test_a_browser_draws_the_curves_and_zooms(tmp_path, browser: Browser):
    browser.open(write_report([write_run(tmp_path / "exp_000")]))
    browser.wait("document.querySelectorAll('#main-curves svg path.curve').length >= 5")
    box = browser.evaluate(f"(r => [r.left, r.top, r.width, r.height])({PLOTS}[0].getBoundingClientRect())")
    labels = f"[...{PLOTS}[2].querySelectorAll('text')].map(t => t.textContent).join(' ')"
    assert " 10" in browser.evaluate(labels)
    middle = box[1] + box[3] / 2
    browser.mouse("mousePressed", box[0] + 60, middle)
    browser.mouse("mouseMoved", box[0] + box[2] * 0.3, middle)
    browser.mouse("mouseMoved", box[0] + box[2] * 0.4, middle)
    browser.mouse("mouseReleased", box[0] + box[2] * 0.4, middle)
    browser.wait(f"!{labels}.includes(' 10')")  # all charts show the same steps
    browser.evaluate("document.getElementById('unzoom').click()")
    browser.wait(f"{labels}.includes(' 10')")
    assert browser.errors == []


def test_text_of_a_run_is_shown_and_never_run(tmp_path, browser: Browser):
    run = write_run(tmp_path / "exp_000", model=EVIL)
    append(run / "metrics.jsonl", **{"step": 13, f"train/{EVIL}": 1.0})
    browser.open(write_report([run]), "#config")
    assert EVIL in browser.evaluate("document.getElementById('main').textContent")
    assert browser.evaluate("document.title") == f"{tmp_path.name}/exp_000"
    assert browser.evaluate("document.images.length") == 0
    assert browser.errors == []


def test_the_policy_of_the_page_stops_a_script_that_came_in(tmp_path, browser: Browser):
    path = write_report([write_run(tmp_path / "exp_000")])
    path.write_text(path.read_text().replace("</body>", "<script>document.title = 'taken'</script></body>"))
    browser.open(path)
    assert browser.evaluate("document.title") != "taken"
    assert any("Content Security Policy" in error for error in browser.errors)
    browser.errors.clear()
