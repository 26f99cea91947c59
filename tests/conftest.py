import gc
import os
import signal

import pytest
from hypothesis import settings

# before torch is imported: threads of several test processes would wait for each other's cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# modules are compiled once, and not by each of the many processes that the tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import real_gpus
import warm
from robust_train.children import interpreters
from robust_train.cli.main import main
from world import World

# launches in the test's process
interpreters.subprocess = warm.Starter()

# how long an example takes depends on what else this machine does
settings.register_profile("any_load", deadline=None)
settings.load_profile("any_load")

pytest_plugins = ["simulated_nvml.fixtures", "memory_world", "fake_torch"]


@pytest.fixture
def world(tmp_path):
    """A folder to run the real commands in, on a machine without a GPU."""
    return World(tmp_path)


@pytest.fixture
def alone(world):
    """Its launchers start as users do, also where torch is imported in their own process."""
    world.alone = True


@pytest.fixture
def says(capfd):
    """Runs ``robust-train …`` in this process; what it prints, if it ends with ``code``."""

    def run(*words, code=0):
        assert main([*map(str, words)]) == code
        return capfd.readouterr()

    return run


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Whoever collects garbage in a test goes through that test's objects alone, and not through
    the million that libraries and earlier tests have left in this process."""
    gc.collect()  # what earlier modules left stays frozen: it is not gone through for each module
    gc.freeze()


def pytest_sessionfinish():
    """Let the interpreter take down what it has, at its end."""
    gc.unfreeze()


@pytest.fixture
def whole_heap():
    """For a test that asks who holds an object: that may be a module of long ago."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _not_the_users_own_folders(tmp_path_factory):
    """Fixtures of a module or a session start runs too, before a test has folders of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _own_runs_and_cache(tmp_path, monkeypatch):
    """Runs of one test, and what its jobs learn about memory, must not be found by another's."""
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


_LONG = ("test_examples.py", "test_accelerate.py", "test_transformers.py", "test_lightning.py")
_APART = (
    "test_conformance.py",
    "test_run_command.py",
    "test_built_in_jobs.py",
    "test_attempts.py",
    "test_recovery_of_each_kind.py",
    "test_devices.py",
    "test_several_ranks.py",
    "test_benchmarks.py",
)


def pytest_collection_modifyitems(items):
    """Files that take long for their number of tests go first, and last those whose tests go to
    whichever worker is free: at the end, no worker waits long for another."""
    items.sort(key=lambda item: (item.path.name in _APART) - (item.path.name in _LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return two workers a core: a test mostly waits for the processes that it has started."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute tests by file, except for tests that share nothing with their file."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrApart(LoadFileScheduling):
        def _split_scope(self, nodeid):
            if real_gpus.are_wanted(config):
                return "gpu"  # one test at a time
            file = nodeid.partition("::")[0]
            return nodeid if file.rpartition("/")[2] in _APART else file

    return ByFileOrApart(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config):
    """Hide real GPUs, and let commands be interrupted also where the tests run in the background or
    under nohup: shells have such jobs ignore these signals, children inherit that, and the launcher
    respects it."""
    real_gpus.prepare(config)
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not real_gpus.can_be_used():
        pytest.skip("needs a GPU that torch can use and on which no one computes: pytest -m gpu")
