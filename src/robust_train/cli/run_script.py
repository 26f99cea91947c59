"""``robust-train run [OPTIONS] -- PROGRAM [ARGUMENT …]``: a script under the launcher."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli.main import OF_LIVE_RUNS
from robust_train.cli.output import Parser
from robust_train.config.names import name_of_program
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.events import Json
from robust_train.script.placeholders import PLACEHOLDERS, literal, placeholders_in

log = logging.getLogger("robust_train")

_EPILOG = f"""
live runs: robust-train run {" | ".join(OF_LIVE_RUNS)} [--run ID|PATH|PID] [--json]

placeholders in the program's arguments, the resume arguments and the checkpoint pattern:
  {" ".join("{" + name + "}" for name in PLACEHOLDERS[:4])}
  {" ".join("{" + name + "}" for name in PLACEHOLDERS[4:])}
The script has the same in environment variables: ROBUST_TRAIN_BATCH_SIZE and so on.

exit codes: 0 completed, 1 the script failed, 2 cannot be run as asked, 75 no device in time,
76 three launches without progress, 129/130/143 stopped by SIGHUP, Ctrl-C, SIGTERM
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script to its end; return the exit code of the job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = command_parser()
    verb = "" if split < len(arguments) else "".join(arguments[:1])
    if near := difflib.get_close_matches(verb, OF_LIVE_RUNS, n=1):
        parser.error(f"{verb}: did you mean {near[0]}? To run a program: -- {verb}")
    options = parser.parse_args(arguments[:split])
    program = arguments[split + 1 :]
    if not program:
        parser.error(
            "no program to run; put -- before it: robust-train run --batch-size 128 -- "
            "python train.py --batch_size {batch_size} (live runs: "
            f"robust-train run {' | '.join(OF_LIVE_RUNS)})"
        )
    try:
        overrides = overrides_of(options, program)
        texts = _texts(options, program)
    except ValueError as error:
        parser.error(str(error))
    from robust_train.execution import at_hand
    from robust_train.execution.screen import never_blocking_output

    at_hand.warm_up(())
    try:
        with never_blocking_output():
            return _run(overrides, texts, options.run_dir)
    finally:
        at_hand.discard()


