"""A script as the trainer: what it is given, what it may tell, and what its end means."""

import json
import subprocess
import sys
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path

import pytest

import warm
from command_world import SCRIPTS, argv, script
from disks import small_disk
from robust_train.attempt.script.check import check_command
from robust_train.config.checks import checked
from robust_train.config.refusals import REFUSALS, composed, explain
from robust_train.model.attempt import Attempt
from robust_train.model.events import Progress, TrainingStarted
from robust_train.model.spec import AttemptSpec
from simulated_nvml import Gpu
from terminal_screen import showing_lines
from two_gpu_machine import A, B


def run_program(scripts, code, *options, words=(), exit_code=0):
    """Run ``train.py`` with this content and these words under ``robust-train run``."""
    (scripts.folder / "train.py").write_text(code)
    ended = scripts.run(*options, "--", sys.executable, "train.py", *words)
    return ended.with_code(exit_code)


@pytest.mark.proves("scripts", "one GPU", "new attempt")
def test_a_real_memory_shortage_halves_until_it_fits(scripts):
    """What is halved is the batch."""
    given = ("${training.batch_size}", "--accumulate", "${training.gradient_accumulation_steps}")
    words = script("hungry.py", "--batch_size", *given)
    ended = scripts.train(words, "training.batch_size=32").with_code(0)
    outcomes = [(a["outcome"], a["batch_size"]) for a in ended.attempts]
    assert outcomes == [("host_oom", 32), ("completed", 16)]
    assert "trained 16 x 2" in ended.stdout
    assert "trained 16 x 2" in (ended.run_dir / "attempt-2.log").read_text().splitlines()
    assert "MemoryError" in (ended.run_dir / "attempt-1.log").read_text()
    assert {a["effective_batch_size"] for a in ended.attempts} == {32}


NO_ACCUMULATION = """
import sys
size, rate = int(sys.argv[1]), float(sys.argv[2])
print(f"trained with {size} at {rate:g}")
if size > 16:
    raise MemoryError
"""
OF_FOUR = ("--gradient-accumulation", "4")
SAVES_NOTHING = ("--checkpoint", "none/*.pt", "--resume-argv", "--resume {checkpoint}")
NOT_GIVEN = "gradient accumulation 4 is not in the script's command"
LINEAR = ("--scale-learning-rate", "linear")


@pytest.mark.parametrize(
    ("options", "rate", "warning"),
    [
        ((), 0.4, "--keep-effective-batch"),
        (OF_FOUR, 0.4, NOT_GIVEN),
        pytest.param(LINEAR, 0.2, "rate is 0.2 instead of 0.4", marks=pytest.mark.slow),
    ],
    ids=["not scaled", "not given", "linear"],
)
def test_scripts_without_accumulation_report_their_true_batch(scripts, options, rate, warning):
    """The effective batch of a script that cannot accumulate."""
    arguments = ("--batch-size", "32", "--learning-rate", "0.4", *SAVES_NOTHING, *options)
    ended = run_program(
        scripts, NO_ACCUMULATION, *arguments, words=("{batch_size}", "{learning_rate}")
    )
    keys = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
    sizes = [tuple(a[key] for key in keys) for a in ended.attempts]
    assert sizes == [(32, 1, 32), (16, 1, 16)]
    assert "trained with 32 at 0.4" in ended.stdout
    assert f"trained with 16 at {rate}" in ended.stdout
    assert "the effective batch size is now 16 instead of 32" in ended.stdout
    assert ended.stdout.count(warning) == 1
    assert ended.stdout.count("no new file matches the pattern for checkpoints none/*.pt") == 1


BEGINS_AGAIN = """
import os, sys
first, *later = sys.argv[1].split()
for name in [first] if len(sys.argv) == 2 else later:
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name, "w").write(str(len(sys.argv)))
if len(sys.argv) == 2:
    os.kill(os.getpid(), 9)
"""
RESUMES = ("--checkpoint", "*.pt", "--resume-argv")


