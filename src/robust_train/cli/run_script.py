"""``robust-train run [OPTIONS] -- PROGRAM [ARGUMENT …]``: a script under the launcher.

The command's own process becomes the launcher.
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
    from robust_train.config.schema import RobustConfig

log = logging.getLogger("robust_train")
BATCH = "training.batch_size"

_INDENTED = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="  ")
EPILOG = f"""
placeholders in the program's arguments, --resume-argv and --checkpoint:
{_INDENTED.fill(" ".join("{" + name + "}" for name in PLACEHOLDERS))}
The script has the same in variables: ROBUST_TRAIN_BATCH_SIZE and so on.

exit codes: 0 completed, 1 the script failed, 2 wrong usage or configuration,
75 no device in time, 76 three launches without progress,
129/130/143 stopped by SIGHUP, Ctrl-C, SIGTERM
"""


_OPTIONS = {option.key: option.names[0] for option in COMMANDS["run"].options if option.key} | {
    "trainer.argv": "PROGRAM"
}
"""The option for each key that an option can set."""


def run(arguments: Namespace) -> int:
    """Run the script to its end. Returns the job's exit code."""
    if not arguments.program:
        raise UsageError(
            "no program to run; write it after the options: robust-train run --batch-size 128 "
            "python train.py --batch_size {batch_size}"
        )
    values = values_of(arguments)
    from robust_train.children.interpreters import discard_early, start_early
    from robust_train.host.job_logging import logged_to_screen

    start_early()
    try:
        with logged_to_screen():
            return _run(arguments, values)
    finally:
        discard_early()


def values_of(arguments: Namespace) -> dict[str, Json]:
    """Return the values that the options and the program set, by key, without the overrides.

    Raises UsageError if they do not describe a job.
    """
    values: dict[str, Json] = {}
    for full_key, name in _OPTIONS.items():
        key, _, of_flag = full_key.partition("=")
        given = vars(arguments)[name.strip("-").lower().replace("-", "_")]
        if not given and (key, given) != ("device", ""):
            continue
        if _gives(arguments, key):
            raise UsageError(f"{name} and {key}=… say the same; leave one out")
        values[key] = of_flag == "true" if of_flag else given
    if "trainer.resume_argv" in values:
        try:
            resume = shlex.split(arguments.resume_argv)
        except ValueError as error:
            problem = f"--resume-argv {arguments.resume_argv!r}: {error}"
            raise UsageError(problem) from error
        values["trainer.resume_argv"] = resume
    used = {name for word in arguments.program for name in placeholders_in(word)}
    is_used = "learning_rate" in used
    rate = "training.lr"
    if is_used and not (rate in values or _gives(arguments, rate)):
        raise UsageError("{learning_rate} is used but not given; add --learning-rate LR")
    if "trainer.scale_learning_rate" in values and not is_used:
        raise UsageError(
            "--scale-learning-rate: reaches the script by {learning_rate} only, which its command "
            "lacks; add --learning-rate LR and, as in train.py, --lr {learning_rate}"
        )
    values |= _batch_sizes(arguments, used)
    # One call escapes all of them, and reaches the words in lists too.
    words: dict[str, Json] = json.loads(literal(json.dumps(values)))
    return words


def _gives(arguments: Namespace, key: str) -> bool:
    """Return whether an override before the program gives this key."""
    return any(each.lstrip("+").startswith(f"{key}=") for each in arguments.overrides)


def _batch_sizes(arguments: Namespace, used: Collection[str]) -> dict[str, Json]:
    """Return the sizes that follow from those that are given."""
    size = arguments.batch_size
    least = arguments.min_batch_size
    if size is None and not _gives(arguments, BATCH):
        sizes = {"batch_size", "effective_batch_size", "min_batch_size"}
        if sizes.intersection(used) or least is not None:
            raise UsageError("the batch size is used but not given; add --batch-size N")
        # the script has a batch size of its own, so a smaller one of ours would change nothing
        return {BATCH: 1, "min_batch_size": 1}
    if least is not None or _gives(arguments, "min_batch_size"):
        return {}
    is_number = (size or "").isdecimal()
    return {"min_batch_size": min(4, int(size))} if is_number else {}


def _run(arguments: Namespace, values: dict[str, Json]) -> int:
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
        # it locks the run folder; until then nothing is written, because a live job may hold it
        job = Job(plan, make_driver(plan), show_end=functools.partial(show_end, print_failure))
        _log_into(plan.run_dir)
        for warning in _warnings(arguments, config, plan.values_used):
            log.warning("%s", warning)
        if arguments.resume_argv and "checkpoint" not in plan.values_used:
            log.info(
                "--resume-argv has no {checkpoint}: the script finds its newest checkpoint itself"
            )
        try:  # Hydra does the same.
            (plan.run_dir / ".hydra").mkdir(exist_ok=True)
            OmegaConf.save(cfg, plan.run_dir / ".hydra" / "config.yaml")
        except OSError as error:  # a full disk costs the record only
            log.warning("cannot write %s: %s", plan.run_dir, error.strerror)
        return exit_code_of(job.run())
    except JobInterrupted as error:
        return error.exit_code
    except refusals.REFUSALS as error:
        line = refusals.explain(error, "robust", overrides)
        print(_in_options(line, arguments), file=sys.stderr)
        if job is not None and arguments.run_dir is None:
            remove_refused(job.plan.run_dir)
        return refusals.exit_code_of(error)


def _in_options(line: str, arguments: Namespace) -> str:
    """Return a refusal that names options instead of keys which the user did not write."""
    for key, option in _OPTIONS.items():
        if not _gives(arguments, key):
            line = re.sub(rf"(?<![\w.{{-]){re.escape(key)}(?=[=:])", option, line)
    return line


def _warnings(arguments: Namespace, config: RobustConfig, used: Collection[str]) -> Iterator[str]:
    """Yield what the command line asks for and the script does not get."""
    by_key = _gives(arguments, BATCH)
    if (arguments.batch_size or by_key) and "batch_size" not in used:
        option = BATCH if by_key else f"--batch-size {arguments.batch_size}"
        yield (
            f"{option} is not in the script's command, so unless the script reads "
            "robust_train.current_run().batch_size its batch is its own and is not halved: write "
            "{batch_size} in the command; for a script that reads a variable it is "
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
            "bash -o pipefail -c in front, or leave tee out, since attempt-<n>.log has the output"
        )
    if arguments.checkpoint and not arguments.resume_argv and "checkpoint" not in used:
        yield (
            "--checkpoint alone gives the script nothing, so an attempt starts from the beginning "
            "unless the script finds its checkpoint itself or reads ROBUST_TRAIN_CHECKPOINT: add "
            "--resume-argv '--resume {checkpoint}'"
        )


def _log_into(run_dir: Path) -> None:
    """Log to a file as well, as ``train_robust.py`` does."""
    from robust_train.host.job_logging import lose_lines_quietly
    from robust_train.host.loggers import ShortLines

    try:
        handler = logging.FileHandler(run_dir / "train_robust.log")
    except OSError as error:
        log.warning("cannot write a log into %s: %s", run_dir, error.strerror)
        return
    handler.setFormatter(ShortLines())
    logging.getLogger().addHandler(handler)
    lose_lines_quietly()
