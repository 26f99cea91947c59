"""Commands and their interpreters that begin as forks of one process with the imports done.

What follows is the real command: its own process, arguments, environment, output and signals; only
the seconds for imports and for Hydra's first composition are paid once a worker. It becomes a child
of the test's process. A command is born with a twin, which serves it as the first one serves the
test's process: it forks where the launcher starts its reaper or an interpreter. Those of a job that
a sweep has forked start as users' do, and so does an interpreter whose environment matters before
``main``.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REQUEST_BYTES = 1 << 17
_IMPORTS = (
    "robust_train.cli.jobs",
    "robust_train.children.interpreters",
    "robust_train.attempt.interpreter",
    "robust_train.report.html",
)
_LARGE_IMPORTS = {
    # the latter is imported when an optimizer is built
    "": ("torch", "torch._dynamo"),
    # what the built-in trainer's default imports; and the trainer itself, for programs without a
    # launcher (see :func:`preloaded`)
    "vision": ("torch.utils.tensorboard", "sklearn.datasets", "robust_train.vision.trainer"),
}
_SHOW_STACKS = signal.SIGRTMAX - 1  # of no use to anybody else
_LAST_WORDS_SECONDS = 1.0
_M_MMAP_THRESHOLD = -3  # malloc.h
_MADV_COLLAPSE = 25  # linux/mman.h
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# what the system or a library has read by the time that a fork could be given another value
_READ_BEFORE = (
    *("GLIBC_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NPY_", "OMP_", "OPENBLAS_"),
    *("PYTHONM", "PYTHONU", "PYTHONH", "PYTORCH_", "TORCH"),
)
# set by scikit-learn and torch when they are imported, be it in the test's process
_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
# read by torch when its allocator is first used
_READ_LATER = (_MMAP_THRESHOLD, "PYTORCH_CUDA_ALLOC_CONF")

_to_servers: dict[str, socket.socket] = {}
_large: dict[str, types.ModuleType] = {}
_read_before: dict[str, str] = {}


class Forked(subprocess.Popen):
    """A process that is a fork: ``fork(stdin, stdout, stderr)`` returns its id."""

    def __init__(self, fork: Callable[[int, int, int], int], args: Any, **options: Any) -> None:
        self._fork = fork
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        pipes = stdin, _, _, stdout, _, stderr = given[10:16]
        self.pid = self._fork(stdin, stdout, stderr)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str, str]:
        """Read all that it prints until it ends. Where that takes too long, it is killed with all
        that it has started, and the error says where each of them stood."""
        try:
            return super().communicate(input, timeout)
        except subprocess.TimeoutExpired:
            code = self.poll()
            how = "ran on" if code is None else f"had ended with {code}"
            _show_where_they_stand_and_kill(self.pid)
            texts = super().communicate(timeout=_LAST_WORDS_SECONDS)
            about = f"{self.args}: after {timeout:g} s it {how}"
            raise AssertionError("\n".join((about, *texts))) from None


def _show_where_they_stand_and_kill(pid: int) -> None:
    """Have a command and what it has started print their stacks to its stderr, and kill them."""
    import psutil  # the server forks from an interpreter that has only what commands import

    pids = [pid]
    with contextlib.suppress(psutil.Error):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    for stuck in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{stuck}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> (_SHOW_STACKS - 1) & 1:
                os.kill(stuck, _SHOW_STACKS)
    time.sleep(_LAST_WORDS_SECONDS)
    for stuck in pids:
        with contextlib.suppress(OSError):
            os.kill(stuck, signal.SIGKILL)


def start(argv, cwd, environ, kind=None, *, alone=False, **options) -> subprocess.Popen[str]:
    """Start ``python argv…``: a script, ``-m module`` or ``-c code``; the caller waits for it.

    It begins as users' do if it is to be ``alone``, or with other options of Popen's.
    """
    argv = [str(word) for word in argv]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if alone or options:
        options = {"cwd": cwd, "env": environ, "stdin": subprocess.DEVNULL, **streams, **options}
        return subprocess.Popen([sys.executable, *argv], **options)
    request = {"is": "command", "argv": argv, "cwd": str(cwd), "environ": dict(environ)}

    def fork(stdin: int, stdout: int, stderr: int) -> int:
        with _adopting_orphans():
            return _fork_by(_server(kind or _kind(argv)), request, [stdout, stderr])

    return Forked(fork, argv, **streams)


def run(argv, environ, cwd=None, timeout=120, kind=None) -> subprocess.CompletedProcess[str]:
    command = start(argv, cwd or Path.cwd(), environ, kind)
    stdout, stderr = command.communicate(timeout=timeout)
    return subprocess.CompletedProcess(list(argv), command.wait(), stdout, stderr)


def preloaded(program, *arguments, cwd=None, environ=None) -> subprocess.CompletedProcess[str]:
    """Run ``python -c program arguments…`` to its end, with torch and the built-in trainer there,
    in this process's environment or in ``environ``. Freed blocks of memory go back to the system at
    once, so that a limit is one on what is held and not on what a heap with holes has kept."""
    environ = environ or {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ = {**environ, _MMAP_THRESHOLD: "65536"}
    return run(("-c", program, *arguments), environ, cwd, 90, kind="vision")


def robust_train(*arguments, environ, cwd=None) -> subprocess.CompletedProcess[str]:
    return run(("-m", "robust_train.cli.main", *arguments), environ, cwd)


def _kind(argv: Sequence[str]) -> str:
    is_built_in = argv[0].endswith("/train_robust.py") and not any(
        word.startswith("trainer") for word in argv
    )
    return "vision" if is_built_in else ""


def _fork_by(server: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Have a server fork for a request; return the fork, which is ours if we adopt orphans."""
    data = json.dumps(request).encode()
    assert len(data) < _REQUEST_BYTES
    socket.send_fds(server, [data], descriptors)
    pid = int(server.recv(64))
    assert server.recv(64) == b"it is yours"
    return pid


