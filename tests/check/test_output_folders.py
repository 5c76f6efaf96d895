"""Which of a script's own folders go with a node, judged before anything is launched."""

import pytest

from harness.check.output_folders import REMEDY, lost_with_node
from harness.clouds import sky_task

HF = """\
import os
from transformers import HfArgumentParser, Trainer, TrainingArguments
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model, args).train()
"""
RUN = "export PATH=$HOME/bin:$PATH  # it's here\nexec harness run --run \"$RUN\" --trackers \"\" -- train.py "


@pytest.fixture
def warned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def warn(arguments="", script=HF, more="", run=RUN):
        (tmp_path / "train.py").write_text(script)
        lines = "".join(f"  {line}\n" for line in (run + arguments).splitlines())
        (tmp_path / "t.yaml").write_text(f"workdir: .\nenvs: {{RUN: null, OUT: {tmp_path.anchor}o}}\n{more}run: |\n{lines}")
        return lost_with_node(sky_task.load("t.yaml", {"RUN": "s3://b/r", "ALSO": "--bf16 --output_dir=x"}))

    return warn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--output_dir out --bf16", "t.yaml: --output_dir: out is on the node's disk"),
        ("--bf16 \\\n  --output-dir='my out' && echo done", "--output-dir: my out is"),
        ("--output_dir $OUT", "--output_dir: /o is"),
        ("--output_dir \"${NONE:-here}\"", "--output_dir: here is"),
        ("$ALSO", "--output_dir: x is"),
        ("--output_dir out --project_dir $HOME/logs", "--output_dir: out and 1 other folder are"),
        ("fit --trainer.default_root_dir logs", "--trainer.default_root_dir: logs is"),
    ],
)  # fmt: skip
def test_a_folder_on_a_nodes_disk_is_named_with_its_flag_and_the_remedy(warned, arguments, said):
    found = warned(arguments)
    assert said in found and found.endswith(REMEDY) and "\n" not in found


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("TrainingArguments('out', bf16=True)", "TrainingArguments(output_dir=...) in line 1 of train.py: out is"),
        ("a = trl.SFTConfig(\n  output_dir='out')", "SFTConfig(output_dir=...) in line 1 of train.py: out is"),
        ("Seq2SeqTrainingArguments(bf16=True)", "without output_dir= in line 1 of train.py: trainer_output is"),
        ("Accelerator(project_dir='p')", "Accelerator(project_dir=...) in line 1 of train.py: p is"),
        ("import lightning as L\nL.Trainer(max_epochs=1)", "Trainer(...) without default_root_dir= in line 2"),
        ("p.add_argument('-o', '--output-dir', default='out')", "--output-dir, by its default in line 1"),
    ],
)  # fmt: skip
def test_a_folder_in_the_source_is_named_with_its_line(warned, script, said):
    assert said in warned(script=script)


def test_a_flag_takes_the_place_of_its_default(warned):
    script = "p.add_argument('--output_dir', default='out')"
    assert not warned("--output_dir s3://b/out", script)


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        ("--output_dir s3://b/out", HF),
        ("--output_dir $UNKNOWN/out", HF),
        ("--output_dir out", "run = harness.attach()\nrun.files.restore('out')"),
        ("", "TrainingArguments(**given)\nTrainer(default_root_dir=somewhere())"),
        ("", "Trainer(model, args)"),  # of transformers
        ("", "def broken("),
        ("| tee --output_dir out", HF),  # another command's flag
    ],
)
def test_what_outlives_a_node_or_is_unknown_gives_no_warning(warned, arguments, script):
    assert warned(arguments, script) == ""


@pytest.mark.parametrize(
    ("folder", "mounts", "kept"),
    [
        ("/ckpt/a", "file_mounts: {/ckpt: {source: s3://b/c, mode: MOUNT_CACHED}}", True),
        ("out/a", "file_mounts: {out: {source: s3://b/c}}", True),
        ("~/sky_workdir/out", "file_mounts: {out/: {name: bucket}}", True),
        ("/ckpt", "file_mounts: {/ckpt: {source: s3://b/c, mode: COPY}}", False),
        ("/ckpt", "file_mounts: {/ckpt: s3://b/c}", False),  # SkyPilot copies it once
        ("/ckpt2", "file_mounts: {/ckpt: {source: s3://b/c}}", False),
        ("/mnt/d/x", "volumes: {/mnt/d: my-volume}", True),
        ("/mnt/d/x", "volumes: {/mnt/d: {size: 10Gi}}", False),
    ],
)
def test_mounts_and_volumes_outlive_nodes(warned, folder, mounts, kept):
    assert bool(warned(f"--output_dir {folder}", more=f"{mounts}\n")) is not kept


def test_a_task_without_our_command_gives_no_warning(warned):
    assert warned("--output_dir out", run="python train.py ") == ""
    assert warned("--output_dir out", run='echo "\nharness run --run x ') == ""
