"""The mask of a seed: the key stream of AES-256-CTR, as words that are added to a block in place, modulo the ring."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from privacy.secagg.messages import CHECK_WORDS, Words
from privacy.secagg.terms import SecaggError, kdf

_CHUNK = 256 * 1024
_ZEROS = bytes(_CHUNK)
_SPARE = 15
"""Extra bytes that the cipher needs in its output buffer."""


def add_mask(words: Words, seed: bytes, context: bytes, block: int, *, subtract: bool = False) -> None:
    """Add or subtract the mask of a seed, in place. words: contiguous, unsigned and little-endian.

    Guarantees: each key makes only one stream, since it depends on context and block. The additional memory is one
    chunk of 256 KiB.
    """
    stream = Cipher(algorithms.AES(kdf(seed, context, "mask", block)), modes.CTR(bytes(16))).encryptor()
    zeros, step = memoryview(_ZEROS), _CHUNK // words.itemsize
    buffer = bytearray(min(_CHUNK, words.nbytes) + _SPARE)
    drawn = np.frombuffer(buffer, words.dtype, min(step, len(words)))
    add = np.subtract if subtract else np.add
    for start in range(0, len(words), step):
        part = words[start : start + step]
        stream.update_into(zeros[: part.nbytes], buffer)
        add(part, drawn[: len(part)], out=part)


def subtracted(member: int, other: int) -> bool:
    """Return whether `member` subtracts the mask of its pair with `other`, which then adds it. Own masks are added."""
    return member > other


def check_words(block: Words, silos: int, task: str) -> None:
    """Raise SecaggError (E-RUN-48) unless each check word of an opened sum is the number of uploads in it.

    task: description for the error. A sum whose masks did not cancel passes with probability 2^-128 in ring32.
    """
    if (words := block[:CHECK_WORDS].tolist()) != [silos] * CHECK_WORDS:
        raise SecaggError(
            "E-RUN-48",
            f"{task}: expected check words of {silos} in the opened sum, found {words}: "
            "a hospital masked for another model or with other keys, or sent something else; the sum is discarded",
        )
