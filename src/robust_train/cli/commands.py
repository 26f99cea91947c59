"""The table of the commands of ``robust-train``.

``cli/main.py`` finds a command here, and builds the help and the shell completion from the table.
Each command names its function by a string, ``module:function`` in ``cli/``. So the table imports
nothing that only a command needs, and ``--help`` answers at once.
"""

from __future__ import annotations

from robust_train.cli.command import Command, converter, flag, option

_JSON = flag("--json", help="print JSON for programs; sizes in bytes")
_RUN = option("--run", metavar="ID|PATH|PID", help="which run; default: your only live one")
_WHICH_HELP = (
    "id, run folder, sweep folder or job name; default: your only live job, else the last job "
    "of this directory"
)
_WHICH = option("which", nargs="?", metavar="RUN", help=_WHICH_HELP)
_AMOUNT = converter(int, lambda n: n >= 0, "an integer of 0 or more")
_DAYS = converter(float, lambda n: n >= 0, "a number of 0 or more")
_SHARE = converter(float, lambda n: 0 < n <= 1, "a number over 0, up to 1")
_FOLDER = option("path", metavar="FOLDER", help="a sweep folder")
_YES = flag("--yes", "-y", help="do not ask")
_QUEUE_DIR = option("--dir", help="the queue directory, as in gpu_queue=PATH")
_FORCE = flag(
    "--force", help="also collect unreachable objects, and name the objects that still hold memory"
)

_STARTING = (
    Command(
        "train",
        "train a job, or with -m a sweep",
        "train:train",
        (option("overrides", nargs="*", metavar="KEY=VALUE"),),
        parses_itself=True,
    ),
    Command(
        "run",
        "run a script in any language",
        "run_script:run",
        (
            option(
                "--batch-size",
                key="training.batch_size",
                metavar="N",
                help="micro-batch size of the first attempt; auto: the largest that fits",
            ),
            option(
                "--gradient-accumulation",
                key="training.gradient_accumulation_steps",
                metavar="N",
                help="micro-batches per optimizer step (1)",
            ),
            option(
                "--min-batch-size",
                key="min_batch_size",
                metavar="N",
                help="smallest micro-batch size to try (4)",
            ),
            flag(
                "--keep-effective-batch",
                key="preserve_effective_batch_size=true",
                help="stop if the script cannot make up for a smaller micro-batch",
            ),
            option(
                "--learning-rate",
                key="training.lr",
                metavar="LR",
                help="the value of {learning_rate} in the first attempt",
            ),
            option(
                "--scale-learning-rate",
                key="trainer.scale_learning_rate",
                choices=("linear", "sqrt"),
                help="how {learning_rate} follows an effective batch that cannot be kept",
            ),
            option(
                "--min-gpu-memory-mb",
                key="min_gpu_memory_mb",
                metavar="MIB",
                help="memory that must be free on a GPU",
            ),
            option(
                "--max-retries",
                key="max_retries",
                metavar="N",
                help="smaller micro-batches to try on one device (3)",
            ),
            option(
                "--device",
                key="device",
                metavar="DEVICE",
                help="cpu, cuda:1 or a GPU's UUID instead of the best GPU",
            ),
            flag("--no-wait", key="wait_for_gpu=false", help="do not wait for a GPU"),
            flag("--no-cpu", key="allow_cpu_fallback=false", help="never fall back to the CPU"),
            flag("--detach", key="detach=true", help="continue in the background, past logout"),
            option(
                "--name", key="job_name", help="job name in queue and tables (the script's name)"
            ),
            option(
                "--run-dir", metavar="DIR", help="run folder; an unfinished job in it is resumed"
            ),
            option(
                "--checkpoint",
                key="trainer.checkpoint_glob",
                metavar="GLOB",
                help="the script's own checkpoints, such as 'ckpt/*.pt'",
            ),
            option(
                "--resume-argv",
                key="trainer.resume_argv",
                metavar="ARGUMENTS",
                help="append these if there is a checkpoint, such as '--resume {checkpoint}'",
            ),
            option(
                "--stop-signal",
                key="trainer.stop_signal",
                choices=("TERM", "INT", "USR1"),
                help="the signal that asks the script to stop, for example at Ctrl-C (TERM)",
            ),
            option(
                "overrides",
                nargs="*",
                metavar="KEY=VALUE",
                help="any other key of configs/robust.yaml",
            ),
        ),
        about="Run a script in any language on the best GPU, and wait for a GPU if necessary. If "
        "memory runs out, start the script again with a smaller batch.",
        epilog="run_script:EPILOG",
        takes_program=True,
    ),
    Command(
        "resume",
        "resume a job or sweep that has ended",
        "resume:resume",
        (
            option("which", nargs="?", metavar="RUN", help=_WHICH_HELP),
            option("overrides", nargs="*", metavar="KEY=VALUE", help="new values from now on"),
            flag("--all", help="resume all jobs that you did not stop, in the background"),
        ),
        about="Resume a job, script or sweep by its own command, in its own working directory, "
        "with the environment of this command. --all: for example after a reboot, resume all jobs "
        "that were killed or were ended by a signal of the system. On a host with systemd, "
        "robust-train completion --help shows a unit that does this at each start.",
    ),
    Command(
        "init",
        "write a new project that trains at once",
        "init:write_project",
        (option("dir", metavar="DIR", help="created if necessary; nothing is overwritten"),),
    ),
)

