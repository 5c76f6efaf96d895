"""What `harness check` sees of each step inside a worker: the rows that the model is trained on,
what its layers draw, losses, gradients, and what is left afterwards."""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.proof.check_evidence import ForwardCall, Gradient, Picture, StepSeen, packed
from harness.proof.check_picture import Album

if TYPE_CHECKING:
    from harness.proof.check_probe import Ownership

T = TypeVar("T")

BINS = 64  # of a gradient's sketch
MOST_CALLS = 512  # of one step, that are told
DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU)


def drawing_layers(model: nn.Module) -> Iterator[str]:
    """Layers that draw random numbers, as far as their types tell."""
    for name, module in model.named_modules():
        rate = getattr(module, "dropout", 0.0) or getattr(module, "attention_dropout", 0.0)
        if (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or (
            isinstance(module, (nn.RReLU, nn.MultiheadAttention, nn.RNNBase)) and rate
        ):
            yield f"{name or 'model'} ({type(module).__name__})"


def unseen(look: Callable[..., T]) -> Callable[..., T]:
    """What we look at is neither compiled with the model nor seen by modes that watch what the
    script does with its tensors."""

    @functools.wraps(look)
    def looked(*args: Any, **more: Any) -> T:
        with torch._C.DisableTorchFunction():
            return look(*args, **more)

    return cast(Callable[..., T], torch.compiler.disable(looked))  # type: ignore[no-untyped-call]


class Senses:
    """Fed by hooks that `listen` and `watch` set; `step_body` tells of a step and begins anew."""

    def __init__(self, own: Ownership):
        self._own = own
        self._model: nn.Module | None = None
        self._saved: Callable[[], set[int]] = lambda: set()
        self._album = Album(own.module, lambda: self._saved())
        self._clear()

    def _clear(self) -> None:
        self._rows: set[int] = set()
        self._read, self._reads = 0, 0
        self._calls: list[ForwardCall] = []
        self._gradients: list[Gradient] = []
        self._losses: list[float] = []
        self._backward = ""
        self._before: tuple[int, str] | None = None
        self._depth = 0  # forwards within forwards

    # ---- hooks -----------------------------------------------------------------------------------
    def listen(self) -> None:
        """To every optimizer's step, behind which gradients are still there (before it, those of a
        closure are not yet), and every backward."""
        register_optimizer_step_post_hook(unseen(self._optimized))
        backward, note = torch.Tensor.backward, unseen(self._note_loss)

        @functools.wraps(backward)
        def noted(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            note(tensor)
            return backward(tensor, *args, **more)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]

    def watch(self, model: nn.Module, training: Any) -> None:
        """The forwards of what `prepare` was given."""
        self._model = model
        self._saved = lambda: {
            id(thing) for thing in (*training._saved.values(), *training.optimizers)
        }
        watched = [model] if type(model).forward is not nn.Module.forward else []
        if not watched or hasattr(model, "training_step"):  # which need not call its own forward
            watched += list(model.children())
        for module in watched:
            module.register_forward_pre_hook(unseen(self._entered), with_kwargs=True)
            module.register_forward_hook(unseen(self._left))

    def note_read(self, positions: Any, said: Any) -> None:
        """A loop that is not ours says so."""
        pairs = zip(positions.tolist(), said.tolist(), strict=True)
        self._read += sum(xxhash.xxh3_64_intdigest(f"{p} {s}".encode()) % 2**62 for p, s in pairs)
        self._reads += len(positions)

    def _note_loss(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 1:
            self._losses.append(float(tensor.detach()))
        self._backward = self._backward or self._own.line()

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1 and module.training and torch.is_grad_enabled():
            rows = rows_of((args, kwargs))
            self._rows |= set(rows)
            self._before = sum(rows) % 2**63, drawn()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._before is not None and self._depth == 0:
            rows, before = self._before
            self._before = None
            if len(self._calls) < MOST_CALLS:
                self._calls.append(ForwardCall(rows, before, drawn() != before))

    def _optimized(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if grads:
            self._gradients.append(sketched(grads))

    # ---- what is told ----------------------------------------------------------------------------
    @unseen
    def step_body(self, number: int, pictures: bool) -> dict[str, Any]:
        """`StepSeen` as a line has it."""
        picture = self.picture() if pictures else {}
        seen = StepSeen(
            number,
            sum(self._rows) % 2**63,
            len(self._rows),
            self._read % 2**63,
            self._reads,
            losses=tuple(self._losses),
            backward=self._backward,
            norms=statistics_of(self._model),
            t=time.time(),
        )
        body = {
            **{name: getattr(seen, name) for name in seen.__dataclass_fields__},
            "calls": [[c.rows, c.before, c.drew] for c in self._calls],
            "gradients": [[g.norm, g.sketch] for g in self._gradients],
            "picture": packed(picture),
        }
        self._clear()
        return body

    @unseen
    def picture(self) -> Picture:
        """Of all that the script's names lead to now."""
        return self._album.picture(roots(self._own))


def roots(own: Ownership) -> dict[str, Any]:
    """The script's globals, those of its own modules, the locals of its functions that are at
    work, and the global generators. A local is named with its function."""
    found: dict[str, Any] = {}
    main = sys.modules.get("__main__")
    if main is not None:
        found |= {k: v for k, v in vars(main).items() if k[:2] != "__"}
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if own.file(code.co_filename) and code.co_name != "<module>":
            for name, value in dict(frame.f_locals).items():
                found.setdefault(f"{code.co_name}().{name}", value)
        frame = frame.f_back  # type: ignore[assignment]
    for name, module in list(sys.modules.items()):
        if module is not None and name != "__main__" and own.module(name):
            for key, value in list(vars(module).items()):
                if key[:2] != "__":
                    found.setdefault(f"{name}.{key}", value)
    found["Python's random"] = random._inst
    found["numpy's random"] = np.random.mtrand._rand
    found["torch's random"] = torch.default_generator
    return found


# ---- numbers -------------------------------------------------------------------------------------
def rows_of(given: Any) -> list[int]:
    """A hash of each row that a forward is given: of all tensors in it whose first dimension is
    the batch's, what lies at one index."""
    tensors = [t for t in _tensors(given) if t.dim() > 0]
    if not tensors:
        return []
    count = tensors[0].shape[0]
    hashes = [b""] * count
    for tensor in tensors:
        if tensor.shape[0] != count or tensor.layout is not torch.strided:
            continue
        flat = tensor.detach().cpu().contiguous().reshape(count, -1).view(torch.uint8).numpy()
        hashes = [
            xxhash.xxh3_64_digest(before + row.tobytes())
            for before, row in zip(hashes, flat, strict=True)
        ]
    return [int.from_bytes(h, "little") % 2**62 for h in hashes]


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict) or hasattr(given, "items"):
        for _, value in sorted(given.items(), key=lambda pair: str(pair[0])):
            yield from _tensors(value)
    elif isinstance(given, (list, tuple)):
        for value in given:
            yield from _tensors(value)


def drawn() -> str:
    """Where the global generators stand."""
    h = xxhash.xxh3_64()
    h.update(torch.default_generator.get_state().numpy().tobytes())
    h.update(repr(random.getstate()[1]).encode())
    state: Any = np.random.get_state(legacy=False)
    h.update(state["state"]["key"].tobytes())
    h.update(repr(state["state"]["pos"]).encode())
    if torch.cuda.is_available():
        h.update(torch.cuda.get_rng_state().numpy().tobytes())
    return h.hexdigest()


def sketched(grads: list[torch.Tensor]) -> Gradient:
    """Linear in the gradients, so the sketch of a difference is the difference of sketches. Each
    number goes to one of BINS bins, with a sign that its place decides."""
    bins = torch.zeros(BINS, dtype=torch.float64)
    square = 0.0
    for i, grad in enumerate(grads):
        local = getattr(grad, "to_local", None)
        flat = (local() if local is not None else grad).detach()
        flat = (flat.to_dense() if flat.is_sparse else flat).reshape(-1).double().cpu()
        square += float(flat.square().sum())
        signs = (
            torch.arange(i, i + flat.numel(), dtype=torch.int64)
            .mul_(0x9E3779B1)
            .bitwise_and_(1 << 31)
        )
        flat = torch.where(signs == 0, flat, -flat)
        padded = nn.functional.pad(flat, (0, -flat.numel() % BINS))
        bins += padded.view(-1, BINS).sum(0).roll(i)
    return Gradient(math.sqrt(square), tuple(bins.tolist()))


def statistics_of(model: nn.Module | None) -> dict[str, float]:
    """Of layers whose running statistics depend on who forwards what: a number for each. Those
    that are not in training are left out."""
    found = {}
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training:
            buffers = [b for b in module.buffers(recurse=False) if b.is_floating_point()]
            if module.track_running_stats and buffers:
                weights = [
                    torch.linspace(1.0, 2.0, b.numel(), dtype=torch.float64) for b in buffers
                ]
                found[f"{name} ({type(module).__name__})"] = float(
                    sum(
                        (b.detach().double().cpu() * w).sum()
                        for b, w in zip(buffers, weights, strict=True)
                    )
                )
    return found
