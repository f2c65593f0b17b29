"""`multilora doctor --deep` with planted steps: whatever a step does, the report stays whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from service.doctor import supervise
from service.doctor.deep import JournalError, opened
from tests.doctor.conftest import BUNDLED, ROOT, Meeting
from tests.support import planted_checks
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.quantised_models import make_gguf
from tests.support.planted_checks import MAX_FILE_BYTES, NO_TEMPORARY_FILES


def test_a_step_that_fails_costs_no_other(meeting: Meeting) -> None:
    code, out, _ = meeting.run("works,fails,raises,aborts,exits,means_nothing,warns")
    assert code == 1
    found = {step["name"]: (step["status"], step["reason"]) for step in meeting.report["steps"]}
    assert found["works"] == ("ok", None)
    assert found["fails"] == ("failed", "The planted fault is here.")
    assert found["raises"] == ("failed", "RuntimeError: two lines")
    assert found["aborts"] == ("crashed", f"was killed by signal {signal.SIGABRT} (the last words)")
    assert found["exits"] == ("crashed", "ended with exit code 7")
    assert found["means_nothing"] == ("not applicable", "there is nothing of the kind here")
    assert meeting.step("fails")["facts"] == meeting.step("aborts")["facts"] == {"before": "kept"}
    faults = {(fault["step"], fault["code"]) for fault in meeting.report["faults"]}
    assert faults == {("fails", "step-failed"), ("raises", "step-failed"), ("aborts", "step-crashed"),
                      ("exits", "step-crashed"), ("warns", "planted")}  # fmt: skip
    assert "warning in warns: Something is slow. (planted)" in out
    assert meeting.report["summary"] == "2 of 6 steps have an answer; 4 failed (fails, raises, aborts, exits)."


def test_without_a_device_that_can_be_used_the_rest_waits_until_that_is_mended(meeting: Meeting) -> None:
    """One fault, and not one for each step; `--resume` asks again, with what the step before had found. What is for
    other devices does not wait."""
    steps = "works,is_mended,warns,fails,fails_on_npu"
    code, out, _ = meeting.run(steps)
    assert code == 1
    found = [step["status"] for step in meeting.report["steps"]]
    assert found == ["ok", "failed", "not run", "not run", "not applicable"]
    assert meeting.step("warns")["reason"] == "is_mended failed, without which there is no answer"
    assert [fault["message"] for fault in meeting.report["faults"]] == ["The step failed: The device cannot be used."]
    assert "1 failed (is_mended); 2 were not run." in out
    (meeting.directory / "mended").touch()
    meeting.run(steps, "--resume")
    assert [step["status"] for step in meeting.report["steps"]] == ["ok", "ok", "ok", "failed", "not applicable"]
    assert meeting.step("warns")["reason"] is None
    assert (meeting.directory / "begun").read_text().split() == ["works", "works"], "what was found first is stale"


@pytest.mark.parametrize(("needed", "status"), [("needed_aborts", "crashed"), ("needed_hangs", "timed out")])
def test_a_device_that_kills_or_hangs_who_tries_it_is_tried_by_no_later_step(
    meeting: Meeting, needed: str, status: str
) -> None:
    """Each of them would take all of its time. `--resume` begins with it again."""
    with meeting.start(f"{needed},works") as command:
        if needed == "needed_hangs":
            assert (meeting.directory / "gate").read_text() == ""
        command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 1
    assert [step["status"] for step in meeting.report["steps"]] == [status, "not run"]
    assert meeting.step("works")["reason"] == f"{needed} {status}, without which there is no answer"
    assert len(meeting.report["faults"]) == 1
    if needed == "needed_aborts":
        _, out, _ = meeting.run(f"{needed},works", "--resume")
        assert f"[1/2] {needed}: crashed" in out


def test_a_step_that_hangs_is_killed_with_all_that_it_started(meeting: Meeting) -> None:
    with meeting.start("hangs,works") as command, (meeting.directory / "gate").open() as gate:
        assert gate.read() == ""  # its writer, a process of the step's, is gone
        command.communicate(timeout=LIMIT_SECONDS)
    step = meeting.step("hangs")
    assert (step["status"], step["facts"]) == ("timed out", {"before": "kept"})
    assert step["reason"].startswith("did not end within 300 s")
    assert meeting.step("works")["status"] == "ok"


def test_the_page_is_whole_and_shows_text_as_text(meeting: Meeting) -> None:
    assert meeting.run("works")[0] == 0
    assert meeting.page.startswith("<!doctype html>")
    assert "&lt;b&gt;bold&lt;/b&gt;" in meeting.page and "<b>bold" not in meeting.page
    assert "src=" not in meeting.page and "<link" not in meeting.page and "<script" not in meeting.page


def test_without_an_output_the_report_is_written_all_the_same(meeting: Meeting) -> None:
    with meeting.start("works", before=("sh", "-c", 'exec "$@" >&-', "sh")) as command:
        _, err = command.communicate(timeout=LIMIT_SECONDS)
    assert (command.returncode, err) == (0, "")
    assert meeting.step("works")["status"] == "ok"


def test_two_at_a_time_are_refused(meeting: Meeting) -> None:
    with meeting.start("waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        code, _, err = meeting.run("works", "--resume")
        assert code == 2
        assert err.startswith(
            "multilora: Another multilora doctor --deep is at work on doctor-report; wait for its end."
        )
        command.kill()
        command.communicate(timeout=LIMIT_SECONDS)


def test_a_directory_that_cannot_be_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's disk without locks: nobody else is at work on it."""
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(JournalError, match="cannot be locked: No locks available"), opened(tmp_path):
        pass


