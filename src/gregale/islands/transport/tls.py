"""TLS 1.3 between the members of a fleet. All have one certificate, which each makes from the fleet's token.

Both sides of a connection show this certificate and accept no other. So a connection proves that both have the token.
Names of hosts and clocks do not matter. The keys of a connection are new for each, so a token that leaks later does not
decrypt recorded traffic.
"""

import hashlib
import os
import socket
import ssl
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from gregale.errors import UserError, install_hint

# Against guesses of a weak token; the certificate is the same for all versions of Gregale that have these values.
SCRYPT = {"salt": b"gregale fleet", "n": 1 << 14, "r": 8, "p": 1, "dklen": 32}
VALID = datetime(2000, 1, 1), datetime(9999, 1, 1)  # X.509 demands two times; no member compares them with its clock
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the module ssl does not name
MISSING = "Islands and their lighthouse need the extra `islands`. " + install_hint("islands")


class TlsContexts(NamedTuple):
    """Of a fleet, for the connections that a host accepts, and for those that it opens."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@lru_cache
def tls_contexts(token: bytes) -> TlsContexts:
    """Return the contexts of the fleet with this token. Raises UserError if the extra `islands` is missing."""
    key, certificate = key_and_certificate(token)
    # A file in memory: the standard library reads a private key only from a file.
    file = os.memfd_create("gregale-tls")
    try:
        os.write(file, key + certificate)
        contexts = TlsContexts(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        for context in contexts:
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.verify_flags |= NO_CHECK_TIME  # the token alone proves membership
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=certificate.decode())
    finally:
        os.close(file)
    contexts.server.num_tickets = 0  # so that a side that only writes has nothing to read
    return contexts


def key_and_certificate(token: bytes) -> tuple[bytes, bytes]:
    """Return the fleet's Ed25519 key and its self-signed certificate as PEM: the same bytes for the same token."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        raise UserError(MISSING) from None
    key = Ed25519PrivateKey.from_private_bytes(hashlib.scrypt(token, **SCRYPT))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gregale fleet")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *VALID)
    certificate = builder.sign(key, None).public_bytes(Encoding.PEM)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), certificate


def shut(connection: socket.socket) -> None:
    """End a connection from any thread; the thread that uses it notices."""
    with suppress(OSError):  # the peer closed it first
        # Not `SSLSocket.shutdown`: after it the thread would go on without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
