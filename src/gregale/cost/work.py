"""Counts the work of a function by a walk over its jaxpr: FLOPs of products, and bytes of the device's memory.

    work_of(jax.make_jaxpr(step)(state, batch))

A product of matrices has 2 FLOPs for each multiply-add; other operations have none, because products outnumber them by
orders of magnitude. The bytes are those of the operands and results of products, kernels, gathers, scatters and sorts:
a compiler fuses all other operations with these. Shapes of a jaxpr are those of all devices together, and inside of
`jax.shard_map` those of one device, so that they count for each. A loop counts as often as it runs; of a `while` a
scope around it tells (`gregale.scopes`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax.extend as jex
from jax.core import ShapedArray
from jax.interpreters import partial_eval

from gregale.cost.pallas_cost import attention_flops
from gregale.scopes import SUM, seen_share, times_of, visible


@dataclass(frozen=True)
class Work:
    """Work of all devices together.

    - `flops`: of all products; of attention with all pairs of a query and a key, unless a kernel leaves some out
    - `hidden_flops`: those of `flops` for pairs that a mask hides
    - `eight_bit_flops`: those of `flops` in products of 8-bit numbers
    - `memory_bytes`: read from and written to the devices' memory
    - `host_bytes`: moved to the hosts' memory and back
    - `saved_bytes`: the most that one loop, with those inside of it, keeps of each iteration, such as what a backward
      pass needs of each layer; what lies in hosts' memory is left out
    - `unknown`: names of operations whose products are not known, and of loops that count once
    """

    flops: float = 0.0
    hidden_flops: float = 0.0
    eight_bit_flops: float = 0.0
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    saved_bytes: float = 0.0
    unknown: frozenset[str] = field(default_factory=frozenset)

    @property
    def visible_flops(self) -> float:
        return self.flops - self.hidden_flops

    def __add__(self, other: "Work") -> "Work":
        sums = {name: vars(self)[name] + vars(other)[name] for name in COUNTS}
        return Work(**sums, saved_bytes=max(self.saved_bytes, other.saved_bytes), unknown=self.unknown | other.unknown)

    def __mul__(self, times: float) -> "Work":
        return replace(self, **{name: times * vars(self)[name] for name in COUNTS}) if times else Work()


COUNTS = ("flops", "hidden_flops", "eight_bit_flops", "memory_bytes", "host_bytes")
Scopes = tuple[str, ...]


def work_of(jaxpr: jex.core.ClosedJaxpr) -> Work:
    """Return the work of a closed jaxpr, without operations whose results nothing uses."""
    return _work(jaxpr, ())


def _work(jaxpr: Any, scopes: Scopes, outputs: Sequence[bool] | None = None) -> Work:
    """Return the work of a jaxpr inside of some scopes; `outputs`: which of its results are used; None: all."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, jex.core.ClosedJaxpr) else jaxpr
    needed, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars) if outputs is None else list(outputs))
    found, used = Work(), {own for own in needed.outvars if isinstance(own, jex.core.Var)}
    for each in reversed(needed.eqns):
        uses = [own in used for own in each.outvars]
        if any(uses) or each.effects:  # kernels are in `needed` always
            found += _of_equation(each, (*scopes, str(each.source_info.name_stack)), uses)
            used.update(own for own in each.invars if isinstance(own, jex.core.Var))
    return found


def _of_equation(equation: Any, scopes: Scopes, outputs: Sequence[bool]) -> Work:
    name, given = equation.primitive.name, equation.params
    if name in PRODUCTS:
        return _product(equation, PRODUCTS[name](equation), scopes)
    if name in MOVED:
        return Work(memory_bytes=2 * _bytes(MOVED[name](equation)))
    match name:
        case "pallas_call":
            flops = _of_kernel(equation)
            return _unknown(equation) if flops is None else _product(equation, flops, ())  # of what the mask shows
        case "device_put":
            moves = any("MemorySpace" in str(each) for each in given["devices"])  # to a host's memory, or from it
            return Work(host_bytes=_bytes(equation.outvars) * moves)
        case "scan":
            kept = [each for each in equation.outvars[given["num_carry"] :] if "host" not in str(each.aval).lower()]
            body = _work(given["jaxpr"], (*scopes, LOOP)) * given["length"]
            return replace(body, saved_bytes=body.saved_bytes + _bytes(kept))
        case "while":
            return _of_loop(equation, scopes)
        case "cond":
            return max((_work(each, scopes) for each in given["branches"]), key=lambda work: work.flops)
        case "shard_map":  # into which `dce_jaxpr` does not look
            devices = prod(given["mesh"].shape[axis] for axis in given["newly_manual_axes"])
            return _work(given["jaxpr"], scopes, outputs) * devices
    inner = sum((_work(each, scopes) for each in _functions(given.values())), Work())
    return inner + _unknown(equation) if name in DECOMPOSITIONS or any(word in name for word in OPAQUE) else inner