def test_a_disk_that_is_full_leaves_the_report_as_it_was(meeting: Meeting) -> None:
    """Files of this process may not grow beyond a size, which is between that of a first report and of a later one."""
    assert meeting.run("works,waits", limit="0.5")[0] == 1
    assert meeting.step("waits")["status"] == "timed out"
    before = meeting.report
    directory = meeting.directory / "doctor-report"
    for step in before["steps"]:
        step["status"] = "not run"
    (directory / "report.json").write_text(json.dumps(before))
    was = (directory / "report.json").read_bytes()
    code, _, err = meeting.run("works,waits", "--resume", limit="0.5", **{MAX_FILE_BYTES: "256"})
    assert code == 2
    assert err.startswith("multilora: The report cannot be written to doctor-report: File too large. Make room")
    assert (directory / "report.json").read_bytes() == was
    assert not list(directory.glob("*.new"))


def test_a_step_that_cannot_be_started_costs_no_report(meeting: Meeting) -> None:
    code, _, _ = meeting.run("works,warns", **{NO_TEMPORARY_FILES: "1"})
    assert code == 1
    assert [(step["status"], step["reason"]) for step in meeting.report["steps"]] == [
        ("crashed", "its process could not be started (No usable temporary directory)")
    ] * 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model-dir", "nowhere"], "nowhere is no directory"),
        (["--model-dir", "bare"], "bare holds no model: there is no config.json in it."),
        (["--model-dir", "."], ". has GGUF files and no safetensors: name one of them, such as cut-short.gguf."),
        (["--model-dir", "bad"], "The model in bad cannot be read: bad/config.json: Expecting value"),
        (["--model-dir", "unreadable"], "unreadable/model.safetensors: Is a directory."),
        (["--model-dir", "empty"], "empty holds no weights"),
        (["--model-dir", "cut-short"], "cut-short cannot be read: cut-short/model.safetensors: Error while"),
        (["--model-dir", "cut-short.gguf"], "cut-short.gguf is cut or no GGUF file: download it again, or name"),
        (["--model-dir", "links"], "links/model.safetensors is a link to a file that is not here"),
        (["--report-dir", "begun/below"], "The report's directory begun/below cannot be written: Not a directory"),
        (["--resume"], "There is no report in doctor-report to go on with"),
        (["--dtype", "int3"], "Setting --dtype"),
        (["--device", "banana"], "There are no steps for the device 'banana'; --device is one of npu, cuda, cpu"),
        (["--device", ""], "There are no steps for the device ''"),
        (["--minutes", "0"], "is not a number of minutes above 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    meeting: Meeting,
    flags: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before any step, so that the command needs no process of its own."""
    for name in ("bad", "unreadable", "empty", "cut-short", "links"):
        (meeting.directory / name).mkdir()
        (meeting.directory / name / "config.json").write_text("" if name == "bad" else "{}")
    (meeting.directory / "unreadable" / "model.safetensors").mkdir()
    (meeting.directory / "bare").mkdir()
    # As of a model in Hugging Face's cache of which a container has the snapshot alone.
    (meeting.directory / "links" / "model.safetensors").symlink_to("../../blobs/0")
    (meeting.directory / "cut-short.gguf").write_bytes(b"GGUF")
    whole = (BUNDLED / "model.safetensors").read_bytes()
    (meeting.directory / "cut-short" / "model.safetensors").write_bytes(whole[:-1])  # as by a download
    monkeypatch.chdir(meeting.directory)
    monkeypatch.setattr(supervise, "time", supervise.time)  # which the planted steps replace
    monkeypatch.setattr(sys, "argv", ["", "works", "--device", "cpu", *flags])
    try:
        code: Any = planted_checks.main()
    except SystemExit as ended:
        code = ended.code
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert sentence in err
    assert not (meeting.directory / "begun").read_text()


def test_a_report_of_another_model_or_version_or_garbage_is_not_gone_on_with(meeting: Meeting, tmp_path: Path) -> None:
    assert meeting.run("works", "--model-dir", str(BUNDLED))[0] == 0
    code, _, err = meeting.run("works", "--model-dir", str(BUNDLED), "--dtype", "float32", "--resume")
    assert (code, "is of other settings" in err) == (2, True)
    older = {**meeting.report, "multilora": "0.1"}
    (tmp_path / "doctor-report" / "report.json").write_text(json.dumps(older))
    code, _, err = meeting.run("works", "--model-dir", str(BUNDLED), "--resume")
    assert (code, "is of multilora 0.1, and this is " in err) == (2, True)
    (tmp_path / "doctor-report" / "report.json").write_text('{"steps": 3}')
    code, _, err = meeting.run("works", "--resume")
    assert (code, "is no report of this command" in err) == (2, True)


def test_a_killed_command_is_resumed(meeting: Meeting) -> None:
    """Steps with an answer are not run again; the step that was running, whose process ended too, starts anew."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        command.kill()
        assert gate.read() == ""  # the step's process is gone
        command.communicate(timeout=LIMIT_SECONDS)
    assert [step["status"] for step in meeting.report["steps"]] == ["ok", "running"]
    code, _, err = meeting.run("works,waits")
    assert (code, "--resume goes on with it" in err) == (2, True)
    code, out, _ = meeting.run("works,waits", "--resume")
    assert code == 0
    (limit,) = re.findall(r"waits: .* \(at most (\d+) s\)", out)
    assert 300 < int(limit) <= 600, "what the first step had left of its time is the other one's too"
    assert [step["status"] for step in meeting.report["steps"]] == ["ok", "ok"]
    assert (meeting.directory / "begun").read_text().split() == ["works", "waits", "waits"]
    assert meeting.step("waits")["facts"] == {"answer": 43}


# In the place of torch: waits for ever where the module NAME is what the process runs, and is torch itself elsewhere.
_PLANTED_TORCH = """
import os, sys
if NAME in sys.orig_argv:
    gate = open(GATE, "w")
    print("here", file=gate, flush=True)
    os.read(os.pipe()[0], 1)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
import torch
"""


@pytest.mark.parametrize(("step", "name"), [("launches", "first_launch"), ("adds", "machine_facts")])
def test_a_killed_command_leaves_no_process_of_a_step_behind(meeting: Meeting, step: str, name: str) -> None:
    """However early: torch, which brings the device's own package, is still being imported."""
    planted, gate_path = meeting.directory / "planted", meeting.directory / "gate"
    planted.mkdir()
    code = _PLANTED_TORCH.replace("NAME", repr(f"service.doctor.checks.{name}")).replace("GATE", repr(str(gate_path)))
    (planted / "torch.py").write_text(code)
    paths = os.pathsep.join([str(planted), str(ROOT)])
    with meeting.start(step, PYTHONPATH=paths) as command, gate_path.open() as gate:
        assert gate.readline() == "here\n"
        command.kill()
        assert gate.read() == ""  # it is gone
        command.communicate(timeout=LIMIT_SECONDS)


def test_a_step_that_always_kills_the_command_is_passed_over(meeting: Meeting) -> None:
    for flags in ((), ("--resume",)):
        with meeting.start("always_waits,works", *flags) as command, (meeting.directory / "gate").open() as gate:
            assert gate.readline() == "here\n"
            command.kill()
            assert gate.read() == ""  # the step's process is gone
            command.communicate(timeout=LIMIT_SECONDS)
    assert meeting.run("always_waits,works", "--resume")[0] == 1
    assert meeting.step("always_waits")["reason"].startswith("the command was killed each of the 2 times")
    assert meeting.step("works")["status"] == "ok"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_keeps_what_was_found(meeting: Meeting, sent: signal.Signals) -> None:
    """By hand, by a container's end, and by that of a terminal whose connection is gone."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        command.send_signal(sent)
        assert gate.read() == ""
        _, err = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 130
    assert err == "multilora: interrupted; what was found is in doctor-report/report.html, and --resume goes on.\n"
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_a_terminal_that_is_lost_interrupts(meeting: Meeting) -> None:
    """There is nobody to tell it to, and the report is there."""
    ours, its = os.openpty()
    with meeting.start("works,waits", terminal=its) as command, (meeting.directory / "gate").open() as gate:
        os.close(its)
        assert gate.readline() == "here\n"
        os.close(ours)
        assert gate.read() == ""
        assert command.wait(LIMIT_SECONDS) == 130
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_an_interruption_is_not_interrupted(meeting: Meeting) -> None:
    """By somebody who does not let go of Ctrl-C."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        while command.poll() is None:
            command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 130
    assert err == "multilora: interrupted; what was found is in doctor-report/report.html, and --resume goes on.\n"
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_a_command_that_is_to_outlive_its_terminal_does(meeting: Meeting) -> None:
    """As under nohup."""
    with meeting.start("meets", ignored=(signal.SIGHUP,)) as command:
        assert (meeting.directory / "gate").read_text() == "here\n"
        command.send_signal(signal.SIGHUP)
        (meeting.directory / "gate").write_text("go on\n")
        command.communicate(timeout=LIMIT_SECONDS)
    assert (command.returncode, meeting.step("meets")["status"]) == (0, "ok")


def test_a_gguf_file_is_examined_as_it_lies(meeting: Meeting) -> None:
    make_gguf("Q8_0", "llama", meeting.directory)
    assert meeting.run("works", "--model-dir", "tiny.gguf")[0] == 0
    assert meeting.report["model"].endswith("/tiny") and "/gguf/" in meeting.report["model"]