@pytest.mark.parametrize(
    ("names", "is_seen", "advice"),
    [
        ("model-2.pt model-1.pt/trainer_state.json", True, 1),
        ("at1-loss0.52.pt at2-loss0.48.pt v1.pt", False, 0),
        pytest.param("model-2.pt model-1.pt", True, 0, marks=pytest.mark.slow),
    ],
    ids=["transformers", "continues", "another library"],
)
def test_ignored_checkpoints_show_by_new_writes(scripts, names, is_seen, advice):
    """A script that begins again next to its checkpoint is noticed by what it writes."""
    options = (*RESUMES, "--resume_from_checkpoint {checkpoint}")
    ended = run_program(scripts, BEGINS_AGAIN, *options, words=(names,))
    seen = "was given model-2.pt, but wrote model-1.pt"
    assert (seen in ended.stdout) == is_seen
    assert ended.stdout.count("trainer.train(resume_from_checkpoint=") == advice


SAVES_ON_A_FULL_DISK = """
import sys, torch
folder = sys.argv[1].partition("=")[2]
for number in range(4):
    torch.save(torch.zeros(200_000), f"{folder}/{number}.pt")
"""


def test_a_full_disk_is_named_for_torch(scripts, tmp_path):
    """What torch.save raises names neither a file nor a disk; the job waits for that one."""
    with small_disk(tmp_path / "disk", "size=1m"):
        out = (f"--out={tmp_path}/disk",)
        ended = run_program(scripts, SAVES_ON_A_FULL_DISK, "max_retries=0", words=out, exit_code=1)
    assert ended.summary["reason"].endswith(f"; no space is left in {tmp_path}/disk")
    assert "free space on the disk that the trainer writes to" in ended.output


ADDS_UP_MEANS = """
import sys
print({"loss": 0.69, "grad_norm": 1.5, "learning_rate": 1e-05, "epoch": 0.1})
if int(sys.argv[1]) > 8:
    raise MemoryError
"""


def test_transformers_summed_gradients_are_mentioned_once(scripts):
    """The line comes before the first smaller attempt."""
    words = ("{batch_size}", "{gradient_accumulation_steps}")
    ended = run_program(scripts, ADDS_UP_MEANS, "--batch-size", "32", words=words)
    first, _, rest = ended.stdout.partition("attempt 2 on the CPU")
    assert "accumulates 2 micro-batches instead of 1" in first
    assert "gradients may be 2 times as large" in first
    assert "gradients may be" not in rest


REFUSED = """
import pickle, sys
if len(sys.argv) == 1:
    open("1.pt", "wb").write(b"PK" + bytes(100))
    sys.exit(137)
raise pickle.UnpicklingError(
    "Weights only load failed. WeightsUnpickler error: Unsupported global: GLOBAL Namespace "
    "was not an allowed global by default.\\n\\nCheck the documentation of torch.load"
)
"""


def test_a_refused_checkpoint_is_named_with_help(scripts):
    """It is torch that refuses the checkpoint."""
    ended = run_program(scripts, REFUSED, *RESUMES, "{checkpoint}", exit_code=1)
    file = scripts.folder / "1.pt"
    assert f"ended with exit code 1: torch.load takes weights only, and {file}" in ended.stdout
    assert "weights_only=False" in ended.summary["reason"]
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 if a library" in ended.summary["reason"]


TELLS = """
import json, os, pathlib, pickle, signal, sys

def tell(path, **more):
    with open(os.environ["ROBUST_TRAIN_EVENTS"], "a") as events:
        print(json.dumps({"event": "checkpoint", "path": str(path), **more}), file=events)

"""
DAMAGED = """
if len(sys.argv) > 1:
    with open(sys.argv[1], "rb") as file:
        print("resumed at", pickle.load(file)["step"])
    sys.exit()
for step in (1, 2):
    whole = pickle.dumps({"weights": bytes(1000), "step": step})
    with open(f"{step}.pkl", "wb") as file:
        file.write(whole if step == 1 else whole[:500])
    tell(f"{step}.pkl")
open("3.pkl", "w").close()
tell("3.pkl")  # an empty file is no checkpoint, whoever says so
os.kill(os.getpid(), signal.SIGKILL)
"""
LACKS_A_FILE = """
if len(sys.argv) > 1:
    folder = pathlib.Path(sys.argv[1])
    sys.exit(folder.name == "step_2" and (folder / "optimizer").read_text())
for step in (1, 2):
    folder = pathlib.Path(f"step_{step}")
    folder.mkdir()
    (folder / "model").write_text("weights")
    tell(folder)
os.kill(os.getpid(), signal.SIGKILL)
"""
READS_ANOTHER = ["retry", "earlier_checkpoint", "none"]


