"""Programs in the manner of other people's: what happens to them on the way does not change what
they learn, or it is said.

Each program runs once as its author would start it, and once under ``robust-train run`` while
something happens; the figures at the end are compared. A new program or event is an entry.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from command_world import CommandWorld
from world import is_running, wait_for_text, wait_until

PROGRAMS = Path(__file__).parent / "programs"
RESUMES = "--resume-argv '--resume {checkpoint}' --checkpoint"
# a run of several attempts, none of which has to wait for a network
OWN = "max_retries=1 retry_pause_seconds=0.1"


@dataclass(frozen=True)
class Program:
    """How its author starts it, and how one starts it here."""

    plain: str  # the author's command
    options: str  # of ``robust-train run``
    command: str  # the program under it
    keeps: bool = True  # what it learns is the same after an out-of-memory error
    saves: bool = True  # it resumes from its checkpoints; else it begins again
    stop_saves: bool = False  # it saves when it is stopped


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 torchrun_inside.py"
# the arguments of most
SIZES = "--batch-size {batch_size} --accumulate {gradient_accumulation_steps}"
PLACES = {
    "no accumulation": Program(
        "no_accumulation.py",
        "--batch-size 16",
        "no_accumulation.py --batch-size {batch_size}",
        keeps=False,
        saves=False,
    ),
    "config file": Program(
        "config_file.py plain.json",
        "--batch-size 16 --resume-argv '{checkpoint}' --checkpoint 'saved/*/*.json'",
        'sh -c \'sed "s/BATCH/{batch_size}/; s/STEPS/{gradient_accumulation_steps}/" config.in > '
        '{run_dir}/config.json && exec python config_file.py {run_dir}/config.json "$@"\' sh',
    ),
    "overwrites": Program(
        "overwrites.py",
        "--batch-size 16 --resume-argv '--init_from=resume' --checkpoint out/ckpt.json",
        "overwrites.py --batch_size={batch_size} "
        "--accumulation_steps={gradient_accumulation_steps}",
    ),
    "folders": Program(
        "folders.py", f"--batch-size 16 {RESUMES} 'out/step_*'", f"folders.py {SIZES}"
    ),
    "own Ctrl-C": Program(
        "own_ctrl_c.py",
        f"--stop-signal INT {RESUMES} model.json",
        "own_ctrl_c.py",
        saves=False,
        stop_saves=True,
    ),
    "spawns": Program("spawns.py", f"{RESUMES} 'checkpoints/*.json'", "spawns.py"),
    "bars": Program(
        "bars.py",
        f"--batch-size 16 {RESUMES} 'ckpt/*.json'",
        "bars.py -b {batch_size} -a {gradient_accumulation_steps}",
    ),
    "catches": Program(
        "catches.py 16", "--batch-size 16", "catches.py {batch_size}", keeps=False, saves=False
    ),
    "click": Program(
        "with_click.py",
        f"--batch-size 16 {RESUMES} 'runs/*/checkpoints/last.json'",
        "with_click.py --batch-size {batch_size} --grad-accum {gradient_accumulation_steps}",
    ),
    "YAML": Program(
        "with_yaml.py config.yaml",
        "--batch-size 16 --resume-argv 'resume={checkpoint}' --checkpoint 'weights/*.json'",
        "with_yaml.py config.yaml batch={batch_size} accumulate={gradient_accumulation_steps}",
    ),
    "environment": Program(
        "environment.py",
        "--batch-size 16 --checkpoint 'out/*.json'",
        "env OUTPUT=out BATCH_SIZE={batch_size} ACCUMULATE={gradient_accumulation_steps} "
        "RESUME_FROM={checkpoint} python environment.py",
    ),
    "fixed workers": Program(
        "fixed_workers.py", f"{RESUMES} 'checkpoints/*.json'", "fixed_workers.py"
    ),
    "torchrun inside": Program(TORCHRUN, f"{RESUMES} 'checkpoints/*.json'", TORCHRUN),
}
HAVE_CHILDREN = ("spawns", "fixed workers", "torchrun inside")
HAVE_NO_BATCH = (*HAVE_CHILDREN, "own Ctrl-C")


class Case:
    """One program in a folder of its own, and what is to happen to it."""

    def __init__(self, scripts, name):
        self.scripts, self.name, self.program = scripts, name, PLACES[name]
        self.folder, self.environ = scripts.folder, scripts.world.environ
        shutil.copytree(PROGRAMS, self.folder, dirs_exist_ok=True)
        template = '{"batch_size": BATCH, "accumulate": STEPS}'
        plain = template.replace("BATCH", "16").replace("STEPS", "1")
        (self.folder / "config.in").write_text(template)
        (self.folder / "plain.json").write_text(plain)
        (self.folder / "config.yaml").write_text("batch: 16\naccumulate: 1\nresume: null\n")
        self.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.ready = self.folder / "ready"

    def undisturbed(self):
        """What it learns where nothing happens, without robust-train."""
        folder = self.folder / "undisturbed"
        ignored = shutil.ignore_patterns("undisturbed", "queue_of_jobs", "runs")
        shutil.copytree(self.folder, folder, ignore=ignored)
        words = [sys.executable, *shlex.split(self.program.plain)]
        surroundings = {"cwd": folder, "env": {**self.environ, "OUTPUT": "out"}}
        return learned(
            subprocess.run(words, capture_output=True, text=True, check=True, **surroundings)
        )

    def start(self, event):
        self.environ |= {"EVENT": event, "READY_FILE": str(self.ready)}
        options = shlex.split(f"{self.program.options} {OWN}")
        if event == "hang":
            options.append("stall_timeout_minutes=0.04")
        command = shlex.split(self.program.command)
        if command[0] not in ("sh", "env"):
            command.insert(0, "python")
        return self.scripts.start(*options, "--", *command)

    def ends(self, event, code=0):
        return self.scripts.world.end(self.start(event), code)

    def is_sent(self, signum, code):
        """Signal the launcher once the program trains; return how it has ended."""
        process = self.start("wait")
        pid = int(wait_for_text(self.ready, "it trains"))
        process.send_signal(signum)
        ended = self.scripts.world.end(process, code)
        wait_until(lambda: not is_running(pid), "the program is gone")
        return ended

    def resumed(self, ended):
        return ended.attempts[-1]["resumed_from"] is not None


def learned(ended):
    lines = [line for line in ended.stdout.splitlines() if line.startswith("result ")]
    return [float(word) for word in lines[-1].split()[1:]]


def out_of_memory(case):
    ended = case.ends("out of memory")
    sizes = [attempt["effective_batch_size"] for attempt in ended.attempts]
    if case.name == "catches":
        assert sizes == [16], "what a program handles itself is its own affair"
    elif case.program.keeps:
        assert sizes == [16, 16]
        assert [attempt["batch_size"] for attempt in ended.attempts] == [16, 8]
    else:
        assert sizes == [16, 8]
        assert "the effective batch size is now 8 instead of 16" in ended.stdout
    return ended


def killed(case):
    ended = case.ends("kill")
    assert [a["outcome"] for a in ended.attempts] == ["interrupted", "completed"]
    return ended


def child_killed(case):
    ended = case.ends("kill of a child")
    assert len(ended.attempts) == 2
    return ended


def hang(case):
    ended = case.ends("hang")
    assert "stalled" in ended.attempts[0]["message"]
    return ended


def launcher_killed(case):
    case.is_sent(signal.SIGKILL, -signal.SIGKILL)
    return case.ends("wait")


def stop(case):
    ended = case.is_sent(signal.SIGINT, 130)
    saves = case.program.saves or case.program.stop_saves
    assert (ended.summary["checkpoint"] is not None) == saves
    return case.ends("wait")


EVENTS = {
    "out of memory": out_of_memory,
    "kill": killed,
    "kill of a child": child_killed,
    "hang": hang,
    "kill of the launcher": launcher_killed,
    "stop": stop,
}
FAST = {
    ("bars", "stop"),
    ("no accumulation", "out of memory"),
    ("overwrites", "kill of the launcher"),
    ("folders", "kill"),
    ("folders", "stop"),
    ("own Ctrl-C", "stop"),
    ("spawns", "kill of a child"),
}


def can_happen(name, event):
    if event == "out of memory":
        return name not in HAVE_NO_BATCH
    if event == "kill of a child":
        return name in HAVE_CHILDREN
    return name != "torchrun inside" or event not in ("kill", "hang")


@pytest.fixture
def scripts(world):
    """A folder to run programs in, on a machine without a GPU."""
    return CommandWorld(world)


@pytest.mark.parametrize(
    ("name", "event"),
    [
        pytest.param(name, event, marks=() if (name, event) in FAST else pytest.mark.slow)
        for name in PLACES
        for event in EVENTS
        if can_happen(name, event)
    ],
)
def test_trouble_does_not_change_what_programs_learn(scripts, name, event):
    case = Case(scripts, name)
    expected = case.undisturbed()
    ended = EVENTS[event](case)
    program = case.program
    same = learned(ended) == pytest.approx(expected, rel=1e-9)
    assert same == (program.keeps or event != "out of memory")
    if event != "out of memory" or name != "catches":
        by_stop = event == "stop" and program.stop_saves
        assert case.resumed(ended) == (program.saves or by_stop), ended.output
        if not case.resumed(ended):
            assert "from the last checkpoint" not in ended.stdout


def test_an_incomplete_first_folder_is_never_resumed(scripts):
    """It was cut off."""
    case = Case(scripts, "folders")
    case.program = replace(case.program, command=f"{case.program.command} --every 8")

    ended = killed(case)

    assert "may lack files and is not used" in ended.output
    assert not case.resumed(ended)


@pytest.mark.parametrize(
    "name",
    [name if name == "bars" else pytest.param(name, marks=pytest.mark.slow) for name in PLACES],
)
def test_a_programs_bug_is_not_retried(scripts, name):
    ended = Case(scripts, name).ends("bug", 1)
    assert len(ended.attempts) == 1
    assert re.search(r"KeyError: 'learning_rte'", ended.output)
