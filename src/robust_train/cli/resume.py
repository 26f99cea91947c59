"""``robust-train resume``: resumes a job or a sweep with the command that started it.

Each run and sweep folder records that command, and ``exec`` replaces this process with it. With
``--all``, the commands of several jobs start in the background.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path

from robust_train.children.detach import OUTPUT_FILE, find_logout_protection
from robust_train.cli.command import Answer
from robust_train.cli.commands import COMMANDS
from robust_train.cli.main import OVERRIDE, split_program
from robust_train.folder.lock import is_alive
from robust_train.folder.requests import SWEEP_FILE
from robust_train.folder.resume_command import (
    arguments_of_run,
    folder_override,
    key_of,
    with_overrides,
)
from robust_train.folder.run_list import DIED, KnownRun, choose_run, find_runs, sweep_at
from robust_train.folder.state import STATE_FILE
from robust_train.gpu.processes import user_name
from robust_train.model.errors import EXIT_TRY_LATER, NotDoneError
from robust_train.sweep.record import read_table

UNIT = """
a unit that resumes your jobs whenever the host starts
(~/.config/systemd/user/robust-train-resume.service):

  [Unit]
  Description=Resume jobs of robust-train
  [Service]
  Type=oneshot
  RemainAfterExit=yes
  KillMode=process
  ExecStart=/path/to/your/environment/bin/robust-train resume --all
  [Install]
  WantedBy=default.target

  systemctl --user enable robust-train-resume; loginctl enable-linger
