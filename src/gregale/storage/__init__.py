"""Places: files on a disk and objects in a store, by the same names.

    folder = place("s3://bucket/runs")          # a Remote; place("runs") is a pathlib.Path
    write_bytes(folder / "a" / "b.json", b"{}")  # whole or not at all
    (folder / "a" / "b.json").read_bytes()
    read_range(folder / "tokens.bin", 0, 1024)
    status(folder / "tokens.bin")                # Status(size, identity), or None
    files_below(folder)                          # {"a/b.json": Status, ...}

A `ObjectPath` has those of Path's methods that objects can have: `/`, `name`, `parent`, `with_name`, `read_bytes`,
`is_file`, `is_dir`, `exists`, `unlink`, and `mkdir`, which does nothing. Requests are repeated while a store is out of
order (see `RetryPolicy`); what then still fails, and what a store refuses, is a `StoreError`, which is a `UserError`.

Worker processes import this package: it imports nothing but the standard library before the first object is asked for.
"""

from gregale.storage.paths import (
    StoragePath,
    create,
    download,
    files_below,
    is_url,
    names,
    read_range,
    remove_tree,
    status,
    storage_path,
    upload,
    write_bytes,
)
from gregale.storage.remote import ObjectPath, Status
from gregale.storage.retry import RetryPolicy, StoreError

__all__ = [
    "ObjectPath",
    "RetryPolicy",
    "Status",
    "StoragePath",
    "StoreError",
    "create",
    "download",
    "files_below",
    "is_url",
    "names",
    "read_range",
    "remove_tree",
    "status",
    "storage_path",
    "upload",
    "write_bytes",
]
