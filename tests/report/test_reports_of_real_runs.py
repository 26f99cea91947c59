"""Reports of jobs that really ran, read as files and looked at in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_browser
from robust_train.memory.samples import Sample, encode
from simulated_nvml import Gpu, Machine
from sweep_world import SweepWorld
from two_gpu_machine import A, B
from world import Ended, World, wait_until

GIB = 1024**3
WIDTHS = {"desktop": 1280, "tablet": 800, "phone": 360}


@dataclass
class Run:
    """A job that ran: its world and how it ended."""

    world: World
    ended: Ended

    @property
    def folder(self) -> Path:
        return self.world.run_dir

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()

    def report(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``robust-train report`` as a user would."""
        return report(self.world, str(self.folder), *arguments)

    @property
    def story(self) -> dict[str, Any]:
        return json.loads(self.report("--json").stdout)


def report(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "robust_train.cli.main", "report", *arguments],
        cwd=world.folder,
        env=world.environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def new_world(tmp_path_factory: pytest.TempPathFactory):
    return lambda name: World(tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def recovered(new_world, gpu_libraries: Path) -> Run:
    """Runs out of memory with 64 and 32 samples on GPU 0, and goes on to the CPU."""
    world = new_world("recovered")
    gpus = [Gpu(uuid=A, total_mib=24000, free_mib=20000), Gpu(uuid=B, total_mib=24000, free_mib=1)]
    world.with_environ(Machine(world.folder, gpu_libraries, gpus).environ)
    world.environ["BATCH_BUDGETS"] = json.dumps({A: 16})
    ended = world.run(
        "trainer._target_=report_trainers.within_a_budget",
        "training.batch_size=64",
        "min_batch_size=32",
        "training.lr=0.01",
    )
    assert ended.returncode == 0, ended.output
    return Run(world, ended)


@pytest.fixture(scope="module")
def out_of_host_memory(new_world) -> Run:
    """Runs out of the host's memory for real, and goes on with half the batch."""
    world = new_world("host")
    ended = world.run("trainer._target_=trainers_of_their_own.a_plain_loop")
    assert ended.returncode == 0, ended.output
    return Run(world, ended)


@pytest.fixture(scope="module")
def failed(new_world) -> Run:
    """Fails with a text that is a script, in a folder whose name is markup."""
    world = new_world("failed")
    world.run_dir = world.folder / "<b>run & co"
    target = "trainer._target_=report_trainers.says_something_nasty"
    command = world.command(target)
    command[-1] = f"hydra.run.dir='{world.run_dir}'"
    process = subprocess.run(
        command, cwd=world.folder, env=world.environ, capture_output=True, text=True, check=False
    )
    ended = Ended(process.returncode, process.stdout, process.stderr, world.run_dir)
    assert ended.returncode == 1, ended.output
    return Run(world, ended)


@pytest.fixture(scope="module")
def interrupted(new_world) -> Run:
    """The built-in trainer, stopped with Ctrl-C after some checkpoints."""
    world = new_world("interrupted")
    process = world.start("training.epochs=1000", "training.checkpoint_every_steps=20")
    journal = world.run_dir / "journal.jsonl"
    wait_until(
        lambda: journal.exists() and journal.read_text().count('"epoch"') >= 3, "three epochs"
    )
    process.send_signal(signal.SIGINT)
    ended = world.end(process)
    assert ended.returncode == 130, ended.output
    return Run(world, ended)


@pytest.fixture(scope="module")
def died(new_world) -> Run:
    """Killed without a chance to say anything, in the middle of a line of its journal."""
    world = new_world("died")
    ready = world.folder / "ready"
    world.environ["READY_FILE"] = str(ready)
    process = world.start("trainer._target_=report_trainers.waits_to_be_killed")
    wait_until(ready.exists, "the trainer at work")
    os.kill(process.pid, signal.SIGKILL)
    ended = world.end(process)
    with (world.run_dir / "journal.jsonl").open("a") as journal:
        journal.write('{"time": 179526')
    return Run(world, ended)


@pytest.fixture(scope="module")
def sweep(new_world) -> SweepWorld:
    """Three jobs, the last of which fails."""
    sweep = SweepWorld(new_world("sweep"))
    ended = sweep.sweep(
        "", "trainer._target_=report_trainers.fails_above_lr", "training.lr=0.01,0.04,0.1"
    )
    assert ended.returncode == 1, ended.output
    return sweep


@pytest.fixture(scope="module")
def long_run(recovered: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recovered run with samples of a GPU in it: saw teeth of eight micro-batches a step."""
    folder = tmp_path_factory.mktemp("long") / "run"
    folder.mkdir()
    text = (recovered.folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(text)
    events = [json.loads(line) for line in text.splitlines()]
    start = next(event["time"] for event in events if event["event"] == "training_started")
    end = events[-1]["time"]
    lines = []
    for i in range(3000):
        used = GIB * (4 + i % 8)
        at = start + (end - start) * i / 3000
        sample = Sample(at, 1, "cuda:0", i // 8, used, 12 * GIB, 14 * GIB, 16 * GIB, GIB)
        lines.append(encode(sample))
    (folder / "memory.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_every_job_leaves_a_report(recovered, failed, interrupted):
    assert "Completed in" in recovered.page
    assert "at the third attempt, on the CPU with batch size 64" in recovered.page
    assert "Memory ran out on cuda:0 at batch size 64 and 32." in recovered.page
    assert "2.0 GiB asked for, 1.2 GiB of 23.5 GiB free" in recovered.page
    assert "Failed after" in failed.page
    assert "Was stopped after" in interrupted.page
    assert "the same command goes on from there" in interrupted.page
    assert all("report" not in run.ended.stderr for run in (recovered, interrupted))


def test_times_of_a_real_run_add_up(recovered, out_of_host_memory, interrupted):
    for run in (recovered, out_of_host_memory, interrupted):
        story = run.story
        seconds = story["seconds"]
        parts = sum(seconds[use] for use in ("useful", "lost", "wait", "startup"))
        assert parts == pytest.approx(seconds["wall"])
        assert seconds["wall"] == pytest.approx(run.ended.summary["wall_seconds"], abs=2)
        assert seconds["useful"] > 0
        assert [a["outcome"] for a in story["attempts"]] == [
            a["outcome"] for a in run.ended.attempts
        ]
    assert recovered.story["seconds"]["lost"] > 0
    assert out_of_host_memory.story["advice"][0]["overrides"].startswith("training.batch_size=")


def test_the_command_makes_the_report_of_a_run_that_died(died):
    assert not (died.folder / "report.html").exists()
    made = died.report()
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(died.folder / "report.html")
    assert "its process died without a word" in died.page
    assert "The last checkpoint holds step 20" in died.page
    assert "1 damaged line passed over" in died.page
    assert died.story["status"] == "unfinished"
    assert died.story["seconds"]["lost"] > 0


def test_the_command_takes_a_file_in_the_folder_and_writes_where_it_is_told(recovered, tmp_path):
    target = tmp_path / "elsewhere.html"
    journal = recovered.folder / "journal.jsonl"
    made = report(recovered.world, str(journal), "--output", str(target))
    assert made.returncode == 0, made.stderr
    assert "Completed in" in target.read_text()


def test_the_command_shows_the_report_in_the_users_browser(recovered, tmp_path):
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/shown\n')
    program.chmod(0o755)
    world = World(recovered.world.folder).with_environ({"BROWSER": f"{program} %s"})
    made = report(world, str(recovered.folder), "--open")
    assert made.returncode == 0, made.stderr
    shown = (tmp_path / "shown").read_text().strip()
    assert shown == (recovered.folder / "report.html").as_uri()


def test_a_folder_without_a_job_is_refused_in_one_line(world: World, tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        made = report(world, str(path))
        assert made.returncode == 2
        assert made.stdout == ""
        assert len(made.stderr.splitlines()) == 1
        assert str(path) in made.stderr


def test_a_report_that_cannot_be_written_fails_the_command_but_costs_a_job_one_warning(
    world: World,
):
    (world.run_dir / "report.html" / "in the way").mkdir(parents=True)
    ended = world.train("what_it_was_given")
    assert ended.returncode == 0, ended.output
    assert ended.output.count("report.html") == 1
    assert f"cannot write {world.run_dir / 'report.html'}: " in ended.output
    assert not list(world.run_dir.glob("*.tmp"))
    made = report(world, str(world.run_dir))
    assert made.returncode == 1
    assert len(made.stderr.splitlines()) == 1


def test_hostile_texts_stay_texts(failed):
    assert failed.page.count("<script>") == 1, "our own"
    assert "<img" not in failed.page
    assert "<i>metric" not in failed.page
    assert "&lt;b&gt;run &amp; co" in failed.page


def test_a_sweep_has_a_page_of_all_jobs_with_links_to_theirs(sweep):
    page = (sweep.folder / "report.html").read_text()
    assert "2 of 3 completed, 1 failed" in page
    assert "this learning rate is not for me" in page
    for number in range(3):
        assert f'href="{number}/report.html"' in page
        assert (sweep.folder / str(number) / "report.html").exists()
    made = report(sweep.world, str(sweep.folder), "--json")
    jobs = json.loads(made.stdout)["jobs"]
    assert [job["row"]["status"] for job in jobs] == ["completed", "completed", "failed"]


def test_the_page_of_a_sweep_that_died_is_made_from_its_jobs(sweep, tmp_path):
    for number in range(2):
        job = tmp_path / str(number)
        job.mkdir()
        for name in ("journal.jsonl", "sweep_job.json"):
            (job / name).write_text((sweep.folder / str(number) / name).read_text())
    made = report(sweep.world, str(tmp_path))
    assert made.returncode == 0, made.stderr
    assert "The end of the sweep is not recorded" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "0" / "report.html").exists()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no browser: `just browser` installs one, ROBUST_TRAIN_BROWSER names one")
    with Browser(program) as browser:
        yield browser


REPORTS = ("recovered", "out_of_host_memory", "failed", "interrupted", "died", "long_run", "sweep")

OVERLAPS = """
[...document.querySelectorAll("svg.plot")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(text => [text, text.getBoundingClientRect()])
    .filter(([, frame]) => frame.width);
  return texts.flatMap(([one, a], i) => texts.slice(i + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([other]) => [svg.getAttribute("aria-label"), one.textContent, other.textContent]));
})
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("svg.plot text")]
  .map(text => text.getBoundingClientRect().height).filter(height => height))
