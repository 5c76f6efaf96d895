"""Work of a script's own is spoken for, and nothing else is."""

import threading

from harness.loops import own_loop


def test_only_between_steps_and_not_for_ever(monkeypatch):
    beats, told = [], threading.Semaphore(0)
    monkeypatch.setattr(own_loop, "BEAT_S", 0.01)

    def alive():
        beats.append(None)
        told.release()

    work = own_loop.OwnWork(alive)
    work.begin()
    assert told.acquire(timeout=60)
    work.end()
    work._thread.join(0.05)  # a beat that had begun
    silent = len(beats)
    work._thread.join(0.2)
    assert len(beats) == silent
    monkeypatch.setattr(own_loop, "OWN_MOST_S", -1.0)
    work.begin()
    work._thread.join(0.2)
    assert len(beats) == silent and work._thread.is_alive()
