"""Who is told of a job, and of what; nothing of it hurts the job."""

import http.server
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from attempts import gpu
from robust_train import ConfigError, launch
from robust_train.children import notifier as module
from robust_train.children.notifier import Notifier, describe_event, notify_settings
from robust_train.config.checks import checked, hide_urls
from robust_train.config.composition import complete
from robust_train.config.schema import NotifyConfig
from robust_train.config.values import is_secret
from robust_train.folder.lock import is_held
from robust_train.folder.state import RunState, read_state
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import CheckpointFailed, CheckpointSaved, Event, Notice
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec
from sweep_world import SweepWorld

URL = "json://user:open-sesame@127.0.0.1:1/here"
NEW = RunState("3-abc", "lora", "/r", 7, "gpu1", "ann", started=1000.0, since=1000.0)
WAITING = replace(NEW, state="waiting", waiting={"position": 1, "reason": "GPU 0 is taken"})
ON_CPU = replace(NEW, state="running", attempt=Attempt(2, AttemptSpec((), 8, 1)))
ON_GPU = replace(ON_CPU, attempt=Attempt(1, AttemptSpec((gpu(1, 20),), 8, 1)))
THIRD = replace(ON_CPU, attempt=Attempt(3, AttemptSpec((), 8, 1)))


class Hanging(Event):
    """An event that brings its notice."""

    def notice(self, attempt):
        return Notice("stalled", f" hangs in attempt {attempt}")


@pytest.fixture(autouse=True)
def _nobody_yet(monkeypatch):
    monkeypatch.setenv(module.URLS_VARIABLE, "")


@pytest.mark.parametrize(
    ("before", "after", "event"),
    [
        (NEW, replace(NEW, state="completed"), "completed"),
        (NEW, replace(NEW, state="no_device"), "failed"),
        (NEW, replace(NEW, state="interrupted"), "interrupted"),
        (ON_GPU, ON_CPU, "cpu"),
        (WAITING, ON_CPU, "cpu"),
        (NEW, ON_CPU, None),
        (ON_CPU, ON_CPU, None),
        (NEW, WAITING, None),
        (WAITING, replace(WAITING, since=200.0), "waiting"),
    ],
)
def test_what_is_news(before, after, event, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 2000.0)
    sent = []
    notifier = Notifier(NotifyConfig(("program",)))
    monkeypatch.setattr(notifier, "deliver", lambda event, *given: sent.append(event))
    for state in (before, after, after):
        notifier.poll(state)
    assert sent == [event] * (event is not None)


def test_each_event_has_its_line():
    broken = replace(NEW, reason="CUDA error\nthere")
    for event, state, line in (
        ("completed", NEW, "completed in 1 min: 0.5"),
        ("completed", replace(NEW, earlier_seconds=120.0), "completed in 3 min: 0.5"),
        ("failed", broken, "failed after 1 min: CUDA error there"),
        ("waiting", WAITING, "has waited 1 min: GPU 0 is taken"),
    ):
        assert describe_event(event, state, 0.5, 1060.0) == f"lora on gpu1 {line}"


@pytest.fixture
def told(tmp_path):
    """A program that notes what it is told, and the JSON and line of each time."""
    file = tmp_path / "told"
    note = f"cat >> {file}; printf '\\n%s\\n' \"${module.TEXT_VARIABLE}\" >> {file}"

    def read():
        lines = file.read_text().splitlines()
        return list(zip(map(json.loads, lines[::2]), lines[1::2], strict=True))

    return ("sh", "-c", note), read


def test_each_requested_event_is_notified_once(told):
    """A program gets it as JSON and as a line."""
    command, read = told
    notifier = Notifier(NotifyConfig(command, on=("waiting", "stalled")))
    for state in (NEW, WAITING, replace(WAITING, updated=5.0)):
        notifier.poll(state)
        notifier.finish()
    notifier.on_event(Hanging(), THIRD)
    notifier.finish()
    notifier.poll(replace(NEW, state="failed"))
    notifier.finish()
    (waiting, line), (stalled, last) = read()
    assert (waiting["event"], waiting["job"], waiting["text"]) == ("waiting", "lora", line)
    assert (stalled["event"], stalled["attempt"]) == ("stalled", 3)
    assert last == "lora on gpu1 hangs in attempt 3"
    assert not notifier.has_failed


def test_a_failing_disk_is_notified_of_once(told):
    """The next notification needs a checkpoint in between."""
    command, read = told
    notifier = Notifier(NotifyConfig(command))
    failed = CheckpointFailed("No space left on device")
    full = Failure(FailureKind.DISK_FULL, "OSError: No space left")
    ended = AttemptEnded(replace(THIRD.attempt, failure=full))
    for event in (failed, failed, ended, CheckpointSaved("/c", 5), ended):
        notifier.on_event(event, THIRD)
        notifier.finish()
    assert [line.partition(": ")[2] for _, line in read()] == [
        "no checkpoint could be saved: No space left on device",
        "OSError: No space left",
    ]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("/nowhere/at-all",), "No such file"),
        (("sh", "-c", "printf 'no\\nnetwork' >&2; exit 1"), "network"),
        (("sleep", "600"), "it took too long"),
    ],
)
def test_a_failed_delivery_is_one_line(command, problem, caplog):
    notifier = Notifier(NotifyConfig(command))
    notifier.send("failed", "text", {})
    notifier.finish(0.3 if "long" in problem else 10.0)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"notification (failed) not delivered by {command[0]}: ")
    assert problem in record.getMessage()
    assert notifier.has_failed