@pytest.mark.parametrize(
    ("code", "actions", "words"),
    [
        (DAMAGED, READS_ANOTHER, ["resumed at 1", "3.pkl is empty; it is not used"]),
        (LACKS_A_FILE, READS_ANOTHER, ["step_2 cannot be read: again"]),
        pytest.param(
            DAMAGED.replace("(1, 2)", "(2,)"), ["retry", "give_up"], [], marks=pytest.mark.slow
        ),
    ],
    ids=["damaged", "a file missing in a folder", "the only one"],
)
def test_an_unreadable_checkpoint_gives_way_to_older_ones(scripts, code, actions, words):
    """The script cannot read it."""
    code, options = TELLS + code, ("--resume-argv", "{checkpoint}")
    ended = run_program(scripts, code, *options, exit_code=int(actions[-1] == "give_up"))
    assert [attempt["action"] for attempt in ended.attempts] == actions
    assert [word for word in words if word not in ended.output] == []


GOES_ON = """
import logging, sys
from pathlib import Path
from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.command import train
from robust_train.config.refusals import composed

logging.basicConfig(stream=sys.stdout)
reported = Path("2.pt").absolute()
train(composed(sys.argv[1:]), Run(run_dir=Path("run"), attempt=2, resume_checkpoint=reported))
"""


@pytest.mark.parametrize("left", [None, b"PK\x03\x04"], ids=["removed", "torn"])
def test_a_lost_checkpoint_gives_way_to_older_ones(scripts, left):
    """It is lost after the launcher has read it, and before the script starts."""
    (scripts.folder / "run").mkdir()
    (scripts.folder / "run" / "checkpoints_before.json").write_text("{}")
    (scripts.folder / "1.pt").write_text("weights")
    if left is not None:
        (scripts.folder / "2.pt").write_bytes(left)
    keys = ("trainer=command", "trainer.argv=[echo,is,given]", "trainer.checkpoint_glob='*.pt'")
    keys += ("trainer.resume_argv=['{checkpoint}']",)
    place = {"cwd": scripts.folder, "environ": scripts.world.environ}
    ended = warm.preloaded(GOES_ON, *keys, **place)
    assert f"{scripts.folder}/2.pt is missing or torn and is skipped" in ended.stdout, ended.stderr
    assert f"is given {scripts.folder}/1.pt\n" in ended.stdout


IS_STOPPED_LATE = """
import sys
from pathlib import Path
from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.command import train
from robust_train.config.refusals import composed
from robust_train.model.events import ScriptEnded

def report(event):
    if isinstance(event, ScriptEnded):
        live_of(run).stops.request_stop()

run = Run(run_dir=Path("run"), report=report)
print("result", train(composed(sys.argv[1:]), run))
"""


def test_a_completed_script_keeps_its_result(scripts):
    """The stop arrived after it had completed."""
    (scripts.folder / "run").mkdir()
    tells = (
        """[sh, -c, 'echo "{\\"event\\": \\"result\\", \\"value\\": 7}" >> $ROBUST_TRAIN_EVENTS']"""
    )
    place = {"cwd": scripts.folder, "environ": scripts.world.environ}
    ended = warm.preloaded(IS_STOPPED_LATE, "trainer=command", f"trainer.argv={tells}", **place)
    assert ended.stdout == "result 7\n", ended.stderr