_WATCHING = (
    Command(
        "ps",
        "list your jobs, live and past",
        "ps:list_jobs",
        (
            option("which", nargs="?", metavar="SWEEP", help="a sweep folder: list its jobs"),
            _JSON,
            flag("--paths", help="show whole paths, however long the lines are"),
            flag("--all", help="not only the newest 20, and also jobs that were refused"),
            flag("--live", help="only jobs that are alive"),
        ),
    ),
    Command(
        "status",
        "show the state of a job",
        "runs:status",
        (_WHICH, _JSON),
        about="Show the state of a live job, or the last state of a job that ended: device, batch, "
        "step, loss, last checkpoint, memory.",
    ),
    Command(
        "logs",
        "print the output of a job's last attempt",
        "output:logs",
        (
            _WHICH,
            flag(
                "-f",
                "--follow",
                help="continue with new output, and with later attempts, until the job ends",
            ),
            option(
                "--attempt",
                type=int,
                metavar="N",
                help="the output of attempt N instead of the last attempt",
            ),
        ),
    ),
    Command("attach", "show a live job as its own terminal would", "output:attach", (_WHICH,)),
    Command(
        "wait",
        "wait for jobs or sweeps to end",
        "runs:wait",
        (option("which", nargs="*", metavar="RUN", help=_WHICH_HELP),),
        about="Wait for jobs or sweeps to end. The exit code is that of the first job that did not "
        "complete.",
    ),
    Command("checkpoint", "save a checkpoint at the next step", "runs:request", (_WHICH, _JSON)),
    Command(
        "halve-batch",
        "halve the micro-batch, not the effective batch",
        "runs:request",
        (_WHICH, _JSON),
    ),
    Command(
        "stop",
        "save a checkpoint and end, like SIGTERM",
        "runs:stop",
        (_WHICH, flag("--now", help="end a job that is stopping already"), _JSON),
    ),
)

_MACHINE = (
    Command(
        "sweep limit",
        "change how many jobs of a sweep run at once",
        "runs:limit",
        (_FOLDER, option("number", type=_AMOUNT, metavar="N", help="0: no more jobs start"), _JSON),
        about="Change how many jobs of a live sweep run at once, under gpu_queue or one of our "
        "sweepers. Running jobs are not stopped.",
    ),
    Command(
        "sweep best",
        "print the overrides of a sweep's best job",
        "runs:best",
        (
            _FOLDER,
            flag("--checkpoint", help="print the path of the best job's checkpoint instead"),
            flag("--minimize", help="the smallest result is the best, whatever the sweep says"),
            _JSON,
        ),
        about="Print the overrides of the sweep's best job so far, as words for a shell. If jobs "
        "were repeated, it is the best job of the overrides with the best mean. The largest result "
        "is the best, or the smallest with sweep_direction=minimize.",
    ),
    Command(
        "queue",
        "show which jobs run and wait here, and why",
        "machine:show_queue",
        (_JSON, flag("--verbose", help="show the reservations on each GPU"), _QUEUE_DIR),
        about="Show the jobs on this host: running jobs with their GPUs, and waiting jobs with "
        "their queue position (#) and the reason why they wait.",
    ),
    Command(
        "gpus",
        "show this machine's GPUs and who uses them",
        "machine:show_gpus",
        (_JSON,),
        about="Show this machine's GPUs: index, name, UUID, memory, utilization, and the processes "
        "on them.",
    ),
    Command(
        "need",
        "show how much GPU memory a job needs",
        "feature_commands:answer",
        (
            flag("--probe", help="run the program first, for ten steps, and measure it"),
            option("--batch-size", metavar="N", help="the {batch_size} of the probe run"),
            _JSON,
        ),
        about="Show how much memory a run held on its GPUs at its peak, the parts of that memory, "
        "the smallest GPU of this host that the run fits, and the micro-batch that fits each GPU. "
        "PROGRAM is the id or the folder of a run, or a command line that has run before.",
        takes_program=True,
    ),
    Command(
        "memory info", "show memory by process, and of a live run", "memory:info", (_RUN, _JSON)
    ),
    Command(
        "memory clear",
        "release memory that a live run does not use",
        "memory:request",
        (_FORCE, _RUN, _JSON),
    ),
    Command("memory reset", "reset the peaks of a live run", "memory:request", (_RUN, _JSON)),
    Command(
        "memory fraction",
        "limit a live run to a share of its device",
        "memory:request",
        (option("fraction", type=_SHARE, metavar="FRACTION", help="over 0, up to 1"), _RUN, _JSON),
    ),
    Command(
        "memory enable",
        "print shell lines for expandable segments",
        "memory:enable",
        (_JSON,),
        about='Print shell lines for later programs: eval "$(robust-train memory enable)"',
    ),
    Command(
        "memory snapshot",
        "write a live run's allocations to a file",
        "memory:request",
        (_RUN, _JSON),
    ),
    Command(
        "memory kill",
        "end your own CUDA processes",
        "memory:kill",
        (
            _YES,
            flag("--dry-run", help="only show the processes"),
            option(
                "--pid",
                type=int,
                action="append",
                default=[],
                metavar="PID",
                help="only this process (repeatable); root may name processes of other users",
            ),
            _JSON,
        ),
        about="End your own CUDA processes: SIGTERM, then SIGKILL.",
    ),
    Command(
        "doctor",
        "show which GPUs are usable, or why not",
        "doctor:doctor",
        (
            option("--include", metavar="GPU", help="use the excluded GPU with this UUID again"),
            flag(
                "--probe",
                help="on each idle GPU, allocate, run out of memory and recover, within 2 GiB and "
                "some seconds",
            ),
            _QUEUE_DIR,
            _JSON,
        ),
        about="Show for each GPU whether it is usable, or why not. Show the driver, the queue "
        "directory, excluded GPUs, and the facts that a bug report needs.",
    ),
)

