"""TLS: what is checked before a model is loaded, and the bounds on connections that hold with it too.

The certificates were made with OpenSSL 3, for a hundred years; encrypted.key is server.key behind the password
"sesame":

    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout server.key -out server.pem
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out other.key
    openssl pkcs8 -topk8 -in server.key -out encrypted.key -passout pass:sesame
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, bind

from .serving import ASK_LONG, LONG, WAIT_S, Served, read_to_end, request, serving, warned

FILES = Path(__file__).parent / "certificates"
CERTIFICATE, KEY, OTHER_KEY, ENCRYPTED_KEY = (
    str(FILES / name) for name in ("server.pem", "server.key", "other.key", "encrypted.key")
)
TLS = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def _trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATE)


@contextlib.contextmanager
def _serving(backend: FakeBackend | None = None, **options: Any) -> Any:
    with serving(backend, verify=_trusting(), **TLS | options) as served:
        yield served


def _connect(served: Served) -> ssl.SSLSocket:
    return _trusting().wrap_socket(served.connect(), server_hostname="localhost")


def _cut(connection: socket.socket) -> bool:
    """Whether the server ended the connection, within the time that a test waits."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_requests_are_served_over_tls_at_an_https_url() -> None:
    with _serving() as served:
        assert served.running.url.startswith("https://127.0.0.1:")
        assert served.chat().json()["choices"][0]["message"]["content"] == "Hello, world"
        assert served.chat(stream=True).text.endswith("data: [DONE]\n\n")


def test_the_key_may_be_in_the_certificate_file_or_encrypted(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(CERTIFICATE).read_text() + Path(KEY).read_text())
    with _serving(ssl_certfile=str(both), ssl_keyfile=None) as served:
        assert served.chat().status_code == 200
    with _serving(ssl_keyfile=ENCRYPTED_KEY, ssl_keyfile_password="sesame") as served:
        assert served.chat().status_code == 200


