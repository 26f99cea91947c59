"""``robust-train init``, ``notify test``, ``report`` and ``completion``.

``cli.commands`` names each function, and ``cli.main`` calls it in the command's process. A function
imports what only it needs, so that the other commands start fast.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import webbrowser
from argparse import Namespace
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import Answer, UsageError
from robust_train.cli.commands import COMMANDS, members_of
from robust_train.model.errors import EXIT_FAILED, NotDoneError

if TYPE_CHECKING:
    from robust_train.report.facts import Story
    from robust_train.sweep.page import SweepStory

_TEMPLATE = Path(__file__).parents[1] / "project_template"
_NOTIFY_SECONDS = 30.0


def init(arguments: Namespace) -> Answer:
    """Write a new project without overwriting files."""
    folder = Path(arguments.dir)
    names = sorted(
        str(path.relative_to(_TEMPLATE))
        for path in _TEMPLATE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    for name in names:
        if os.path.lexists(folder / name):
            problem = f"{folder / name} exists already; name another folder"
            raise UsageError(problem)
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_TEMPLATE / name, folder / name)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise UsageError(problem) from error
    there = "" if folder == Path() else f"cd {folder} && "
    return Answer(shown=[f"wrote {', '.join(names)}; now: {there}python main.py"])


def notify(arguments: Namespace) -> Answer:
    """Send a notification as a job with these keys would."""
    from robust_train.children.notifier import Notifier, notifications
    from robust_train.config.checks import checked, hide_urls
    from robust_train.config.refusals import REFUSALS, composed, explain
    from robust_train.config.values import URLS_VARIABLE
    from robust_train.gpu.processes import user_name

    overrides = arguments.overrides
    try:
        cfg = composed(overrides)
        environ = dict(os.environ)
        hide_urls(cfg, environ)
        settings = notifications(checked(cfg).notify, environ)
    except REFUSALS as error:
        problem = explain(error, "robust", overrides)
        raise UsageError(problem) from error
    if not (settings.command or settings.urls):
        problem = f"nothing to send to; give notify.command=…, notify.urls=… or ${URLS_VARIABLE}"
        raise UsageError(problem)
    who = {"host": socket.gethostname(), "user": user_name(os.geteuid())}
    notifier = Notifier(settings)
    notifier.send("test", "a test of {user} on {host}".format(**who), who)
    notifier.finish(_NOTIFY_SECONDS)
    if notifier.has_failed:  # the notifier has logged the reason
        return Answer(exit_code=EXIT_FAILED)
    return Answer(shown=["delivered"])


def report(arguments: Namespace) -> Answer:
    """Write ``report.html`` from what a run or sweep folder holds, or return the data behind it."""
    from robust_train.folder.requests import SWEEP_FILE
    from robust_train.folder.run_list import sweep_at
    from robust_train.report.facts import Story
    from robust_train.report.html import FILE_NAME, job_page, save
    from robust_train.report.sources import read_sources
    from robust_train.report.story import story_of
    from robust_train.sweep.page import read_sweep_story, sweep_page

    which = arguments.which
    sweep = sweep_at(which)
    folder = sweep if sweep is not None else _run_folder(which)
    story = read_sweep_story(folder) if sweep is not None else story_of(read_sources(folder))
    if isinstance(story, Story) and story.status == "empty":
        problem = (
            f"neither a run folder (with journal.jsonl) nor a sweep folder (with {SWEEP_FILE})"
        )
        raise UsageError(f"{folder}: {problem}")
    if arguments.json:
        return Answer(story.as_json())
    if arguments.cite:
        return _citation(story)
    if isinstance(story, Story):
        pages = {folder: job_page(story)}
    else:
        of_jobs = [job.story for job in story.jobs if job.story is not None]
        pages = {Path(story.folder): job_page(story) for story in of_jobs}
        pages[folder] = sweep_page(story)
    problems = []
    for where, page in pages.items():
        try:
            save(where / FILE_NAME, page)
        except OSError as error:
            problems.append(f"cannot write {where / FILE_NAME}: {error.strerror}")
    target = folder / FILE_NAME
    if arguments.open and not webbrowser.open(target.resolve().as_uri()):
        problems.append("--open: no browser was found")
    return Answer(shown=[str(target)], error="; ".join(problems))


def _citation(story: Story | SweepStory) -> Answer:
    """Return what a paper may say about a job, and an entry for its bibliography."""
    from robust_train.report.citation import BIBTEX, sentences_of
    from robust_train.report.facts import Story

    if not isinstance(story, Story):
        raise UsageError("--cite is about one job: name a job of the sweep")
    version = metadata.version("robust-train")
    sentences = sentences_of(story, version)
    if not sentences:
        raise NotDoneError(f"{story.folder}: no step was trained, so there is nothing to cite")
    return Answer(shown=[" ".join(sentences), "", BIBTEX.format(version=version)])


def _run_folder(which: str | None) -> Path:
    """Return the folder of the run that the user means, or a folder that holds only its journal."""
    from robust_train.folder.run_list import NoLiveRunError, choose_run

    try:
        return choose_run(which, dead_too=True, command="report").run_dir
    except NoLiveRunError as error:
        if which is None:
            raise
        path = Path(which)
        if not os.path.exists(path):
            problem = f"{path}: no such folder, and no run of yours has that id or name"
            raise UsageError(problem) from error
        return path.parent if os.path.isfile(path) else path


_OF_HYDRA = ["hydra/launcher=gpu_queue", "hydra.run.dir=", "hydra.sweep.dir="]
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
"""A script for bash and zsh. It contains the words, so that Tab does not start Python."""


def completion(arguments: Namespace) -> int:
    """Print the completion script."""
    from robust_train.cli.train import groups
    from robust_train.config.refusals import all_keys

    words = [f"{group}={name}" for group, names in groups().items() for name in names]
    keys = all_keys(())
    groups_of_keys = {key.rpartition(".")[0] for key in keys}
    words += [f"{key}=" for key in keys if key not in groups_of_keys]
    words += _OF_HYDRA
    first_words = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    # commands of two words first: the first case that matches counts
    names = sorted(COMMANDS | first_words, key=lambda name: -len(name.split()))
    script = _SCRIPT.format(
        keys=_words(words),
        cases="\n".join(case for case in map(_case, names) if case),
        commands=_words(first_words),
    )
    print(script, end="")
    return 0


def _case(name: str) -> str:
    """Return the ``case`` line of the words that may follow a command, empty without words."""
    words = list(members_of(name))
    options = COMMANDS[name].options if name in COMMANDS else ()
    for each in options:
        words += [word for word in each.names if word.startswith("--")]
    escaped = f"robust-train {name} ".replace(" ", "\\ ")
    case = f"        {escaped}*) words={_words(words)}"
    if any(each.names[0] == "which" for each in options):
        case += "$'\\n'\"$(_robust_train_jobs)\""
    return f"{case} ;;" if words else ""


def _words(words: Iterable[str]) -> str:
    """Return words, one per line, as a single quoted value."""
    return shlex.quote("\n".join(words))
