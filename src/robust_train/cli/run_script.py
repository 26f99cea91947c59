"""Runs a script under the launcher: ``robust-train run [OPTIONS] -- PROGRAM [ARGUMENT …]``.

The options become values of config keys, and PROGRAM becomes ``trainer.argv``. The command's own
process becomes the launcher.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shlex
import sys
import textwrap
from argparse import Namespace
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import UsageError
from robust_train.cli.commands import COMMANDS
from robust_train.config.placeholders import PLACEHOLDERS, literal, placeholders_in
from robust_train.model.events import Json

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from robust_train.config.schema import RobustConfig

log = logging.getLogger("robust_train")
BATCH = "training.batch_size"

_INDENTED = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="  ")
EPILOG = f"""
placeholders in the program's arguments, --resume-argv and --checkpoint:
{_INDENTED.fill(" ".join("{" + name + "}" for name in PLACEHOLDERS))}
The script has the same values in variables: ROBUST_TRAIN_BATCH_SIZE and so on.

exit codes: 0 completed, 1 the script failed, 2 wrong usage or configuration,
75 no device in time, 76 three launches without progress,
129/130/143 stopped by SIGHUP, Ctrl-C, SIGTERM
"""


# The option that sets a key, by key. For a flag, the key includes a value, as in `detach=true`.
_OPTIONS = {option.key: option.names[0] for option in COMMANDS["run"].options if option.key}
_OPTIONS["trainer.argv"] = "PROGRAM"


def run(arguments: Namespace) -> int:
    """Run a job of the script, and return the job's exit code."""
    if not arguments.program:
        raise UsageError(
            "no program to run; write it after the options: robust-train run --batch-size 128 "
            "python train.py --batch_size {batch_size}"
        )
    values = values_of(arguments)
    from robust_train.children.interpreters import discard_early, start_early
    from robust_train.host.job_logging import log_to_screen

    start_early()
    try:
        with log_to_screen():
            return _run_job(arguments, values)
    finally:
        discard_early()


def values_of(arguments: Namespace) -> dict[str, Json]:
    """Return the values that the options and the program set, by key, without the overrides.

    Raises:
        UsageError: the options contradict each other or the program.
    """
    values: dict[str, Json] = {}
    for key_or_override, name in _OPTIONS.items():
        key, _, value_of_flag = key_or_override.partition("=")
        value = vars(arguments)[name.strip("-").lower().replace("-", "_")]
        # An empty --device is passed on, so that the job refuses it.
        is_empty_device = key == "device" and value == ""
        if not value and not is_empty_device:
            continue
        if _has_override(arguments, key):
            raise UsageError(f"{name} and {key}=… say the same; leave one out")
        values[key] = value_of_flag == "true" if value_of_flag else value
    if "trainer.resume_argv" in values:
        try:
            resume = shlex.split(arguments.resume_argv)
        except ValueError as error:
            problem = f"--resume-argv {arguments.resume_argv!r}: {error}"
            raise UsageError(problem) from error
        values["trainer.resume_argv"] = resume
    used = {name for word in arguments.program for name in placeholders_in(word)}
    _check_learning_rate(arguments, values, used)
    values |= _default_batch_sizes(arguments, used)
    # Escaped as JSON text, so that one call also reaches the words in lists.
    escaped: dict[str, Json] = json.loads(literal(json.dumps(values)))
    return escaped


def _has_override(arguments: Namespace, key: str) -> bool:
    """Return whether an override before the program sets this key."""
    return any(word.lstrip("+").startswith(f"{key}=") for word in arguments.overrides)


def _check_learning_rate(
    arguments: Namespace, values: dict[str, Json], used: Collection[str]
) -> None:
    """Refuse a learning rate that does not reach the script, or is used but not given.

    Raises:
        UsageError: the options do not fit the program's placeholders, ``used``.
    """
    is_used = "learning_rate" in used
    is_given = "training.lr" in values or _has_override(arguments, "training.lr")
    if is_used and not is_given:
        raise UsageError("{learning_rate} is used but not given; add --learning-rate LR")
    if "trainer.scale_learning_rate" in values and not is_used:
        raise UsageError(
            "--scale-learning-rate: reaches the script by {learning_rate} only, which its command "
            "lacks; add --learning-rate LR and, as in train.py, --lr {learning_rate}"
        )


def _default_batch_sizes(arguments: Namespace, used: Collection[str]) -> dict[str, Json]:
    """Return the batch sizes that the options leave open.

    Raises:
        UsageError: the program uses a batch size that is not given.
    """
    size = arguments.batch_size
    smallest = arguments.min_batch_size
    if size is None and not _has_override(arguments, BATCH):
        placeholders = {"batch_size", "effective_batch_size", "min_batch_size"}
        if placeholders.intersection(used) or smallest is not None:
            raise UsageError("the batch size is used but not given; add --batch-size N")
        # The script has its own batch size, so a smaller size of ours would change nothing.
        return {BATCH: 1, "min_batch_size": 1}
    if smallest is not None or _has_override(arguments, "min_batch_size"):
        return {}
    if size is None or not size.isdecimal():
        return {}
    return {"min_batch_size": min(4, int(size))}


