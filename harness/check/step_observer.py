"""Observations of `harness check` at each step inside a worker: the rows that the model is trained
on, the numbers that its layers draw, losses, gradients, and the state afterwards."""

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

from harness.check.evidence import ForwardCall, Gradient, ObservedStep, Picture, packed
from harness.check.object_digests import Album, raw_bytes

if TYPE_CHECKING:
    from harness.check.probe_hooks import Ownership

T = TypeVar("T")

BINS = 64  # of a gradient's sketch
MOST_CALLS = 512  # recorded for one step


def drawing_layers(model: nn.Module) -> Iterator[str]:
    """Yield the layers that draw random numbers, as far as their types show."""
    for name, module in model.named_modules():
        rate = getattr(module, "dropout", 0.0) or getattr(module, "attention_dropout", 0.0)
        if (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or (
            isinstance(module, (nn.RReLU, nn.MultiheadAttention, nn.RNNBase)) and rate
        ):
            yield f"{name or 'model'} ({type(module).__name__})"


def weights_of(model: nn.Module) -> str:
    """Return a hash of the model's parameters; "" if they cannot be read."""
    h = xxhash.xxh3_128()
    for name, p in sorted(model.named_parameters()):
        if p.is_meta or p.layout is not torch.strided or hasattr(p, "to_local"):
            return ""
        try:
            data = raw_bytes(p.detach())
        except RuntimeError:  # a wrapper (quantised, fake)
            return ""
        h.update(name.encode())
        h.update(data)
    return h.hexdigest()


def unseen(look: Callable[..., T]) -> Callable[..., T]:
    """Wrap an observer so that it is not compiled with the model, nor visible to modes that watch
    what the script does with its tensors."""

    @functools.wraps(look)
    def looked(*args: Any, **more: Any) -> T:
        with torch._C.DisableTorchFunction():
            return look(*args, **more)

    return cast(Callable[..., T], torch.compiler.disable(looked))  # type: ignore[no-untyped-call]


class StepObserver:
    """The observations of one step. Hooks of `listen` and `watch` collect them; `step_body` returns
    them and starts the next step."""

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
        self._depth = 0  # nesting depth of forwards

    # ---- hooks -----------------------------------------------------------------------------------
    def listen(self) -> None:
        """Hook into every backward and every optimizer's step. Gradients are read after the step,
        since those of a closure do not exist before it."""
        register_optimizer_step_post_hook(unseen(self._optimized))
        backward, note = torch.Tensor.backward, unseen(self._note_loss)

        @functools.wraps(backward)
        def noted(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            note(tensor)
            return backward(tensor, *args, **more)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]

    def watch(self, model: nn.Module, training: Any) -> None:
        """Hook into the forwards of the model that `prepare` was given."""
        self._model = model
        self._saved = lambda: {
            id(thing) for thing in (*training._saved.values(), *training.optimizers)
        }
        watched = [model] if type(model).forward is not nn.Module.forward else []
        if not watched or hasattr(model, "training_step"):  # may bypass its forward
            watched += list(model.children())
        for module in watched:
            module.register_forward_pre_hook(unseen(self._entered), with_kwargs=True)
            module.register_forward_hook(unseen(self._left))

    def note_read(self, positions: Any, said: Any) -> None:
        """Record samples that a foreign loop reports as read."""
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
            self._before = sum(rows) % 2**63, generators_hash()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._before is not None and self._depth == 0:
            rows, before = self._before
            self._before = None
            if len(self._calls) < MOST_CALLS:
                self._calls.append(ForwardCall(rows, before, generators_hash() != before))

    def _optimized(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if grads:
            self._gradients.append(sketched(grads))

    # ---- what is recorded ------------------------------------------------------------------------
    @unseen
    def step_body(self, number: int, pictures: bool) -> dict[str, Any]:
        """Return the observed step in the form of its line of JSON, and start the next."""
        picture = self.picture() if pictures else {}
        seen = ObservedStep(
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
        """Return the picture of everything that the script's names lead to now."""
        return self._album.picture(roots(self._own))


def roots(own: Ownership) -> dict[str, Any]:
    """Return the names to start from: the script's globals, those of its own modules, the locals of
    its running functions (named with the function), and the global generators."""
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
    """Return a hash of each row of a forward's input: of all tensors in it with the batch's first
    dimension, the slices at one index."""
    tensors = [t for t in _tensors(given) if t.dim() > 0]
    if not tensors:
        return []
    count = tensors[0].shape[0]
    hashes = [b""] * count
    for tensor in tensors:
        if tensor.shape[0] != count or tensor.layout is not torch.strided:
            continue
        rows = tensor.detach().to("cpu", copy=True).contiguous().reshape(count, -1)
        flat = rows.view(torch.uint8).numpy()
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


def generators_hash() -> str:
    """Return a hash of the state of the global generators."""
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
    """Return the norm and a sketch of gradients. It is linear, so that the sketch of a difference
    is the difference of sketches. Each number goes to one of BINS bins, with a sign that depends on
    its position."""
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
    """Return a number for each layer whose running statistics depend on which samples pass it.
    Layers that are not in training mode are left out."""
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
