"""Loops of many kinds for the tests, each with an update that is cut open."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import harness

kind, reduce, out = sys.argv[1:4]
TOTAL = 6


class Points(torch.utils.data.Dataset):
    fingerprint = "points"

    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()


run = harness.attach(seed=3, reduce=reduce, snapshot_every_steps=2)
torch.manual_seed(0)
losses = []


def gan(step):
    """Two networks, two optimizers, and the second is trained every other step."""
    for real, _ in step:
        fake = model["g"](torch.randn(len(real), 4)).detach()
        real_loss = model["d"](real)
        step.backward(binary_cross_entropy_with_logits(real_loss, torch.ones_like(real_loss)))
        fake_loss = model["d"](fake)
        step.backward(binary_cross_entropy_with_logits(fake_loss, torch.zeros_like(fake_loss)))
    norms = [float(step.sync(clip_norm=1.0, of=optimizers[0]))]
    optimizers[0].step()
    losses.append(step.loss)
    if step.number % 2:
        for real, _ in step.again():
            said = model["d"](model["g"](torch.randn(len(real), 4)))
            step.backward(binary_cross_entropy_with_logits(said, torch.ones_like(said)))
        norms.append(float(step.sync(of=[optimizers[1]])))
        assert all(not p.grad.any() for p in model["d"].parameters())
        optimizers[1].step()
        schedulers[1].step()
        losses.append(step.loss)
    assert all(norms)
    schedulers[0].step()
    step.done()


def closure_loop(step):
    """Its optimizer asks for losses and gradients as often as it likes."""

    def closure():
        for x, y in step.again():
            step.backward(cross_entropy(model["d"](x), y))
        step.sync()
        losses.append(step.loss)
        return losses[-1]

    optimizers[0].step(closure)
    step.done()


def chunked(step):
    """A loss in chunks, by tokens; somebody else goes backward; an average of the weights."""
    for x, y in step:
        for part in (slice(0, 3), slice(3, None)):
            loss = cross_entropy(model["d"](x[part]), y[part])
            step.backward(loss, weight=len(y[part]), via=lambda scaled: scaled.backward())
    torch.distributed.all_reduce(loss.detach())  # a call of the script's own
    step.update(clip_norm=0.5)
    ema.update_parameters(model["d"])
    losses.append(step.loss)


def scaled(step):
    """In half precision, two phases with an optimizer each."""
    norms = []
    for optimizer, batches in ((optimizers[0], step), (optimizers[1], step.again)):
        for x, y in batches if batches is step else batches():
            with torch.autocast("cpu", dtype=torch.float16):
                said = model["d"](model["g"](x[:, :4]))
            step.backward(cross_entropy(said.float(), y))
        norms.append(float(step.sync(clip_norm=1.0, of=optimizer)))
        losses.append(step.loss)
        scaler.step(optimizer)
        scaler.update()
    assert all(norm < 100 for norm in norms)  # they are unscaled
    step.done()


d = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
g = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
if kind == "gan":
    d[3] = nn.Linear(16, 1)
model = nn.ModuleDict({"d": d, "g": g})
ema = torch.optim.swa_utils.AveragedModel(model["d"])
if kind == "lbfgs":
    d[2] = nn.Identity()
    optimizers = [torch.optim.LBFGS(d.parameters(), lr=0.1, max_iter=3)]
elif kind in ("gan", "scaled"):
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (d, g)]
else:
    optimizers = [torch.optim.SGD(d.parameters(), lr=0.1)]
schedulers = [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
state = {"first": schedulers[0], "second": schedulers[-1], "ema": ema}
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if kind == "scaled" else None
run.prepare(model, optimizers, scaler=scaler, state=state)
body = {"gan": gan, "lbfgs": closure_loop, "chunks": chunked, "scaled": scaled}[kind]
between = []
for step in run.steps(Points(), total=TOTAL, global_batch=20, micro_batch=5):
    body(step)
    between.append(torch.rand(1).item())  # an evaluation that draws
    if step.number == 3 and "LEAVE" in os.environ and run.epoch == 1:
        os._exit(9)
state = {k: v.tolist() for k, v in sorted(model.state_dict().items())}
weights = hashlib.sha256(
    b"".join(v.contiguous().numpy().tobytes() for v in model.state_dict().values())
).hexdigest()
if run.rank == 0:
    told = {"weights": weights, "state": state, "losses": losses, "between": between}
    Path(out).write_text(json.dumps(told))