def command_parser() -> Parser:
    parser = Parser(
        prog="robust-train run",
        usage="robust-train run [OPTIONS] [KEY=VALUE …] -- PROGRAM [ARGUMENT …]",
        description="Run a script in any language: picks and waits for a GPU, and starts it again "
        "with a smaller batch when memory runs out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def number(name: str, least: int, metavar: str, meaning: str) -> None:
        def read(text: str) -> int:
            if not re.fullmatch(r"-?\d+", text) or int(text) < least:
                raise argparse.ArgumentTypeError(f"{text} is not an integer of {least} or more")
            return int(text)

        parser.add_argument(name, type=read, metavar=metavar, help=meaning)

    add = parser.add_argument
    number("--batch-size", 1, "N", "micro-batch of the first attempt")
    number("--gradient-accumulation", 1, "N", "micro-batches a step (1)")
    number("--min-batch-size", 1, "N", "never smaller than this (4)")
    number("--min-gpu-memory-mb", 0, "MIB", "free on a GPU to take it")
    number("--max-retries", 0, "N", "smaller batches tried a device (3)")
    add("--device", metavar="DEVICE", help="cpu, cuda:1 or a GPU's UUID instead of the best GPU")
    add("--no-wait", action="store_true", help="do not wait for a GPU")
    add("--no-cpu", action="store_true", help="never fall back to the CPU")
    add("--detach", action="store_true", help="go on in the background, past logout")
    add("--name", help="how queue and tables call the job (the script's name)")
    add("--run-dir", type=Path, metavar="DIR", help="run folder; an unfinished job in it goes on")
    add("--checkpoint", metavar="GLOB", help="the script's own checkpoints, as 'ckpt/*.pt'")
    resume = "appended where there is a checkpoint, as '--resume {checkpoint}'"
    add("--resume-argv", metavar="ARGUMENTS", help=resume)
    add("overrides", nargs="*", metavar="KEY=VALUE", help="any other key of configs/robust.yaml")
    return parser


def overrides_of(options: argparse.Namespace, program: Sequence[str]) -> list[str]:
    """Return the command line as overrides of ``configs/robust.yaml``; ValueError: it is no job."""
    for override in options.overrides:
        if not re.match(r"[+~]{0,2}[\w./@]+=", override):
            raise ValueError(
                f"{override}: accepted before -- are options and key=value; the program comes after"
            )
    batch_size, least = options.batch_size, options.min_batch_size
    is_given = batch_size or any(o.startswith("training.batch_size=") for o in options.overrides)
    if not is_given:
        used = set().union(*(placeholders_in(word) for word in program))
        if used & {"batch_size", "min_batch_size"} or least is not None:
            raise ValueError("the batch size is used but not given; add --batch-size N")
        batch_size = least = 1  # the script's own: no use in starting it again with less
    if batch_size is not None:
        least = min(4, batch_size) if least is None else least
        if least > batch_size:
            problem = f"--min-batch-size {least}: must not be above"
            raise ValueError(f"{problem} --batch-size {batch_size}")
    pairs = {
        "training.batch_size": batch_size,
        "training.gradient_accumulation_steps": options.gradient_accumulation,
        "min_batch_size": least,
        "min_gpu_memory_mb": options.min_gpu_memory_mb,
        "max_retries": options.max_retries,
        "auto_device": None if options.device in (None, "auto") else False,
        "wait_for_gpu": False if options.no_wait else None,
        "allow_cpu_fallback": False if options.no_cpu else None,
        "detach": True if options.detach else None,
    }
    own = [f"{key}={str(value).lower()}" for key, value in pairs.items() if value is not None]
    return ["trainer=command", *own, *options.overrides]


def _texts(options: argparse.Namespace, program: Sequence[str]) -> dict[str, Json]:
    """Return what goes into the config as it is, past the grammar of overrides; ValueError: the
    resume arguments' quotes do not match."""
    try:
        resume = shlex.split(options.resume_argv or "")
    except ValueError as error:
        raise ValueError(f"--resume-argv {options.resume_argv!r}: {error}") from None
    texts = {
        "trainer.argv": [literal(word) for word in program],
        "trainer.resume_argv": [literal(word) for word in resume] or None,
        "trainer.checkpoint_glob": options.checkpoint and literal(options.checkpoint),
        "job_name": literal(options.name or name_of_program(program)),
        "device": options.device,
    }
    return {key: value for key, value in texts.items() if value is not None}


def _run(overrides: Sequence[str], texts: dict[str, Json], run_dir: Path | None) -> int:
    from omegaconf import OmegaConf

    from robust_train import settings
    from robust_train.cli.jobs import exit_code_of, print_failure
    from robust_train.config.batch import settle
    from robust_train.config.refusals import REFUSALS, composed, explain
    from robust_train.errors import JobInterrupted
    from robust_train.launcher import Job
    from robust_train.runfolder import detach
    from robust_train.runfolder.notifier import is_secret
    from robust_train.script.command import CommandSettings

    try:
        cfg = composed(overrides)
        for key, value in texts.items():
            OmegaConf.update(cfg, key, value)
        settle(cfg.copy())
        CommandSettings.of(cfg)
        settings.hide_urls(cfg)
        if settings.detaches(cfg):
            return detach.start()
        folder = settings.run_folder(run_dir, settings.job_name(cfg, ""))
        _log_into(folder)
        shown = [override for override in overrides if not is_secret(override)]
        _keep_config(folder, OmegaConf.to_yaml(cfg), shown)
        return exit_code_of(Job(None, cfg, folder, explain=print_failure).run())
    except JobInterrupted as error:
        return error.exit_code
    except REFUSALS as error:
        print(explain(error, "robust", overrides), file=sys.stderr)
        return EXIT_BAD_CONFIG


def _keep_config(run_dir: Path, config: str, overrides: Sequence[str]) -> None:
    """Write the config as Hydra does; a full disk costs the record only."""
    folder = run_dir / ".hydra"
    try:
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(config)
        (folder / "overrides.yaml").write_text(json.dumps(list(overrides), indent=1) + "\n")
    except OSError as error:
        log.warning("cannot write %s: %s", folder, error.strerror)


def _log_into(run_dir: Path) -> None:
    """Log as Hydra has it set up for ``train_robust.py``: to the screen and to a file."""
    from robust_train.execution.hydra_state import HYDRAS_FORMAT

    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    try:
        handlers.append(logging.FileHandler(run_dir / "train_robust.log"))
    except OSError as error:
        print(f"warning: no log file in {run_dir}: {error.strerror}", file=sys.stderr)
    logging.basicConfig(level=logging.INFO, format=HYDRAS_FORMAT, handlers=handlers)
