"""Provides the memory, compute and links of chips, from the vendors' published numbers.

Vendors use different conventions for some numbers; here all follow these rules:

- Memory of N GB counts as N * 2**30 bytes, because stacked memory has binary sizes. The system reserves some of it:
  the TPU compiler of JAX 0.10 offers 15.75 GiB of a v5e's 16, 31.25 of a v6e's 32 and 2 * 94.75 of a v7x's 192, and
  an A100 of 40 GB reports 42.4e9 bytes.
- FLOP/s are dense bfloat16 products; NVIDIA's numbers "with sparsity" are halved.
- Links count one direction, all links of a chip together; numbers for both directions are halved.
- The path to the host's memory is PCIe, for a GPU from its datasheet. For TPUs Google publishes no number; 15 GB/s per
  chip is the value in "How to Scale Your Model" (jax-ml.github.io/scaling-book), which also has the rates of one link
  and the sizes from which axes are rings. Those rates are nine tenths of the datasheets'.
"""

from dataclasses import dataclass, replace

from gregale.errors import UserError

GIB = 2**30
TERA = 1e12
GIGA = 1e9
GBIT = 1e9 / 8
TPU_HOST = 15 * GIGA
EIGHT_BIT = (
    2  # rate of 8-bit products over that of bfloat16, in the datasheets of all chips that `compute.matmul` takes
)


