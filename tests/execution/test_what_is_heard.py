"""Warnings and a job's last lines are on the screen, whatever a program does to ``logging``."""

import subprocess
import sys

import pytest

# each program ends with the same four lines of ours
LINES = """
log.info("a line of the job")
log.warning("a warning")
log_always("the last line")
logging.getLogger("robust_train.integrations").error("an error")
"""
BEFORE = """
import io, logging, logging.config, logging.handlers, sys
from robust_train.host.loggers import showing_lines, log_always
log = logging.getLogger("robust_train")
CONSOLE = {"version": 1, "handlers": {"c": {"class": "logging.StreamHandler"}},
           "root": {"handlers": ["c"], "level": "INFO"}}
FILE = '''[loggers]
keys=root
[handlers]
keys=
[formatters]
keys=
[logger_root]
handlers=
'''
class Rich(logging.Handler):
    '''As rich's, which knows its stream by a console.'''
    class console:
        file = sys.stderr
    def emit(self, record):
        sys.stderr.write(self.format(record) + "\\n")
def add(handler, name=None):
    handler.setFormatter(logging.Formatter("theirs: %(message)s"))
    logging.getLogger(name).addHandler(handler)
"""
# the handler is the program's, whose job's lines go to a file alone
IN_A_JOB = """
from robust_train.host.loggers import show_lines
logging.getLogger().addHandler(logging.FileHandler("job.txt"))
show_lines()
"""
MUTED = {
    "dictConfig": "logging.config.dictConfig(CONSOLE)",
    "fileConfig": "logging.config.fileConfig(io.StringIO(FILE))",
    "Hydra's disabled": "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})",
    "disable": "logging.disable(logging.CRITICAL)",
    "propagate": "log.propagate = False",
    "a level": "log.setLevel(logging.CRITICAL)",
    "the root's level": "logging.basicConfig(level='CRITICAL', force=True)",
    "a null handler": "add(logging.NullHandler())",
    "a file": "logging.basicConfig(filename='log.txt', level='INFO', force=True)",
    "a filter": "log.addFilter(lambda record: False)",
    "a handler's filter": """
handler = logging.StreamHandler()
handler.addFilter(logging.Filter("mine"))
add(handler)""",
    "a buffer": "add(logging.StreamHandler(io.StringIO()))",
    "a closed stream": """
stream = open("closed.txt", "w")
stream.close()
logging.raiseExceptions = False
add(logging.StreamHandler(stream))""",
    "stdout that is thrown away": """
add(logging.StreamHandler(sys.stdout))
sys.stdout = open("/dev/null", "w")
logging.getLogger().handlers[-1].setStream(sys.stdout)""",
    "both streams": "add(logging.StreamHandler(io.StringIO()))\n"
    "sys.stdout = sys.stderr = open('/dev/null', 'w')",
    "an object that swallows all": """
class Nothing:
    def write(self, text): pass
    def flush(self): pass
add(logging.StreamHandler(Nothing()))
sys.stdout = sys.stderr = logging.getLogger().handlers[-1].stream""",
    "a redirection": "sys.stderr = io.StringIO()\nadd(logging.StreamHandler())",
    "handlers removed": "logging.basicConfig(force=True)\nlogging.getLogger().handlers.clear()",
}
SHOWN_BY = {
    "their own": "add(logging.StreamHandler(), 'robust_train')",
    "the root's": "add(logging.StreamHandler(sys.stdout))",
    "rich's": "add(Rich())",
    "a wrapper's": """
class Tee:
    def __init__(self):
        self.streams = [sys.__stdout__]
    def write(self, text):
        self.streams[0].write(text)
    def flush(self):
        self.streams[0].flush()
sys.stdout = Tee()
add(logging.StreamHandler(sys.stdout))""",
    "a stream that was stderr": """
add(logging.StreamHandler())
sys.stderr = open(2, "w", closefd=False)""",
}


def run(tmp_path, program):
    ended = subprocess.run(
        [sys.executable, "-c", BEFORE + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.parametrize("setup", MUTED.values(), ids=MUTED)
def test_what_matters_reaches_stderr_once(tmp_path, setup):
    ended = run(tmp_path, IN_A_JOB + setup + LINES)
    shown = [line[9:] for line in ended.stderr.splitlines()]
    assert shown == ["warning: a warning", "the last line", "error: an error"]
    assert ended.stdout == ""


@pytest.mark.parametrize("name", ["dictConfig", "disable", "a level", "a filter"])
def test_that_holds_for_a_program_without_a_launcher(tmp_path, name):
    ended = run(tmp_path, MUTED[name] + LINES)
    assert "warning: a warning" in ended.stderr


def test_the_programs_own_log_file_is_enough(tmp_path):
    ended = run(tmp_path, MUTED["a file"] + LINES)
    assert ended.stdout + ended.stderr == ""
    assert "a warning" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("setup", SHOWN_BY.values(), ids=SHOWN_BY)
def test_what_the_program_shows_is_not_shown_twice(tmp_path, setup):
    ended = run(tmp_path, f"{IN_A_JOB}{setup}\nlog.setLevel(logging.INFO)" + LINES)
    lines = ["a line of the job", "a warning", "the last line", "an error"]
    assert (ended.stdout + ended.stderr).splitlines() == [f"theirs: {line}" for line in lines]


def test_lines_are_shown_unless_the_program_logs(tmp_path):
    """With no logging at all they go to stdout; if logging was set up later, what it does not show
    goes to stderr.
    """
    lines = LINES.replace("\n", "\n    ")
    block = f"with showing_lines():\n    log_always('begins')\n    SETUP\n{lines}"
    plain = run(tmp_path, block.replace("SETUP", "pass"))
    assert [line[9:] for line in plain.stdout.splitlines()] == [
        *("begins", "a line of the job", "warning: a warning", "the last line", "error: an error")
    ]
    assert plain.stderr == ""
    later = run(tmp_path, block.replace("SETUP", MUTED["dictConfig"]))
    assert later.stdout.count("\n") == 1
    assert [line[9:] for line in later.stderr.splitlines()] == [
        *("a line of the job", "warning: a warning", "the last line", "error: an error")
    ]
    nowhere = run(
        tmp_path, "sys.stdout = open('/dev/null', 'w')\n" + block.replace("SETUP", "pass")
    )
    assert [line[9:] for line in nowhere.stderr.splitlines()] == [
        *("begins", "warning: a warning", "the last line", "error: an error")
    ]
    level = run(tmp_path, block.replace("SETUP", "log.setLevel(logging.WARNING)"))
    assert "a line of the job" not in level.stdout + level.stderr


def test_later_ranks_show_only_their_marked_warnings(tmp_path):
    """The first rank shows all of its lines."""
    name = "show_only_warnings_of_rank"
    begin = f"from robust_train.host.loggers import {name}\n{name}(1)\n"
    for setup in ("logging.config.dictConfig(CONSOLE)", "logging.basicConfig(level='INFO')"):
        ended = run(tmp_path, begin + setup + LINES)
        assert ended.stderr.count("[rank 1] a warning") == 1, setup
        assert "line" not in ended.stdout + ended.stderr, setup
