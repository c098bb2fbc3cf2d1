"""The outer state of an island: theta, the outer optimizer, and their exchange with devices, peers and checkpoints.

`method.py` shows a whole round. Every array belongs to one fragment and one shard, lies in this host's memory
and has a name:

    {fragment}/theta/{path}|{index of the shard along each axis}
    {fragment}/optimizer/{path in the state}
    {fragment}/second/{path}|{index}/{row}/codes, scales         # only in checkpoints: the second phase's error
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gregale.axes.layout import Tree, is_named
from gregale.codecs.codec import QuantisedArray
from gregale.communication.quantised import RowLayout, no_error
from gregale.communication.reduce import ShardedLeaf
from gregale.islands.method import Island
from gregale.islands.network_reducer import NetworkReducer, OwnError, Reduced
from gregale.islands.shards import host_device, keys_here, on_devices, shards_here
from gregale.islands.transport.transfer import VersionedArray, bytes_of
from gregale.methods.diloco import outer_step
from gregale.methods.schedule import Fragment
from gregale.storage import digest


class FragmentShards(NamedTuple):
    """A fragment's arrays on this host."""

    index: int  # of the fragment
    fragment: Fragment
    tree: Tree  # the fragment's part of the parameters
    leaves: list[ShardedLeaf]  # of the fragment, on one device
    places: list[NamedSharding]  # the sharding of each leaf
    theta: dict[str, jax.ShapeDtypeStruct]  # by key of the shard
    optimizer: Tree  # the outer optimizer's state for such a dictionary
    rows: dict[str, RowLayout]  # by key: the rows of messages

    def expected(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        arrays = named(self.index, self.theta, self.optimizer)
        return {name: (np.dtype(array.dtype), array.shape) for name, array in arrays.items()}

    @property
    def size(self) -> int:
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.expected().values())


def part_of(island: Island, index: int) -> FragmentShards:
    fragment, mesh = island.fragment(index), island.layout.mesh
    tree = jax.eval_shape(fragment.take, island.parameters)
    leaves = island.leaves(fragment)
    places = [NamedSharding(mesh, leaf.params) for leaf in leaves]
    theta, rows = {}, {}
    for leaf, place, array in zip(leaves, places, jax.tree.leaves(tree), strict=True):
        for key in keys_here(leaf.path, shape_of(leaf), place):
            theta[key], rows[key] = jax.ShapeDtypeStruct(leaf.shape, array.dtype), island.rows(leaf)
    optimizer = jax.eval_shape(island.outer.init, theta)
    return FragmentShards(index, fragment, tree, leaves, places, theta, optimizer, rows)


def shape_of(leaf: ShardedLeaf) -> tuple[int, ...]:
    return tuple(axis.size for axis in leaf.axes)


def theta_name(index: int, key: str) -> str:
    return f"{index}/theta/{key}"


def optimizer_names(index: int, optimizer: Tree) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    return [f"{index}/optimizer/{jax.tree_util.keystr(path, simple=True, separator='.')}" for path, _ in leaves]


def named(index: int, theta: Mapping[str, Any], optimizer: Tree) -> dict[str, Any]:
    arrays = zip(optimizer_names(index, optimizer), jax.tree.leaves(optimizer), strict=True)
    return {theta_name(index, key): array for key, array in theta.items()} | dict(arrays)


Arrays = dict[str, np.ndarray]


class OuterView(NamedTuple):
    """All arrays of a host at one moment, and the versions of their fragments: references, not copies."""

    held: dict[int, Arrays]  # by fragment, by name
    versions: dict[int, int]
    errors: dict[int, tuple[str, OwnError]]  # of the second phase, by fragment, with its group

    def part(self, index: int) -> "OuterView":
        """Return the view of one fragment alone, which keeps no other arrays in memory."""
        return OuterView({index: self.held[index]}, {}, {})


class OwnLeaves(NamedTuple):
    """The leaves only in a member's own checkpoint: the second phase's errors of its own rows."""

    arrays: dict[str, np.ndarray]  # by name
    groups: dict[int, str]  # by fragment, the group that reduced it last; another group cannot use the errors


NO_OWN_LEAVES = OwnLeaves({}, {})


class Prepared(NamedTuple):
    """A fragment after its outer step, not committed yet."""

    index: int  # of the fragment
    arrays: Arrays  # by name
    fragment_digest: bytes
    digest: str  # of the whole outer state, if this is committed
    finite: bool  # whether theta is finite; infinities or NaN would spread to every island
    group: str  # the members that reduced it
    error: OwnError  # of the second phase


class ValidatedState(NamedTuple):
    """Whole, valid fragments of a peer or of a checkpoint."""

    held: dict[int, Arrays]  # by fragment, by name
    versions: dict[int, int]
    digests: dict[int, bytes]
    digest: str  # of the whole outer state, if they are loaded


