"""Loads and checks the server's TLS certificate. Each error names the file and a remedy."""

from __future__ import annotations

import ssl
from pathlib import Path

from sidestream.errors import ConfigError
from sidestream.server.options import ServerOptions

_PASSWORD_VARIABLE = "SIDESTREAM_SSL_KEYFILE_PASSWORD"


class _NoPassword(Exception):
    """The key is encrypted, and no password was given."""


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """The TLS context for the options; None for plain HTTP. Raises ConfigError for a file that cannot be used."""
    if options.ssl_certfile is None:
        return None
    files = {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
    }
    for name, path in files.items():
        if path is not None:
            _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_key(context, options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except ssl.SSLError as failure:
            raise ConfigError(
                f"ssl_ca_certs is {options.ssl_ca_certs}: it holds no certificate in PEM form: give one or more"
            ) from failure
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as failure:
        raise ConfigError(
            f"{name} is {path}: {failure.strerror}: give a file in PEM form that this user may read"
        ) from failure


def _load_key(context: ssl.SSLContext, certificate: str, key: str | None, password: str | None) -> None:
    def give_password() -> str:
        if password is None:
            raise _NoPassword  # without this function, OpenSSL would ask for the password on the terminal
        return password

    named = f"ssl_keyfile is {key}" if key is not None else f"ssl_certfile is {certificate}, without ssl_keyfile"
    try:
        context.load_cert_chain(certificate, key, give_password)
    except _NoPassword:
        raise ConfigError(
            f"{named}: the key is encrypted: set {_PASSWORD_VARIABLE}, or give a key without a password"
        ) from None
    except ssl.SSLError as failure:
        if failure.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{named}: the key does not belong to the certificate {certificate}: give the certificate's key"
            ) from failure
        if not _has_certificate(certificate):
            raise ConfigError(
                f"ssl_certfile is {certificate}: it holds no certificate in PEM form: "
                "give the server's certificate and its chain"
            ) from failure
        if password is not None:
            raise ConfigError(
                f"{named}: it holds no private key in PEM form that {_PASSWORD_VARIABLE} opens: give key and password"
            ) from failure
        raise ConfigError(f"{named}: it holds no private key in PEM form: give the key of the certificate") from failure


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True
