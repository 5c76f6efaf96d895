"""How `make test` is spread over worker processes: the longest first, and what shares a fixture
together. Rooms, proofs and meshes are chosen on the command line (see the Makefile)."""

import os
import sys
from pathlib import Path

import pytest

# A sync for every small object would be most of the time that tests take, and proves nothing to them:
# none of these machines loses its power (tests/storage/test_power_loss.py plays that).
os.environ.setdefault("STORAGE_FSYNC", "0")
os.environ.setdefault("HARNESS_DATA_CACHE", "off")  # nothing in the cache of who runs the tests

# Processes that tests start find `support`, and this tree's code where this process does too.
TESTS = Path(__file__).parent
_ours = [str(path) for path in (TESTS.parent, TESTS) if str(path) in sys.path]
_others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_ours, *_others]))

pytest.register_assert_rewrite("support")
pytest_plugins = ("support.nodes", "support.places", "support.sky_catalog")  # fixtures of several rooms

# Other people's trainers have an environment of their own (`make adapters`).
collect_ignore = [] if os.environ.get("HARNESS_TRAINERS") else ["adapters"]

# Seconds, roughly, on two cores. A test that is named here goes to whichever worker is free, each
# of its parameters apart; the others of a file stay together, so that the fixtures of the file are
# made once. Files that are missing come last: name one that takes longer than 10 s.
ALONE_S = {
    "test_main_job.py::test_the_demo_market": 60,
    "test_main_job.py::test_sigkill_of_anything_at_any_moment": 40,
    "test_main_job.py::test_ctrl_c_drains_and_the_same_command_resumes": 28,
    "test_main_job.py::test_a_controller_killed_after_the_last_step_leaves_nothing_to_the_next": 16,
    "test_main_job.py::test_a_second_controller_is_refused": 15,
    "test_main_job.py::test_a_broken_script_stops_the_run_with_its_reason": 11,
    "test_agent.py::test_join_notice_and_loss": 23,
    "test_agent.py::test_a_lost_nodes_share_is_still_near": 16,
    "test_agent.py::test_a_node_that_comes_back_reads_its_disk": 14,
    "test_audited_runs.py::test_a_run_ends_with_its_script_and_nobody_starts_after_that": 12,
    "test_agent.py::test_a_killed_uploader_costs_nothing": 11,
    "test_agent.py::test_a_world_that_is_too_big_is_made_smaller": 11,
    "test_agent.py::test_a_member_that_goes_before_its_workers_begin_is_not_waited_for": 10,
    "test_agent.py::test_a_spell_of_refusals_does_not_end_a_run": 10,
    "test_controller.py::test_nodes_without_a_leader_train_on_and_then_drain": 16,
    "test_controller.py::test_trouble_of_the_controller_leaves_the_nodes_training_and_down_ends_them": 14,
    "test_controller.py::test_a_second_signal_kills": 11,
    "test_versions.py::test_an_agent_of_another_version_ends_with_its_own_code": 15,
    "test_wandb_run.py::test_interruptions_resizes_quarantine_and_a_killed_publisher": 40,
    "test_torchrun.py::test_nodes_join_the_one_with_rank_0_is_killed_and_the_run_finishes": 14,
    "test_replicas.py::test_agents_form_worlds_of_whole_replicas": 12,
    "test_health.py::test_a_stopped_worker_is_named_and_replaced_and_a_sick_gpu_is_left": 13,
    "test_health.py::test_a_worker_that_hangs_writes_where": 12,
}
FILE_S = {
    "test_agent.py": 60,
    "test_budget.py": 40,
    "test_plan_calibration.py": 120,
    "test_price_waits.py": 25,
    "test_system.py": 55,
    "test_session.py": 45,
    "test_bad_input.py": 60,
    "test_live_faults.py": 400,
    "test_drill.py": 25,
    "test_snapshots.py": 35,
    "test_objects.py": 30,
    "test_sim.py": 28,
    "test_wandb_run.py": 40,
    "test_throttle.py": 40,
    "test_trackers.py": 25,
    "test_launch_sky.py": 16,
    "test_watch_processes.py": 20,
    "test_alerting.py": 16,
    "test_rerun.py": 15,
    "test_timing.py": 14,
    "test_stream.py": 12,
    "test_check_run.py": 20,
    "test_micro_loader.py": 30,
    "test_own_loop.py": 25,
    "test_open_steps.py": 20,
    "test_own_files.py": 15,
    "test_loops_page.py": 15,
    "test_frozen.py": 15,
    "test_shares.py": 10,
    "test_hostile_inputs.py": 12,
    "test_hostile_day.py": 60,
    "test_secrets.py": 12,
    "test_dashboards.py": 8,
    "test_serve.py": 8,
    "test_browser.py": 8,
    "test_replay.py": 24,
    "test_exact.py": 30,
    "test_state.py": 20,
    "test_dcp.py": 20,
    "test_replicas.py": 20,
    "test_examples.py": 18,
    "test_expert_worlds.py": 180,
    "test_experts.py": 15,
    "test_package.py": 15,
    "test_main_job.py": 15,
    "test_whereabouts.py": 14,
    "test_controller.py": 10,
    "test_torchrun.py": 10,
    "test_sharding.py": 10,
    "test_extending.py": 10,
    "test_many_nodes.py": 10,
    "test_house.py": 8,
    "test_nursery.py": 8,
    "test_replica.py": 7,
    "test_tiers.py": 7,
}


def unit(nodeid: str) -> str:
    """What is given to a worker as one: a file, or a test that is named above."""
    path, _, test = nodeid.partition("::")
    file = Path(path).name
    return f"{file}::{test}" if f"{file}::{test.partition('[')[0]}" in ALONE_S else file


def seconds(name: str) -> float:
    """Of a unit."""
    return FILE_S.get(name) or ALONE_S.get(name.partition("[")[0], 0.0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """What `--dist loadscope` means. None: any other, as pytest-xdist has it."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def _assign_work_unit(self, node: object) -> None:
            self.workqueue.move_to_end(max(self.workqueue, key=seconds), last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)
