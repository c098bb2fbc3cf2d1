"""Files on a disk and objects in a store, under one interface.

    folder = storage_path("s3://bucket/runs")    # an ObjectPath; storage_path("runs") is a pathlib.Path
    write_bytes(folder / "a" / "b.json", b"{}")  # atomic
    (folder / "a" / "b.json").read_bytes()
    read_range(folder / "tokens.bin", 0, 1024)
    status(folder / "tokens.bin")                # Status(size, identity), or None
    files_below(folder)                          # {"a/b.json": Status, ...}

An `ObjectPath` has the methods of `Path` that apply to objects: `/`, `name`, `parent`, `with_name`, `read_bytes`,
`is_file`, `is_dir`, `exists`, `unlink`, and `mkdir`, which does nothing. Failed requests are retried (`RetryPolicy`). A
request that the store rejects, or that still fails after the retries, raises `StoreError`, which is a `UserError`.

Worker processes import this package, so it imports only the standard library until the first request.
"""

from gregale.storage.stores import (
    EXTRAS,
    ObjectPath,
    RetryPolicy,
    Status,
    StoragePath,
    StoreError,
    create,
    digest,
    files_below,
    is_url,
    names,
    parallel_map,
    read_range,
    remove_tree,
    status,
    storage_path,
    upload,
    write_bytes,
)
