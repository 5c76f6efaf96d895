"""A small classifier of images, read from a corpus of records by random access.

    python examples/images.py --make shapes
    harness data prepare shapes shapes-corpus --records --held-out 0.1
    harness run --run runs/shapes -- examples/images.py --data shapes-corpus

`--make` draws circles, squares and triangles into a folder for each, with Pillow. The record of a
file has its bytes under the ending of its name, and its path as `__key__`, so `decode` takes the
label from the folder. What `decode` draws from the global generators is seeded by the sample's
position in the run: the same image is augmented alike on whichever node reads it, and otherwise in
the next epoch.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from torch import Tensor, nn

SHAPES = ("circle", "square", "triangle")
SIZE = 24  # pixels, each way


def draw(folder: Path, count: int, seed: int) -> None:
    """So many images of each shape, as PNG and JPEG, in colours on noise."""
    from PIL import Image, ImageDraw

    rng = random.Random(seed)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image = Image.frombytes("RGB", (SIZE, SIZE), rng.randbytes(3 * SIZE * SIZE))
            image = image.point(lambda value: value // 4)
            pen, r = ImageDraw.Draw(image), rng.randint(5, 8)
            x, y = (rng.randint(r + 1, SIZE - r - 2) for _ in range(2))
            fill = tuple(rng.randint(120, 255) for _ in range(3))
            box = (x - r, y - r, x + r, y + r)
            if shape == "circle":
                pen.ellipse(box, fill)
            elif shape == "square":
                pen.rectangle(box, fill)
            else:
                pen.polygon([(x - r, y + r), (x + r, y + r), (x, y - r)], fill)
            image.save(folder / shape / f"{i:04d}.{'jpg' if i % 3 else 'png'}")


def pixels(record: dict[str, bytes]) -> tuple[Tensor, int]:
    """(image (3, SIZE, SIZE) in 0..1, label) of a record."""
    from PIL import Image

    data = next(value for name, value in record.items() if name in ("png", "jpg"))
    with Image.open(io.BytesIO(data)) as image:
        raw = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    label = SHAPES.index(record["__key__"].split(b"/")[-2].decode())
    return raw.view(SIZE, SIZE, 3).permute(2, 0, 1).float() / 255, label


def augmented(record: dict[str, bytes]) -> tuple[Tensor, int]:
    """The same, mirrored, shifted and brighter or darker by chance."""
    image, label = pixels(record)
    if random.random() < 0.5:
        image = image.flip(2)
    shift = torch.randint(-3, 4, (2,)).tolist()
    return image.roll(shift, (1, 2)) * random.uniform(0.7, 1.3), label


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(32 * 9, len(SHAPES)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, held_out: harness.data.Records, device: torch.device) -> float:
    images, labels = zip(*(held_out[i] for i in range(len(held_out))), strict=True)
    found = model(torch.stack(images).to(device)).argmax(1).cpu()
    return float((found == torch.tensor(labels)).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    p.add_argument("--make", default="", metavar="FOLDER", help="draw images, and end")
    p.add_argument("--images", type=int, default=300, help="of each shape, with --make")
    p.add_argument("--data", default="", help="URL of the corpus")
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--workers", type=int, default=0, help="processes that read and decode")
    flags = p.parse_args(argv)
    if flags.make:
        draw(Path(flags.make), flags.images, seed=0)
        return
    run = harness.attach(seed=0, snapshot_every_steps=20, reduce="exact")
    model = build().to(run.device)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train = harness.data.Records(flags.data, decode=augmented)
    for step in run.steps(
        train, total=flags.steps, global_batch=48, micro_batch=8, num_workers=flags.workers
    ):
        for images, labels in step:
            step.backward(nn.functional.cross_entropy(model(images), labels))
        step.update()
        if step.number % 20 == 0:
            run.print(f"step {step.number}: loss {step.loss:.4f}")
    held_out = harness.data.Records(flags.data, decode=pixels, split="validation")
    run.print(f"accuracy {accuracy(model, held_out, run.device):.3f} of {len(held_out)} held out")


if __name__ == "__main__":
    main()
