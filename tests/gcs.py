"""A stand-in for GCS: gcp-storage-emulator's, on a socket that listens; it carries out one request at a time."""

import socket
import sys
from functools import partial
from http.server import HTTPServer

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

if __name__ == "__main__":
    number, bucket = sys.argv[1:]
    storage = Storage(use_memory_fs=True)
    create_bucket(bucket, storage)
    with HTTPServer(("127.0.0.1", 0), partial(RequestHandler, storage), bind_and_activate=False) as server:
        server.socket = socket.socket(fileno=int(number))
        server.server_address = server.socket.getsockname()
        server.serve_forever()