WRITTEN_OVER = """
import io, time, zipfile
whole = io.BytesIO()
with zipfile.ZipFile(whole, "w") as archive:
    archive.writestr("weights", bytes(1000))
whole = whole.getvalue()
for number in (1, 2):
    with open("last.pt", "wb") as file:
        for at in range(0, len(whole), 100):
            file.write(whole[at : at + 100])
            file.flush()
            time.sleep(0.1 * (number - 1))
    if number == 1:
        tell("last.pt", step=1)
time.sleep(1.2)
"""


def test_a_checkpoint_being_written_is_not_damaged(scripts):
    ended = run_program(scripts, TELLS + WRITTEN_OVER, "--checkpoint", "*.pt")
    assert "it is not used" not in ended.stdout
    assert "checkpoint" in [event["event"] for event in ended.journal]


def test_the_learning_rate_follows_only_on_request():
    """It follows the batch size."""
    rates = {}
    for how in ("null", "linear", "sqrt"):
        keys = ("training.lr=0.4", "training.batch_size=64", f"trainer.scale_learning_rate={how}")
        config = checked(composed(["trainer=command", argv("true"), *keys]))
        rates[how] = round(config.learning_rate_at(16), 6)
    assert rates == {"null": 0.4, "linear": 0.1, "sqrt": 0.2}


def test_scripts_preserving_their_batch_are_not_retried(scripts):
    """They cannot accumulate, and the batch is to be preserved."""
    options = ("--batch-size", "64", "--keep-effective-batch")
    words = ("{batch_size}", "1")
    ended = run_program(scripts, NO_ACCUMULATION, *options, words=words, exit_code=1)
    assert len(ended.attempts) == 1
    assert "would change the effective batch size" in ended.summary["reason"]


def test_an_ignored_batch_size_ends_the_retries(scripts):
    """It does not reach the script, and a line says so."""
    options = ("--batch-size", "64")
    ended = run_program(scripts, NO_ACCUMULATION, *options, words=("64", "1"), exit_code=1)
    assert "--batch-size 64 is not in the script's command" in ended.stdout
    (attempt,) = ended.attempts
    assert attempt["batch_size"] is None
    assert "micro-batch" not in ended.output


KILLED_ONCE = """
import os
if os.environ["ROBUST_TRAIN_ATTEMPT"] == "1":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("words", [(), ("{checkpoint}",)])
def test_an_ignored_checkpoint_is_reported(scripts, words):
    """It does not reach the script."""
    ended = run_program(scripts, KILLED_ONCE, "--checkpoint", "*.pt", words=words)
    assert ("--checkpoint alone gives the script nothing" in ended.stdout) == (not words)
    assert "no checkpoint is known\n" in ended.stdout, "nor does it advise what was given"


READS_ITS_BATCH = """
import robust_train
run = robust_train.current_run()
size, steps = run.batch_size, run.gradient_accumulation_steps
if size > 16:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


def test_a_script_using_run_gets_smaller_batches(scripts):
    """The script reads its batch size from our ``run``."""
    ended = run_program(scripts, READS_ITS_BATCH, "--batch-size", "32")
    sizes = [(a["batch_size"], a["gradient_accumulation_steps"]) for a in ended.attempts]
    assert sizes == [(32, 1), (16, 2)]


COUNTS_BATCHES = """
import os, robust_train
run = robust_train.current_run()
state = {"seen": []}
for step, number in enumerate(run.batches(range(6)), run.load(state) + 1):
    state["seen"].append(number)
    run.progress(step)
    run.save(state, step)
    run.finish_saving()
    if step == 4 and run.attempt == 1:
        os.kill(os.getpid(), 9)
run.epoch_ended(1, accuracy=0.25)
run.record("tested", {"step": 6, "accuracy": 0.5})
run.result(state["seen"])
"""


