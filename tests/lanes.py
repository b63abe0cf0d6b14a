"""Tests in lanes: processes that are forked when everything is collected.

Imports and the list of tests, which take half a minute of a core, are thus made once. A lane is handed one unit after
another (a whole run, a file of tests, or everything that shares a Ray cluster) and sends its reports back. Fixtures of
the session live as long as their lane, all others as long as the unit. A lane that ends in a test fails that test, and
another one goes on with the rest of the unit.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest

END_S = 60.0  # in which a lane tears its fixtures down
FORK = multiprocessing.get_context("fork")


class Sender:
    """In a lane: what the terminal, the cache and others of the first process are to hear."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config = config
        self.connection = connection
        self.is_registered = False  # until then it is told the warnings of before

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if not self.is_registered:
            return
        try:
            pickle.dumps(warning_message)
        except (pickle.PicklingError, TypeError, AttributeError):
            told = UserWarning(f"{warning_message.category.__name__}: {warning_message.message}")
            place = warning_message.filename, warning_message.lineno
            warning_message = warnings.WarningMessage(told, UserWarning, *place)
        self.connection.send(("warning", warning_message, when, nodeid, location))


def lane_main(session: pytest.Session, connection: Connection, folder: Path) -> None:
    """Run the items whose numbers arrive, until nothing does."""
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    sender = Sender(config, connection)
    config.pluginmanager.register(sender, "lane")
    sender.is_registered = True
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # it writes to the files of the first process
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir()
    factory: Any = config._tmp_path_factory
    factory._basetemp = folder
    state: Any = session._setupstate
    try:
        while numbers := connection.recv():
            for position, number in enumerate(numbers):
                following = session.items[numbers[position + 1]] if position + 1 < len(numbers) else session
                config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=following)
                connection.send(("done", number))
    except (KeyboardInterrupt, EOFError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    state.teardown_exact(None)


class Lane:
    """A process, the numbers of the items that it was given and has not done, and the last that it has."""

    def __init__(self, session: pytest.Session, folder: Path, before: Sequence[Lane]) -> None:
        self.connection, theirs = FORK.Pipe()
        self.left: list[int] = []
        self.last = 0

        def main() -> None:
            status = 1
            try:
                for lane in (*before, self):
                    lane.connection.close()
                lane_main(session, theirs, folder)
                status = 0
            except BaseException:  # of a fixture: the process ends in any case
                traceback.print_exc()
            os._exit(status)  # threads that a test left behind hold nobody up

        self.process = FORK.Process(target=main)
        self.process.start()
        theirs.close()

    def give(self, numbers: Sequence[int]) -> None:
        self.left = list(numbers)
        with suppress(BrokenPipeError):  # it has just ended, which `Lanes` hears next
            self.connection.send(self.left)


class Lanes:
    """Hands units, the numbers of items of a session, to `num_lanes`. All but the last begin with `runs`."""

    def __init__(
        self, session: pytest.Session, runs: Sequence[list[int]], others: Sequence[list[int]], num_lanes: int
    ) -> None:
        self.session = session
        self.config = session.config
        self.runs, self.others = list(runs), list(others)
        factory: Any = self.config._tmp_path_factory
        self.folder: Path = factory.getbasetemp()
        self.num_lanes = num_lanes
        self.num_forked = 0
        self.lanes: list[Lane] = []

    def run(self) -> None:
        assert threading.active_count() == 1, f"a fork would lose {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # the collector touches, and thereby copies, no page that lanes share
        terminal: Any = self.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False
        try:
            for number in range(self.num_lanes):
                self._start(takes_runs=number < self.num_lanes - 1)
            while self.lanes:
                for connection in wait([lane.connection for lane in self.lanes]):
                    self._hear(next(lane for lane in self.lanes if lane.connection is connection))
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            self._end()

    def _start(self, *, takes_runs: bool = False, numbers: Sequence[int] = ()) -> None:
        lane = Lane(self.session, self.folder / f"lane-{self.num_forked}", self.lanes)
        self.num_forked += 1
        self.lanes.append(lane)
        lane.give(numbers or self._next(takes_runs=takes_runs))

    def _next(self, *, takes_runs: bool = True) -> list[int]:
        """A unit; nothing when there is none left."""
        if self.runs and (takes_runs or not self.others):
            return self.runs.pop(0)
        return self.others.pop(0) if self.others else []

    def _hear(self, lane: Lane) -> None:
        hook = self.config.hook
        try:
            kind, *said = lane.connection.recv()
        except EOFError:
            self._ended(lane)
            return
        if kind == "start":
            hook.pytest_runtest_logstart(nodeid=said[0], location=said[1])
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self.config, data=said[0])
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            message, when, nodeid, location = said
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            )
        else:
            assert kind == "done" and said == lane.left[:1]
            lane.last = lane.left.pop(0)
            item = self.session.items[lane.last]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            if not lane.left:
                lane.give(self._next())

    def _ended(self, lane: Lane) -> None:
        lane.process.join()
        lane.connection.close()
        self.lanes.remove(lane)
        if lane.left:
            self._fail(lane.left[0], "call", f"the process of this test ended with status {lane.process.exitcode}")
            self._start(takes_runs=True, numbers=lane.left[1:])
        elif lane.process.exitcode != 0:
            self._fail(lane.last, "teardown", "fixtures of the session were not torn down: see the output above")

    def _fail(self, number: int, when: Literal["call", "teardown"], told: str) -> None:
        item = self.session.items[number]
        keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
        report = pytest.TestReport(item.nodeid, item.location, keywords, "failed", told, when)
        self.config.hook.pytest_runtest_logreport(report=report)

    def _end(self) -> None:
        """Interrupt lanes that still run, so that they tear their fixtures down."""
        for lane in self.lanes:
            if lane.process.pid is not None and lane.process.is_alive():
                os.kill(lane.process.pid, signal.SIGINT)
        for lane in self.lanes:
            lane.process.join(END_S)
            lane.process.kill()
