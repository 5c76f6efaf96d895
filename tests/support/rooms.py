"""The rooms of the house, from the ground up: a room imports rooms above it in these lists, never
below."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPINE = (
    *("core", "bucket", "ledger", "node", "notices", "rendezvous", "uploader", "agent", "worker"),
    *("controller", "clouds"),
)
SATELLITES = (
    *("meshes", "guards", "loops", "adapters", "data", "look", "planner", "local", "check", "lab", "testing"),
)
ORDER = (*SPINE, *SATELLITES, "cli")
STORAGE_SATELLITES = ("export", "testing")
