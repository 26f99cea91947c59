"""Scripts under the launcher, through either door, in a folder of their own."""

import json
import subprocess
import sys
from pathlib import Path

import warm
from world import Ended, World, is_running, wait_for_text, wait_until

SCRIPTS = Path(__file__).parents[1] / "command" / "scripts"


def script(name: str, *arguments: str) -> list[str]:
    program = "sh" if name.endswith(".sh") else sys.executable
    return [program, str(SCRIPTS / name), *arguments]


def argv(*words: str) -> str:
    """The override that makes these words the command."""
    return f"trainer.argv={json.dumps(list(words))}"


class CommandWorld:
    """Starts scripts; ``world`` is the machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.folder = world.folder
        self.run_dir = world.run_dir

    def train(self, words: list[str], *overrides: str) -> Ended:
        """``train_robust.py trainer=command``, to its end."""
        return self.world.run("trainer=command", argv(*words), *overrides)

    def start(self, *arguments, **options) -> subprocess.Popen[str]:
        """Start ``robust-train run``; the caller waits for it."""
        words = ["-m", "robust_train.cli.main", "run", "--run-dir", str(self.run_dir), *arguments]
        world = self.world
        return warm.start(words, self.folder, world.environ, alone=world.alone, **options)

    def run(self, *arguments, **options) -> Ended:
        return self.world.end(self.start(*arguments, **options))

    def started_script(self, file: Path) -> int:
        """Wait until a script has written its process id to ``file``."""
        return int(wait_for_text(file, "it is at work"))


def all_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), "every process of the script is gone")