def test_scripts_share_all_functions_of_run(scripts):
    """The very next batch, as many checkpoints as are asked for, and its objective on the way."""
    overrides = ("retry_pause_seconds=0.1", "training.keep_checkpoints=3", "objective=accuracy")
    ended = run_program(scripts, COUNTS_BATCHES, *overrides)
    assert len(ended.attempts) == 2
    assert ended.summary["result"] == [0, 1, 2, 3, 4, 5]
    kept = sorted(path.stem for path in (ended.run_dir / "checkpoints").glob("*.pt"))
    assert kept == [f"step-{step:08}" for step in (4, 5, 6)]
    reported = [event for event in ended.journal if event["event"] == "report"]
    assert [(report["step"], report["value"]) for report in reported] == [(1, 0.25), (6, 0.5)]


ENDS_BADLY = """
import sys, time
print("Loss: 2.18", end="", flush=True)
time.sleep(0.3)
raise ValueError("the weights are not whole\\nSee https://example.org/docs: help")
"""


def test_what_a_script_leaves_behind_says_so(scripts):
    """No checkpoint, an error of several lines, an unfinished line, options instead of keys."""
    options = ("--checkpoint", "ckpt/*.pt", "--resume-argv", "--init_from=resume")
    ended = run_program(scripts, ENDS_BADLY, *options, exit_code=1)
    reason = "ended with exit code 1: ValueError: the weights are not whole"
    assert ended.summary["reason"] == reason
    assert [a["outcome"] for a in ended.attempts] == ["bug"]
    assert ended.stderr.strip().endswith("See https://example.org/docs: help")
    frames = [line for line in ended.output.splitlines() if line.strip().startswith("File ")]
    assert frames
    assert all("train.py" in frame for frame in frames), "frames of the launcher are shown"
    assert "attempt 1 failed: exit code 1" in ended.stdout
    assert ended.stdout.count("no new file matches the pattern for checkpoints ckpt/*.pt") == 1
    assert " --resume-argv has no {checkpoint}: the script finds" in ended.stdout
    assert "Loss: 2.18" in ended.stdout.splitlines()


UNKNOWN = """
import pathlib, sys
step = int(pathlib.Path(sys.argv[1]).read_text()) if sys.argv[1:] else 0
if step == 4:
    raise RuntimeError("odd")
while step < 9:
    step += 1
    path = pathlib.Path(f"ckpt/{step}.pt")
    path.parent.mkdir(exist_ok=True)
    path.write_text(str(step))
    if step in (2, 4) and not pathlib.Path(f"seen-{step}").exists():
        pathlib.Path(f"seen-{step}").touch()
        sys.exit(3)
"""


def test_unnamed_failures_are_retried_per_checkpoint(scripts):
    """Each later checkpoint is worth one more try."""
    options = ("--checkpoint", "ckpt/*.pt", "--resume-argv", "{checkpoint}")
    ended = run_program(scripts, UNKNOWN, *options, exit_code=1)
    resumed = [Path(a["resumed_from"]).name for a in ended.attempts if a["resumed_from"]]
    assert resumed == ["2.pt", "4.pt"]
    why = "neither a known failure nor certainly a bug, so once more"
    assert ended.stdout.count(f"{why}, from the last checkpoint") == 2
    assert "RuntimeError: odd: twice at the same place" in ended.summary["reason"]
    assert ended.summary["reason"].endswith("the first time: ended with exit code 3")
    assert "RuntimeError: odd" in ended.stderr


OVER_ITS_DEAD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("failure", ["MemoryError: no more", "KeyError: 'lr'"])
def test_exit_0_over_dead_children_is_doubted(scripts, failure):
    name, _, message = failure.partition(": ")
    code = f"raise {name}({message.strip(chr(39))!r})"
    ended = run_program(scripts, OVER_ITS_DEAD, words=(code,))
    doubt = f"exit code 0, but its output shows a failure: {failure}"
    assert doubt in ended.stdout
    assert doubt in ended.summary["reason"]
    assert doubt in (ended.run_dir / "report.html").read_text().replace("&#39;", "'")


def test_what_a_shell_hides_is_said(scripts):
    ended = scripts.run("--", "sh", "-c", "sleep 60 & echo | tee").with_code(0)
    assert "(sleep) still ran, which is ended too" in ended.stdout
    assert "exit code is that of tee" in ended.stdout


