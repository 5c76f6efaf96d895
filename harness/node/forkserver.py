"""The processes that run the user's script, forked from one process per node that has already
imported torch.

`python -m harness.node.forkserver FD` imports torch, then forks a worker for each request on the
socket FD (sent by `harness.node.forkserver`): environment, command and a pipe for its output. It
dies
with its node agent, and the workers die with it. A script's exception is written to
TORCHELASTIC_ERROR_FILE, as torchrun does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import harness
from harness.core import extensions
from harness.core.facts import OUT_OF_MEMORY
from harness.core.masking import learn, masked_deep
from harness.core.world import BadInput
from harness.node.heartbeat import (
    APPENDS,
    DUMP_SIGNAL,
    MESSAGE_NBYTES,
    die_with_parent,
    name_process,
    process_state,
    stacks_file,
)
from harness.node.marks import ATTACHED, UNADOPTED
from harness.node.worker_gpus import ONE_GPU, OWN_GPU, UNTOUCHED
from storage.tensor_threads import end_threads

# The node's warm process, from the agent's side: torch is imported once per node, and workers are
# forked from it in milliseconds.

NO_MORE_S = 5.0  # for the warm process to report the end of a worker
FORK_S = 1.0  # for the warm process to report a fork that is wanted no more
CLOSE_S = 10.0  # for the warm process to end once it is killed; longer if it hangs in the kernel


class Forked:
    """One worker, with an interface like `subprocess.Popen`."""

    def __init__(self, nursery: ForkServerClient):
        self.pid = 0  # 0 until the warm process has forked it
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit code and return it. Raises subprocess.TimeoutExpired."""
        with self._nursery.changed:
            if not self._nursery.changed.wait_for(lambda: self.returncode is not None, timeout_s):
                raise subprocess.TimeoutExpired("harness.node.forkserver", timeout_s)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._nursery.changed:
            if self.pid and self.returncode is None:
                os.kill(self.pid, number)

    def strike(self) -> None:
        """Send SIGKILL to its process group, without waiting."""
        with self._nursery.changed:
            if self.pid and self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def kill(self, within_s: float) -> None:
        """Send SIGKILL to its process group and wait for its end, for about `within_s` at most: a
        worker that hangs in a driver cannot be killed."""
        until_s = time.monotonic() + within_s
        while self.returncode is None:
            self.strike()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(min(NO_MORE_S if self.pid else FORK_S, within_s))
                return
            # the worker has ended, or never began: the warm process hangs, or is stopped
            if not self.pid or process_state(self.pid) in ("Z", ""):
                self._nursery.close()
            if time.monotonic() > until_s:
                return


class ForkServerClient:
    """A warm process from which workers are forked. `env`: its, and so their, environment."""

    def __init__(self, env: Mapping[str, str]):
        self.changed = threading.Condition()
        self._children: dict[int, Forked] = {}
        self._count = 0
        self._warm = threading.Event()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.node.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**UNTOUCHED, **env},
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def warm(self) -> bool:
        """Return whether it has imported what scripts need, or has ended and never will."""
        return self._warm.is_set()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, order: Mapping[str, Any]) -> tuple[Forked, BinaryIO]:
        """Start a worker that runs `order` (see `harness.node.forkserver.run`) as soon as the
        process is warm. Return it, and a file of its output."""
        out, theirs = os.pipe()
        worker = Forked(self)
        with self.changed:
            self._count += 1
            self._children[self._count] = worker
            number = self._count
        try:
            socket.send_fds(
                self._socket, [json.dumps({"fork": number, "order": order}).encode()], [theirs]
            )
        except OSError:  # it has ended, and `_listen` may have returned already
            self._lose(number)
        finally:
            os.close(theirs)
        return worker, open(out, "rb")

    def close(self, within_s: float = CLOSE_S) -> None:
        """End the process, and with it its workers. Wait for its end, for `within_s` at most."""
        until_s = time.monotonic() + within_s
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
            self._listener.join(max(0.0, until_s - time.monotonic()))

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(MESSAGE_NBYTES) or b"{}")
            except ConnectionError:
                message = {}
            if not message:
                break
            with self.changed:
                if "warm" in message:
                    self._warm.set()
                elif "pid" in message:
                    self._children[message["fork"]].pid = message["pid"]
                else:
                    self._children.pop(message["fork"]).returncode = message["code"]
                    with contextlib.suppress(OSError):
                        self._socket.send(json.dumps({"reap": message["fork"]}).encode())
                self.changed.notify_all()
        # a living process that has closed its socket is of no use either
        self._process.kill()
        self._process.wait()
        for number in list(self._children):
            self._lose(number)
        self._warm.set()
        self._socket.close()

    def _lose(self, number: int) -> None:
        with self.changed:
            worker = self._children.pop(number, None)
            if worker is None:
                return
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # it dies with the warm process; processes that it has started do not
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.returncode = -signal.SIGKILL
            self.changed.notify_all()