def _run_job(arguments: Namespace, values: dict[str, Json]) -> int:
    """Run the job, and return its exit code. If the job is refused, print the reason."""
    from omegaconf import OmegaConf

    from robust_train.attempt.script.check import check_command
    from robust_train.children import detach
    from robust_train.cli.jobs import exit_code_of
    from robust_train.config import refusals
    from robust_train.config.checks import checked, hide_urls
    from robust_train.entry import plan_launch
    from robust_train.folder.hydra_state import remove_refused
    from robust_train.launcher.driver import make_driver
    from robust_train.launcher.job import Job
    from robust_train.model.errors import JobInterrupted
    from robust_train.report.narration import print_failure, show_end

    job = None
    overrides = ["trainer=command", *arguments.overrides]
    try:
        cfg = refusals.composed(overrides)
        for key, value in values.items():
            OmegaConf.update(cfg, key, value)
        hide_urls(cfg)
        config = checked(cfg)
        check_command(config)
        if detach.must_detach(config):
            return detach.start()
        plan = plan_launch(None, cfg, arguments.run_dir)
        # Creating the job locks the run folder. Until then nothing may be written into it, because
        # another job may hold it.
        job = Job(plan, make_driver(plan), show_end=functools.partial(show_end, print_failure))
        _log_into(plan.run_dir)
        for warning in _warnings(arguments, config, plan.values_used):
            log.warning("%s", warning)
        if arguments.resume_argv and "checkpoint" not in plan.values_used:
            log.info(
                "--resume-argv has no {checkpoint}: the script finds its newest checkpoint itself"
            )
        _save_config(cfg, plan.run_dir)
        return exit_code_of(job.run())
    except JobInterrupted as error:
        return error.exit_code
    except refusals.REFUSALS as error:
        line = refusals.explain(error, "robust", overrides)
        print(_name_options(line, arguments), file=sys.stderr)
        if job is not None and arguments.run_dir is None:
            remove_refused(job.plan.run_dir)
        return refusals.exit_code_of(error)


def _save_config(cfg: DictConfig, run_dir: Path) -> None:
    """Save the config in the run folder, in the place where Hydra saves it for other jobs."""
    from omegaconf import OmegaConf

    try:
        (run_dir / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(cfg, run_dir / ".hydra" / "config.yaml")
    except OSError as error:
        # On a full disk, only this record is lost.
        log.warning("cannot write %s: %s", run_dir, error.strerror)


def _name_options(line: str, arguments: Namespace) -> str:
    """Return a refusal with options instead of keys, except for keys that the user wrote."""
    for key, option in _OPTIONS.items():
        if not _has_override(arguments, key):
            line = re.sub(rf"(?<![\w.{{-]){re.escape(key)}(?=[=:])", option, line)
    return line


def _warnings(arguments: Namespace, config: RobustConfig, used: Collection[str]) -> Iterator[str]:
    """Yield a warning for each value of the command line that does not reach the script."""
    is_override = _has_override(arguments, BATCH)
    if (arguments.batch_size or is_override) and "batch_size" not in used:
        option = BATCH if is_override else f"--batch-size {arguments.batch_size}"
        yield (
            f"{option} is not in the script's command, so unless the script reads "
            "robust_train.current_run().batch_size its batch is its own and is not halved: write "
            "{batch_size} in the command; for a script that reads a variable, write "
            "env BATCH_SIZE={batch_size} python train.py"
        )
    steps = config.training.gradient_accumulation_steps
    if steps > 1 and "gradient_accumulation_steps" not in used:
        yield (
            f"gradient accumulation {steps} is not in the script's command, so unless the script "
            "reads robust_train.current_run().gradient_accumulation_steps it makes an optimizer "
            "step of each micro-batch: write {gradient_accumulation_steps} in the command"
        )
    text = " ".join(arguments.program)
    if re.search(r"\|&?\s*tee\b", text) and "pipefail" not in text:
        yield (
            "the script's exit code is that of tee, so its failures are not seen: write "
            "bash -o pipefail -c in front, or leave tee out, because attempt-<n>.log has the output"
        )
    if arguments.checkpoint and not arguments.resume_argv and "checkpoint" not in used:
        yield (
            "--checkpoint alone gives the script nothing, so an attempt starts from the beginning "
            "unless the script finds its checkpoint itself or reads ROBUST_TRAIN_CHECKPOINT: add "
            "--resume-argv '--resume {checkpoint}'"
        )


def _log_into(run_dir: Path) -> None:
    """Log to ``train_robust.log`` in the run folder as well, like ``train_robust.py``."""
    from robust_train.host.job_logging import drop_lines_on_full_disk
    from robust_train.host.loggers import ShortLines

    try:
        handler = logging.FileHandler(run_dir / "train_robust.log")
    except OSError as error:
        log.warning("cannot write a log into %s: %s", run_dir, error.strerror)
        return
    handler.setFormatter(ShortLines())
    logging.getLogger().addHandler(handler)
    drop_lines_on_full_disk()
