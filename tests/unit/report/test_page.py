"""The report as a file, and as a browser shows it."""

import base64
import json
import re
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from nemo_rl.data.chat.images import small_jpeg
from nemo_rl.report.page import script_json, write_report
from tests.chromium import Browser, chromium
from tests.unit.report.runs import append, write_run

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><!--\u2028]]>"

PLOTS = "document.querySelectorAll('#main-curves .card > svg')"


@pytest.fixture(scope="module")
def chrome():
    with chromium() as found:
        yield found


@pytest.fixture
def browser(chrome: Browser):
    """A test leaves no error in its console."""
    chrome.errors.clear()
    yield chrome
    assert chrome.errors == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "exp_000")


def test_the_page_holds_every_metric_of_every_step(run):
    """A value that is not finite is a text, and a line in the making is left out."""
    append(run / "metrics.jsonl", **{"step": 13, "train/loss": "NaN"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "train/lo')
    page = write_report([run]).read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    (found,) = json.loads(data[1])["runs"]
    assert found["steps"] == list(range(14)) and found["num_steps"] == 12 and found["algorithm"] == "grpo"
    rewards, losses = found["metrics"]["train/reward"], found["metrics"]["train/loss"]
    assert rewards[0] is None and rewards[12] == pytest.approx(0.9502129) and losses[-1] == "nan"


def test_a_browser_draws_the_curves_and_zooms(run, browser: Browser):
    browser.open(write_report([run]), "#curves")
    browser.wait("document.querySelectorAll('#main-curves svg path.curve').length >= 5")
    box = browser.evaluate(f"(r => [r.left, r.top, r.width, r.height])({PLOTS}[0].getBoundingClientRect())")
    labels = f"[...{PLOTS}[2].querySelectorAll('text')].map(t => t.textContent).join(' ')"
    assert " 10" in browser.evaluate(labels)
    for event, right in (("Pressed", 60), ("Moved", box[2] * 0.3), ("Moved", box[2] * 0.4), ("Released", box[2] * 0.4)):
        browser.mouse(f"mouse{event}", box[0] + right, box[1] + box[3] / 2)
    browser.wait(f"!{labels}.includes(' 10')")  # all charts show the same steps
    browser.click("#unzoom")
    browser.wait(f"{labels}.includes(' 10')")


def test_json_in_a_script_ends_nothing_and_the_policy_of_the_page_stops_a_script_that_came_in(run, browser: Browser):
    text = script_json({"answer": EVIL})
    assert "<" not in text and ">" not in text and text.isascii() and json.loads(text)["answer"] == EVIL
    path = write_report([run])
    path.write_text(path.read_text().replace("</body>", "<script>document.title = 'taken'</script></body>"))
    browser.open(path)
    assert browser.evaluate("document.title") != "taken"
    assert any("Content Security Policy" in error for error in browser.errors)
    browser.errors.clear()


def write_samples(run: Path, num_steps: int, per_step: int, block_steps: int = 50, **more: Any) -> None:
    """Samples as a worker writes them, their number in a step as reward; of many blocks only the first and the last."""
    folder, index, blocks = run / "samples", [], defaultdict(list)
    text = {"ids": [1, 2, 3, 4], "texts": ["a", " b", EVIL, "\n"], "mask": "0011"}
    text |= {"generation_logprobs": [0, 0, -1, -0.5], "outputs": [0, 0, -3, -0.5]}
    for step, number in product(range(1, num_steps + 1), range(per_step)):
        first, group = step - (step - 1) % block_steps, f"{step}/0/p:{number}"
        about = {"step": step, "id": f"{group}/0", "group": group, "reward": number, "status": "completed"}
        about |= {"prompt": f"p:{number}", "length": 4, "error": 1 + number / 100}
        block = f"policy-0_{first:06d}.js"
        index.append(json.dumps({"block": block, **about, "advantage": -number}))
        if first == 1 or first + block_steps > num_steps:
            said = [{"role": "assistant", "content": f"<tool_call>{EVIL}</tool_call> {step}"}]
            sample = {**about, **text, "advantages": -number, "messages": said, **more}
            blocks[block].append(f"nemo_rl_sample({script_json(sample)});")
    folder.mkdir()
    for name, lines in {"index_policy-0.jsonl": index, **blocks}.items():
        (folder / name).write_text("\n".join(lines) + "\n")


def test_samples_are_sorted_filtered_paged_and_coloured(run, browser: Browser):
    write_samples(run, 12, 10, block_steps=6)
    index = run / "samples" / "index_policy-0.jsonl"
    of_run = index.read_text()
    index.write_text("".join(of_run.splitlines(keepends=True)[:60]))  # the first block
    browser.open(write_report([run]), "#curves")
    index.write_text(of_run)
    write_report([run])  # the run goes on while the first page is open
    browser.click("#tab-samples")
    browser.wait_for("#sample .tokens .t", 4)
    assert "page 1 of 3, 120 samples" in browser.texts("#pages")[0]
    browser.change("#sort", "reward")
    browser.wait("document.querySelector('.split tbody tr').children[2].textContent === '9'")
    browser.click("#direction")
    browser.wait("document.querySelector('.split tbody tr').children[2].textContent === '0'")
    browser.click("#next")
    browser.wait("document.getElementById('pages').textContent.startsWith('page 2')")
    # the third token: training is less likely by 2, in red; the fourth agrees; the first two carry no loss
    colours = browser.evaluate("[...document.querySelectorAll('#sample .t')].map(t => t.style.background)")
    assert "--bad" in colours[2] and colours[0] == colours[1] == colours[3] == ""
    browser.change("#colouring", "mask")
    browser.wait("document.querySelectorAll('#sample .t')[3].style.background !== ''")
    browser.change("input[placeholder='prompt or sample id']", "p:7", "input")
    browser.wait("document.getElementById('pages').textContent.includes('12 samples')")


def test_a_hundred_thousand_samples_are_sorted_at_once(run, browser: Browser):
    write_samples(run, 1000, 100)
    path = write_report([run])
    assert path.stat().st_size < 1e6, "samples are loaded on demand"
    browser.open(path, "#samples")
    browser.wait_for("#sample .t", 4)
    began = time.monotonic()
    browser.change("#sort", "reward")
    assert "100,000 samples" in browser.texts("#pages")[0]
    assert browser.texts(".split tbody tr:first-child > *")[2] == "99"
    assert time.monotonic() - began < 2.0  # 0.04 s by themselves


def test_text_and_pictures_of_a_run_are_shown_and_never_run(tmp_path, browser: Browser):
    run = write_run(tmp_path / "exp_000", model=EVIL)
    append(run / "metrics.jsonl", **{"step": 13, f"train/{EVIL}": 1.0})
    jpeg = base64.b64encode(small_jpeg(Image.new("RGB", (300, 150), "red")).tobytes()).decode()
    write_samples(run, 1, 1, pictures=[f"data:image/jpeg;base64,{jpeg}", f'data:," onerror="document.title=1{EVIL}'])
    append(run / "events.jsonl", time=1.0, step=1, kind="warning", text=EVIL)
    browser.open(write_report([run]), "#samples")
    browser.wait("document.images.length === 2 && [...document.images].every(image => image.complete)")
    assert browser.evaluate("[...document.images].map(image => image.naturalWidth)") == [192, 0]
    browser.wait_for("#sample .message", 1)
    assert browser.texts("#sample .t")[2] == EVIL
    assert browser.texts("#sample .call")[0] == f"<tool_call>{EVIL}</tool_call>"
    for tab in ("events", "config"):
        browser.click(f"#tab-{tab}")
        assert EVIL in browser.texts("#main")[0]
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.title") == f"{tmp_path.name}/exp_000"


TIMES = """
phases: generation 0 5, policy_training 5 9
generation-0: drain 0 9, prefill 0 2, decode 2 5, asleep 5 7, receive_bucket 7 9
policy-0: train 5 7
policy-1: train 5 9
rollout-0: collect 0 5, environment 'math' 4 5
"""


def write_times(run: Path) -> None:
    """Three steps of a second, in whose tenths TIMES are: generation, then training, in which rank 1 is slower."""
    for step in (1, 2, 3):
        lanes = {}
        for lane, spans in (line.split(": ") for line in TIMES.strip().splitlines()):
            parts = [span.rsplit(" ", 2) for span in spans.split(", ")]
            lanes[lane] = [[name, *(1000.0 + step + int(tenth) / 10 for tenth in tenths)] for name, *tenths in parts]
        append(run / "timeline.jsonl", step=step, phases=lanes.pop("phases"), workers=lanes)


def test_the_timeline_says_who_waited_for_whom(run, browser: Browser):
    write_times(run)
    told = {"timing/train/weight_sync": 2.0, "performance/predicted_s/weight_sync": 1.5}
    append(run / "metrics.jsonl", step=13, **told, **{"performance/ideal_s/weight_sync": 0.5})
    browser.open(write_report([run]), "#time")
    browser.wait_for(".lanes .lane", 6)
    lanes = browser.texts(".lanes .lane")
    assert lanes == ["controller", "policy-0", "policy-1", "generation-0", "rollout-0", "environment 'math'"]
    text = browser.texts("#main")[0]
    rows = browser.evaluate("[...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))")
    assert next(row for row in rows if row[0] == "phase")[3:6] == ["median", "predicted", "ideal"]
    assert next(row for row in rows if "weight_sync" in row[0])[4:6] == ["1.50 s", "500 ms"]
    assert browser.texts(".bars .cut") == [] and browser.evaluate("document.querySelector('p.note').hidden")
    shown = browser.texts(".lanes .inside")
    assert {"prefill", "decode", "asleep", "refit"} <= set(shown) and "drain" not in shown, shown
    assert next(row for row in rows if row[0] == "generation-0")[1] == "72 %", "asleep is idle"
    last = next(row for row in rows if row[0] == "policy_training" and row[2].startswith("policy"))
    assert last[2:] == ["policy-1", "200 ms"]
    idle = next(row for row in rows if row[0] == "policy-0")
    assert idle[3].startswith("generation 1.50 s, policy_training 600 ms"), text


def test_two_hundred_thousand_steps_are_shown_and_a_bar_beyond_the_axis_is_marked(tmp_path, browser: Browser):
    folder, num_steps = tmp_path / "exp_000", 200_000
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            seconds = 1e6 if step == num_steps // 2 else 0.5
            file.write(f'{{"step": {step}, "train/loss": 0.5, "timing/train/generation": {seconds}}}\n')
    path = write_report([folder])
    browser.open(path, "#time")
    browser.wait("document.querySelectorAll('.bars g').length > 100")
    assert browser.texts("tbody tr:first-child > *")[-2:] == ["277.8 h", "200,000"]
    assert browser.texts(".bars .cut") == ["▲"]
    assert browser.evaluate("document.querySelector('p.note').hidden") is False
    browser.click("#tab-curves")
    # All steps faintly and their means as a line; the last step's number is not cut off.
    browser.wait("document.querySelectorAll('#main-curves svg path.curve').length === 2")
    assert browser.evaluate("document.querySelectorAll('#main-curves svg path.faint').length") == 1
    right = "[...document.querySelectorAll('#main-curves svg text')].map(t => t.getBoundingClientRect().right)"
    assert browser.evaluate(
        f"Math.max(...{right}) <= document.querySelector('#main-curves svg').getBoundingClientRect().right"
    )


def test_two_runs_side_by_side(tmp_path, browser: Browser):
    runs = [write_run(tmp_path / "exp_000"), write_run(tmp_path / "exp_001", seed=7)]
    for run in runs:
        write_samples(run, 2, 2)
    append(runs[0] / "samples" / "index_policy-0.jsonl", step=0, id="0/0/p:0/0", block="", length=4, status="truncated")
    page = write_report(runs, tmp_path / "compare" / "two #1.html")
    write_report(runs[::-1], page.with_name("others.html"))
    browser.open(page, "#config")
    assert browser.texts("tbody tr:first-child > *")[:3] == ["grpo.seed", "42", "7"]
    browser.click("#tab-samples")
    browser.wait_for("#sample .t", 4)  # from a folder that is not the page's
    assert browser.texts("#pages")[0].endswith("5 samples")
    browser.change(".bar label:last-of-type select", "2")  # completed; in the other run a prompt has this number
    assert browser.texts("#pages")[0].endswith("4 samples")
    browser.change(".bar select", "1")  # a filter is of one run
    browser.wait("document.getElementById('pages')?.textContent.endsWith('4 samples')")
    browser.click("#tab-curves")
    browser.wait(f"{PLOTS}[1].querySelectorAll('path.curve').length === 2")


@pytest.mark.parametrize("metrics", [{"train/loss": 0.5, "validation/val_loss": 0.4}, {"train/loss": "Infinity"}, {}])
def test_a_run_of_any_algorithm_opens_on_every_tab(tmp_path, browser: Browser, metrics):
    """SFT, for example, has no groups and no rewards; and a run may have just begun."""
    folder = tmp_path / "exp_000"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "run.json").write_text(json.dumps({"host": "elsewhere", "started": time.time() + 600}))
    for step in (1, 2) if metrics else ():
        append(folder / "metrics.jsonl", step=step, **metrics)
    append(folder / "events.jsonl", time=1.0, step=1, kind="error", text="disk full")
    append(folder / "events.jsonl", time=1.0, step=1, kind="info", text="saved")
    path = write_report([folder])
    for tab in ("overview", "curves", "events"):
        browser.open(path, f"#{tab}")
        assert browser.evaluate(f"document.getElementById('tab-{tab}').getAttribute('aria-selected')") == "true"
    assert browser.texts("#main")[0].count("disk full") == 1
    assert browser.texts("#tab-events") == ["Events 1"], "as many as it lists, without messages"
    browser.open(path, "#overview")
    assert browser.texts("tbody tr:first-child > *")[5] == "", "no time before it started"


@pytest.mark.parametrize("width", [400, 1400])
def test_no_tab_is_wider_than_the_window_and_a_table_that_goes_on_fades_out(run, browser: Browser, width: int):
    write_samples(run, 2, 2)
    write_times(run)
    rewards = ([1.0, 1.0], "all right"), ([0.0, 0.0], "all wrong"), ([0.5, 0.5], "all equal"), ([0.0, 1.0], "")
    rest = {"prompt": "p", "task": "t", "lengths": [3, 4], "status": "cc", "advantages": []}
    groups = [{"id": str(number), "rewards": own, **rest} for number, (own, _) in enumerate(rewards)]
    append(run / "groups.jsonl", step=1, groups=groups)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"none": None, "on": True, "long": "x" * 300}))
    path = write_report([run])
    with browser.window(width):
        for tab in ("overview", "curves", "time", "samples", "groups", "config"):
            browser.open(path, f"#{tab}")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            browser.wait(
                "[...document.querySelectorAll('.scroll')].every(box => "
                "box.classList.contains('cut') === box.scrollWidth > box.clientWidth + 2)"
            )
        assert "null" in browser.texts("td.mono") and "true" in browser.texts("td.mono")
        browser.open(path, "#groups")
        browser.wait(f"document.querySelectorAll('.boxes').length === {len(rewards)}")
        assert sorted(browser.texts(".scroll:last-child td:nth-child(5)")) == sorted(text for _, text in rewards)
