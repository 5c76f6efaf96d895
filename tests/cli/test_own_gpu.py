"""The GPU of each worker, on nodes that say they have some: real agents, real forks, no GPU."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from harness.cli.node import node_gpus, wants_one_gpu
from harness.core.world import UNFIT, BadInput
from harness.node.worker_gpus import GPUS, ONE_GPU, OWN_GPU
from harness.worker import alone
from harness.worker.process_group import backend_of


def run_agent(tmp_path, text, *flags, **variables):
    (tmp_path / "lightning.py").write_text("")  # what the script imports
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "run", "--run", (tmp_path / "run").as_uri(),
         "--set", "preload=none", "--set", "gpu_health=off", "--set", "measure_s=0", *flags, "--", str(script)],
        env={**os.environ, "HARNESS_NODE_DIR": str(tmp_path / "node"), **variables},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


SEES = """
import os
print("sees", os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
print("untouched", os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"], flush=True)
"""


def test_workers_of_an_unchanged_script_see_different_gpus_before_it_begins(tmp_path):
    """The speed of the offer that the controller launched reaches the world."""
    said = run_agent(
        tmp_path, "import lightning\n" + SEES, CUDA_VISIBLE_DEVICES="4,5", HARNESS_SPEED="0.25"
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert {line[4:] for line in said.stdout.splitlines() if "sees" in line} == {
        "sees 0 4", "sees 1 5",
    }  # fmt: skip
    assert said.stdout.count("untouched 1") == 2
    (epoch,) = (tmp_path / "run/rdzv/epochs").glob("*.json")
    assert json.loads(epoch.read_text())["speeds"] == [0.25]


def test_workers_that_choose_by_local_rank_see_all_gpus(tmp_path):
    said = run_agent(tmp_path, SEES + "# by LOCAL_RANK", CUDA_VISIBLE_DEVICES="4,5")
    assert {line[4:] for line in said.stdout.splitlines() if "sees" in line} == {
        "sees 0 4,5", "sees 1 4,5",
    }  # fmt: skip


def test_which_scripts_see_one_gpu(tmp_path):
    def wants(text, adapt="auto"):
        (tmp_path / "s.py").write_text(text)
        return wants_one_gpu(adapt, [str(tmp_path / "s.py")])

    assert wants("from transformers import Trainer")
    assert wants("import lightning.pytorch as pl")
    assert not wants("import transformers\nimport os\nx = os.environ['LOCAL_RANK']")
    assert not wants("import torchtitan, transformers") and not wants("import torch")
    assert not wants("import transformers", "none")
    assert wants("import mine", "transformers") and not wants("import mine", "accelerate")
    assert wants_one_gpu("auto", ["-m", "trl.scripts.sft"])
    assert not wants_one_gpu("auto", ["-m"])


def test_the_gpus_of_a_node_are_counted_as_cuda_counts(tmp_path):
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert node_gpus({}, tmp_path) == ("0", "1")
    assert node_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 1"}, tmp_path) == ("GPU-a", "1")
    assert node_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()


def test_a_rank_without_its_gpu_leaves_its_node_as_unfit(tmp_path):
    """The script claims a torch with CUDA, which then sees no GPU."""
    said = run_agent(
        tmp_path,
        "import torch\ntorch.version.cuda = '12.8'\nimport harness\nrun = harness.attach()\n"
        "print('trains on', run.device)\n",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert said.returncode == UNFIT, said.stdout + said.stderr
    assert "the node has 1 GPUs, but CUDA shows 0 of them" in said.stdout
    assert "trains on" not in said.stdout


def test_what_another_node_would_not_mend_is_wrong_input(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BadInput, match=r"built without CUDA.*CUDA_VISIBLE_DEVICES=''"):
        alone.device_of({GPUS: "2"}, 0)
    assert alone.device_of({GPUS: "0"}, 1) == torch.device("cpu")


def cuda(monkeypatch, seen, fails=""):
    """Make torch look as if it saw `seen` GPUs."""

    def use(index):
        if fails:
            raise RuntimeError(fails)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "set_device", use)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: seen, raising=False)


def test_fewer_gpus_than_promised_or_ones_that_do_not_work_are_unfit(monkeypatch, capsys):
    cuda(monkeypatch, 8)
    assert alone.device_of({GPUS: "8"}, 3) == torch.device("cuda", 3)
    cuda(monkeypatch, 1)
    assert alone.device_of({GPUS: "8", ONE_GPU: "1"}, 3) == torch.device("cuda", 0)
    with pytest.raises(SystemExit) as end:
        alone.device_of({GPUS: "8"}, 3)
    assert end.value.code == UNFIT and "has 8 GPUs, but CUDA shows 1" in capsys.readouterr().out
    cuda(monkeypatch, 8, "system not yet initialized\nmore")
    with pytest.raises(SystemExit) as end:
        alone.device_of({GPUS: "8"}, 0)
    assert end.value.code == UNFIT and "not yet initialized" in capsys.readouterr().out


def test_a_script_that_has_used_cuda_before_its_trainer_is_refused(monkeypatch):
    """Whatever torch says of it: what counts is how many GPUs CUDA shows in the end."""
    cuda(monkeypatch, 8)  # the variable comes too late
    env = {OWN_GPU: "5", "LOCAL_RANK": "1"}
    with pytest.raises(BadInput, match="has used CUDA before it made its trainer"):
        alone.show_one_gpu(env)
    cuda(monkeypatch, 1)
    alone.show_one_gpu(env)
    assert env["CUDA_VISIBLE_DEVICES"] == "5" and env[ONE_GPU] == "1"


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        ("abcd", "cpu:gloo,cuda:nccl"),
        ("abcb", "cpu:gloo,cuda:gloo"),
        ("aaaa", "cpu:gloo,cuda:gloo"),
    ],
    ids=["one each", "two share one", "all share one"],
)
def test_ranks_that_share_a_gpu_exchange_through_the_host(monkeypatch, gpus, wanted):
    """NCCL refuses two ranks on one GPU. All ranks decide alike, whoever comes first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=gpus[device.index]),
    )
    with ThreadPoolExecutor(len(gpus)) as pool:
        ranks = [
            pool.submit(
                backend_of,
                torch.device("cuda", rank),
                PrefixStore("x", TCPStore("127.0.0.1", store.port)),
                len(gpus),
            )
            for rank in range(len(gpus))
        ]
        assert {rank.result(60) for rank in ranks} == {wanted}


def test_a_single_rank_and_ranks_of_cpus_ask_nobody(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    assert backend_of(torch.device("cuda", 0), None, 2) == "cpu:gloo,cuda:nccl"
    assert backend_of(torch.device("cpu"), None, 2) == "gloo"


def test_more_workers_than_gpus_share_them(monkeypatch):
    cuda(monkeypatch, 2)
    shares = [alone.device_of({GPUS: "2"}, rank) for rank in range(5)]
    assert [d.index for d in shares] == [0, 1, 0, 1, 0]