def test_steps_of_resumed_attempts_start_where_saved():
    """The attempt before has saved that step."""
    first = Attempt(1, AttemptSpec((), 1, 1)).after(Progress(5, 20))
    assert (first.start_step, first.end_step) == (0, 5)
    resumed_at_5 = Attempt(2, first.spec, resumed_from="five.pt", start_step=5)
    assert resumed_at_5.after(Progress(10, 20)).start_step == 5
    assert resumed_at_5.after(Progress(3, 20)).start_step == 2, "it counts otherwise"
    unknown = Attempt(2, first.spec, resumed_from="five.pt")
    assert unknown.after(Progress(6, 20)).after(Progress(9, 20)).start_step == 5
    assert unknown.after(TrainingStarted(0)).after(Progress(6, 20)).start_step == 0

    itself = replace(unknown, resumed_from=None).after(Progress(6, 20)).infer_start_step
    assert itself(Attempt(1, first.spec).after(Progress(1, 20))).start_step == 5
    assert itself(Attempt(1, first.spec).after(Progress(6, 20))).start_step == 0, "it began again"


WAITS_TO_BE_SEEN = """
import json, pathlib, subprocess, sys, time
if len(sys.argv) == 2:  # the script is a shell for its own child
    sys.exit(subprocess.call([sys.executable, __file__, sys.argv[1], "child"]))
held = bytearray(b"x") * (200 << 20)
until = time.monotonic() + 60
while time.monotonic() < until:
    lines = pathlib.Path(sys.argv[1], "memory.jsonl").read_text().splitlines()
    if any(json.loads(line)["anonymous"] > len(held) for line in lines if line.endswith("}")):
        sys.exit(0)
    time.sleep(0.05)
sys.exit("never seen")
"""


@pytest.mark.slow
def test_its_memory_includes_everything_it_started(scripts):
    """Memory over time is that of a script and its children."""
    program = scripts.folder / "waits.py"
    program.write_text(WAITS_TO_BE_SEEN)
    scripts.train([sys.executable, str(program), "{run_dir}"]).with_code(0)


def test_a_shell_script_is_a_full_trainer(scripts):
    """It gets and reports as much as any other."""
    ended = scripts.train(script("shell.sh"), "training.batch_size=12").with_code(0)
    assert "batch 12 on cpu, attempt 1" in ended.stdout
    assert f"sees <> checkpoint <> in {scripts.run_dir}" in ended.stdout
    assert ended.summary["result"] == {"objective": 0.75}
    assert (ended.attempts[0]["start_step"], ended.attempts[0]["end_step"]) == (2, 5)
    events = {event["event"]: event for event in ended.journal}
    assert events["progress"]["metrics"]["loss"] == 0.25
    assert events["progress"]["attempt"] == 1
    assert "deep" in [event.get("event_name") for event in ended.journal]
    user_event = events["user"]
    assert (user_event["event_name"], user_event["fields"]["note"]) == ("mine", "kept")
    assert [e["event"] for e in ended.journal].count("job_ended") == 1
    assert ended.output.count("not JSON") == 1


def test_a_python_script_uses_run_without_torch(scripts):
    words = script("with_our_help.py", "{batch_size}")
    ended = scripts.train(words, "training.batch_size=12").with_code(0)
    result = {"objective": 0.5, "batch": 12, "device": "cpu", "torch": False}
    assert ended.summary["result"] == result
    assert ended.attempts[0]["end_step"] == 3
    (speed,) = ended.attempts[0]["speed"]
    assert (speed["steps"], speed["data_share"]) == (2, None)
    slow, fast = (12 / speed[key] for key in ("seconds_per_step_p95", "seconds_per_step"))
    assert 0.97 * slow <= speed["samples_per_second"] <= 1.03 * fast, "the mean of two steps"


