"""``robust-train completion``: prints a script that completes commands in bash and zsh."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterable

from robust_train.cli.commands import COMMANDS, members_of

_HYDRAS_WORDS = ["hydra/launcher=gpu_queue", "hydra.run.dir=", "hydra.sweep.dir="]
# The script for bash and zsh. All words to complete are filled in, because Python would take too
# long to start at each Tab.
_SCRIPT = """\
# robust-train completion: commands, options, keys, choices and jobs
_robust_train_jobs() {{
    local state="${{XDG_STATE_HOME:-${{HOME-}}/.local/state}}/robust-train/runs"
    sed -En 's/^."id": "([^"]*)".*/\\1/p' \\
        "${{ROBUST_TRAIN_STATE_DIR:-$state}}"/*/state.json 2> /dev/null || :
}}
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


def print_script(arguments: Namespace) -> int:
    """Print the completion script."""
    from robust_train.cli.train import list_choices
    from robust_train.config.refusals import all_keys

    words = [f"{group}={name}" for group, names in list_choices().items() for name in names]
    keys = all_keys(())
    groups_of_keys = {key.rpartition(".")[0] for key in keys}
    words += [f"{key}=" for key in keys if key not in groups_of_keys]
    words += _HYDRAS_WORDS
    first_words = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    # Commands of two words come first, because the first case that matches counts.
    names = sorted(COMMANDS | first_words, key=lambda name: -len(name.split()))
    cases = [_format_case(name) for name in names]
    script = _SCRIPT.format(
        keys=_quote_words(words),
        cases="\n".join(case for case in cases if case),
        commands=_quote_words(first_words),
    )
    print(script, end="")
    return 0


def _format_case(name: str) -> str:
    """Return the ``case`` line with the words that may follow a command, empty without words."""
    words = list(members_of(name))
    options = COMMANDS[name].options if name in COMMANDS else ()
    for each in options:
        words += [word for word in each.names if word.startswith("--")]
    if not words:
        return ""
    escaped = f"robust-train {name} ".replace(" ", "\\ ")
    case = f"        {escaped}*) words={_quote_words(words)}"
    if any(each.names[0] == "which" for each in options):
        case += "$'\\n'\"$(_robust_train_jobs)\""
    return f"{case} ;;"


def _quote_words(words: Iterable[str]) -> str:
    """Return words, one per line, as a single quoted value."""
    return shlex.quote("\n".join(words))
