"""Shell completion, in a real bash."""

import shutil
import subprocess

import pytest

from robust_train.cli.main import main

_ASKS = """
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
while read -r line; do
    COMP_LINE="$line" COMP_POINT="${#line}" COMPREPLY=()
    _robust_train || :
    echo "${COMPREPLY[*]}"
done
"""


def shown_by(*command, **given):
    ended = subprocess.run(command, capture_output=True, text=True, **given)
    assert ended.stderr == "" or command[0] == "zsh"
    return ended.stdout.splitlines()


def test_bash_completes_commands_keys_choices_and_jobs(capsys, tmp_path, monkeypatch):
    assert main(["completion"]) == 0
    (tmp_path / "1-token").mkdir()
    (tmp_path / "1-token" / "state.json").write_text('{"id": "0-abcdef", "name": "a job"}\n')
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path))
    expected = {
        "robust-train ru": "run ",
        "robust-train run --che": "--checkpoint ",
        "robust-train memory sn": "snapshot ",
        "robust-train memory clear --f": "--force ",
        "robust-train train model=lo": "lora ",
        "python train_robust.py -m training.effective": "training.effective_batch_size=",
        "robust-train train hydra/l": "hydra/launcher=gpu_queue ",
        "python other.py mod": "",
        "python pretrain.py mod": "",
        "python train.py mod": "",
        "robust-train run -- python train.py mod": "",
        "robust-train status 0-a": "0-abcdef ",
        "robust-train stop --n": "--now ",
    }
    typed = "".join(f"{line}\n" for line in expected)
    completed = shown_by("bash", "-euc", capsys.readouterr().out + _ASKS, input=typed)
    assert dict(zip(expected, completed, strict=True)) == expected


_ASKS_OTHERS = """
compopt() { :; }
for name in python python3; do
    for script in other.py train.py train_robust.py; do
        COMP_LINE="$name $script model=lin" COMP_POINT=${#COMP_LINE}
        _robust_train_$name
        echo "${COMPREPLY[*]}"
    done
done
complete -p
"""


def test_python_completes_other_scripts_as_before(capsys):
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    before = "_theirs() { COMPREPLY=(theirs); }; complete -o filenames -F _theirs python3\n"
    before += "__load_completion() { complete -F _theirs python; }\n"
    answers = shown_by("bash", "-c", before + script + script + _ASKS_OTHERS)
    assert answers[:-3] == 2 * ["theirs", "theirs", "linear_probe "]
    assert sorted(answers[-3:]) == [
        "complete -F _robust_train_python python",
        "complete -o default -o nospace -F _robust_train robust-train",
        "complete -o filenames -F _robust_train_python3 python3",
    ]
    registered = shown_by("bash", "-c", f"complete -C other python\n{script}complete -p python")
    assert registered == ["complete -C 'other' python"], "not a function, so left alone"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_other_scripts_as_before(capsys):
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    begins = "autoload -Uz compinit bashcompinit && compinit -D && bashcompinit\n"
    asks = """
    _python() { print others $words }
    words=(python other.py mod) CURRENT=3 PREFIX=mod
    compadd() { print ours }
    $_comps[python]
    words=(python3 train_robust.py mod) PREFIX=
    $_comps[python3]
    """
    others, *ours = shown_by("zsh", "-fc", begins + script + script + asks)
    assert others == "others python other.py mod"
    assert {line.split()[0] for line in ours} == {"ours"}
