"""``robust-train completion``: a script for bash or zsh; with it a Tab starts no Python."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.cli.door import groups
from robust_train.cli.main import COMMANDS, OF_LIVE_RUNS
from robust_train.cli.memory import ACTIONS
from robust_train.cli.output import Parser
from robust_train.config.refusals import all_keys, composed

_OF_HYDRA = ["hydra/launcher=gpu_queue", "hydra.run.dir=", "hydra.sweep.dir="]
_SCRIPT = """\
# robust-train completion: commands, keys and choices
_robust_train() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" words="" IFS=$'\\n'
    local cur="${{line##* }}"
    case "$line" in
        *" -- "*) ;;
        *[\\ /]train_robust.py\\ *|robust-train\\ train\\ *|robust-train\\ plan\\ *)
            words='{keys}' ;;
        robust-train\\ run\\ *) words='{run}' ;;
        robust-train\\ memory\\ *) words='{memory}' ;;
        robust-train\\ *\\ *) ;;
        robust-train\\ *) words='{commands}' ;;
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script."""
    about = "Print a script that completes commands, keys and choices in bash and zsh."
    Parser(prog="robust-train completion", description=about).parse_args(argv)
    choices = [f"{group}={name}" for group, names in groups().items() for name in names]
    found = all_keys(composed, ())
    keys = [f"{key}=" for key in found if not any(one.startswith(f"{key}.") for one in found)]
    words = {"commands": COMMANDS, "keys": [*choices, *keys, *_OF_HYDRA]}
    words |= {"run": OF_LIVE_RUNS, "memory": ACTIONS}
    print(_SCRIPT.format(**{name: "\n".join(given) for name, given in words.items()}), end="")
    return 0
