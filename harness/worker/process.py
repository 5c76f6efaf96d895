"""The processes in which the user's script runs, forked from one per node that has torch imported
already.

`python -m harness.worker.process FD` imports torch, then forks a worker for each request on the
socket FD (`harness.agent.nursery` asks): environment, command and a pipe for its output. It dies
with its agent, and they with it. A script's exception is written to TORCHELASTIC_ERROR_FILE, as
torchrun does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from harness.core.masking import learn, masked_deep
from harness.node.processes import DUMP_SIGNAL, MESSAGE_NBYTES, die_with_parent, name_process
from storage.errands import end_threads


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
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    with contextlib.suppress(OSError), open(path, "w") as f:
        json.dump(masked_deep(body), f)


def run(order: dict[str, Any]) -> None:
    """Become the script: `order` is {"env": {...}, "argv": ["script.py" or "-m", ...]}."""
    os.environ.update(order["env"])
    learn(os.environ)
    argv: list[str] = order["argv"]
    try:
        if os.environ.get("HARNESS_ADAPT", "none") != "none":
            # by name: the script may need no adapter, and this room knows of none
            importlib.import_module("harness.adapters.hook").install()
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


def serve(fd: int) -> None:
    """Import, then fork for as long as the agent lives."""
    die_with_parent()
    # a Ctrl-C or a cloud's SIGTERM is for the agent, which tells workers in its own way
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # imports make next to no garbage, and looking for it in them is a tenth of their time
    gc.disable()
    # torch._dynamo: the first optimizer that is made imports it, which takes as long as half of
    # torch; numpy.ma: numpy.unique does.
    for module in (
        "numpy",
        "numpy.ma",
        "torch",
        "torch.distributed",
        "torch.distributed.checkpoint",
        "harness.worker.session",
        "torch._dynamo",
    ):
        with contextlib.suppress(ImportError):  # the script may need none of them
            importlib.import_module(module)
    for module in filter(None, os.environ.get("HARNESS_PRELOAD", "").split(",")):
        try:
            importlib.import_module(module)
        except Exception as e:  # the script will say so in its own words, if it needs it
            print(f"harness: --preload {module}: {type(e).__name__}: {e}", flush=True)
    gc.collect()
    gc.freeze()  # what is there for good is neither looked at by collections nor copied by them
    gc.enable()
    agent = socket.socket(fileno=fd)
    awake, alarm = socket.socketpair()
    awake.setblocking(False)
    alarm.setblocking(False)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent.send(b'{"warm": true}')
    living: dict[int, int] = {}  # number of the request -> process
    # not reaped: until the agent has heard of the end, nobody else may have the id
    ended: dict[int, int] = {}
    while True:
        if agent in select.select([agent, awake], [], [])[0]:
            data, fds, _, _ = socket.recv_fds(agent, MESSAGE_NBYTES, 1)
            if not data:
                return
            request = json.loads(data)
            if "reap" in request:
                os.waitpid(ended.pop(request["reap"]), 0)
                continue
            warm = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(warm)
                for one in (agent, awake, alarm):
                    one.close()
                become_worker(request["order"], fds[0])
            os.close(fds[0])
            living[request["fork"]] = pid
            agent.send(json.dumps({"fork": request["fork"], "pid": pid}).encode())
        with contextlib.suppress(BlockingIOError):
            awake.recv(4096)
        for number, pid in list(living.items()):
            if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                ended[number] = living.pop(number)
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                agent.send(json.dumps({"fork": number, "code": code}).encode())


def become_worker(order: dict[str, Any], out: int) -> NoReturn:
    """In the fork: run the script as if this were a process of its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    name_process(f"rank-{order['env'].get('RANK', '')}")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    # an import of the site's own has touched CUDA: begin anew
    if torch is not None and torch.cuda._is_in_bad_fork():
        pipe = os.memfd_create("order")
        os.write(pipe, json.dumps(order).encode())
        os.lseek(pipe, 0, os.SEEK_SET)
        os.dup2(pipe, 0)
        os.execv(sys.executable, [sys.executable, "-m", "harness.worker.process", "-"])
    if numpy is not None:
        # each process has its own, as if it had imported numpy itself; Python's does so by itself
        numpy.random.seed()
    leave(exit_code(order))


def main() -> None:
    if sys.argv[1] != "-":
        serve(int(sys.argv[1]))
        return
    die_with_parent()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    order = json.loads(sys.stdin.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    leave(exit_code(order))


def exit_code(order: dict[str, Any]) -> int:
    """Run the script to its end; what Python would exit with."""
    try:
        code = 0
        try:
            run(order)
        except SystemExit as e:
            if not (e.code is None or isinstance(e.code, int)):
                print(e.code, file=sys.stderr)
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if code == 0 and (session := sys.modules.get("harness.worker.session")) is not None:
            try:
                session.conclude()  # while threads and connections still stand
            except SystemExit as e:
                return e.code if isinstance(e.code, int) else 1
            except BaseException as e:
                write_error(e)
                raise
        return code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def leave(code: int) -> NoReturn:
    """End as Python does, threads joined and atexit functions run, but without tearing torch's
    modules down: that takes a second or two on a busy machine, in which the next world waits for
    this rank. Nothing is torn down under a thread, so threads with tensors are not waited for."""
    atexit.unregister(end_threads)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