def test_bars_and_colours_reach_the_terminal(scripts):
    """They do not hide the error."""
    words = argv(*script("bars.py", "fails", "{batch_size}"))
    shown = scripts.world.run_in_terminal("trainer=command", words)
    assert "\x1b[32mterminal\x1b[0m" in shown
    assert "200 columns ''" in shown
    assert showing_lines(shown, 200).count("100%|##########") == 2, "one of each attempt"
    summary = json.loads((scripts.run_dir / "summary.json").read_text())
    assert [a["outcome"] for a in summary["attempts"]] == ["host_oom", "completed"]
    assert summary["attempts"][0]["message"] == "ended with exit code 1: MemoryError: no more"
    log = (scripts.run_dir / "attempt-1.log").read_text()
    assert "100%|##########" in log
    assert " 20%" not in log, "a rewritten line is kept as it was in the end"


def test_output_comes_while_the_script_runs(scripts):
    """Python's buffer would hold back what is printed to a pipe."""
    go = scripts.folder / "go"
    code = (
        "import os, sys, time\nprint('first words')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    process = scripts.start("--", "python3", "-c", code)
    for line in process.stdout:
        if line == "first words\n":
            go.touch()
            break
    scripts.world.end(process, 0)


@pytest.fixture
def gpus(scripts, cuda_machine_with):
    """GPU 0 (A) has 20000 MiB free, GPU 1 (B) has 10000."""
    machine = cuda_machine_with(
        Gpu(uuid=A, total_mib=24000, free_mib=20000), Gpu(uuid=B, total_mib=24000, free_mib=10000)
    )
    scripts.world.with_environ(machine.environ)
    return machine


@pytest.mark.proves("scripts", "several GPUs", "new attempt")
@pytest.mark.parametrize(
    ("seen", "asks", "told", "num_gpus"),
    [
        ("0", "{device}", "cuda:0", 1),  # many programs read integers there
        pytest.param("0,1", "{num_gpus}", "2", 2, marks=pytest.mark.slow),
    ],
)
def test_torchs_memory_message_halves_the_batch(scripts, gpus, seen, asks, told, num_gpus):
    """The GPUs stay the reserved ones."""
    attempts = scripts.folder / "attempts"
    budgets = {"BATCH_BUDGETS": json.dumps({seen: 8}), "ATTEMPTS_FILE": str(attempts)}
    scripts.world.environ |= budgets
    words = script("within_a_budget.py", "{batch_size}", asks, "{gradient_accumulation_steps}")
    overrides = (f"num_gpus={num_gpus}", "training.batch_size=16")
    ended = scripts.train(words, *overrides).with_code(0)
    reports = [json.loads(line) for line in attempts.read_text().splitlines()]
    holds_the_reservation = True
    assert reports == [[seen, told, size, holds_the_reservation] for size in (16, 8)]
    assert [a["outcome"] for a in ended.attempts] == ["device_oom", "completed"]
    assert {a["effective_batch_size"] for a in ended.attempts} == {16 * num_gpus}
    assert "CUDA out of memory" in ended.attempts[0]["message"]
    record = next(e for e in ended.journal if e["event"] == "attempt_ended")["record"]
    assert record["failure"]["evidence"]["requested_bytes"] == 2 * 1024**3


def test_train_py_runs_a_script_once(scripts):
    (scripts.folder / "train.py").write_text(NO_ACCUMULATION)
    given = ("trainer=command", argv(sys.executable, "train.py", "{batch_size}", "1"))
    ended = scripts.world.run(*given, script="train.py", code=1)
    assert ended.stderr.strip().endswith("MemoryError; train_robust.py would continue")
    ended = scripts.world.run(*given, "training.batch_size=2", script="train.py", code=0)
    assert "trained with 2 at 1" in ended.stdout


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["trainer.argv", "must be given"]),
        (["trainer.argv=python"], ["trainer.argv", "must be a list"]),
        (
            ["trainer.argv=[ls]", "isolation=none"],
            ["isolation=none", "always runs in a separate process"],
        ),
        (["trainer.argv=[]"], ["trainer.argv", "must name a program"]),
        (["trainer.argv=[no_such_program]"], ["'no_such_program'", "PATH"]),
        (["trainer.argv=[./no_such_file]"], ["./no_such_file: no such file in "]),
        (["trainer.argv=[python,train_rbust.py]"], ["train_rbust.py: no such file"]),
        (["trainer.argv=[ls,'{batchsize}']"], ["{batchsize}", "did you mean {batch_size}?"]),
        (["trainer.argv=[ls]", "trainer.cwd=/no/such"], ["trainer.cwd=/no/such", "no such folder"]),
        ([f"trainer.argv=[{SCRIPTS}/polite.py]"], ["is not an executable file: chmod +x"]),
        (["trainer.argv=[polite.py]", f"trainer.cwd={SCRIPTS}"], ["write python polite.py"]),
        ([f"trainer.argv=[{SCRIPTS}]"], ["scripts is a folder"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_unrunnable_commands_are_refused_in_one_line(overrides, words):
    with pytest.raises(REFUSALS) as refused:
        check_command(checked(composed(["trainer=command", *overrides])))
    line = explain(refused.value, "robust", overrides)
    assert "\n" not in line
    assert all(word in line for word in words)


def test_a_script_without_interpreter_is_refused(scripts):
    program = scripts.folder / "mine"
    program.write_text("#!/no/such/python\n")
    program.chmod(0o700)
    scripts.run("--", "./mine").was_refused(["PROGRAM: ./mine: ", "first line, #!…, name an inter"])


@pytest.mark.parametrize("activated", [False, True], ids=["uvx", "activated"])
def test_a_scripts_python_is_the_users(world, activated):
    """``uvx robust-train`` has its own environment and puts it in front of PATH."""
    tool, users = world.folder / "cache" / "archive" / "tool", world.folder / "users"
    for folder in (tool, users):
        venv.create(folder, symlinks=True)
    (world.folder / "cache" / "CACHEDIR.TAG").touch()
    (libraries,) = (tool / "lib").glob("python*/site-packages")
    (libraries / "ours.pth").write_text(sysconfig.get_path("purelib"))
    world.environ["PATH"] = f"{tool}/bin:{users}/bin:{world.environ['PATH']}"
    world.environ["VIRTUAL_ENV"] = str(tool if activated else users)
    words = [*("-m", "robust_train.cli.main", "run", f"--run-dir={world.run_dir}", "--")]
    program = ["python", "-c", "import sys; print('prefix', sys.prefix)"]
    surroundings = {"cwd": world.folder, "env": world.environ}
    python = [str(tool / "bin" / "python"), *words, *program]
    ended = subprocess.run(python, capture_output=True, text=True, **surroundings)
    assert ended.returncode == 0, ended.stderr
    assert f"prefix {tool if activated else users}\n" in ended.stdout


@pytest.mark.parametrize(
    "words", ["run device=cuda -- true", "train device=cuda", "train training.batch_size=x"]
)
def test_a_refused_command_leaves_no_folder(words, scripts):
    """What no device decides of ``robust-train run``: see ``test_commands``."""
    words = ["-m", "robust_train.cli.main", *words.split()]
    started = warm.start(words, scripts.folder, scripts.world.environ)
    scripts.world.end(started).was_refused([])
    assert list(scripts.folder.glob("outputs/*")) == []


@pytest.mark.parametrize("by_the_user", [False, True])
def test_a_program_gets_no_variables_for_our_hydra(world, by_the_user):
    """With ours, its own Hydra would raise its errors and look for its configs in our package."""
    names = "HYDRA_FULL_ERROR", "HYDRA_MAIN_MODULE"
    for name in names:
        world.environ.pop(name, None)
    if by_the_user:
        world.environ |= dict.fromkeys(names, "1")
    code = f"import os; print('given', [os.environ.get(name) for name in {names}])"
    argv = json.dumps([sys.executable, "-c", code])
    ended = world.run("trainer=command", f"trainer.argv={argv}", "device=cpu", code=0)
    given = "1" if by_the_user else None
    assert f"given {[given, given]}" in ended.stdout
