"""Meshes to choose from: how they are written, and which of them a world has."""

import pytest

from harness.core.mesh import AutoMesh, MeshChoice, ModelMesh, choice_of, meshes_told, parse_choice
from harness.core.world import BadInput
from harness.worker.process_group import Peers

EIGHT, FOUR, TWO = (ModelMesh(dp_shard=n) for n in (8, 4, 2))
LIST = "dp_shard=8|dp_shard=4|dp_shard=2"


@pytest.mark.parametrize(
    "text",
    ["dp_shard=8,tp=2", LIST, "auto:8..64", "dp_shard=8,tp=2|auto:2..4|tp=2", "auto:4..16,tp=2"],
)
def test_what_is_written_is_read(text):
    found = parse_choice(text)
    assert str(found) == text and parse_choice(str(found)) == found
    assert choice_of(text) == choice_of(text.split("|")) == found == meshes_told({"HARNESS_MESH": text})
    assert choice_of([{"dp_shard": 8}, "auto:2..4"]) == parse_choice("dp_shard=8|auto:2..4")
    assert meshes_told({}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto", "wanted auto:LEAST..MOST"),
        ("auto:8", "wanted auto:LEAST..MOST"),
        ("auto:8..x", "wanted auto:LEAST..MOST"),
        ("auto:8..4", "from 1 to 65536"),
        ("auto:0..4", "from 1 to 65536"),
        ("auto:2..4,dp_shard=2", "which it chooses"),
        ("auto:1..3,tp=4", "no copy is of whole groups of tp=4"),
        ("dp_shard=8|", "wanted NAME=SIZE"),
        ("|".join(["dp_shard=2"] * 17), "at most 16 meshes"),
    ],
)
def test_what_makes_no_sense_is_refused(text, says):
    with pytest.raises(BadInput, match="mesh") as refused:
        parse_choice(text)
    assert says in str(refused.value)


@pytest.mark.parametrize("asked", [[], [3], 7])
def test_a_script_that_asks_for_none_is_refused(asked):
    with pytest.raises((BadInput, TypeError)):
        choice_of(asked)


def chosen(text, sizes, max_replicas=None, worlds=()):
    mesh, places = parse_choice(text).choose(sizes, max_replicas, worlds)
    return (str(mesh) if mesh else "", sum(sizes[i] for i in places))


@pytest.mark.parametrize(
    ("text", "ranks", "found"),
    [
        (LIST, 16, ("dp_shard=8", 16)),
        (LIST, 15, ("dp_shard=8", 8)),  # the order is strict, whatever is left over
        (LIST, 7, ("dp_shard=4", 4)),
        (LIST, 3, ("dp_shard=2", 2)),
        (LIST, 1, ("", 0)),
        ("auto:8..64", 64, ("dp_shard=64", 64)),
        ("auto:8..64", 72, ("dp_shard=36", 72)),  # two copies; nobody is left over
        ("auto:8..64", 63, ("dp_shard=63", 63)),
        ("auto:8..32", 67, ("dp_shard=32", 64)),  # a prime: as few as possible are left over
        ("auto:8..64", 7, ("", 0)),
        ("auto:4..8,tp=2", 8, ("dp_shard=4,tp=2", 8)),
        ("tp=4|auto:2..2", 3, ("dp_shard=2", 2)),
    ],
)
def test_the_first_that_can_be_had_is_taken(text, ranks, found):
    assert chosen(text, [1] * ranks) == found


def test_nodes_are_taken_whole_and_only_as_many_as_a_step_has_work_for():
    assert chosen(LIST, [8, 8, 4]) == ("dp_shard=8", 16)
    assert chosen("dp_shard=8|dp_shard=4", [4, 3]) == ("dp_shard=4", 4)
    assert chosen("auto:2..4", [3, 3]) == ("dp_shard=3", 6)
    # replicas of two ranks each (tp): six of them have work
    assert chosen("dp_shard=2,tp=2", [4] * 5, max_replicas=6) == ("dp_shard=2,tp=2", 12)
    assert chosen("dp_shard=8|dp_shard=4", [1] * 16, worlds=(4, 12)) == ("dp_shard=4", 12)