def test_a_failed_delivery_costs_only_a_line(monkeypatch, caplog):
    """There is no room for its files, or the program runs as another user, for example by sudo."""
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nowhere")
        Notifier(NotifyConfig(("true",))).send("failed", "text", {})
    notifier = Notifier(NotifyConfig(("sleep", "2")))
    notifier.send("failed", "text", {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", mock.Mock(side_effect=PermissionError))
        notifier.finish(0.0)
    problems = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert problems == ["No such file or directory", "it took too long"]


def test_a_signal_cuts_the_last_deliveries_short(tmp_path, caplog):
    """The job stays completed."""
    begun = tmp_path / "begun"

    def stop_when_it_is_being_delivered():
        while not begun.exists() or is_held(tmp_path / "run"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop_when_it_is_being_delivered)
    thread.start()
    deliver = ["sh", "-c", f"touch {begun}; exec sleep 600"]
    cfg = {"isolation": "none", "notify": {"command": deliver}}
    summary = launch(lambda cfg: 0.5, cfg, run_dir=tmp_path / "run")
    thread.join()
    assert (summary.status, summary.result) == ("completed", 0.5)
    assert read_state(tmp_path / "run").exit_code == 0
    assert "ended by a signal" in caplog.text


def test_a_delivery_ends_without_its_launcher_too(tmp_path):
    """Its time limit holds even if the launcher is killed."""
    ask = f"import signal; open('{tmp_path}/left', 'w').write(str(signal.alarm(0)))"
    notifier = Notifier(NotifyConfig((sys.executable, "-c", ask)))
    notifier.send("failed", "text", {})
    notifier.finish()
    assert 0 < int((tmp_path / "left").read_text()) <= 60


def test_any_text_can_be_told(told):
    command, read = told
    notifier = Notifier(NotifyConfig(command))
    notifier.send("failed", "a\0b\x1bc\ud800", {"reason": "\0\ud800"})
    notifier.finish()
    assert [line for _, line in read()] == [r"a\x00b\x1bc\ud800"]


def test_urls_are_those_of_one_launch():
    for urls in ([URL], []):
        cfg, environ = complete({"notify": {"urls": urls or None}}), dict[str, str]()
        hide_urls(cfg, environ)
        assert notify_settings(checked(cfg).notify, environ).urls == tuple(urls)


def test_a_launched_job_notifies_and_leaks_no_url(tmp_path, capfd, monkeypatch, posted):
    pytest.importorskip("apprise")
    (url, bodies), sent, seen = posted, [], {}
    cfg = {"notify": {"command": "tell me", "urls": [url]}, "device": "cpu", "isolation": "none"}
    with monkeypatch.context() as patch:
        patch.setattr(Notifier, "deliver", lambda self, *given: sent.append(given))
        launch(lambda cfg: seen.update(cfg.notify) or 0.5, cfg, run_dir=tmp_path)
    (_, _, command, content, _), to_url = sent
    assert command == ("tell", "me")
    assert (content["event"], content["result"]) == ("completed", 0.5)
    notifier = Notifier(NotifyConfig())
    notifier.deliver(*to_url)
    notifier.finish(60.0)
    (body,) = map(json.loads, bodies)
    assert (body["title"], body["message"]) == ("robust-train: completed", content["text"])
    assert seen["urls"] is None
    assert with_the_secret(tmp_path) == []
    shown = capfd.readouterr()
    assert "open-sesame" not in shown.out + shown.err
    with pytest.raises(ConfigError, match=r"notify\.on=done: must be one of completed, failed"):
        launch(lambda cfg: None, {"notify": {"on": ["done"]}}, run_dir=tmp_path / "2")


def with_the_secret(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if b"open-sesame" in path.read_bytes()]


def test_urls_are_removed_from_all_recorded_configs():
    """Hydra's part of the config is among them."""
    GlobalHydra.instance().clear()
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        overrides = [f"notify.urls=['{URL}']", "seed=1"]
        cfg = compose("robust", overrides=overrides, return_hydra_config=True)
    assert hide_urls(cfg)
    assert "open-sesame" not in OmegaConf.to_yaml(cfg)
    assert list(cfg.hydra.overrides.task) == ["seed=1"]
    words = ["+notify.urls=x", "++robust.notify.urls=x", "robust.notify={urls: x}"]
    assert all(map(is_secret, words))
    assert not hide_urls(cfg)


def test_notify_test_says_whether_it_was_delivered(says):
    assert says("notify", "test", "notify.command=/bin/true").out == "delivered\n"
    says("notify", "test", "notify.command=/nowhere/program", code=1)


@pytest.fixture
def posted():
    """A URL that takes notifications, and what it was sent."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"json://user:open-sesame@127.0.0.1:{server.server_port}", bodies
        server.shutdown()


@pytest.mark.slow
def test_a_sweep_notifies_once_and_writes_no_url(world, posted):
    pytest.importorskip("apprise")
    url, bodies = posted
    # in a project's own file: Hydra composes each job of a sweep anew from it
    configs = world.folder / "configs"
    configs.mkdir()
    (configs / "mine.yaml").write_text(f"defaults: [robust, _self_]\nnotify:\n  urls: ['{url}']\n")
    sweeps = SweepWorld(world)
    options = (f"--config-dir={configs}", "--config-name=mine")
    ended = world.run(*options, *sweeps.arguments("objective", "training.lr=1,2", "device=cpu"))
    (body,) = bodies
    assert "sweep on" in json.loads(body)["message"]
    assert with_the_secret(world.folder) == [configs / "mine.yaml"]
    assert "open-sesame" not in ended.output