_MORE = (
    Command(
        "rm",
        "remove the run folders of old jobs",
        "rm:remove_runs",
        (
            option(
                "--days",
                type=_DAYS,
                default=30.0,
                metavar="N",
                help="only of jobs that ended at least N days ago (30)",
            ),
            flag("--all", help="also of jobs that did not complete, with their checkpoints"),
            _YES,
            flag("--dry-run", help="only show the folders"),
            _JSON,
        ),
        about="Remove the run folders of jobs that completed long ago. The folders are listed "
        "first, with their age and size. A folder with files that are older than its job stays.",
    ),
    Command(
        "report",
        "write report.html of a run or sweep",
        "report:write_report",
        (
            _WHICH,
            flag("--open", help="show it in the browser"),
            flag("--cite", help="print sentences about the job for a paper instead"),
            flag("--json", help="print the data instead, for programs"),
        ),
        about="Write report.html of a run or a sweep from its journals, while it runs, after it "
        "has ended, or after it died.",
    ),
    Command(
        "notify test",
        "send a notification as a job would",
        "notify:send_test",
        (
            option(
                "overrides",
                nargs="*",
                metavar="KEY=VALUE",
                help="notify.command=… and notify.urls=…",
            ),
        ),
        about="Send one notification, as a job with the same keys and $ROBUST_TRAIN_NOTIFY_URLS "
        "would.",
    ),
    Command(
        "completion",
        "print shell completion for bash and zsh",
        "completion:print_script",
        about="Print a script that completes commands, keys, choices and jobs in bash and zsh.",
        epilog="resume:UNIT",
    ),
)

GROUPS = {"start": _STARTING, "watch": _WATCHING, "machine": _MACHINE, "more": _MORE}
"""The commands as ``--help`` lists them."""

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}

OTHER_NAMES = {
    "tail": "logs -f",
    "log": "logs",
    "follow": "attach",
    "watch": "attach",
    "ls": "ps",
    "list": "ps",
    "jobs": "ps",
    "runs": "ps",
    "show": "status",
    "info": "status",
    "result": "status",
    "kill": "stop",
    "cancel": "stop",
    "pause": "stop",
    "delete": "rm",
    "remove": "rm",
    "clean": "rm",
    "continue": "resume",
    "restart": "resume",
    "cite": "report --cite",
    "start": "run",
    "exec": "run",
    "launch": "run",
    "nvidia-smi": "gpus",
    "check": "doctor",
}
"""Suggestions for names of commands that other tools have. The most similar name would be wrong:
``tail`` resembles ``train``."""


def members_of(group: str) -> dict[str, Command]:
    """Return the commands whose first word is ``group``, by their second word."""
    return {
        name.partition(" ")[2]: command
        for name, command in COMMANDS.items()
        if name.startswith(f"{group} ")
    }
