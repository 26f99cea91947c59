"""What processes that die do to the result: nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# A user's loop. Samples grow longer: from step 40 on, for some steps, all 32 at once are more than
# fits.
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights_bit_for_bit(tmp_path):
    """Four kills here; fifty in benchmarks/kill_and_resume.py."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/kill_and_resume.py"), "--kills=4", "--epochs=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == 4
    assert found["bitwise_equal"]