def wrong_call(error: BaseException) -> str:
    """Return in words that a script called a function of `harness` with wrong arguments, which no
    retry can change; "" if `error` is none of that kind."""
    found = re.match(r"(\w+)(\.\w+)?\(\) (missing|got|takes) ", str(error))
    if not isinstance(error, TypeError) or found is None or found[1] not in harness.__all__:
        return ""
    # Python raises it where the function is called, before that begins
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{at.filename}:{at.lineno}: {error}; docs/API.md lists what it takes"


MOST_SAID = 600  # characters of an allocator's own message
# what torch raises where an allocation fails, besides its own OutOfMemoryError
NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't|not)|out of memory|bad_alloc|ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, MemoryError):
        return True
    named = any(kind.__name__ == OUT_OF_MEMORY for kind in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def described(error: BaseException) -> tuple[str, str]:
    """Return type and message of an error, as the agent judges it. Where memory ran out, a session
    says what held it, if it can: there may be no memory left for that either."""
    if wrong := wrong_call(error):
        return BadInput.__name__, wrong
    if not is_out_of_memory(error):
        return type(error).__name__, str(error)
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_SAID]}"
    if (session := sys.modules.get("harness.worker.session")) is None:
        return OUT_OF_MEMORY, said
    try:
        report = session.out_of_memory()
    except Exception as e:  # without memory anything may fail
        report = f"what held the memory is not known ({type(e).__name__}: {e})"
    if report:
        print(f"harness: {report}", flush=True)
    return OUT_OF_MEMORY, f"{report}; {said}" if report else said


def write_error(error: BaseException) -> None:
    """Write type, message and traceback to the file that the agent (or torchrun) reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    name, text = described(error)
    body = {
        "message": {
            "message": f"{name}: {text}",
            "type": name,
            "text": text,
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    with contextlib.suppress(OSError), open(path, "w") as f:
        json.dump(masked_deep(body), f)


STEPS_ALONE = 8  # optimizer steps after which a script is believed to have no session


def notice_steps(mark: Path, adapts: bool) -> None:
    """Leave a file beside `mark` when torch's optimizers step in this process before a session has
    left its own. `adapts`: refuse such a script, with BadInput from the optimizer's step, if each
    of several workers trains for itself."""
    if "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = STEPS_ALONE

    def stepped(*_: Any) -> None:
        nonlocal left
        # it is not removed then: torch goes through its hooks when it calls this one
        if left <= 0:
            return
        left -= 1
        if mark.with_name(ATTACHED).exists():
            left = 0
        elif not left:
            mark.with_name(UNADOPTED).touch()
            world = int(os.environ.get("WORLD_SIZE", 1))
            if adapts and world > 1 and not sys.modules["torch"].distributed.is_initialized():
                raise BadInput(each_for_itself(world))

    register_optimizer_step_post_hook(stepped)


def each_for_itself(world: int) -> str:
    """Return the message for a script whose workers know nothing of each other."""
    return (
        f"wanted one training by {world} workers, found that each trains for itself: the script "
        "has no session, no trainer that an adapter drives, and no process group. Give its loop "
        "run.steps or run.loader (docs/trainers/loops.md), or start one worker (--nproc 1 "
        "--worlds 1); if each is to train for itself, say --adapt none"
    )


def run(order: dict[str, Any]) -> None:
    """Run the script here. `order` is {"env": {...}, "argv": ["script.py" or "-m", ...]}."""
    os.environ.update(order["env"])
    if os.environ.get(ONE_GPU) and (gpu := os.environ.get(OWN_GPU)):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything can initialize CUDA
    learn(os.environ)
    argv: list[str] = order["argv"]
    adapt = os.environ.get("HARNESS_ADAPT", "none")
    if mark := os.environ.get("HARNESS_MARK"):
        notice_steps(Path(mark), adapt != "none")
    try:
        if adapt != "none":
            try:
                extensions.load(extensions.IMPORT_HOOK, f"--adapt {adapt}").install()
            except BadInput:  # without adapters, a script of `harness.attach` needs none
                if adapt != "auto":
                    raise
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


# The first optimizer that is made imports torch._dynamo, which takes half as long as torch itself;
# numpy.unique imports numpy.ma.
LOADED = (
    "numpy",
    "numpy.ma",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "harness.worker.session",
    "torch._dynamo",
)


def serve(fd: int) -> None:
    """Import torch and more, then fork workers on request until the agent ends."""
    die_with_parent()
    # Ctrl-C and a cloud's SIGTERM are for the agent, which then notifies the workers itself
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # imports make almost no garbage, and collecting it takes a tenth of their time
    gc.disable()
    for module in LOADED:
        with contextlib.suppress(ImportError):  # the script may need none of them
            importlib.import_module(module)
    for module in filter(None, os.environ.get("HARNESS_PRELOAD", "").split(",")):
        try:
            importlib.import_module(module)
        except Exception as e:  # the script itself will fail, if it needs the module
            with contextlib.suppress(OSError):
                print(f"harness: preload {module}: {type(e).__name__}: {e}", flush=True)
    gc.collect()
    gc.freeze()  # permanent objects are not scanned, so workers do not copy their pages
    gc.enable()
    agent = socket.socket(fileno=fd)
    awake, alarm = socket.socketpair()
    awake.setblocking(False)
    alarm.setblocking(False)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent.send(b'{"warm": true}')
    living: dict[int, int] = {}  # number of the request -> process
    # Not reaped yet: no other process may get the id before the agent knows of the end.
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
    """Run the script, in the fork, as if this process had been started for it. `out`: the pipe for
    its output."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    dump_to_file(order)
    name_process(f"rank-{order['env'].get('RANK', '')}")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    # a preloaded module has initialized CUDA, which does not survive a fork: start a new process
    if torch is not None and torch.cuda._is_in_bad_fork():
        pipe = os.memfd_create("order")
        os.write(pipe, json.dumps(order).encode())
        os.lseek(pipe, 0, os.SEEK_SET)
        os.dup2(pipe, 0)
        os.execv(sys.executable, [sys.executable, "-m", "harness.node.forkserver", "-"])
    if numpy is not None:
        # each process gets its own seed, as if it had imported numpy; Python's reseeds after a fork
        numpy.random.seed()
    leave(exit_code(order))