"""


@pytest.fixture
def page_of(request: pytest.FixtureRequest):
    def find(name: str) -> Path:
        found = request.getfixturevalue(name)
        folder = found if isinstance(found, Path) else found.folder
        if not (folder / "report.html").exists():
            world = found.world if isinstance(found, Run) else World(folder.parent)
            assert report(world, str(folder)).returncode == 0
        return folder / "report.html"

    return find


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("device", WIDTHS)
def test_a_browser_shows_the_report(browser, page_of, name, device):
    page = browser.open(page_of(name), width=WIDTHS[device])
    assert page.complaints == []
    assert page.requests == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[device]
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(SMALLEST_TEXT) > 9
    shown = page.screenshot()
    assert shown.width == WIDTHS[device]
    assert len(shown.convert("RGB").getcolors(1 << 24)) > 50, "more than a blank page"
    page.close()


def test_a_dark_room_gets_a_dark_page(browser, recovered):
    def brightness(dark: bool) -> float:
        page = browser.open(recovered.folder / "report.html", width=1280, dark=dark)
        pixels = page.screenshot().convert("L").resize((1, 1)).getpixel((0, 0))
        page.close()
        return pixels

    assert brightness(dark=False) > 200
    assert brightness(dark=True) < 60


def test_the_pointer_reads_values_out(browser, page_of):
    page = browser.open(page_of("long_run"), width=1280)
    where = page.evaluate(
        """(() => { const plot = document.querySelector("svg[data-plot]");
        plot.scrollIntoView({block: "center"});
        const frame = plot.getBoundingClientRect();
        return [frame.left + frame.width * 0.7, frame.top + frame.height * 0.4]; })()"""
    )
    page.point_at(*where)
    told = page.evaluate('document.querySelector("#readout").textContent')
    assert "allocated: " in told
    assert "GiB" in told
    page.point_at(1, 1)
    assert page.evaluate('document.querySelector("#readout").hidden')
    assert page.complaints == []
    page.close()


def test_everything_can_be_read_without_scripts(browser, page_of):
    texts = []
    for script in (True, False):
        page = browser.open(page_of("recovered"), width=1280, script=script)
        texts.append(page.evaluate("document.body.innerText"))
        page.close()
    assert texts[0] == texts[1]
    assert "Completed in" in texts[0]
