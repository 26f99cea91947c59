"""``robust-train completion``: a script for bash or zsh; with it a Tab starts no Python."""

from __future__ import annotations

import shlex
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable

from robust_train.cli.commands import COMMANDS, members_of
from robust_train.cli.train import groups
from robust_train.config.refusals import all_keys, composed

_OF_HYDRA = ["hydra/launcher=gpu_queue", "hydra.run.dir=", "hydra.sweep.dir="]
_SCRIPT = """\
# robust-train completion: commands, options, keys and choices
_robust_train() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" words="" IFS=$'\\n'
    local cur="${{line##* }}"
    case "$line" in
        *" -- "*) ;;
        *[\\ /]train_robust.py\\ *|robust-train\\ train\\ *) words={keys} ;;
{cases}
        robust-train\\ *\\ *) ;;
        robust-train\\ *) words={commands} ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur" | sed 's/[^=]$/& /'))
    # the shell completes what follows the last = as a word of its own
    if [[ "$COMP_WORDBREAKS" == *=* && "$cur" == *=* ]]; then
        COMPREPLY=("${{COMPREPLY[@]#"${{cur%=*}}="}}")
    fi
    [[ -n "${{COMPREPLY-}}" ]]
}}
complete -o nospace -o default -F _robust_train robust-train
# python completes as before where another script follows
{{ __load_completion python || _comp_load python || :; }} &> /dev/null
for _name in python python3; do
    if [[ -n "${{ZSH_VERSION-}}" ]]; then
        _was="${{_comps[$_name]:-_python}}" _set="compdef $_was $_name"
        _ours="_bash_complete -o nospace -F _robust_train"
    else
        _set="$(complete -p $_name 2> /dev/null || echo "complete -o default -F : $_name")"
        _was="${{_set##*-F }}" _was="${{_was%% *}}" _ours="_robust_train && compopt -o nospace"
    fi
    [[ "$_set" == *" $_was "* && "$_was" != _robust_train* ]] || continue
    eval "_robust_train_$_name() {{ $_ours || $_was "'"$@"; }}'
    eval "${{_set/$_was/_robust_train_$_name}}"
done; unset _name _was _set _ours
"""


def completion(arguments: Namespace) -> int:
    """Print the script."""
    choices = [f"{group}={name}" for group, names in groups().items() for name in names]
    found = all_keys(composed, ())
    keys = [
        f"{key}="
        for key in found
        if not any(each.startswith(f"{key}.") for each in found)
    ]
    # commands of two words first: the first case that matches counts
    by_length = sorted(COMMANDS, key=lambda name: -len(name.split()))
    groups_of_commands = {name.partition(" ")[0] for name in COMMANDS}
    cases = [
        _case(name) for name in [*by_length, *groups_of_commands.difference(COMMANDS)]
    ]
    script = _SCRIPT.format(
        keys=_words([*choices, *keys, *_OF_HYDRA]),
        cases="\n".join(case for case in cases if case),
        commands=_words(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)),
    )
    print(script, end="")
    return 0


def _case(name: str) -> str:
    """Return the line for the words that may follow a command; empty if there are none."""
    words = list(members_of(name))
    if name in COMMANDS:
        shown = (
            each
            for each in COMMANDS[name].options
            if each.settings.get("help") != SUPPRESS
        )
        words += [
            word for each in shown for word in each.names if word.startswith("--")
        ]
    pattern = "robust-train " + name + " "
    escaped = pattern.replace(" ", "\\ ")
    return f"        {escaped}*) words={_words(words)} ;;" if words else ""


def _words(words: Iterable[str]) -> str:
    """Return words as one quoted value, a line each."""
    return shlex.quote("\n".join(words))
