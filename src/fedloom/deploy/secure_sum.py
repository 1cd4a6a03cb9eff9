"""Secure sums: the server learns the sum of the nodes' vectors, but no single vector.

The protocol is that of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
with double masks, recovery of lost nodes and the consistency check against a server that lies. In each round

seal      every node draws two seeds and sends shares of both to every other node, sealed for that node alone
mask      every node sends its vector plus a mask of its own and, for each other node, a mask that both can compute and
          that one adds and the other subtracts
agree     every node that is left vouches to every other one, once, for whose uploads it was told have arrived
unmask    every node that sees ``threshold`` nodes vouch for the same gives, of each node whose upload arrived, the
          share of its own mask's seed, and of each that was lost, the share of the seed of its common masks; never both

so that the common masks cancel out, and ``threshold`` nodes together remove the others. Nodes authenticate each other
by certificates of the federation's authority, on keys (X25519) from which any two of them derive the key that seals
their boxes. All primitives are those of ``cryptography`` and ``pycryptodome``: docs/adr/0024.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedloom.deploy.keys import SEAL_KEY, certified_key
from fedloom.deploy.messages import SEALED_BYTES, MessageError

Words: TypeAlias = NDArray[np.uint64]  # numbers modulo 2**64
BITS = 32  # fractional bits of a number
SEED, PUBLIC, BOX = 16, 32, SEALED_BYTES  # bytes of a seed, a public key, and of a box: nonce, key, shares, tag
CODE = 32  # bytes with which a node vouches to another


class Parties(NamedTuple):
    """The members of one sum; ``about`` identifies it."""

    about: str
    members: tuple[int, ...]  # the nodes, by number
    threshold: int  # how many of them must remain at the end
    names: tuple[str, ...]  # of all nodes, by number


class Sealed(NamedTuple):
    """What a node sends before it knows its vector."""

    public: bytes  # its key for common masks
    commitments: tuple[bytes, bytes]  # hashes of its two seeds, to detect wrong shares
    boxes: Mapping[int, bytes]  # for every other member


class Shares(NamedTuple):
    """A node's shares of another's seeds."""

    own: bytes  # of the seed of its own mask
    common: bytes  # of the seed of its common masks


class Seeds(NamedTuple):
    own: bytes
    common: bytes


class Session:
    """A node's part in one sum. It masks one vector and gives shares once, whatever it is asked."""

    def __init__(self, parties: Parties, me: int, key: Any, others: Mapping[int, Any]) -> None:
        self.parties, self.me = parties, me
        self._key, self._others = key, others
        self._seeds = Seeds(secrets.token_bytes(SEED), secrets.token_bytes(SEED))
        self._shares: dict[int, Shares] = {}
        self._masked = False
        self._arrived: frozenset[int] = frozenset()  # the nodes for whose uploads it has vouched

    def sealed(self) -> Sealed:
        """The boxes for the other members."""
        members, threshold = self.parties.members, self.parties.threshold
        both = [dict(Shamir.split(threshold, len(members), seed, ssss=False)) for seed in self._seeds]
        parts = {member: Shares(*(shares[at + 1] for shares in both)) for at, member in enumerate(members)}
        public = _public(_common_key(self._seeds.common))
        self._shares = {self.me: parts[self.me]}
        boxes = {other: self._box(other, public + b"".join(parts[other])) for other in members if other != self.me}
        return Sealed(public, (_commitment(self._seeds.own), _commitment(self._seeds.common)), boxes)

    def masked(self, vector: NDArray[np.float64], boxes: Mapping[int, bytes]) -> Words:
        """The vector under its masks; ``boxes``: from the members that have sealed theirs."""
        if self._masked:
            raise MessageError("this sum has its vector already: a second one under the same masks would show both")
        self._masked = True
        publics = {other: self._opened(other, box) for other, box in boxes.items()}
        words = fixed_point(vector, len(self.parties.members)) + _stream(self._seeds.own, len(vector))
        mine = _common_key(self._seeds.common)
        for other, public in publics.items():
            words = _with_common(words, self.me, other, _agreed(mine, public, self.parties, other))
        return words

    def vouched(self, arrived: Sequence[int]) -> dict[int, bytes]:
        """A code for each other member, by which it sees whose uploads this one was told have arrived."""
        found = frozenset(arrived) & frozenset(self._shares)
        if not self._masked or self._arrived:
            raise MessageError("cannot vouch for uploads: it sent none in this sum, or has vouched for some already")
        if len(found) < self.parties.threshold or len(found) < len(arrived) or self.me not in found:
            raise MessageError(f"{len(found)} uploads arrived, and a secure sum needs {self.parties.threshold}")
        self._arrived = found
        return {other: self._code(other, self.me, other) for other in self.parties.members if other != self.me}

    def shares_of(self, codes: Mapping[int, bytes]) -> dict[int, bytes]:
        """The share of each member's own mask, if its upload arrived, else that of its common masks.

        ``codes``: of the members that have vouched. Two sets of ``threshold`` nodes have a node in common, which has
        vouched once: so no server can name some uploads to one node and others to another, and get both seeds.
        """
        if not self._arrived or not self._shares:
            raise MessageError("has no share to give: it vouched for no upload in this sum, or has given them already")
        others = self._arrived - {self.me}
        same = [k for k in others & codes.keys() if hmac.compare_digest(codes[k], self._code(k, k, self.me))]
        if len(same) + 1 < self.parties.threshold:
            what = f"nodes that vouch for the same uploads, this one included: {len(same) + 1}"
            raise MessageError(f"{what}; a secure sum needs {self.parties.threshold}")
        held, self._shares = self._shares, {}
        return {member: shares.own if member in self._arrived else shares.common for member, shares in held.items()}

    def _code(self, other: int, sender: int, receiver: int) -> bytes:
        """What only these two can compute, of the uploads that have arrived."""
        key = _derived(self._key.exchange(self._others[other]), f"agree {self.parties.about}")
        return hmac.digest(key, self._about(sender, receiver) + f" {sorted(self._arrived)}".encode(), "sha256")

    def _box(self, other: int, content: bytes) -> bytes:
        nonce = secrets.token_bytes(12)
        return nonce + bytes(self._cipher(other).encrypt(nonce, content, self._about(self.me, other)))

    def _opened(self, other: int, box: bytes) -> bytes:
        """The other's public key; its shares are kept."""
        try:
            content = bytes(self._cipher(other).decrypt(box[:12], box[12:], self._about(other, self.me)))
        except InvalidTag:
            raise MessageError(f"the box of {self.parties.names[other]} was not sealed by it for this sum") from None
        public, own, common = content[:PUBLIC], content[PUBLIC : PUBLIC + SEED], content[PUBLIC + SEED :]
        self._shares[other] = Shares(own, common)
        return public

    def _cipher(self, other: int) -> Any:
        return ChaCha20Poly1305(_derived(self._key.exchange(self._others[other]), f"box {self.parties.about}"))

    def _about(self, sender: int, receiver: int) -> bytes:
        """What a box is bound to: the sum, its members, the sender and the receiver."""
        return f"{self.parties} {sender} {receiver}".encode()