class Starter:
    """Stands in for :mod:`subprocess` where the launcher starts its reaper and its interpreters."""

    def __init__(self, twin: socket.socket | None = None) -> None:
        self._twin = twin
        self._owner = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Have a fork become ``python -I -S reaper.py …`` or ``python …/attempt/__main__.py …``."""
        kind, environ = "reaper" if args[1] == "-I" else "interpreter", dict(options["env"])
        read_before = _read_before or _of_importance(_environ())
        # a job that a sweep has forked does not adopt what the twin forks
        is_owner = self._twin is None or os.getpid() == self._owner
        if not is_owner or (kind == "interpreter" and _of_importance(environ) != read_before):
            return subprocess.Popen(args, **options)
        # Options such as -B, for PYTHONDONTWRITEBYTECODE, stand before an interpreter's program.
        words = args[5:] if kind == "reaper" else args[-2:-1]
        request = {"is": kind, "argv": words, "environ": environ, "cwd": os.getcwd()}

        def fork(*streams: int) -> int:
            server = _server() if self._twin is None else self._twin
            # its caller is a subreaper by now
            return _fork_by(server, request, [options["pass_fds"][0], *streams])

        return Forked(fork, args, **options)


def _of_importance(environ: Mapping[str, str]) -> dict[str, str]:
    important = {name: value for name, value in environ.items() if name.startswith(_READ_BEFORE)}
    for name in (*_READ_LATER, *_SET_BY_LIBRARIES):
        important.pop(name, None)
    return important


def plain_environ() -> dict[str, str]:
    """Return the environment without what is said of GPUs and their memory."""
    hidden = ("CUDA_", "PYTORCH_", "HYDRA_", "NVIDIA_", "SIMULATED_")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


def _environ() -> dict[str, str]:
    """Return the environment of the server."""
    # as shared_machine_environment() does for every interpreter
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", **plain_environ()}


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _server(kind: str = "") -> socket.socket:
    """Return the connection to a server: the first one, or a fork of it that imports more."""
    if kind not in _to_servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if kind:
            request = {"is": "server", "imports": _LARGE_IMPORTS[kind]}
            _fork_by(_server(), request, [theirs.fileno()])
        else:
            source = Path(__file__).resolve().parents[2] / "src"
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**_environ(), "PYTHONPATH": str(source)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            atexit.register(process.wait)
        theirs.close()
        _to_servers[kind] = ours
        atexit.register(ours.close)
    return _to_servers[kind]


def _serve(connection: socket.socket) -> None:
    """Fork for each request; return in the fork, which is to be the command."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 5)
        if not data:
            os._exit(0)
        between = os.fork()
        if not between:
            fork = os.fork()
            if not fork:
                connection.close()
                request = json.loads(data)
                if request["is"] == "server":
                    connection = socket.socket(fileno=descriptors[0])
                    _import_large(request["imports"])
                    continue
                if request["is"] == "reaper":
                    _be_reaper(request, descriptors)
                if request["is"] == "interpreter":
                    _be_interpreter(request, descriptors)
                _become(request, descriptors)
                return
            connection.send(str(fork).encode())
            os._exit(0)  # so the fork is an orphan, which the test's process adopts
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.send(b"it is yours")


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process the command, with a twin that forks for it."""
    from robust_train.children import interpreters

    argv = request["argv"]
    runs_a_job = argv[0] not in ("-c", "-m") or "train" in argv or "--" in argv
    twin = _bear_twin(descriptors) if runs_a_job else None
    # where the first one wants a reaper: its launcher blocks them meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # the old one takes the file it was made for to be there still
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    faulthandler.register(_SHOW_STACKS, file=2)
    _adopt(request)
    if twin is not None:
        interpreters.subprocess = Starter(twin)
    _hide_large_modules()
    gc.set_threshold(100_000)  # composing a config makes many objects and no garbage
    sys.argv = request["argv"]
    first = os.getcwd() if argv[0] in ("-c", "-m") else argv[0].rpartition("/")[0]
    paths = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [first, *filter(None, paths)]
    _register_plugins(paths)


def _register_plugins(paths: Sequence[str]) -> None:
    """Have Hydra know the plugins in these folders: it has looked for plugins already."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.plugin import Plugin

    for folder in (Path(path) / "hydra_plugins" for path in paths):
        is_ours = folder.parent.name == "src"  # ours are found at once
        for package in () if is_ours else folder.glob("*/__init__.py"):
            module = importlib.import_module(f"hydra_plugins.{package.parent.name}")
            for item in vars(module).values():
                is_own = isinstance(item, type) and item.__module__ == module.__name__
                if is_own and issubclass(item, Plugin):
                    Plugins.instance().register(item)


