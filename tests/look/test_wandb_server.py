"""The loopback W&B server answers the pinned client's own process as W&B does, and sees what would
harm a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.wandb_server import HISTORY, LoopbackRun, WandbServer

CLIENT = """
import json, sys
import wandb
def session(upto, final, **how):
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True, disable_git=True, x_save_requirements=False,
        x_file_stream_transmit_interval=0.2, x_update_finish_state=final)
    run = wandb.init(id="one", project="tried", settings=settings, mode="online", **how)
    first = run.starting_step
    for i in range(first, upto):
        run.log({"loss": i / 7, "_timestamp": 1000.0 + i}, step=i, commit=True)
    return first, run
first, run = session(3, False, resume="allow", group="g", job_type="train", tags=["spot"],
                     config={"lr": 0.1})
run.finish()
again, run = session(6, False, resume="allow")
artifact = wandb.Artifact("snapshot", "model")
artifact.add_reference("x://bucket/snapshots", name="all", checksum=False)
run.log_artifact(artifact, aliases=["best"]).wait()
run.alert("loss", "it rises", level="WARN")
run.finish()
rewound, run = session(8, True, resume_from="one?_step=4")
run.finish(exit_code=3)
print(json.dumps([first, again, rewound]))
"""


def quiet(server):
    """The client's environment: nothing of the machine's own W&B."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {
        **base,
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": server.key,
        "WANDB_ERROR_REPORTING": "false",
    }


def test_the_pinned_client_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("wandb", minversion="0.31")
    with WandbServer() as server:
        out = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env=quiet(server),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert out.returncode == 0, out.stderr
        assert json.loads(out.stdout.splitlines()[-1]) == [0, 3, 5]
        run = server.runs["one"]
        assert [(r["_step"], r["loss"]) for r in run.history] == [(i, i / 7) for i in range(8)]
        assert run.values() == {"lr": 0.1}
        assert (run.about["groupName"], run.about["jobType"]) == ("g", "train")
        assert run.problems == []
        assert (run.ends, run.rewinds, server.state("one")) == ([3], [4], "failed")
        assert [a["title"] for a in run.alerts] == ["loss"]
        assert server.aliases("snapshot") == {"best": "v0", "latest": "v0"}
        assert run.logged == [server.artifacts[0].id]
        assert b"x://bucket/snapshots" in server.artifacts[0].manifest
        assert server.misunderstood == []


def test_harm_is_named():
    run = LoopbackRun("r", "p", "e", "id")
    run.write(HISTORY, 0, ['{"_step": 0, "a": 1}', '{"_step": 1, "a": 2}'])
    run.write(HISTORY, 1, ['{"_step": 1, "a": 2, "_runtime": 5}'])  # the same, sent again
    assert run.problems == []
    run.write(HISTORY, 1, ['{"_step": 1, "a": 3}'])
    run.write(HISTORY, 4, ['{"_step": 4, "a": 1}'])
    assert [p.split(": ")[1] for p in run.problems[:2]] == [
        "line 1 was overwritten by another one",
        "lines 2-3 are missing",
    ]


def test_states_as_pages_show_them():
    clock = [0.0]
    server = WandbServer(now=lambda: clock[0])
    server.answer(
        "POST",
        "/graphql",
        server.key,
        b'{"query": "mutation UpsertBucket", "variables": {"name": "r"}}',
    )
    path = "/files/someone/uncategorized/r/file_stream"
    assert server.state("r") == "running"
    clock[0] = 301.0
    assert server.state("r") == "crashed"
    server.answer("POST", path, server.key, b"{}")
    assert server.state("r") == "running"
    for code, state in [(0, "finished"), (1, "failed"), (255, "killed")]:
        body = json.dumps({"complete": True, "exitcode": code}).encode()
        server.answer("POST", path, server.key, body)
        assert server.state("r") == state
    server.fail("file_stream", 500, times=1)
    assert server.answer("POST", path, server.key, b"{}")[0] == 500
    assert server.answer("POST", path, "another", b"{}")[0] == 401
    assert server.answer("POST", path, server.key, b"{}")[0] == 200
    server._http.server_close()


@pytest.mark.parametrize("operation", ["Viewer", "RunResumeStatus"])
def test_a_wrong_key_is_refused(operation):
    server = WandbServer()
    body = json.dumps({"query": f"query {operation}", "variables": {"name": "r"}}).encode()
    status, answer = server.answer("POST", "/graphql", "wrong", body)
    assert status == 401 or json.loads(answer)["data"]["viewer"] is None
    server._http.server_close()


def test_it_is_a_command():
    found = subprocess.run(
        [sys.executable, "-m", "support.wandb_server", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "--port" in found.stdout
