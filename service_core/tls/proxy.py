"""TCP connections as gRPC makes them, through the environment's HTTP proxy if there is one."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from service_core.tls.causes import ConnectionFailedError, Diagnosis

_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_BYPASS_VARIABLES = ("no_grpc_proxy", "no_proxy")


def proxy_for(host: str) -> tuple[str, int, str] | None:
    """Return the proxy that gRPC uses for `host` as (host, port, variable), or None."""
    bypass = next((os.environ[name] for name in _BYPASS_VARIABLES if os.environ.get(name)), "")
    entries = [entry.strip().lstrip(".") for entry in bypass.split(",") if entry.strip()]
    if any(host == entry or host.endswith("." + entry) for entry in entries):
        return None
    for name in _PROXY_VARIABLES:
        if os.environ.get(name):
            url = urlsplit(os.environ[name] if "://" in os.environ[name] else f"http://{os.environ[name]}")
            return (url.hostname or "", url.port or 80, name)
    return None


def open_connection(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to `host:port`, `timeout` seconds per step; raises ConnectionFailedError (E-TLS-01, E-TLS-13)."""
    proxy = proxy_for(host)
    if proxy is None:
        return _connect(host, port, timeout)
    where, proxy_port, variable = proxy
    sock = _connect(where, proxy_port, timeout, f"the proxy that {variable} names, ")
    answer = b""
    try:
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        while b"\r\n\r\n" not in answer and len(answer) < 16384:
            piece = sock.recv(1)  # byte by byte: TLS follows the header
            if not piece:
                break
            answer += piece
    except OSError:
        answer = answer or b"(no answer)"
    status = answer.split(b"\r\n", 1)[0].decode("ascii", "replace")[:80]
    if status.split(" ")[1:2] != ["200"]:
        sock.close()
        raise ConnectionFailedError(
            Diagnosis(
                "E-TLS-13",
                f"the proxy {where}:{proxy_port} (from {variable}) did not open a tunnel to {host}:{port}. It "
                f"answered {status!r}",
                f"ask your network team to allow CONNECT to {host}:{port}, or set no_proxy={host}",
            )
        )
    return sock


def _connect(host: str, port: int, timeout: float, what: str = "") -> socket.socket:
    place = f"{what}{host}:{port}"
    try:
        return socket.create_connection((host, port), timeout)
    except socket.gaierror as error:
        diagnosis = Diagnosis(
            "E-TLS-01",
            f"{what}{host} is not a known host name ({error.strerror})",
            "check the spelling of the address and this machine's DNS; an IP address works if the coordinator was "
            "given it at `coordinator init`",
        )
    except ConnectionRefusedError:
        diagnosis = Diagnosis(
            "E-TLS-01",
            f"no service is listening at {place}",
            "start it (`coordinator serve`), or correct the port",
        )
    except TimeoutError:
        diagnosis = Diagnosis(
            "E-TLS-01",
            f"{place} did not answer within {timeout:g} s",
            "a firewall may be dropping packets, or the machine may be off: ask your network team to allow outgoing "
            "TCP to this address and port",
        )
    except OSError as error:
        diagnosis = Diagnosis(
            "E-TLS-01",
            f"there is no connection to {place}: {error.strerror or type(error).__name__}",
            "check this machine's network and VPN. If they work, ask your network team to allow outgoing TCP to "
            "this address and port",
        )
    raise ConnectionFailedError(diagnosis)