class HostOuter:
    """theta and the outer optimizer's state of this host's shards, by fragment.

    Nothing is changed in place: `prepare` makes new arrays, `commit` replaces the old ones. One thread calls `prepare`,
    `commit` and `load`; others may read meanwhile. In an island of many hosts all hosts call `begin`, and the methods
    that move theta to the devices, in the same order.

    - `island`: defines layout, fragments and outer optimizer
    """

    def __init__(self, island: Island):
        self.island = island
        self._held: dict[int, Arrays] = {}  # by fragment, by name
        self._versions: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._errors: dict[int, tuple[str, OwnError]] = {}  # with its group

    def begin(self, parameters: Tree) -> None:
        """Set the outer state before the first round from the island's parameters; version 0."""
        finest = self.island.finest
        taken = jax.jit(
            lambda fragment, tree: finest.constrain(fragment.take(tree), finest.params),
            compiler_options=self.island.compiler_options,
        )
        for index, part in enumerate(self.parts):
            arrays = jax.tree.leaves(taken(part.fragment, parameters))
            theta = {}
            for leaf, array in zip(part.leaves, arrays, strict=True):
                theta |= {key: np.asarray(shard) for key, shard in shards_here(leaf.path, array).items()}
            with jax.default_device(host_device()):
                optimizer = jax.jit(self.island.outer.init)(theta)
            self._take_over(index, *self._kept(index, theta, optimizer), version=0)

    def follow(self, island: Island) -> None:
        """Keep the outer state for another stage of the island, which has the same shards on the same devices."""
        self.island, self.parts = island, [part_of(island, index) for index in range(len(self.parts))]

    def now(self) -> OuterView:
        return OuterView(dict(self._held), dict(self._versions), dict(self._errors))

    def theta(self, index: int, moment: OuterView | None = None) -> Tree:
        """Return theta of a fragment on the island's devices under `opt_state`, for `Island.depart` and
        `Island.arrive`.

        - `moment`: the view to read; None: the current one
        """
        part = self.parts[index]
        held = self._theta(index, moment)
        arrays = [
            leaf.wrap(on_devices(held, leaf.path, shape_of(leaf), place))
            for leaf, place in zip(part.leaves, part.places, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(part.tree, is_leaf=is_named), arrays)

    def reducer(self, index: int) -> NetworkReducer:
        return NetworkReducer(self.island.reduce, self.parts[index].rows)

    def compile(self) -> None:
        """Compile the processor's programs for the first round of each fragment; after `begin` or `load`."""
        for index, part in enumerate(self.parts):
            self.reducer(index).compile()
            nothing = {key: np.zeros(shard.shape, np.float32) for key, shard in part.theta.items()}
            with jax.default_device(host_device()):
                self._outer_step(self._theta(index), self._optimizer(index), nothing)

    def error(self, index: int, group: str) -> OwnError | None:
        """Return the unsent rest of a fragment's second phase; None if another group reduced it last.

        - `group`: names its members in the order of their ranks
        """
        last, error = self._errors.get(index, ("", None))
        return error if last == group else None

    def prepare(self, index: int, reduced: Reduced, group: str) -> Prepared:
        """Run the outer step on a fragment with the average of a reduce; nothing changes yet.

        Islands with equal inputs and processors of one kind compute equal bits.
        """
        part, theta = self.parts[index], self._theta(index)
        optimizer = self._optimizer(index)
        gradient = {key: reduced.gradient[key].reshape(shard.shape) for key, shard in part.theta.items()}
        with jax.default_device(host_device()):
            theta, optimizer, finite = self._outer_step(theta, optimizer, gradient)
        arrays, own = self._kept(index, theta, optimizer)
        whole = self._joint_digest({**self._digests, index: own})
        return Prepared(index, arrays, own, whole, bool(finite), group, reduced.error)

    def commit(self, prepared: Prepared, version: int) -> None:
        """Replace a fragment by the prepared one; `version`: the number of the round, from 1."""
        self._held[prepared.index] = prepared.arrays
        self._digests[prepared.index] = prepared.fragment_digest
        self._versions[prepared.index] = version
        self._errors[prepared.index] = prepared.group, prepared.error

    @property
    def digest(self) -> str:
        return self._joint_digest(self._digests)

    def leaves(self, moment: OuterView | None = None) -> dict[str, VersionedArray]:
        """Return every array with its version, by name, for peers that heal and for checkpoints.

        - `moment`: the view to read; None: the current one
        """
        held, versions, _ = moment or self.now()
        parts = sorted(held.items())
        return {
            name: VersionedArray(array, versions[index]) for index, arrays in parts for name, array in arrays.items()
        }

    def expected(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return type and shape of every array by name, from the configuration, to check a peer's state."""
        return {name: kind for part in self.parts for name, kind in part.expected().items()}

    def load(self, arrays: Mapping[str, np.ndarray], versions: Mapping[str, int]) -> None:
        """Load whole fragments of a peer or a checkpoint unchanged; other fragments stay.

        Raises `ValueError` if a fragment is incomplete, of mixed versions, or not as `expected`; nothing changes then.
        """
        self.take_over(self.check(arrays, versions))

    def take_over(self, offered: ValidatedState) -> None:
        """Load a state that `check` returned; other fragments stay."""
        for index, arrays in offered.held.items():
            self._take_over(index, arrays, offered.digests[index], offered.versions[index])

    def check(self, arrays: Mapping[str, np.ndarray], versions: Mapping[str, int]) -> ValidatedState:
        """Return the state that `load` would load; raise `ValueError` where `load` would."""
        expected, found = self.expected(), {}
        for name, array in arrays.items():
            if name not in expected or (array.dtype, array.shape) != expected[name]:
                what = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"{name} is {what}; expected: {expected.get(name, 'no such array')}")
            found.setdefault(int(name.split("/", 1)[0]), {})[name] = array
        for index, part in found.items():
            names = [name for name in expected if name.startswith(f"{index}/")]
            if missing := set(names) - set(part):
                raise ValueError(f"fragment {index} lacks {sorted(missing)[0]} and {len(missing) - 1} more")
            if len(rounds := {versions[name] for name in names}) > 1:
                raise ValueError(f"fragment {index} is of rounds {sorted(rounds)}")
        digests = {index: _digest(part) for index, part in found.items()}
        rounds = {index: versions[next(iter(part))] for index, part in found.items()}
        return ValidatedState(found, rounds, digests, self._joint_digest({**self._digests, **digests}))

    def own_leaves(self, moment: OuterView | None = None) -> OwnLeaves:
        """Return the leaves that only this member's checkpoint needs.

        - `moment`: the view to read; None: the current one
        """
        errors = (moment or self.now()).errors
        arrays = {name: array for index, (_, error) in errors.items() for name, array in _own(index, error).items()}
        return OwnLeaves(arrays, {index: group for index, (group, _) in errors.items()})

    def load_own(self, own: OwnLeaves) -> None:
        """Load `own_leaves` of a checkpoint; after `load`.

        Raises `ValueError` if an error does not match this island's rows; nothing changes then.
        """
        found: dict[int, OwnError] = {}
        arrays = own.arrays
        for index in own.groups:
            start, rows = f"{index}/second/", {}
            for key, cut in self.parts[index].rows.items():
                for row in range(cut.count):
                    if f"{start}{key}/{row}/codes" in arrays:
                        rows[key, row] = QuantisedArray(
                            *(arrays.get(f"{start}{key}/{row}/{part}") for part in QuantisedArray._fields)
                        )
            found[index] = OwnError(int(arrays.get(f"{start}steps", np.int64(0))), rows)
            offered = {name: _kind(array) for name, array in arrays.items() if name.startswith(f"{index}/")}
            wanted = OwnError(0, {place: no_error(self.parts[index].rows[place[0]].row) for place in rows})
            if offered != {name: _kind(array) for name, array in _own(index, wanted).items()}:
                raise ValueError(f"the second phase's errors of fragment {index} do not match this island's rows")
        self._errors |= {index: (own.groups[index], error) for index, error in found.items()}

    @cached_property
    def parts(self) -> list[FragmentShards]:
        return [part_of(self.island, index) for index in range(self.island.schedule.fragments)]

    @cached_property
    def _outer_step(self) -> Callable[..., Any]:
        def step(theta: Tree, optimizer: Tree, gradient: Tree):
            theta, _, optimizer = outer_step(self.island.outer, theta, optimizer, gradient)
            return theta, optimizer, jnp.all(jnp.stack([jnp.isfinite(array).all() for array in jax.tree.leaves(theta)]))

        return jax.jit(step)

    def _theta(self, index: int, moment: OuterView | None = None) -> Arrays:
        held = (moment or self.now()).held[index]
        return {key: held[theta_name(index, key)] for key in self.parts[index].theta}

    def _optimizer(self, index: int) -> Tree:
        held, state = self._held[index], self.parts[index].optimizer
        arrays = [held[name] for name in optimizer_names(index, state)]
        return jax.tree.unflatten(jax.tree.structure(state), arrays)

    def _kept(self, index: int, theta: Tree, optimizer: Tree) -> tuple[Arrays, bytes]:
        """Return copies of these arrays by name, which arrays of JAX may share and their digest."""
        kept = {name: np.array(array, order="C") for name, array in named(index, theta, optimizer).items()}
        return kept, _digest(kept)

    def _take_over(self, index: int, arrays: Arrays, digest: bytes, version: int) -> None:
        self._held[index], self._versions[index], self._digests[index] = arrays, version, digest
        self._errors.pop(index, None)

    @staticmethod
    def _joint_digest(digests: Mapping[int, bytes]) -> str:
        return digest(*(of_fragment for _, of_fragment in sorted(digests.items())))


def _own(index: int, error: OwnError) -> Arrays:
    """Return the arrays of a second phase's error, by name."""
    arrays: Arrays = {f"{index}/second/steps": np.array(error.steps, np.int64)}
    for (key, row), stored in error.rows.items():
        arrays |= {f"{index}/second/{key}/{row}/{name}": array for name, array in stored._asdict().items()}
    return arrays


def _kind(array: np.ndarray) -> tuple[np.dtype, tuple[int, ...]]:
    return array.dtype, array.shape


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the digest of a fragment's arrays with their names."""
    contents = ((name.encode(), bytes_of(np.ascontiguousarray(array))) for name, array in sorted(arrays.items()))
    return bytes.fromhex(digest(*chain.from_iterable(contents)))
