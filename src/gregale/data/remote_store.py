"""Token stores in an object store: what is needed of them is read by pieces, and kept on this host's disk."""

import hashlib
import io
from dataclasses import dataclass

import numpy as np

from gregale.data.disk import Disk
from gregale.data.parts import PIECE_BYTES, Damaged, Seal, read_part, read_pieces, read_seal
from gregale.data.progress import Report, silent
from gregale.data.store import DOCUMENTS_NAME, MANIFEST_NAME, TokenStore, read_manifest
from gregale.errors import UserError
from gregale.storage import Place, Remote

MENDING = "Delete the folder, and the next run builds it again from the parts that are sound."


class PartTokens:
    """The tokens of a store that lie in parts, read as they are asked for.

    Args:
        parts: where the parts lie.
        bounds: where each part begins among the tokens, and the end of the last, int64 [part + 1].
        dtype: of a token.
        disk: keeps what was read.
    """

    def __init__(self, parts: Place, bounds: np.ndarray, dtype: np.dtype, disk: Disk):
        self._parts, self._bounds, self._disk = parts, bounds, disk
        self.dtype = dtype
        self._seals: dict[int, Seal] = {}

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
            data = np.frombuffer(self._piece(number, piece), self.dtype)
            found[chosen] = data[within[chosen] % PIECE_BYTES // self.dtype.itemsize]
        return found

    def seal(self, number: int) -> Seal:
        """The seal of a part."""
        if number not in self._seals:
            if (seal := read_seal(self._parts, number)) is None:
                raise damaged(self._parts, number)
            self._seals[number] = seal
        return self._seals[number]

    def _piece(self, number: int, piece: int) -> bytes:
        seal = self.seal(number)
        try:
            return self._disk.get(seal.pieces[piece], lambda: read_pieces(self._parts, number, seal, piece, 1))
        except Damaged:
            raise damaged(self._parts, number) from None


def damaged(parts: Place, number: int) -> UserError:
    store = str(parts).removesuffix(".parts")
    return UserError(f"{parts}: part {number} is damaged or missing. {MENDING.replace('the folder', store)}")


@dataclass(frozen=True)
class RemoteStore(TokenStore):
    """An open store whose tokens lie in an object store; every piece is checked when it is read."""

    tokens: PartTokens  # pyright: ignore[reportIncompatibleVariableOverride]

    def verify(self, label: str = "checking", report: Report = silent) -> None:
        """Reads all parts and compares them with their seals; see `TokenStore.verify`."""
        parts, count = parts_of(self.folder), len(self.manifest["parts"])
        seals = [self.tokens.seal(number) for number in range(count)]
        done, total = 0, sum(seal.size_bytes for seal in seals)
        for number, seal in enumerate(seals):
            try:
                for block in read_part(parts, number, seal):
                    done += len(block)
                    report(label, done, total)
            except Damaged:
                raise damaged(parts, number) from None

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
    expected = manifest["files"][DOCUMENTS_NAME]

    def fetched() -> bytes:
        content = (folder / DOCUMENTS_NAME).read_bytes()
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise UserError(f"{folder / DOCUMENTS_NAME}: not what was written. {MENDING}")
        return content

    offsets = np.load(io.BytesIO(disk.get(expected["sha256"], fetched)), allow_pickle=False)
    bounds = offsets[np.concatenate([[0], manifest["parts"]]).cumsum(dtype=np.int64)]
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    return RemoteStore(folder, PartTokens(parts_of(folder), bounds, dtype, disk), offsets, manifest)
