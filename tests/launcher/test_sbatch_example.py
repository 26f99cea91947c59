"""examples/slurm/job.sbatch: a job whose time is up goes back into Slurm's queue."""

import os
import signal
import subprocess

import pytest

from world import ROOT, wait_until

TRAINER = """#!/bin/bash
trap 'exit {code}' USR1
touch ready
until [ -e never ]; do sleep 0.01; done
"""


def _program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(("code", "requeued"), [(138, ["requeue", "7"]), (76, []), (0, [])])
def test_a_job_whose_time_is_up_is_requeued(tmp_path, code, requeued):
    _program(tmp_path / ".venv/bin/python", TRAINER.format(code=code))
    _program(tmp_path / "bin/scontrol", '#!/bin/bash\nprintf "%s\\n" "$@" > asked\n')
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "lora",
        "SLURM_JOB_ID": "7",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    batch = subprocess.Popen(
        ["bash", str(ROOT / "examples/slurm/job.sbatch")], env=os.environ | slurm
    )
    wait_until((tmp_path / "ready").exists, "the trainer to begin")
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(60) == code
    request = tmp_path / "asked"
    assert (request.read_text().split() if request.exists() else []) == requeued
