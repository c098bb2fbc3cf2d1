"""Token stores in an object store: what is needed of them is read by pieces, and kept on this host's disk."""

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from gregale.data.disk import Disk
from gregale.data.parts import PIECE_BYTES, Damaged, Seal, read_part, read_pieces, read_seal
from gregale.data.progress import Report, silent
from gregale.data.store import DOCUMENTS_NAME, MANIFEST_NAME, TEXT_BYTES_NAME, TokenStore, read_manifest
from gregale.data.text_bytes import NONE, Corrections
from gregale.errors import UserError
from gregale.storage import Place, Remote

MENDING = "Delete the folder, and the next run builds it again from the parts that are sound."


class PartTokens:
    """Tokens that lie in parts, read as they are asked for.

    Args:
        bounds: where each part begins among the tokens, and the end of the last, int64 [part + 1].
        dtype: of a token.
        piece: reads a piece of a part: `piece(part, number)`.
    """

    def __init__(self, bounds: np.ndarray, dtype: np.dtype, piece: Callable[[int, int], bytes]):
        self._bounds, self.dtype, self._piece = bounds, dtype, piece

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """The tokens at some places [place]."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        part = np.searchsorted(self._bounds, places, side="right") - 1
        within = (places - self._bounds[part]) * self.dtype.itemsize
        found = np.empty(len(places), self.dtype)
        keys = np.stack([part, within // PIECE_BYTES])
        for number, piece in np.unique(keys, axis=1).T.tolist():
            chosen = (keys[0] == number) & (keys[1] == piece)
            data = self._piece(number, piece)
            count = len(data) // self.dtype.itemsize
            found[chosen] = np.frombuffer(data, self.dtype, count)[within[chosen] % PIECE_BYTES // self.dtype.itemsize]
        return found


class PartFiles:
    """The parts of a store and their seals, by pieces.

    Args:
        folder: where the parts lie.
        disk: keeps what was read; None: they lie on a disk themselves.
    """

    def __init__(self, folder: Place, disk: Disk | None):
        self.folder, self._disk = folder, disk
        self._seals: dict[int, Seal] = {}

    def seal(self, number: int) -> Seal:
        """The seal of a part; raises `Damaged` if it has none."""
        if number not in self._seals:
            if (seal := read_seal(self.folder, number)) is None:
                raise Damaged(number)
            self._seals[number] = seal
        return self._seals[number]

    def forget(self, number: int) -> None:
        """Reads the seal of a part anew when it is asked for."""
        self._seals.pop(number, None)

    def piece(self, number: int, piece: int) -> bytes:
        """A piece of a part; raises `Damaged` if it is not what was sealed."""
        seal = self.seal(number)

        def read() -> bytes:
            return read_pieces(self.folder, number, seal, piece, 1)

        return read() if self._disk is None else self._disk.get(seal.pieces[piece], read)


@contextmanager
def complete(parts: Place) -> Iterator[None]:
    """Says what to do about a damaged part of a store that is complete."""
    try:
        yield
    except Damaged as damaged:
        store = str(parts).removesuffix(".parts")
        mending = MENDING.replace("the folder", store)
        raise UserError(f"{parts}: part {damaged.number} is damaged or missing. {mending}") from None


@dataclass(frozen=True)
class RemoteStore(TokenStore):
    """An open store whose tokens lie in an object store; every piece is checked when it is read."""

    tokens: PartTokens  # pyright: ignore[reportIncompatibleVariableOverride]
    files: PartFiles

    def verify(self, label: str = "checking", report: Report = silent) -> None:
        """Reads all parts and compares them with their seals; see `TokenStore.verify`."""
        with complete(self.files.folder):
            seals = [self.files.seal(number) for number in range(len(self.manifest["parts"]))]
            done, total = 0, sum(seal.size_bytes for seal in seals)
            for number, seal in enumerate(seals):
                for block in read_part(self.files.folder, number, seal):
                    done += len(block)
                    report(label, done, total)

    def verify_once(self, label: str, report: Report) -> None:
        """Nothing: what is not read need not be right."""


def parts_of(folder: Place) -> Place:
    """Where the parts of a store lie, before it is complete and, in an object store, behind that."""
    return folder.with_name(f"{folder.name}.parts")


def open_remote(folder: Remote, disk: Disk) -> RemoteStore:
    """Opens a finished store in an object store.

    Raises:
        UserError: the store is missing, damaged or of another version.
    """
    manifest = read_manifest(folder / MANIFEST_NAME)

    def fetched(name: str) -> np.ndarray:
        sha256 = manifest["files"][name]["sha256"]

        def read() -> bytes:
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != sha256:
                raise UserError(f"{folder / name}: not what was written. {MENDING}")
            return content

        return np.load(io.BytesIO(disk.get(sha256, read)), allow_pickle=False)

    offsets = fetched(DOCUMENTS_NAME)
    corrections = Corrections(*fetched(TEXT_BYTES_NAME)) if TEXT_BYTES_NAME in manifest["files"] else NONE
    bounds = offsets[np.concatenate([[0], manifest["parts"]]).cumsum(dtype=np.int64)]
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    files = PartFiles(parts_of(folder), disk)

    def piece(part: int, number: int) -> bytes:
        with complete(files.folder):
            return files.piece(part, number)

    return RemoteStore(folder, PartTokens(bounds, dtype, piece), offsets, manifest, corrections, files)
