"""Images and sounds as records, end to end: files in folders, tar, Arrow; decoded, augmented, trained
on by real processes that are killed."""

import io
import random
import re
import signal
import subprocess
import sys
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest

import harness
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from storage.stores.store_urls import open_store
from support.corpora import command, prepared
from support.worlds import environment, history, newer, newest, start, train

pytestmark = pytest.mark.proof
PIL = pytest.importorskip("PIL.Image")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "images.py")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A corpus of the example's images, by its own commands."""
    root = tmp_path_factory.mktemp("shapes")
    words = [sys.executable, EXAMPLE, "--make", root / "files", "--images", 150]
    subprocess.run(list(map(str, words)), env=environment(), check=True, timeout=120)
    made = command("prepare", root / "files", root / "corpus", "--records", "--held-out", 0.1)
    assert made.returncode == 0, made.stderr
    return root


# ---- what a record is ----------------------------------------------------------------------------
def test_a_file_in_a_folder_keeps_its_path(shapes):
    records = harness.data.Records(str(shapes / "corpus"))
    found = [records[i] for i in range(len(records))]
    for record in found:
        ending = record["__key__"].decode().rpartition(".")[2]
        assert (shapes / "files" / record["__key__"].decode()).read_bytes() == record[ending]
    assert {one["__key__"].split(b"/")[0] for one in found} == {b"circle", b"square", b"triangle"}
    held_out = harness.data.Records(str(shapes / "corpus"), split="validation")
    assert len(records) + len(held_out) == 450 and len(held_out) > 20


@pytest.mark.parametrize("source", ["{}", "{}/", "{}/*/*", "{}/*", "file://{}"])
def test_the_path_is_that_within_what_was_named(tmp_path, source):
    folder = tmp_path / "files"
    for name in ("a/x.bin", "b/x.bin"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(name.encode())
    inner = source == "{}/*"
    roots = [folder / "a", folder / "b"] if inner else [folder]
    prepared(tmp_path / "made", *map(source.format, roots), kind="records")
    records = harness.data.Records(str(tmp_path / "made"))
    wanted = [b"x.bin", b"x.bin"] if inner else [b"a/x.bin", b"b/x.bin"]
    assert [records[i]["__key__"] for i in range(2)] == wanted
    assert [records[i]["bin"] for i in range(2)] == [b"a/x.bin", b"b/x.bin"]
    prepared(tmp_path / "one", folder / "a" / "x.bin", kind="records")
    assert harness.data.Records(str(tmp_path / "one"))[0]["__key__"] == b"x.bin"


def sound(seconds, rate=8000):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        tone = np.sin(np.arange(int(seconds * rate)) / 9) * 9000
        file.writeframes(tone.astype("<i2").tobytes())
    return out.getvalue()


def frames(record):
    with wave.open(io.BytesIO(record["wav"])) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_sounds(tmp_path):
    for i in range(12):
        path = tmp_path / "sounds" / f"speaker{i % 3}" / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound(0.1 * (i + 1)))
    prepared(tmp_path / "made", tmp_path / "sounds", kind="records")
    records = harness.data.Records(str(tmp_path / "made"), decode=frames)
    assert sorted(len(records[i]) for i in range(12)) == [800 * (i + 1) for i in range(12)]
    shown = command("show", tmp_path / "made", "--item", 0).stdout
    assert "__key__: speaker0/0.wav" in shown and "wav: WAV, 8000 Hz, 1 channels, 0.10 s" in shown


def test_records_are_shown_by_what_they_are(shapes):
    shown = command("show", shapes / "corpus", "--item", 0, "--item", 1).stdout
    assert re.search(r"(png: PNG|jpg: JPEG), 24 x 24 RGB, [\d,]+ bytes", shown), shown


def picture(i):
    out = io.BytesIO()
    PIL.frombytes("RGB", (8, 8), random.Random(i).randbytes(192)).save(out, "PNG")
    return out.getvalue()


def test_a_tar_of_images_and_classes(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(20):
            for ending, data in (("png", picture(i)), ("cls", str(i % 4).encode())):
                info = tarfile.TarInfo(f"train/{i:03d}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    prepared(tmp_path / "made", tmp_path / "a.tar", kind="records")
    records = harness.data.Records(str(tmp_path / "made"), decode=classed)
    assert [records[i] for i in range(20)] == [((8, 8), i % 4) for i in range(20)]


def classed(record):
    with PIL.open(io.BytesIO(record["png"])) as image:
        return image.size, int(record["cls"])


def test_a_dataset_with_a_column_of_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": picture(i), "path": f"{i}.png"} for i in range(30)], "label": [i % 3 for i in range(30)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    prepared(tmp_path / "made", tmp_path / "saved", kind="records")
    records = harness.data.Records(str(tmp_path / "made"))
    for i in range(30):
        record = records[i]
        with PIL.open(io.BytesIO(record["image.bytes"])) as image:
            assert image.size == (8, 8)
        assert (record["image.bytes"], int(record["label"])) == (picture(i), i % 3)


# ---- training ------------------------------------------------------------------------------------
def test_the_example_learns_and_is_the_same_when_it_is_killed(shapes, tmp_path):
    """One process that nothing happens to; and two that are killed, then one, then two with
    processes that read."""
    flags = ["--data", shapes / "corpus", "--steps", 80]
    ended = train(tmp_path / "calm", 1, *flags, script=EXAMPLE)
    accuracy = float(re.search(r"accuracy (\d\.\d+)", ended.output)[1])
    assert accuracy > 0.6, ended.output  # guessing: 0.33

    run = tmp_path / "killed"
    for world, more, least in ((2, [], 0), (1, [], 20)):
        processes = start(run, world, *flags, *more, script=EXAMPLE)
        newer(run, least, processes)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()
        assert newest(run).step < 80
    train(run, 2, *flags, "--workers", 1, script=EXAMPLE)
    said = [[(r.step, r.digest, r.contents, r.loss) for r in history(one)] for one in (tmp_path / "calm", run)]
    assert said[0] == said[1] and len(said[0]) == 80
    store = open_store(str(run))
    assert with_contents(audit(store), store, str(shapes / "corpus")).ok