"""


def resume(arguments: Namespace) -> Answer:
    """Replace this process with the command that resumes a job or sweep.

    With ``--all``, start in the background the commands of all jobs that the user did not stop.
    """
    which = arguments.which
    overrides = list(arguments.overrides)
    if arguments.all:
        if which:
            raise NotDoneError(f"--all or {which}, not both")
        return _resume_all()
    # The first word may be an override. But the folders of a sweep may look like overrides too.
    if which and OVERRIDE.match(which) and not os.path.lexists(which):
        overrides.insert(0, which)
        which = None
    for word in overrides:
        if not OVERRIDE.match(word):
            raise NotDoneError(f"{word}: not KEY=VALUE; name one run at most")
    sweep = sweep_at(which)
    if sweep is not None:
        folder = sweep
        command = _command_of_sweep(sweep)
    else:
        run = choose_run(which, dead_too=True, command="resume")
        folder = run.run_dir
        command = _command_of_job(run)
    if overrides:
        command = _add_overrides(command, folder, overrides)
    print(command, flush=True)
    return os.execvp("sh", _shell_words(command))


def _add_overrides(command: str, folder: Path, overrides: list[str]) -> str:
    """Return the command with new values. Options of ``robust-train run`` and overrides that set
    the same keys are removed."""
    _, directory, _, *words = shlex.split(command)
    begin = arguments_of_run(words)
    if not begin:
        return with_overrides(command, folder, overrides)
    run = COMMANDS["run"]
    keys = {key_of(override) for override in overrides}
    replaced: set[str] = set()
    for option in run.options:
        if key_of(option.key) in keys:
            replaced.update(option.names)
    options, program = split_program(run, words[begin:])
    kept = []
    for word in options:
        name = word.partition("=")[0]
        if name not in replaced and key_of(word) not in keys:
            kept.append(word)
    words[begin:] = [*kept, *overrides, "--", *program]
    return f"cd {shlex.quote(directory)} && {shlex.join(words)}"


def _command_of_job(run: KnownRun) -> str:
    """Return the command that resumes a job, or its sweep if it belongs to a sweep."""
    if run.alive:
        raise NotDoneError(f"{run.id} is alive: robust-train attach {run.id} shows it")
    if not run.is_unfinished:
        raise NotDoneError(f"{run.id} has completed: nothing is left to do")
    for folder in run.run_dir.parents:
        if (folder / SWEEP_FILE).is_file():
            return _command_of_sweep(folder)
    _refuse_file_of_other_user(run.run_dir / STATE_FILE)
    if run.state is None or run.state.resume_command is None:
        raise NotDoneError(
            f"{run.id} has no command to repeat: it was a call of launch(), its ranks were started "
            "by an engine such as torchrun, or the command contained a secret or a line break, "
            f"which is not kept; repeat it yourself with the run folder {run.run_dir}"
        )
    return run.state.resume_command


def _refuse_file_of_other_user(file: Path) -> None:
    """Refuse to run a command from another user's file, because it could be any command.

    Raises:
        NotDoneError: the file belongs to another user.
    """
    if file.exists() and (owner := file.stat().st_uid) != os.geteuid():
        who = user_name(owner)
        raise NotDoneError(
            f"{file.parent}: {who} started this, and resuming runs a command of the folder, so "
            f"only {who} can"
        )


def _command_of_sweep(folder: Path) -> str:
    """Return the command that resumes a sweep."""
    _refuse_file_of_other_user(folder / SWEEP_FILE)
    table = read_table(folder)
    has_ended = table is None or table.exit_code is not None
    if is_alive(folder, has_ended=has_ended):
        raise NotDoneError(f"{folder}: this sweep is alive")
    if table is None or table.resume_command is None:
        raise NotDoneError(
            f"{folder}: {SWEEP_FILE} names no command, for example because it contained a secret; "
            f"repeat it yourself with hydra.sweep.dir={folder}"
        )
    if table.exit_code == 0:
        raise NotDoneError(f"{folder}: this sweep has completed: nothing is left to do")
    here = folder_override("hydra.sweep.dir", folder.resolve())
    if here not in shlex.split(table.resume_command):
        raise NotDoneError(
            f"{folder}: the sweep was started in another folder, where its command would continue; "
            f"repeat it yourself with hydra.sweep.dir={folder}"
        )
    return table.resume_command


def _resume_all() -> Answer:
    """Resume all jobs that the user did not stop, in the background."""
    # The jobs of a sweep share a command, or the reason why no command exists.
    commands: dict[str, KnownRun] = {}
    problems: dict[str, KnownRun] = {}
    for run in find_runs():
        if run.alive or not run.is_here or not _should_resume(run):
            continue
        try:
            commands.setdefault(_command_of_job(run), run)
        except NotDoneError as problem:
            problems.setdefault(str(problem), run)
    resumed = []
    for command, run in commands.items():
        try:
            _start(command, run.run_dir / OUTPUT_FILE)
        except OSError as problem:
            # The other jobs are still resumed.
            problems[str(problem)] = run
        else:
            resumed.append(run)
    lines = [f"{run.id} resumes in the background; {run.run_dir}" for run in resumed]
    lines.append("robust-train ps shows them" if resumed else "there is nothing to resume")
    warnings = [f"{run.id} is not resumed: {why}" for why, run in problems.items()]
    return Answer({"resumed": [run.id for run in resumed]}, lines, warnings)


def _should_resume(run: KnownRun) -> bool:
    """Return whether a job was killed, was ended by a signal of the system, or found no device."""
    state = run.state
    if run.status == DIED or state is None:
        return run.status == DIED
    if state.state == "interrupted":
        return not state.was_asked_to_end
    return state.exit_code == EXIT_TRY_LATER


def _start(command: str, output: Path) -> None:
    """Start a command that outlives this process and the user's session."""
    prefix, _ = find_logout_protection()
    with output.open("ab") as file:
        subprocess.Popen(
            [*prefix, *_shell_words(command)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _shell_words(command: str) -> list[str]:
    """Return a command line that runs ``command`` in a shell. The job replaces the shell (``exec``)
    so that it receives the signals and sets the exit code."""
    # The command is "cd FOLDER && …".
    _, folder, _, *words = shlex.split(command)
    return ["sh", "-c", f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"]
