"""Shell completion, in a real bash."""

from __future__ import annotations

import subprocess

import pytest

from robust_train.cli.main import main

_ASKS = """
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
while read -r line; do
    COMP_LINE="$line" COMP_POINT="${#line}" COMPREPLY=()
    _robust_train
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_completes_commands_keys_and_choices(capsys: pytest.CaptureFixture[str]):
    assert main(["completion"]) == 0
    expected = {
        "robust-train ru": "runs  run ",
        "robust-train run stat": "status ",
        "robust-train memory sn": "snapshot ",
        "robust-train train model=lo": "lora ",
        "python train_robust.py -m training.effective": "training.effective_batch_size=",
        "robust-train plan hydra/l": "hydra/launcher=gpu_queue ",
        "python other.py mod": "",
        "robust-train run -- python train.py mod": "",
    }
    script = capsys.readouterr().out + _ASKS
    ended = subprocess.run(
        ["bash", "-c", script],
        input="".join(f"{line}\n" for line in expected),
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""
    assert dict(zip(expected, ended.stdout.splitlines(), strict=True)) == expected