def new_session(folder: Path, parties: Parties, me: int, seals: Mapping[int, str]) -> Session:
    """A session of the node whose folder this is, with members whose certificates are the authority's."""
    members = parties.members
    if len(set(members)) != len(members) or me not in members or len(members) < 2:
        raise MessageError("a secure sum needs two nodes at least, each of them once, and this one among them")
    if not len(members) / 2 < parties.threshold <= len(members):
        what = f"its threshold should be more than half of its {len(members)} nodes (got {parties.threshold})"
        raise MessageError(f"{what}: else the server could ask some for the one seed of a node, and some for the other")
    authority = (folder / "ca.crt").read_bytes()
    others = {k: certified_key(seals.get(k, ""), authority, parties.names[k]) for k in members if k != me}
    key = serialization.load_pem_private_key((folder / SEAL_KEY).read_bytes(), None)
    return Session(parties, me, key, others)


def unmasked(
    parties: Parties,
    vectors: Mapping[int, Words],
    sealed: Mapping[int, Sealed],
    given: Mapping[int, Mapping[int, bytes]],
) -> NDArray[np.float64]:
    """The sum of the vectors that arrived; ``given``: by whom, whose, which share."""
    total = np.zeros_like(next(iter(vectors.values())))
    for vector in vectors.values():
        total = total + vector
    for member, seals in sealed.items():
        name = parties.names[member]
        shares = [(parties.members.index(by) + 1, theirs[member]) for by, theirs in given.items() if member in theirs]
        if len(shares) < parties.threshold:
            raise MessageError(f"{len(shares)} shares of {name} came, and {parties.threshold} are needed")
        seed = Shamir.combine(shares[: parties.threshold], ssss=False)
        if _commitment(seed) != seals.commitments[member not in vectors]:
            raise MessageError(f"the shares of {name} do not fit together: a node has sent a wrong one")
        if member in vectors:
            total = total - _stream(seed, len(total))
            continue
        for other in vectors:  # the others' common masks with the lost node, which have not cancelled out
            key = _agreed(_common_key(seed), sealed[other].public, parties, other)
            total = _with_common(total, member, other, key)
    return floating(total)


def fixed_point(vector: NDArray[np.float64], members: int) -> Words:
    """Numbers as integer multiples of 2**-BITS; refused if a sum of them might overflow.

    The refusal, which the server reads, names no number of the vector.
    """
    most = 2.0 ** (62 - BITS) / members
    if not (np.abs(vector) < most).all():
        raise MessageError(f"has a number that is too large for a secure sum, whose numbers are below {most:.3g}")
    return np.rint(vector * 2.0**BITS).astype(np.int64).view(np.uint64)


def floating(words: Words) -> NDArray[np.float64]:
    return words.view(np.int64).astype(np.float64) / 2.0**BITS


def _with_common(words: Words, one: int, other: int, key: bytes) -> Words:
    """The words with the mask that two nodes have in common: the lower number adds it, the other subtracts it."""
    mask = _stream(key, len(words))
    return words + mask if one < other else words - mask


def _agreed(key: Any, public: bytes, parties: Parties, other: int) -> bytes:
    """The key of the mask that a node has in common with ``other``, whose public key this is."""
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order
        raise MessageError(f"{parties.names[other]} has sent a public key that is none") from None
    return _derived(shared, f"mask {parties.about}")


def _common_key(seed: bytes) -> Any:
    return X25519PrivateKey.from_private_bytes(_derived(seed, "key of common masks"))


def _public(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes_raw()
    return found


def _derived(secret: bytes, purpose: str) -> bytes:
    found: bytes = HKDF(hashes.SHA256(), 32, None, f"fedloom secure sum, {purpose}".encode()).derive(secret)
    return found


def _commitment(seed: bytes) -> bytes:
    return hashlib.sha256(b"fedloom secure sum, seed " + seed).digest()


def _stream(key: bytes, count: int) -> Words:
    """Pseudo-random words from a key: ChaCha20's key stream."""
    cipher = Cipher(ChaCha20(_derived(key, "stream"), bytes(16)), None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), np.dtype("<u8")).astype(np.uint64, copy=False)
