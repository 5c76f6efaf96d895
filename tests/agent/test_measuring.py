"""Hardware is measured beside the agent, and facts about it stay few, however long a run is."""

import json
import queue
import random

import pytest

from harness.agent import gpu_health
from harness.agent.gpu_health import FakeNvml, NvmlReader
from harness.agent.host import Gauges, HardwareWatch, MachineReader
from harness.bucket import volumes
from harness.bucket.volumes import Volume, WriterSpan, brief_of, digested, joined_briefs
from harness.core import facts as f
from harness.core.facts import Chain
from support.worlds import until


def test_gauges_are_means_since_they_were_taken():
    gauges = Gauges()
    gauges.add({"a": 1.0, "b": 5.0})
    gauges.add({"a": 3.0})
    assert gauges.take() == {"a": 2.0, "b": 5.0}
    assert gauges.take() == {}


def test_this_machine_can_be_read(tmp_path):
    machine = MachineReader(tmp_path)
    found = {**machine.gauges(), **machine.rates(2.0)}
    assert {"cpu/percent", "memory/percent", "disk/percent"} <= set(found)
    assert all(0 <= value <= 100 for name, value in found.items() if "percent" in name)
    assert all(value >= 0 for value in found.values())
    gone = MachineReader(tmp_path / "gone")
    assert "disk/percent" not in gone.gauges()


def test_a_watch_tells_again_and_again_and_the_rest_at_its_end(tmp_path):
    told, gauges = queue.SimpleQueue(), Gauges()
    watch = HardwareWatch("m1", 0.1, tmp_path, gauges, told.put)
    gauges.add({"gpu0/percent": 40.0})
    first, second = told.get(timeout=60), told.get(timeout=60)
    assert (first.member, "cpu/percent" in second.metrics) == ("m1", True)
    assert first.seconds >= 0.1
    watch.crowd(10**6)  # from here on nothing is due
    watch.stop()
    found = [first, second]
    while not told.empty():
        found.append(told.get())
    assert [m.metrics["gpu0/percent"] for m in found if "gpu0/percent" in m.metrics] == [40.0]


def test_what_gpus_measure_comes_from_the_probe(tmp_path):
    script = tmp_path / "gpus"
    line = {"gpu": 1, "percent": 90, "memory_percent": 50, "celsius": 65, "watts": 400}
    script.write_text(json.dumps({"gpus": 2}) + "\n" + json.dumps(line) + "\n")
    busy = {"gpu1/percent": 90, "gpu1/memory_percent": 50, "gpu1/celsius": 65, "gpu1/watts": 400}
    found = NvmlReader(FakeNvml(script)).measure()
    assert found.items() >= busy.items() and len(found) == 8
    gauges = Gauges()
    monitor = gpu_health.start(str(script), print, on_measured=gauges.add)
    until(lambda: gauges._sums, "a measurement")
    monitor.stop()
    assert gauges.take() == found
    script.write_text(json.dumps({"gpus": 1}) + "\n" + json.dumps({"gpu": 0, "lost": True}) + "\n")
    lost = NvmlReader(FakeNvml(script))
    assert lost.measure() == {}
    assert [each.what for each in lost.look()] == ["lost"]


# ---- in the archive ------------------------------------------------------------------------------
def volume(number, lines):
    """Of (writer, t): a measurement and, of every tenth, something that stays."""
    by_writer = {}
    for i, (writer, t) in enumerate(lines):
        chain, made = by_writer.setdefault(writer, (Chain(f"{writer}-{number}"), []))
        made.append(chain.line(t, f.NodeMeasured(writer, 60.0, {"cpu/percent": 1.0})))
        if i % 10 == 0:
            made.append(chain.line(t, f.Warned(i, 1, "stays")))
    runs, body = [], b""
    for writer, (_, made) in sorted(by_writer.items()):
        data = ("\n".join(made) + "\n").encode()
        runs.append(WriterSpan(f"{writer}-{number}", 0, (len(data),), ""))
        body += data
    made = Volume(number, "x" * number, tuple(runs), body)
    return digested(made, made.encode())[0]


@pytest.mark.parametrize("most", [4, 40])
def test_a_merge_of_merges_is_the_merge_of_all(monkeypatch, most):
    """Else `harness prove verify` would find an archive changed that was not."""
    monkeypatch.setattr(volumes, "MOST_MEASURED", most)
    rng = random.Random(most)
    t, parts = 1000.0, []
    for number in range(16):
        lines = []
        for _ in range(rng.randrange(60)):
            t += rng.choice([5.0, 61.0, 400.0])
            lines.append((f"agent-{rng.randrange(3)}", t))
        parts.append(volume(number, lines))
    at_once = joined_briefs(parts)
    merged = [joined_briefs(parts[i : i + 4]) for i in range(0, 16, 4)]
    assert joined_briefs(merged) == at_once
    brief = brief_of(at_once, "x")
    told = [volumes.fact_in_line(writer, line).fact for writer, _, line in brief.lines()]
    kept = [fact for fact in told if isinstance(fact, f.NodeMeasured)]
    assert 0 < len(kept) <= max(most, 48)  # each writer of each volume is another one here
    stay = sum(data.count(b'"fact":"Warned"') for data in parts)
    assert len(told) - len(kept) == stay > 0


