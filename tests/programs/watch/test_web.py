"""Who gets the page, and who does not."""

import http.client
import socket
import urllib.request
from urllib.parse import urlsplit

import pytest

from gregale.errors import UserError
from gregale.programs.live_page import HEADERS, is_loopback, served


class Written:
    """A page that may change, or fail."""

    def __init__(self) -> None:
        self.text, self.fails = "<p>the page</p>", False

    def now(self) -> bytes:
        if self.fails:
            raise UserError("the store is out of order.")
        return self.text.encode()


@pytest.fixture(scope="module")
def page() -> Written:
    return Written()


@pytest.fixture(scope="module")
def local(page):
    with served(page.now, "127.0.0.1", 0) as address:
        yield address


def answer(
    address: str,
    path: str = "",
    host: str | None = None,
    method: str = "GET",
    beneath: str | None = None,
    tag: str | None = None,
):
    """Status, headers and text of an answer; `beneath`: in place of the address's path."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
    given = {"Host": host, "If-None-Match": tag}
    headers = {name: value for name, value in given.items() if value is not None}
    connection.request(method, (parts.path if beneath is None else beneath) + path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, dict(response.getheaders()), text


def test_the_page_comes_once_until_it_is_another_one(local, page):
    status, headers, text = answer(local)
    assert (status, text, headers["Content-Type"]) == (200, "<p>the page</p>", "text/html; charset=utf-8")
    assert headers.items() >= HEADERS.items()
    tag = headers["ETag"]
    assert answer(local, tag=tag)[::2] == (304, "")
    page.text = "<p>another</p>"
    assert answer(local, tag=tag)[::2] == (200, "<p>another</p>")
    assert answer(local, "?a=b")[0] == 200
    assert answer(local, "other")[0] == 404
    assert answer(local, method="POST")[0] == 501
    page.fails = True
    status, _, text = answer(local)
    assert (status, "the store is out of order." in text) == (503, True)
    page.fails = False


def test_loopback_answers_to_its_names_and_to_no_other(local):
    """A page of evil.example, whose name leads here, would read what is served."""
    for host in ("127.0.0.1", "localhost", "LOCALHOST:99", "[::1]:8080", "127.0.0.1:1", "127.3.2.1"):
        assert answer(local, host=host)[0] == 200, host
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "10.0.0.1", "a@b"):
        status, _, text = answer(local, host=host)
        assert (status, "page</p>" in text) == (403, False), host


def test_elsewhere_all_lies_below_a_secret(page):
    with served(page.now, "0.0.0.0", 0) as server, served(page.now, "0.0.0.0", 0) as other:
        path = urlsplit(server).path
        assert len(path) > 20
        assert path != urlsplit(other).path
        assert urlsplit(server).hostname == socket.gethostname().lower()
        assert answer(server, host="evil.example")[0] == 200, "who knows the secret may come by any name"
        for beneath in ("/", path[:-1], path[:-2] + "/", "/" + "a" * (len(path) - 2) + "/", "/%C3%A9/"):
            assert answer(server, beneath=beneath)[0] == 404


def test_every_address_of_this_machine_is_answered_at_its_own_name(page, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", None)  # a name server may take its time
    with served(page.now, "127.0.0.2", 0) as address, urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.read() == page.now()


def test_where_nothing_can_listen(local):
    taken = ("127.0.0.1", urlsplit(local).port or 0, "Address already in use")
    for host, port, why in (taken, ("no.such.host.invalid", 0, "")):
        with pytest.raises(UserError, match=f"nothing can listen there: {why}"), served(Written().now, host, port):
            pass


def test_what_is_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not is_loopback("0.0.0.0")
