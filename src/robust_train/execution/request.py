"""What an attempt is given: which trainer, which config, where, with which environment."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig

from robust_train.batch.search import BatchSearch
from robust_train.errors import ConfigError
from robust_train.memory.steering import AttemptMemory
from robust_train.run import MicroBatchPlan, Run
from robust_train.runfolder.cadence import SavePlan

MAIN_MODULE = "__robust_main__"

_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that an extra of the same name brings along."""


@dataclass(frozen=True)
class TrainerRef:
    """A trainer by name, so that another process can import it.

    Attributes:
        path: dotted path of the callable, ``package.module.function``.
        main_file: the script to load first where the callable was defined in ``__main__``.
    """

    path: str
    main_file: str | None = None

    @classmethod
    def of(cls, trainer: str | Callable[..., Any]) -> TrainerRef:
        """The reference for a dotted path or a callable.

        Raises:
            ConfigError: the callable cannot be found again by name (a lambda, a local function).
        """
        if isinstance(trainer, str):
            return cls(trainer)
        module = getattr(trainer, "__module__", None)
        name = getattr(trainer, "__qualname__", None)
        main_file = getattr(sys.modules.get("__main__"), "__file__", None)
        is_named = bool(module) and bool(name) and "<" not in str(name)
        if not is_named or (module == "__main__" and main_file is None):
            raise ConfigError(
                f"trainer={name or trainer!r}: a separate process can only import functions at the "
                "top level of a module; move it there or use isolation=none"
            )
        if module == "__main__":
            return cls(f"{MAIN_MODULE}.{name}", str(Path(str(main_file)).resolve()))
        return cls(f"{module}.{name}")

    def load(self) -> tuple[ModuleType, Callable[..., Any]]:
        """Import the trainer: its module and the callable.

        Raises:
            ConfigError: it cannot be imported or is not callable; one line that says why.
        """
        if self.main_file is not None and MAIN_MODULE not in sys.modules:
            _load_main(self.main_file)
        module, names = self._import_module()
        found: Any = module
        for name in names:
            if not hasattr(found, name):
                raise ConfigError(f"trainer._target_={self.path}: {found.__name__} has no {name!r}")
            found = getattr(found, name)
        if not callable(found) or isinstance(found, ModuleType):
            raise ConfigError(f"trainer._target_={self.path}: is not callable")
        return module, found

    def _import_module(self) -> tuple[ModuleType, list[str]]:
        parts = self.path.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) < 2:
            raise ConfigError(
                f"trainer._target_={self.path}: accepted is the dotted path of a function, "
                "package.module.function"
            )
        for end in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:end])
            try:
                if name not in sys.modules and importlib.util.find_spec(name) is None:
                    continue
                return importlib.import_module(name), parts[end:]
            except ModuleNotFoundError as error:
                if error.name and (name == error.name or name.startswith(error.name + ".")):
                    continue
                raise self._cannot_import(error) from error
            except Exception as error:
                raise self._cannot_import(error) from error
        raise ConfigError(
            f"trainer._target_={self.path}: no module {parts[0]!r} on the Python path; start the "
            "command from its folder or set PYTHONPATH"
        )

    def _cannot_import(self, error: Exception) -> ConfigError:
        where = ""
        if isinstance(error, SyntaxError):
            where = f" ({error.filename}, line {error.lineno})"
        elif error.__traceback__ is not None:
            *_, last = inspect.getinnerframes(error.__traceback__)
            where = f" ({last.filename}, line {last.lineno})"
        text = (str(error).splitlines() or [""])[0]
        extra = error.name if isinstance(error, ModuleNotFoundError) else None
        remedy = f'; pip install "robust-train[{extra}]"' if extra in _EXTRAS else ""
        return ConfigError(
            f"trainer._target_={self.path}: cannot be imported: "
            f"{type(error).__name__}: {text}{where}{remedy}"
        )


def _load_main(path: str) -> None:
    """Import a script under another name than ``__main__``, so that its guard holds."""
    spec = importlib.util.spec_from_file_location(MAIN_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"trainer: cannot import the script {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_MODULE] = module
    spec.loader.exec_module(module)


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, ready to be carried to another process.

    Attributes:
        trainer: which callable to run.
        cfg: the composed config with this attempt's device, batch and workers, fully resolved.
        hydra_cfg: Hydra's own config, so that ``HydraConfig`` and logging work in the trainer.
        attempt: number of the attempt, counted from 1.
        run_dir: the job's run folder.
        resume_checkpoint: the checkpoint to go on from.
        environ: the whole environment of the attempt's process.
        cwd: its working directory.
        stall_timeout_seconds: without progress for so long it is ended; 0 for never.
        ranks: processes that run the trainer together.
        stop_grace_seconds: time that they have for a last checkpoint when one of them has ended in
            a way that the others know of.
        batch_search: the micro-batch is to be found before training.
    """

    trainer: TrainerRef
    cfg: DictConfig
    hydra_cfg: DictConfig | None
    attempt: int
    run_dir: Path
    resume_checkpoint: Path | None
    environ: dict[str, str]
    cwd: str
    stall_timeout_seconds: float = 0.0
    ranks: int = 1
    stop_grace_seconds: float = 20.0
    batch_search: BatchSearch | None = None

    @property
    def stacks_file(self) -> Path:
        """Where the attempt writes what its threads are doing, when it is asked to."""
        return self.run_dir / f"attempt-{self.attempt}.stacks"


def call_trainer(trainer: Callable[..., Any], cfg: DictConfig, run: Any) -> Any:
    """``trainer(cfg)``, or ``trainer(cfg, run)`` if it takes a second parameter.

    A second parameter counts if it is called ``run`` or has no default value.
    """
    if not isinstance(run, Run):
        return _call(trainer, cfg, run)
    run.memory_keeper = keeper = AttemptMemory(run, cfg)
    run.micro_batch_plan = MicroBatchPlan.of(cfg)
    run.saving.plan = SavePlan.of(cfg)
    with keeper:
        return _call(trainer, cfg, run)


def _call(trainer: Callable[..., Any], cfg: DictConfig, run: Any) -> Any:
    try:
        parameters = inspect.signature(trainer).parameters
    except (TypeError, ValueError):
        return trainer(cfg)
    if "run" in parameters:
        return trainer(cfg, run=run)
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return trainer(cfg, run) if len(required) >= 2 else trainer(cfg)