def _bear_twin(descriptors: Sequence[int]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        os.setsid()
        # a signal to all processes of the job must not end it before the command
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        _serve(theirs)
        os._exit(0)
    theirs.close()
    return ours


def _be_like_new(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Do what a process of the launcher's does first; return the descriptor that it inherits."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    os.setsid()
    inherited, *streams = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    _adopt(request)
    launcher = int(request["argv"][0])
    while os.getppid() != launcher:  # it adopts this process
        if not os.path.exists(f"/proc/{launcher}"):  # killed meanwhile
            os._exit(0)
        time.sleep(0.001)
    return inherited


def _be_reaper(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    from robust_train.host import reaper

    pipe = _be_like_new(request, descriptors)
    sys.argv[:] = ["reaper.py", str(pipe), *request["argv"]]
    reaper.main()
    os._exit(0)


def _be_interpreter(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Do what a new interpreter does that runs ``python -m robust_train.attempt``."""
    channel = _be_like_new(request, descriptors)
    _hide_large_modules()
    sys.argv[:] = ["__main__.py", *request["argv"], str(channel)]
    from robust_train.attempt import interpreter

    interpreter.main()


def _hide_large_modules() -> None:
    for name in _large:
        del sys.modules[name]
    sys.meta_path.insert(0, _Hidden())


def _adopt(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    importlib.invalidate_caches()
    # what the C library and the dynamic loader have read already
    if threshold := os.environ.get(_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    folders = [
        Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder
    ]
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        first = next((folder / name for folder in folders if (folder / name).exists()), None)
        with contextlib.suppress(OSError):  # it hides the driver's (real_gpus)
            if first is not None:
                ctypes.CDLL(str(first))


class _Hidden:
    """Gives a command the large libraries that its interpreter has, should it import them."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        module = _large.get(name)
        if module is None or module.__spec__ is None:
            return None
        like = module.__spec__
        spec = ModuleSpec(
            name, self, origin=like.origin, is_package=like.submodule_search_locations is not None
        )
        spec.submodule_search_locations = like.submodule_search_locations
        spec.has_location = like.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        sys.meta_path.remove(self)
        self._spec = _large[spec.name].__spec__
        sys.modules.update(_large)
        return _large[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _warm_up() -> None:
    from hydra import compose, initialize_config_module

    from robust_train.report import html

    _read_before.update(_of_importance(os.environ))
    for name in _IMPORTS:
        importlib.import_module(name)
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        compose("robust", return_hydra_config=True)
    for template in html.TEMPLATES.glob("*.j2"):
        html.template_environment().get_template(template.name)
    _import_large(_LARGE_IMPORTS[""])


def _import_large(names: Sequence[str]) -> None:
    small = set(sys.modules)
    for name in names:
        importlib.import_module(name)
    for name in set(sys.modules) - small:
        if name.partition(".")[0] not in sys.stdlib_module_names:
            _large[name] = sys.modules[name]
    for finalizer in weakref.finalize._registry:  # torch's take a tenth of a second at each exit
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _use_huge_pages() -> None:
    """A fork copies one entry for each page: 2 MiB each where the kernel takes the hint."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _run_and_exit() -> NoReturn:
    """Run the command, and exit like its interpreter, but do not tear large libraries down."""
    code: object = 0
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            code_to_run = compile(sys.argv.pop(1), "<string>", "exec")
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(code_to_run, sys.modules["__main__"].__dict__)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    # a launch in the test's process starts its interpreters with these blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _run_and_exit()
