"""The process in which the user's script runs. Started by the agent ahead of time, so that torch is imported already.

`python -m harness.worker` imports torch, then waits on its standard input for one line of JSON: environment and command
of the script. It dies with its agent. A script's exception is written to TORCHELASTIC_ERROR_FILE, as torchrun does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
DUMP_SIGNAL = signal.SIGUSR2  # the agent asks a hung worker where it hangs


def die_with_parent() -> None:
    """Linux: be killed when the parent dies, however it dies. Elsewhere there is no such call; pipes closing must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_error(error: BaseException) -> None:
    """Leave type, message and traceback where the agent (or torchrun) looks for them."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    body = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "type": type(error).__name__,
            "text": str(error),
            "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))},
        }
    }
    with contextlib.suppress(OSError), open(path, "w") as f:
        json.dump(body, f)


def run(order: dict[str, Any]) -> None:
    """Become the script: `order` is {"env": {...}, "argv": ["script.py" or "-m", ...]}."""
    os.environ.update(order["env"])
    argv: list[str] = order["argv"]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException as e:
        write_error(e)
        raise


def main() -> None:
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:  # it died before we could ask to die with it
        sys.exit(1)
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a Ctrl-C or a cloud's SIGTERM is for the agent, which tells us in its own way
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # torch._dynamo: the first optimizer that is made imports it, which takes as long as half of torch.
    for module in ("numpy", "torch", "torch.distributed", "torch.distributed.checkpoint", "harness.session", "torch._dynamo"):
        with contextlib.suppress(ImportError):  # the script may need none of them
            importlib.import_module(module)
    if warm_file := os.environ.pop("HARNESS_WARM", ""):
        with contextlib.suppress(OSError):  # then the agent counts on us a little later
            open(warm_file, "x").close()
    line = sys.stdin.readline()
    if not line:  # the agent is gone or does not need us
        sys.exit(0)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    leave(exit_code(json.loads(line)))


def exit_code(order: dict[str, Any]) -> int:
    """Run the script to its end; what Python would exit with."""
    try:
        run(order)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as Python does, threads joined and atexit functions run, but without tearing torch's modules down: that takes
    a second or two on a busy machine, in which the next world waits for this rank."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
