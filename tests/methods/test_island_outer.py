"""The outer side in host memory: what is kept, committed, digested, handed to peers and taken from them."""

import jax
import numpy as np
import pytest

from gregale.codecs.codec import ReduceConfig
from gregale.islands.network_reducer import OwnError, Reduced
from gregale.islands.outer import HostOuter
from gregale.islands.plan import IslandTraffic
from gregale.methods.schedule import Schedule
from tests.mesh.support import layout_of
from tests.methods.islands import LAYERS, Fleet, Net, island_on, on_one_device, rows

STREAMING = Schedule(4, 3, 1, LAYERS), 0.5
FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")


def trained(steps: int = 3, reduce: ReduceConfig = FOUR_BITS) -> Fleet:
    """Two islands that have sent fragments, and may have one on its way."""
    fleet = Fleet.of([on_one_device(*STREAMING, reduce)] * 2)
    for t in range(1, steps + 1):
        fleet.step(t)
    return fleet


def test_all_begin_with_the_same_bits_and_hold_each_value_of_the_parameters_once():
    one, other = trained(0).members
    assert one.host.digest == other.host.digest
    for theta, own in zip(one.theta, one.parameters, strict=True):
        np.testing.assert_array_equal(theta, own)
    held = one.host.leaves()
    assert {each.version for each in held.values()} == {0}
    assert {name: (each.array.dtype, each.array.shape) for name, each in held.items()} == one.host.expected()
    theta = [array.size for name, (array, _) in held.items() if name.split("/")[1] == "theta"]
    momentum = [array.size for name, (array, _) in held.items() if ".trace." in name]
    assert sum(theta) == sum(momentum) == sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(Net.init)))


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "model": 2}, {"replica": 2, "data": 2}, {"stage": 2, "data": 2}], ids=str
)
def test_a_host_holds_and_sends_each_value_once_whatever_the_mesh(sizes):
    island = island_on(layout_of(**sizes), *STREAMING)
    host, parameters = HostOuter(island), jax.tree.leaves(jax.eval_shape(Net.init))
    held = [shape for name, (_, shape) in host.expected().items() if name.split("/")[1] == "theta"]
    sent = [rows.size for index in range(3) for rows in host.reducer(index).rows.values()]
    assert sum(int(np.prod(shape)) for shape in held) == sum(sent) == sum(leaf.size for leaf in parameters)


@pytest.mark.quick
def test_preparing_changes_nothing_and_committing_changes_one_fragment():
    member = trained(4).members[0]
    host = member.host
    before, digest = host.leaves(), host.digest
    gradient = {key: np.ones(shard.size, np.float32) for key, shard in host.parts[1].theta.items()}
    prepared = host.prepare(1, Reduced(gradient, OwnError(1, {})), "others")
    next(iter(gradient.values()))[0] = np.nan
    assert not host.prepare(1, Reduced(gradient, OwnError(1, {})), "others").finite
    assert prepared.finite
    assert host.digest == digest != prepared.digest
    assert all(host.leaves()[name].array is each.array for name, each in before.items())
    host.commit(prepared, version=77)
    after = host.leaves()
    assert host.digest == prepared.digest
    for name, (array, _) in before.items():
        mine = name.startswith("1/")
        assert (after[name].version == 77) == mine
        assert (after[name].array is array) != mine
    assert host.error(1, "others") == OwnError(1, {})
    assert host.error(1, "all") is None
    assert host.error(0, "all") is not None
    assert prepared.finite
    next(iter(gradient.values()))[0] = np.nan
    assert not host.prepare(1, Reduced(gradient, OwnError(1, {})), "all").finite


def test_nothing_is_compiled_in_a_round_that_was_compiled_before():
    member = Fleet.of([on_one_device(*STREAMING, ReduceConfig(codec="int8", gather_codec="int8"))]).members[0]
    member.host.compile()
    programs = {member.host.reducer(index).programs(key) for index in range(3) for key in member.host.parts[index].rows}

    def sizes() -> list[int]:
        rows = [each._cache_size() for program in programs for each in (program.add, program.encode, program.decode)]
        return [*rows, member.host._outer_step._cache_size()]

    before = sizes()
    assert min(before) >= 1
    member.train(rows(1, 1), 1)
    for index in range(3):
        Fleet([member]).send(index, [1.0])
    assert sizes() == before


def test_every_bit_of_every_array_is_in_the_digest():
    host = trained(2).members[0].host
    leaves = host.leaves()
    for name in leaves:
        changed = {key: held.array for key, held in leaves.items() if key.split("/")[0] == name.split("/")[0]}
        changed[name] = changed[name].copy()
        changed[name].reshape(-1).view(np.uint8)[-1] ^= 1
        other = HostOuter(host.island)
        other.load({key: held.array for key, held in leaves.items()}, dict.fromkeys(leaves, 1))
        assert other.digest == host.digest
        other.load(changed, dict.fromkeys(changed, 1))
        assert other.digest != host.digest, name