@dataclass(frozen=True)
class Ici:
    """Links between neighbouring chips in the grid of a TPU slice.

    - `bytes_per_second`: rate of one link in one direction
    - `ring`: an axis is a ring if its size is a multiple of this
    - `cubes`: and only if all axes' sizes are
    """

    bytes_per_second: float
    ring: int
    cubes: bool

    def links(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return for each axis of a slice the links of its first chip: two on a ring, one at the end of a line."""
        rings = [size % self.ring == 0 for size in sizes]
        closed = all(rings) or not self.cubes
        return tuple(0 if size == 1 else 2 if ring and closed else 1 for size, ring in zip(sizes, rings, strict=True))


TORUS_OF_CUBES = Ici(90 * GIGA, ring=4, cubes=True)


@dataclass(frozen=True)
class Chip:
    """Properties of one chip.

    Attributes:
        flops_per_second: peak of dense bfloat16 products; a multiply-add is two operations.
        link_bytes_per_second: send rate of a chip inside a slice (ICI) or a box (NVLink), all its links together.
        ici: the links of a TPU; None for a GPU.
        network_bytes_per_second: send rate of a chip over the data-centre network, its share of the host's; None if
            it is not published.
        host_bytes_per_second: rate of a chip to its host's memory, or from it.
        devices: JAX devices of one chip, each with its share of memory and compute.
        cycles_per_second: the clock of the TPU compiler's estimates; the peak over two operations and the multipliers
            of all matrix units. None if the compiler has no such estimates.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float | None
    source: str
    host_bytes_per_second: float = TPU_HOST
    devices: int = 1
    cycles_per_second: float | None = None
    ici: Ici | None = None

    @property
    def matrix_unit(self) -> int:
        """Return the rows and columns of a TPU's matrix units, to which a kernel's head size is filled up."""
        return 256 if self.name in ("v6e", "v7x") else 128

    def in_slice(self, sizes: tuple[int, ...]) -> "Chip":
        """Return the chip in a slice of these sizes: the send rate is that of a corner, which has the fewest links."""
        if self.ici is None or not any(found := self.ici.links(sizes)):
            return self
        return replace(self, link_bytes_per_second=sum(found) * self.ici.bytes_per_second)


A100 = Chip(
    name="A100",
    memory_bytes=80 * GIB,
    flops_per_second=312 * TERA,
    memory_bytes_per_second=2039 * GIGA,
    link_bytes_per_second=600 * GIGA / 2,
    network_bytes_per_second=200 * GBIT,
    source="NVIDIA A100 datasheet, SXM 80 GB; network: DGX A100 datasheet, 8 of 200 Gbit/s for 8 GPUs",
    host_bytes_per_second=64 * GIGA / 2,
)
H100 = Chip(
    name="H100",
    memory_bytes=80 * GIB,
    flops_per_second=1979 * TERA / 2,
    memory_bytes_per_second=3350 * GIGA,
    link_bytes_per_second=900 * GIGA / 2,
    network_bytes_per_second=400 * GBIT,
    source="NVIDIA H100 datasheet, SXM; network: DGX H100 datasheet, 8 of 400 Gbit/s for 8 GPUs",
    host_bytes_per_second=128 * GIGA / 2,
)
CHIPS = {
    found.name: found
    for found in (
        Chip(
            name="v4",
            memory_bytes=32 * GIB,
            flops_per_second=275 * TERA,
            memory_bytes_per_second=1200 * GIGA,
            link_bytes_per_second=6 * 50 * GIGA,
            network_bytes_per_second=None,
            source="Google Cloud documentation, TPU v4; links: TPU v4 paper (arXiv 2304.01433), 6 of 50 GB/s",
            cycles_per_second=275 * TERA / (2 * 8 * 128**2),
            ici=Ici(45 * GIGA, ring=4, cubes=True),
        ),
        Chip(
            name="v5e",
            memory_bytes=16 * GIB,
            flops_per_second=197 * TERA,
            memory_bytes_per_second=819 * GIGA,
            link_bytes_per_second=400 * GIGA / 2,
            network_bytes_per_second=6400 * GBIT / 256,
            source="Google Cloud documentation, TPU v5e; network: 6.4 Tbit/s a pod of 256",
            cycles_per_second=197 * TERA / (2 * 4 * 128**2),
            ici=Ici(45 * GIGA, ring=16, cubes=False),
        ),
        Chip(
            name="v5p",
            memory_bytes=95 * GIB,
            flops_per_second=459 * TERA,
            memory_bytes_per_second=2765 * GIGA,
            link_bytes_per_second=1200 * GIGA / 2,
            network_bytes_per_second=50 * GBIT,
            source="Google Cloud documentation, TPU v5p",
            cycles_per_second=459 * TERA / (2 * 8 * 128**2),
            ici=TORUS_OF_CUBES,
        ),
        Chip(
            name="v6e",
            memory_bytes=32 * GIB,
            flops_per_second=918 * TERA,
            memory_bytes_per_second=1638 * GIGA,
            link_bytes_per_second=800 * GIGA / 2,
            network_bytes_per_second=100 * GBIT,
            source="Google Cloud documentation, TPU v6e (Trillium) and TPU7x (Ironwood, comparison table)",
            cycles_per_second=918 * TERA / (2 * 4 * 256**2),
            ici=Ici(90 * GIGA, ring=16, cubes=False),
        ),
        Chip(
            name="v7x",
            memory_bytes=192 * GIB,
            flops_per_second=2307 * TERA,
            memory_bytes_per_second=7380 * GIGA,
            link_bytes_per_second=1200 * GIGA / 2,
            network_bytes_per_second=100 * GBIT,
            source="Google Cloud documentation, TPU7x (Ironwood)",
            devices=2,
            cycles_per_second=2307 * TERA / (2 * 8 * 256**2),
            ici=TORUS_OF_CUBES,
        ),
        replace(
            A100,
            name="A100-40GB",
            memory_bytes=40 * GIB,
            memory_bytes_per_second=1555 * GIGA,
            source="NVIDIA A100 datasheet, SXM 40 GB; network: DGX A100 datasheet, 8 of 200 Gbit/s for 8 GPUs",
        ),
        A100,
        H100,
        replace(
            H100,
            name="H200",
            memory_bytes=141 * GIB,
            memory_bytes_per_second=4800 * GIGA,
            source="NVIDIA H200 datasheet, SXM; network: DGX H200 datasheet, 8 of 400 Gbit/s for 8 GPUs",
        ),
        Chip(
            name="B200",
            memory_bytes=1440 // 8 * GIB,
            flops_per_second=4500 * TERA / 2,
            memory_bytes_per_second=64 * TERA / 8,
            link_bytes_per_second=1800 * GIGA / 2,
            network_bytes_per_second=400 * GBIT,
            source="NVIDIA DGX B200 datasheet, an eighth of the system; FLOP/s: NVIDIA Blackwell brief, HGX B200",
            host_bytes_per_second=128 * GIGA / 2,
        ),
    )
}

# By `jax.Device.device_kind`. Other kinds have a different peak (an H100 on PCIe) or an unknown one.
OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


def of_device(kind: str) -> Chip | None:
    """Return the chip of a JAX device by its `device_kind`; None if it is unknown."""
    name = OF_KIND.get(kind)
    return None if name is None else CHIPS[name]


def chip(name: str) -> Chip:
    """Return the chip with a name, case-insensitive.

    Raises:
        UserError: the chip is not in the table.
    """
    for known, found in CHIPS.items():
        if known.lower() == name.lower():
            return found
    raise UserError(f"chip: {name!r} is not in the table; choose one of {', '.join(CHIPS)}.")