def dump_to_file(order: dict[str, Any]) -> None:
    """Let this worker's stacks go to a file of the node's folder, for the agent, which asks for
    them more often than anybody wants to read them. On a full disk they go to the log."""
    mark, local_rank = order["env"].get("HARNESS_MARK"), order["env"].get("LOCAL_RANK", "0")
    file = 2
    if mark:
        with contextlib.suppress(OSError):
            file = os.open(stacks_file(Path(mark).parent, int(local_rank)), APPENDS, 0o600)
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True)


def main() -> None:
    if sys.argv[1] != "-":
        serve(int(sys.argv[1]))
        return
    die_with_parent()
    order = json.loads(sys.stdin.readline())
    dump_to_file(order)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    leave(exit_code(order))


def exit_code(order: dict[str, Any]) -> int:
    """Run the script to its end. Return the exit code that Python would have."""
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
                session.conclude()  # while threads and connections still exist
            except SystemExit as e:
                return e.code if isinstance(e.code, int) else 1
            except BaseException as e:
                write_error(e)
                raise
        return code
    except BaseException as e:
        if not tell_lost_peer(e):
            sys.excepthook(*sys.exc_info())
        return 1


# what gloo and NCCL say when the process at the other end is gone
PEER_GONE = re.compile(r"gloo.*(by peer|Broken pipe)|remote process exited", re.S)


def tell_lost_peer(error: BaseException) -> bool:
    """Say in one line that another rank is gone, and keep the traceback in a file of the node's
    folder: it shows where this rank stood, and the fault is elsewhere. Return whether it was so."""
    mark = os.environ.get("HARNESS_MARK")
    if not mark or not isinstance(error, RuntimeError) or not PEER_GONE.search(str(error)):
        return False
    path = Path(mark).with_name(f"lost-peer-{os.environ.get('LOCAL_RANK', '0')}.txt")
    try:
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return False
    print(f"harness: another rank is gone; where this one stood is in {path}", file=sys.stderr)
    if (session := sys.modules.get("harness.worker.session")) is not None:
        session.keep_state()
    return True


def leave(code: int) -> NoReturn:
    """End the process as Python does, with threads joined and atexit functions run, but without
    tearing down torch's modules: that takes a second or two on a busy machine, while the next world
    waits for this rank. As nothing is torn down, threads with tensors are not waited for."""
    atexit.unregister(end_threads)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