def test_one_that_healed_goes_on_as_the_others():
    """A joiner with theta and the outer optimizer's state of a peer comes to the same bits in the next round."""
    fleet = trained(5)
    peer = fleet.members[0]
    joiner = Fleet.of([peer.island]).members[0]
    assert joiner.host.digest != peer.host.digest
    leaves = peer.host.leaves()
    copies = {name: held.array.copy() for name, held in leaves.items()}
    joiner.host.load(copies, {name: held.version for name, held in leaves.items()})
    assert joiner.host.digest == peer.host.digest
    for index in range(3):
        joiner.errors[index] = None
        joiner.arrive(index, keep=0.0)
    for own, theta in zip(joiner.parameters, peer.theta, strict=True):
        np.testing.assert_array_equal(own, theta)
    fleet.members.append(joiner)
    fleet.send(2, [1.0, 1.0, 0.0], group="with the joiner")  # compares their digests


def test_what_does_not_fit_is_refused_and_changes_nothing():
    source, host = trained(3).members[0].host, HostOuter(on_one_device(*STREAMING, FOUR_BITS))
    leaves = source.leaves()
    host.load({name: held.array for name, held in leaves.items()}, dict.fromkeys(leaves, 4))
    before, right = host.digest, {name: held.array + 1 for name, held in leaves.items()}
    name = next(name for name in right if name.startswith("1/theta"))
    array, versions = right[name], dict.fromkeys(leaves, 5)
    for wrong, of_rounds in (
        (right | {name: array[..., :-1]}, versions),
        (right | {name: array.astype(np.float64)}, versions),
        (right | {"1/theta/other|0": array}, versions),
        ({key: each for key, each in right.items() if key != name}, versions),
        (right, versions | {name: 6}),
    ):
        with pytest.raises(ValueError, match="1"):
            host.load(wrong, of_rounds)
        assert host.digest == before
        assert {held.version for held in host.leaves().values()} == {4}


@pytest.mark.parametrize("reduce", [ReduceConfig(), FOUR_BITS], ids=["float32", "four bits"])
def test_closed_forms_of_bytes_are_those_of_a_fleet(reduce):
    member = trained(1, reduce).members[0]
    for members in (1, 2, 5):
        traffic = IslandTraffic(member.island, members)
        for index in range(3):
            reducer = member.host.reducer(index)
            most = max(reducer.bytes_sent(members, rank) for rank in range(members))
            assert traffic.bytes_sent(index) == most
            assert traffic.seconds(index, 1e3) == most / 1e3
        assert (traffic.bytes_a_period() == 0) == (members == 1)
    traffic = IslandTraffic(member.island, 2)
    assert traffic.host_bytes() == sum(held.array.nbytes for held in member.host.leaves().values())
    assert traffic.device_bytes() == sum(array.nbytes for array in jax.tree.leaves(member.state.method.error))
    theta = [sum(array.nbytes for array in jax.tree.leaves(member.host.theta(index))) for index in range(3)]
    messages = [sum(message.nbytes for message in member.depart(index).values()) for index in range(3)]
    assert traffic.device_bytes_in_flight() == max(sum(pair) for pair in zip(theta, messages, strict=True))
    assert traffic.host_bytes_in_flight() > max(messages)


def test_a_fleet_that_comes_back_from_a_checkpoint_goes_on_bit_for_bit():
    """theta, the outer optimizer, and the errors of both phases; those of the second would else begin anew."""
    fleet, back, without = trained(6), Fleet.of([on_one_device(*STREAMING, FOUR_BITS)] * 2), trained(0)
    for others in (back, without):
        for member, saved in zip(others.members, fleet.members, strict=True):
            member.state = jax.tree.map(np.asarray, saved.state)
            member.state = jax.device_put(member.state, jax.tree.map(lambda x: x.sharding, saved.state))
            member.seen = saved.seen.copy()
            held = saved.host.leaves()
            member.host.load({name: each.array for name, each in held.items()}, dict.fromkeys(held, 1))
            member.errors = dict(saved.errors)
    for member, saved in zip(back.members, fleet.members, strict=True):
        member.host.load_own(saved.host.own_leaves())
    for t in range(7, 12):
        for each in (fleet, back, without):
            each.step(t)
    assert back.members[0].host.digest == fleet.members[0].host.digest != without.members[0].host.digest
    for one, other in zip(back.members[1].parameters, fleet.members[1].parameters, strict=True):
        np.testing.assert_array_equal(one, other)


def test_errors_of_other_rows_are_refused():
    member = trained(3).members[0]
    own = member.host.own_leaves()
    for how in ("shape", "row", "missing"):
        arrays = dict(own.arrays)
        name = next(name for name in arrays if name.endswith("/codes"))
        if how == "shape":
            arrays[name] = arrays[name][:-1]
        elif how == "row":
            arrays[name.replace("/codes", "1/codes")] = arrays[name]
        else:
            del arrays[name]
        with pytest.raises(ValueError, match="rows"):
            member.host.load_own(own._replace(arrays=arrays))
    member.host.load_own(own._replace(groups=dict.fromkeys(own.groups, "again")))
    index = next(iter(own.groups))
    assert member.host.error(index, "all") is None
    assert member.host.error(index, "again") is not None
