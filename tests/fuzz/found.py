"""Inputs that once broke something, by target: each is tried first, for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_DEEP = b"[" * 100_000

FOUND: Mapping[str, Sequence[bytes]] = {
    "addresses_file": (_DEEP,),
    "admission": (_DEEP,),
    "attested": (b'["", null, "", "00", 0]', b'["", "3", "", "00", 0]', _DEEP),
    "authority": (_DEEP,),
    "certificate": (
        b"-----BEGIN CERTIFICATE-----\n"  # of a key on another curve
        b"MIIB7zCCAZagAwIBAgIUY6CxJ1CIrQpRJaJeSCe5IZqfNV0wCgYIKoZIzj0EAwIw\n"
        b"NTENMAsGA1UECgwEZGVtbzEkMCIGA1UEAwwbQ29uc2lsaXVtIGF1dGhvcml0eSBv\n"
        b"ZiBkZW1vMB4XDTI2MTEyMzIzNTAxMFoXDTI3MDIyMjAwNTAxMFowJDENMAsGA1UE\n"
        b"CgwEZGVtbzETMBEGA1UEAwwKc2lsbyBub3J0aDBZMBMGByqGSM49AgEGCCqGSM49\n"
        b"AwFjA0IABIoWyRoSkeaKwjT4mEMUpVLs8DGCb/8LY1PJIhFR3BBplRUJBrxOKXGT\n"
        b"CQuN+QeGFvR0ZtaqDtiAS9X8UIlAfo+jgZQwgZEwDAYDVR0TAQH/BAIwADAOBgNV\n"
        b"HQ8BAf8EBAMCB4AwEwYDVR0lBAwwCgYIKwYBBQUHAwIwHAYDVR0RBBUwE4YRc2ls\n"
        b"bzovL2RlbW8vbm9ydGgwHQYDVR0OBBYEFPCHdb3IcyeA5pliOhBCjals9grnMB8G\n"
        b"A1UdIwQYMBaAFIvBXowN1LLVG1k5NiWlwHjJ580KMAoGCCqGSM49BAMCA0cAMEQC\n"
        b"IHzDDJdUwOP4dFV/Hqj35/pl59c7HDVoH/On/cv3iaczAiBYl/6F9BKNuYPNzk9K\n"
        b"fEvr0KaJ8ruKC+fyfmSiZaWu/w==\n"
        b"-----END CERTIFICATE-----\n",
    ),
    "csv": (
        b"path,label,group,split\n" + b"9" * 5000 + b",x,,train\n",
        b"path,label,group,split\n\x00,,,train\n,,,",
    ),
    "generation": (b'{"incarnation": "a", "generation": Infinity, "checkpointed": 0, "check": ""}',),
    "image": (b"GIF87a\xff\xff\xff\xffr\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00",),
    "leaf": (b'{"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [1%s], "y": [3]}}}' % (b"0" * 400), _DEEP),
    "ledger_place": (_DEEP,),
    "roster": (_DEEP,),
    "signing_request": (_DEEP,),
}