def test_clients_without_a_required_certificate_are_refused() -> None:
    known = _trusting()
    known.load_cert_chain(CERTIFICATE, KEY)
    with serving(verify=known, **TLS, ssl_ca_certs=CERTIFICATE) as served:
        assert served.chat().status_code == 200
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"{served.running.url}/health", verify=_trusting(), timeout=WAIT_S)
    assert served.refused("tls_handshake") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ssl_certfile": "none.pem"}, "ssl_certfile is none.pem: No such file or directory: give a file in PEM form"),
        ({"ssl_certfile": str(FILES)}, f"ssl_certfile is {FILES}: Is a directory: give a file"),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": "none.key"},
            "ssl_keyfile is none.key: No such file or directory",
        ),
        (
            {"ssl_certfile": CERTIFICATE},
            f"ssl_certfile is {CERTIFICATE}, without ssl_keyfile: it holds no private key in PEM form",
        ),
        ({"ssl_certfile": KEY}, f"ssl_certfile is {KEY}: it holds no certificate in PEM form"),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": CERTIFICATE},
            f"ssl_keyfile is {CERTIFICATE}: it holds no private key in PEM form",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": OTHER_KEY},
            f"the key does not belong to the certificate {CERTIFICATE}",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": ENCRYPTED_KEY},
            "the key is encrypted: set SIDESTREAM_SSL_KEYFILE_PASSWORD",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": ENCRYPTED_KEY, "ssl_keyfile_password": "wrong"},
            "that SIDESTREAM_SSL_KEYFILE_PASSWORD opens",
        ),
        ({**TLS, "ssl_ca_certs": KEY}, f"ssl_ca_certs is {KEY}: it holds no certificate in PEM form"),
        ({**TLS, "ssl_ca_certs": "none.pem"}, "ssl_ca_certs is none.pem: No such file or directory"),
    ],
    ids=str,
)
def test_an_unusable_certificate_is_refused_before_the_address_is_bound(options: dict[str, Any], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as refusal:
        bind(ServerOptions(port=taken.getsockname()[1], **options))
    assert said in str(refusal.value)
    assert "wrong" not in str(refusal.value)


def test_an_error_about_an_unreadable_key_names_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path, *arguments: Any, **named: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", unreadable)  # root may read anything
    with pytest.raises(
        ConfigError, match=r"ssl_certfile is .*server\.pem: Permission denied: give a file .* that this user may read"
    ):
        bind(ServerOptions(port=0, **TLS))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_tls_options_without_ssl_certfile_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is x without ssl_certfile: give the server's certificate too"):
        ServerOptions(**{name: "x"})  # type: ignore[arg-type]


def test_an_unfinished_handshake_is_ended_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with _serving(head_timeout_s=0.2) as served, served.connect() as silent, served.connect() as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert _cut(silent)
        assert _cut(half)
    assert served.refused("tls_handshake") == 2
    (line,) = warned(caplog)
    assert line.endswith(": its TLS handshake failed, or did not end within 0.2 s")


def test_plain_http_to_a_tls_port_is_ended_and_counted() -> None:
    with _serving() as served, served.connect() as plain:
        plain.sendall(HEALTH)
        assert _cut(plain)
    assert served.refused("tls_handshake") == 1


def test_a_client_that_leaves_during_its_handshake_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with _serving(max_connections=1) as served:
        served.connect().close()
        half = served.connect()
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        half.close()
        assert _answered(served)
    assert served.refused("tls_handshake") == 0
    assert not [record for record in caplog.records if "handshake" in record.getMessage()]


def test_unfinished_handshakes_count_as_connections() -> None:
    with (
        _serving(max_connections=2) as served,
        served.connect() as one,
        served.connect() as two,
        served.connect() as three,
    ):
        assert _cut(three)
        assert served.refused("limit") == 1
        one.close()
        two.close()
        assert _answered(served)


def _answered(served: Served) -> bool:
    """Whether the server answers, once it has seen that earlier clients have left."""
    for _ in range(1000):
        with contextlib.suppress(httpx.TransportError):
            return served.http.get("/health").status_code == 200
    return False


def test_a_request_in_the_last_packet_of_the_handshake_is_answered() -> None:
    """The last bytes of the handshake and the request's are one packet."""
    with _serving() as served, served.connect() as raw:
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = _trusting().wrap_bio(received, sent, server_hostname="localhost")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(sent.read())
                received.write(raw.recv(1 << 16))
        client.write(HEALTH)
        raw.sendall(sent.read())
        while True:
            try:
                assert client.read(12) == b"HTTP/1.1 200"
                break
            except ssl.SSLWantReadError:
                received.write(raw.recv(1 << 16))


def test_half_a_request_head_is_refused_after_the_head_timeout_with_tls_too() -> None:
    with _serving(head_timeout_s=0.3) as served, _connect(served) as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: ")
        assert half.recv(12) == b"HTTP/1.1 408"
        assert served.refused("head_timeout") == 1


def test_a_client_that_never_closes_tls_is_disconnected() -> None:
    """TLS is closed by both ends; this client only listens below TLS."""
    with _serving(head_timeout_s=0.3) as served, _connect(served) as idle:
        raw = socket.socket(fileno=idle.detach())
        with raw:
            raw.settimeout(WAIT_S)
            read_to_end(raw)


def test_a_tls_client_that_does_not_read_is_disconnected_after_stall_timeout() -> None:
    with _serving(FakeBackend(LONG), stall_timeout_s=0.5) as served, _connect(served) as slow:
        slow.sendall(request(ASK_LONG, "/v1/completions"))
        served.backend.wait_until(lambda fake: fake.aborted == fake.names != [])
    assert served.refused("stall_timeout") == 1


def test_a_long_tls_reply_is_complete_even_if_the_connection_then_closes() -> None:
    with _serving(FakeBackend(LONG)) as served, _connect(served) as slow:
        slow.sendall(request(ASK_LONG, "/v1/completions"))
        received = read_to_end(slow)
        assert b"[DONE]" in received
        assert received.count(b"x") >= len(LONG.text)


def test_a_stop_does_not_wait_for_unfinished_handshakes() -> None:
    with _serving(FakeBackend(Script()), head_timeout_s=3600, drain_s=3600) as served, served.connect() as silent:
        assert served.chat().status_code == 200
        served.running.stop()
        assert served.drained.get(timeout=WAIT_S) is True
        assert _cut(silent)
