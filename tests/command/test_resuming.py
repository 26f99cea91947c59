"""A script's own checkpoints: found by pattern or told, given to the next attempt."""

import sys
import zipfile
from pathlib import Path

import pytest

from command_world import script

RESUME = ("--checkpoint", "ckpt/*.pt", "--resume-argv", "--resume {checkpoint}")


@pytest.fixture
def ckpt(scripts):
    """A batch size, the resume arguments, and the script that goes with them."""
    program = ["env", "BATCH_SIZE={batch_size}", *script("resuming.py", "ckpt")]
    return ["--batch-size", "64", *RESUME, "--", *program]


def test_attempts_resume_from_the_newest_whole_checkpoint(scripts, ckpt):
    """They ignore a file that existed before the job; once completed, it starts over."""
    scripts.folder /= "run [1]"  # no pattern by itself
    (scripts.folder / "ckpt").mkdir(parents=True)
    with zipfile.ZipFile(scripts.folder / "ckpt" / "step-8.pt", "w") as old:
        old.writestr("step", "8")
    ended = scripts.run(*ckpt).with_code(0)
    assert [a["outcome"] for a in ended.attempts] == ["host_oom", "completed"]
    assert "from step 0" in (scripts.run_dir / "attempt-1.log").read_text()
    assert "from step 6" in (scripts.run_dir / "attempt-2.log").read_text()
    assert ended.summary["checkpoint"] == str(scripts.folder / "ckpt" / "step-10.pt")
    resumes = "was written with micro-batch 64, and the script resumes with 32: if it counts"
    assert resumes in ended.stdout
    assert "takes its options from the checkpoint, it keeps 64" in ended.stdout
    ended = scripts.run(*ckpt).with_code(0)
    assert "from step 0" in (scripts.run_dir / "attempt-3.log").read_text()


GAN = """
import pathlib, sys
print("sees", *sys.argv[1:])
if "--netD" in sys.argv:
    sys.exit()
for name in ("netG_1.pth", "netD_1.pth"):
    pathlib.Path(name).write_text("weights")
raise MemoryError
"""


def test_files_that_belong_together_stay_together(scripts):
    """They are handed over together, and the report knows the name."""
    (scripts.folder / "main.py").write_text(GAN)
    both = '${1:+--netD "$1" --netG "$(echo "$1" | sed s/netD/netG/)"}'
    shell = f"exec {sys.executable} main.py {{batch_size}} {{effective_batch_size}} {both}"
    batch = ("--batch-size", "8", "--gradient-accumulation", "4")
    options = ("--name", "gan", "--checkpoint", "netD_*.pth", "--resume-argv", "{checkpoint}")
    program = ("sh", "-c", f"{shell} # {{gradient_accumulation_steps}}", "sh")
    ended = scripts.run(*batch, *options, "--", *program).with_code(0)
    d, g = (scripts.folder / f"net{letter}_1.pth" for letter in "DG")
    assert "sees 8 32\n" in ended.stdout
    assert f"sees 4 32 --netD {d} --netG {g}\n" in ended.stdout

    report = scripts.world.robust_train("report", "gan", code=0)
    assert report.stdout.strip() == str(scripts.run_dir / "report.html")


def test_an_overwritten_newest_checkpoint_hides_older_ones(scripts):
    """It would count as progress in each attempt, and the job would never end."""
    (scripts.folder / "ckpt").mkdir()
    code = (
        "if [ $ROBUST_TRAIN_ATTEMPT = 1 ]; then echo 0 > ckpt/0.pt; sleep 0.1; echo 5 > ckpt/5.pt; "
        "else for i in $(seq 40); do echo $i > ckpt/5.pt; sleep 0.05; done; fi; "
        "echo MemoryError: no more; exit 1"
    )
    arguments = ["--batch-size", "64", "--min-batch-size", "32", *RESUME]
    ended = scripts.run(*arguments, "--", "sh", "-c", code, "{batch_size}")
    assert [attempt["batch_size"] for attempt in ended.attempts] == [64, 32], ended.output
    saved = [event for event in ended.journal if event["event"] == "checkpoint"]
    assert {Path(event["path"]).name for event in saved if event["attempt"] > 1} == {"5.pt"}


LOOP = """
from robust_train import launch

def train(cfg, run):
    print("from step", run.load({}))
    if run.attempt == 1:
        run.save({}, 3)
        raise KeyError("a bug")
    return 0.5

if __name__ == "__main__":
    launch(train, {"job_name": "loop"})
    launch(lambda cfg: 1, {"job_name": "second"})
"""


def test_a_launching_program_resumes_by_its_command(scripts):
    (scripts.folder / "loop.py").write_text(LOOP)
    ended = scripts.world.program(sys.executable, "loop.py", code=1)
    assert "after fixing it: robust-train resume " in ended.stdout
    assert "from step 3" in scripts.world.robust_train("resume", "loop").stdout
    names = [folder.name.split("_")[1] for folder in scripts.folder.glob("outputs/*/*")]
    assert sorted(names) == ["loop", "second"], "the variable is for the first call"
