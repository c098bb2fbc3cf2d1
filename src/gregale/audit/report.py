"""Provides the audit of a program: its collectives, and their sums by mesh axis and by link."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from gregale.audit.collectives import Collective, find_collectives
from gregale.audit.device_axes import UNKNOWN, Placement
from gregale.audit.hlo import parse
from gregale.errors import UserError


@dataclass(frozen=True)
class Audit:
    """All collectives of a compiled program, in schedule order."""

    collectives: tuple[Collective, ...]

    def over(self, axis: str) -> tuple[Collective, ...]:
        """Return the collectives between devices that differ along a mesh axis, also if they cross other axes.

        They include those with unknown axes if a group has devices that differ along the axis.
        """
        return tuple(collective for collective in self.collectives if axis in collective.touched)

    def unknown(self) -> tuple[Collective, ...]:
        """Return the collectives whose groups are no grid in the mesh."""
        return tuple(collective for collective in self.collectives if collective.axes == UNKNOWN)

    def bytes_per_step(self, axis: str | None = None) -> int:
        """Return payload bytes on one device in one run of the program, including trip counts, over one axis or all.

        Raises `UserError` if a loop around one of the collectives has an unknown trip count.
        """
        total = 0
        for collective in self.collectives if axis is None else self.over(axis):
            if collective.times is None:
                unknown = ", ".join(f"{loop.name} ({loop.scope})" for loop in collective.loops if loop.times is None)
                raise UserError(
                    f"the compiled program has no trip count for a loop around {collective.name!r}: {unknown}; "
                    "give its count in loop_trips, by the loop's name or by a part of its scope"
                )
            total += collective.bytes * collective.times
        return total

    def to_dict(self) -> dict:
        """Return for JSON `collectives`, and payload bytes in one run, `bytes_per_step`, by `axes` and by `link`.

        Axes are joined with commas. Bytes are None if a loop has an unknown trip count.
        """
        return {
            "collectives": [each.to_dict() for each in self.collectives],
            "bytes_per_step": {
                "axes": _sums((",".join(each.axes), each) for each in self.collectives),
                "link": _sums((each.link, each) for each in self.collectives),
            },
        }

    def table(self) -> str:
        """Return the collectives as a text table."""
        header = ("kind", "dtype", "bytes", "axes", "loop", "times", "link", "name")
        rows: list[tuple[str, ...]] = [header]
        for each in self.collectives:
            axes, loop = ",".join(each.axes) or "-", "/".join(each.loop) or "-"
            times = "?" if each.times is None else str(each.times)
            name = ("async " if each.is_async else "") + ("if " if each.conditional else "") + each.name
            rows.append((each.kind, each.dtype, f"{each.bytes:,}", axes, loop, times, each.link, name))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _sums(keyed: Iterable[tuple[str, Collective]]) -> dict[str, int | None]:
    sums: dict[str, int | None] = {}
    for key, each in keyed:
        before = sums.get(key, 0)
        sums[key] = None if before is None or each.times is None else before + each.bytes * each.times
    return sums


def audit(
    compiled: jax.stages.Compiled | str, mesh: jax.sharding.Mesh, loop_trips: Mapping[str, int] | None = None
) -> Audit:
    """Return all collectives of a compiled program.

    - `compiled`: the program, or its text (`compiled.as_text()`), as XLA prints it for CPU, GPU or TPU.
    - `mesh`: the mesh of the compilation, with its devices in the same order.
    - `loop_trips`: trip counts of loops for which the program has none, by the name of the `while` or by a part of its
      traced scope (such as a `jax.named_scope` around a scan).

    Raises `UserError` if the text is not a compiled program, or its number of devices differs from the mesh's.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse(text or "")
    if not module.entry:
        raise UserError(
            "the audit reads the text of a compiled program (compiled.as_text()); "
            f"found {(text or '')[:60]!r}, which has no ENTRY computation"
        )
    placement = Placement(mesh, module.devices)
    found = find_collectives(module, placement, loop_trips or {})
    if found and not placement.fits:
        raise UserError(
            f"the program was compiled for {placement.program_devices} devices and communicates among them, "
            f"but the mesh {dict(mesh.shape)} has {mesh.size} in {len(set(placement.slice_of.tolist()))} slice(s); "
            "audit it with the mesh that it was compiled for"
        )
    return Audit(found)