def _of_kernel(equation: Any) -> float | None:
    """Return the FLOPs of a Pallas kernel: declared, of each block of its grid, or of rows by matrices of groups."""
    given, grid = equation.params, equation.params["grid_mapping"].grid
    if (flops := attention_flops(equation)) is not None:
        return flops
    if given["cost_estimate"] is not None:
        return given["cost_estimate"].flops
    if all(isinstance(size, int) for size in grid):
        return _work(given["jaxpr"], ()).flops * prod(grid)
    shapes = [each.aval.shape for each in equation.invars]  # a computed grid visits the rows of each group
    rows = max((shape[0] for shape in shapes if len(shape) == 2), default=None)
    matrices = [shape for shape in shapes if len(shape) == 3]
    return sum(2 * rows * inputs * outputs for _, inputs, outputs in matrices) if rows and matrices else None


def _of_loop(equation: Any, scopes: Scopes) -> Work:
    body, count = _work(equation.params["body_jaxpr"], (*scopes, LOOP)), times_of("/".join(scopes).rpartition(LOOP)[2])
    return body + Work(unknown=frozenset({"while"} if body.flops else ())) if count is None else body * count


def _functions(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the jaxprs among the parameters of an equation; rules for derivatives are no jaxprs."""
    for value in values:
        if isinstance(value, jex.core.Jaxpr | jex.core.ClosedJaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _functions(value)


def _size(variable: Any) -> int:
    return prod(variable.aval.shape)


def _bytes(variables: Iterable[Any]) -> float:
    arrays = (each for each in variables if isinstance(each.aval, ShapedArray))  # others are tokens
    return sum(_size(each) * each.aval.dtype.itemsize for each in arrays)


def _product(equation: Any, flops: float, scopes: Scopes) -> Work:
    widths = [each.aval.dtype.itemsize for each in equation.invars if len(each.aval.shape) > 1]
    names = "/".join(scopes)
    hidden, flops = 1 - seen_share(names), 0.0 if SUM in names else flops
    moved = _bytes([*equation.invars, *equation.outvars])
    narrow = 1 in widths if equation.primitive.name == "pallas_call" else widths.count(1) > 1
    return Work(flops, hidden * flops, flops if narrow else 0.0, moved)


def _unknown(equation: Any) -> Work:
    name = equation.params.get("name") or equation.primitive.name
    return Work(memory_bytes=_bytes([*equation.invars, *equation.outvars]), unknown=frozenset({str(name)}))


def _dot(equation: Any) -> float:
    ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * prod(left[axis] for axis in contracted)


def _grouped(equation: Any) -> float:
    """Return the FLOPs of a product of each row with the matrix of its group, or of the sums over a group's rows."""
    (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (rows,) = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    left, groups = equation.invars[0].aval.shape, equation.invars[2].aval.shape[-1]
    found = 2 * _size(equation.outvars[0]) * prod(left[axis] for axis in contracted)
    return found / groups if rows in contracted else found


def _convolution(equation: Any) -> float:
    kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
    return 2 * _size(equation.outvars[0]) * prod(kernel) // kernel[numbers.rhs_spec[0]]


def _triangular(equation: Any) -> float:
    return _size(equation.outvars[0]) * equation.invars[0].aval.shape[-1]


def _fused_attention(products: int) -> Callable[[Any], float]:
    """Return the rule of cuDNN's kernels on [batch, position, heads, head_size], by their number of products."""

    def flops(equation: Any) -> float:
        batch, positions, heads, size = equation.invars[0].aval.shape
        causal, window = "CAUSAL" in str(equation.params["mask_type"]), equation.params["sliding_window_length"]
        pairs = visible(positions, [window]) if causal else positions * equation.invars[1].aval.shape[1]
        return 2 * products * batch * heads * size * pairs

    return flops


PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _grouped,
    "conv_general_dilated": _convolution,
    "triangular_solve": _triangular,
    **{f"dot_product_attention_fwd{end}": _fused_attention(2) for end in ("", "_wrapper")},
    **{f"dot_product_attention_bwd{end}": _fused_attention(5) for end in ("", "_wrapper")},
}
# What moves beside products: results of gathers and sorts, and the updates of scatters.
MOVED: dict[str, Callable[[Any], Any]] = {
    "gather": lambda equation: equation.outvars,
    "sort": lambda equation: equation.outvars,
    "top_k": lambda equation: equation.invars,
    "scatter": lambda equation: equation.invars[2:],
    "scatter-add": lambda equation: equation.invars[2:],
}
OPAQUE = ("callback", "ffi_call", "custom_call")
DECOMPOSITIONS = {"cholesky", "eig", "eigh", "svd", "qr", "geqrf", "householder_product", "lu", "schur", "hessenberg"}
LOOP = "|"  # among the scopes: the body of a loop begins