def test_a_world_without_an_agent_takes_the_first_that_fits_all_of_it():
    choice = parse_choice("dp_shard=4|auto:2..3")
    assert choice.of_world(8) == FOUR and choice.of_world(6) == ModelMesh(dp_shard=3)
    with pytest.raises(BadInput, match="5 ranks make no whole number of copies of any"):
        choice.of_world(5)
    with pytest.raises(BadInput, match="use 4 or 8 ranks"):
        parse_choice("dp_shard=4").of_world(6)
    assert choice.place(FOUR) == 0 and choice.place(TWO) == 1 and choice.place(EIGHT) is None
    assert AutoMesh(2, 8).allows(FOUR) and not AutoMesh(2, 8).allows(ModelMesh(dp_shard=2, tp=2))


def test_a_script_may_ask_for_any_of_those_that_its_nodes_were_told():
    def mesh_of(world, told, asked):
        environ = {"WORLD_SIZE": str(world), **({"HARNESS_MESH": told} if told else {})}
        return Peers(environ, asked_mesh=asked).model_mesh

    assert mesh_of(4, "", [{"dp_shard": 8}, {"dp_shard": 4}]) == FOUR
    assert mesh_of(4, "dp_shard=2", "auto:2..8") == TWO  # as the agents have decided
    assert mesh_of(4, LIST, None) == FOUR  # plain torchrun
    with pytest.raises(BadInput, match="formed of copies that are tp=2"):
        mesh_of(4, "tp=2", LIST)


# ---- worlds of agents ----------------------------------------------------------------------------
def members(place, count, text=LIST, wait_s=3.0):
    meshes = MeshChoice(parse_choice(text).each, wait_s)
    return [place.member(f"m{i}", attempt=i, meshes=meshes) for i in range(count)]


def ready(*them):
    for m in them:
        m.say(state="ready")


def test_a_world_waits_for_the_better_mesh_and_not_for_ever(place):
    four = members(place, 4, "dp_shard=4|dp_shard=2")
    epoch = place.form(*four)
    assert (epoch.mesh, epoch.world) == ("dp_shard=4", 4)
    four[3].leave("drained")
    ready(*four[:3])
    began_s = place.clock.now
    epoch = place.form(*four[:3])
    assert (epoch.mesh, epoch.members) == ("dp_shard=2", ("m0", "m1"))  # m2 is left over
    assert place.clock.now - began_s >= 3.0
    # it has been so before: nobody waits once more
    ready(*four[:2])
    began_s = place.clock.now
    assert place.form(*four[:3]).mesh == "dp_shard=2" and place.clock.now - began_s < 3.0


def test_who_comes_while_it_waits_is_not_left_out(place):
    four = members(place, 4, "dp_shard=4|dp_shard=2", wait_s=60.0)
    assert place.form(*four).mesh == "dp_shard=4"
    four[3].leave("drained")
    ready(*four[:3])
    assert place.form(*four[:3], rounds=4) is None
    new = place.member("m9", attempt=9, meshes=four[0]._meshes)
    epoch = place.form(*four[:3], new)
    assert (epoch.mesh, epoch.members) == ("dp_shard=4", ("m0", "m1", "m2", "m9"))


def test_a_spare_makes_a_better_mesh_with_who_comes(place):
    """Two train, one is left over; with a fourth all are asked to make room."""
    three = members(place, 3, "dp_shard=4|dp_shard=2", wait_s=0.0)
    epoch = place.form(*three)
    assert (epoch.mesh, epoch.members) == ("dp_shard=2", ("m0", "m1"))
    first = three[0]
    assert not first.would_grow(epoch, first.waiting(epoch, first.members()), None)
    new = place.member("m9", attempt=9, meshes=first._meshes)
    for _ in range(11):  # newcomers are looked for now and then
        place.beat(*three, new)
    place.meet(*three, new)
    assert first.would_grow(epoch, first.waiting(epoch, first.members()), None)
    ready(*three[:2])
    epoch = place.form(*three, new)
    assert (epoch.mesh, epoch.world, epoch.replica_ranks) == ("dp_shard=4", 4, 1)
