"""Digests that name a prefix: a pure function of what the prefix is, stable across processes and restarts.

Unit i is `unit_tokens` consecutive token ids. Its digest covers everything before it, so equal digests mean equal
prefixes, and a prefix is found by one look-up per unit.

The format, version 1. `||` joins bytes, integers are little-endian, H is the algorithm:

    tag(name)  = "hybridkv/1/" || name, zero-padded to 64 bytes (one SHA-256 block)
    digest(-1) = H(tag("seed")  || value((algorithm, model, dtype, layout, unit_tokens, adapter, salt)))
    digest(i)  = H(tag("unit")  || digest(i-1) || token ids)                        a unit of tokens alone
    digest(i)  = H(tag("extra") || digest(i-1) || token ids || value(extra keys))   a unit with extra keys

    token ids  = unit_tokens x uint32
    value(v)   = "n"                                        None
                 "i" || int64                               an integer
                 "b" || uint64 length || bytes              bytes
                 "t" || uint64 length || UTF-8 bytes        a string (lone surrogates pass)
                 "l" || uint64 count  || value of each      a sequence

Every tag has one length, digests have one length per algorithm, and the seed fixes `unit_tokens`, so no two different
inputs are the same bytes. The extra keys of a unit are the sequence of (token offset in the unit, image digest), by
offset; an image enters at the unit in which it starts, and so reaches every later unit through the chain.

With "sha256" a collision is out of anyone's reach. "xxh3_128" is about three times faster and not cryptographic: a
collision, which an attacker can construct, **returns the cache of another prompt**. Use it only where every prompt
comes from users who trust each other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import ConfigError, RequestError, TokenOutOfRange

Salt: TypeAlias = str | bytes
Adapter: TypeAlias = str | tuple[str, str]
Image: TypeAlias = tuple[int, str | bytes]
Value: TypeAlias = int | bytes | str | Sequence["Value"] | None


def _tag(name: str) -> bytes:
    return f"hybridkv/1/{name}".encode().ljust(64, b"\0")


_SEED, _UNIT, _EXTRA = _tag("seed"), _tag("unit"), _tag("extra")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _sha256_chain(previous: bytes, units: list[bytes]) -> list[bytes]:
    # The tag is one whole block: a copy of its state saves hashing it again, and costs less than a new hash object.
    copy = hashlib.sha256(_UNIT).copy
    digests: list[bytes] = []
    append = digests.append
    for unit in units:
        state = copy()
        state.update(previous)
        state.update(unit)
        previous = state.digest()
        append(previous)
    return digests


def _xxh3_128_chain(previous: bytes, units: list[bytes]) -> list[bytes]:
    digest, tag = xxhash.xxh3_128_digest, _UNIT
    return [previous := digest(tag + previous + unit) for unit in units]


class _Algorithm(NamedTuple):
    size: int
    once: Callable[[bytes], bytes]
    chain: Callable[[bytes, list[bytes]], list[bytes]]


_ALGORITHMS: Mapping[str, _Algorithm] = {
    "sha256": _Algorithm(32, _sha256, _sha256_chain),
    "xxh3_128": _Algorithm(16, xxhash.xxh3_128_digest, _xxh3_128_chain),
}


class PartLike(Protocol):
    """What the layout's identity reads of a part."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class GroupLike(Protocol):
    """What the layout's identity reads of a layer group."""

    @property
    def kind(self) -> str: ...
    @property
    def parts(self) -> Sequence[PartLike]: ...
    @property
    def params(self) -> Sequence[tuple[str, int]]: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def entries(self) -> Sequence[tuple[int, int]]: ...


def digest_size(algorithm: str) -> int:
    """Bytes of one digest: 32 for "sha256", 16 for "xxh3_128".

    Raises:
        ConfigError: an unknown algorithm.
    """
    return _algorithm(algorithm).size


def layout_identity(groups: Iterable[GroupLike]) -> bytes:
    """What a set of layer groups stores, as canonical bytes.

    It is a list of layers: the names and the order of the groups, and whether a planner split one of them by layers,
    do not matter, so a pool of another size keeps its digests.
    """
    rows: dict[bytes, list[tuple[int, int]]] = {}
    for group in groups:
        parts = [(part.name, part.shape, part.dtype) for part in group.parts]
        shared = canonical((group.kind, parts, sorted(group.params), group.page_tokens))
        rows.setdefault(shared, []).extend((layer, index) for layer, index in group.entries)
    return canonical([(shared, sorted(entries)) for shared, entries in sorted(rows.items())])


def chain_seed(
    *,
    algorithm: str = "sha256",
    model: str = "",
    dtype: str = "",
    groups: str | bytes | Iterable[GroupLike] = "",
    unit_tokens: int = 16,
    adapter: Adapter | None = None,
    salt: Salt | None = None,
) -> bytes:
    """The digest before the first unit: requests share a prefix only if all of this is equal.

    Args:
        algorithm: "sha256" or "xxh3_128".
        model: identity of the weights, e.g. a name and a revision.
        dtype: of the computation.
        groups: the layer groups, or their identity if the caller has one.
        unit_tokens: tokens in a unit.
        adapter: name of a LoRA adapter, or its name and revision. None is the base model.
        salt: keeps tenants apart. None differs from an empty one, and a string from its bytes.

    Raises:
        ConfigError: an unknown algorithm, or a model, dtype or unit that cannot be.
        RequestError: an adapter or a salt of another type.
    """
    once = _algorithm(algorithm).once
    _check_unit(unit_tokens)
    if not isinstance(model, str) or not isinstance(dtype, str):
        raise ConfigError(f"model and dtype must be strings, got {model!r} and {dtype!r}")
    if not (salt is None or isinstance(salt, str | bytes)):
        raise RequestError(f"a salt is a string or bytes, got {type(salt).__name__}")
    layout = groups if isinstance(groups, str | bytes) else layout_identity(groups)
    return once(_SEED + canonical((algorithm, model, dtype, layout, unit_tokens, _checked_adapter(adapter), salt)))


def unit_digests(
    previous: bytes,
    tokens: ArrayLike,
    unit_tokens: int = 16,
    extras: Mapping[int, bytes] | None = None,
    algorithm: str = "sha256",
    first_unit: int = 0,
) -> list[bytes]:
    """Digests of consecutive units, each over the one before it.

    Cutting a prompt anywhere between units and passing the last digest on gives the same digests.

    Args:
        previous: the seed, or the digest of unit `first_unit - 1`.
        tokens: token ids, [n * unit_tokens], uint32 or any integers in that range.
        unit_tokens: tokens in a unit.
        extras: unit of the prompt -> canonical bytes of its extra keys (see `image_extras`); other units are ignored.
        algorithm: the one the seed was made with.
        first_unit: where `tokens` begins in the prompt, in units.

    Returns:
        n digests of `digest_size(algorithm)` bytes.

    Raises:
        ConfigError: an unknown algorithm, a digest of another size, or tokens that are not whole units.
        TokenOutOfRange: a token id that is no uint32.
    """
    size, once, chain = _algorithm(algorithm)
    _check_unit(unit_tokens)
    if len(previous) != size:
        raise ConfigError(f"{algorithm} continues from a digest of {size} bytes, got {len(previous)}")
    ids = checked_tokens(tokens)
    if len(ids) % unit_tokens:
        raise ConfigError(f"{len(ids)} tokens are no whole number of units of {unit_tokens}; pass full units only")
    # A void array turns into one bytes object per unit without a slice each.
    units: list[bytes] = np.frombuffer(ids.tobytes(), f"V{4 * unit_tokens}").tolist() if len(ids) else []
    if not extras:
        return chain(previous, units)
    digests: list[bytes] = []
    for unit in sorted(unit - first_unit for unit in extras if first_unit <= unit < first_unit + len(units)):
        digests += chain(previous, units[len(digests) : unit])
        before = digests[-1] if digests else previous
        previous = once(_EXTRA + before + units[unit] + extras[first_unit + unit])
        digests.append(previous)
    return digests + chain(previous, units[len(digests) :])


def unit_digest(
    previous: bytes, tokens: NDArray[np.uint32], extra: bytes | None = None, algorithm: str = "sha256"
) -> bytes:
    """`unit_digests` for one unit of checked tokens, as a decoding request completes it."""
    once = _algorithm(algorithm).once
    body = previous + tokens.astype("<u4", copy=False).tobytes()
    return once(_UNIT + body) if extra is None else once(_EXTRA + body + extra)


def image_extras(images: Iterable[Image], unit_tokens: int = 16) -> dict[int, bytes]:
    """The extra keys of the units in which images (or other non-text input) start.

    Args:
        images: (token offset in the prompt, digest of the content), in any order.
        unit_tokens: tokens in a unit.

    Returns:
        Unit of the prompt -> canonical bytes, for `unit_digests`.

    Raises:
        ConfigError: a unit below one token.
        RequestError: a malformed image, a negative offset, an empty digest, or two images at one token.
    """
    _check_unit(unit_tokens)
    placed: dict[int, str | bytes] = {}
    for image in images:
        offset, digest = _checked_image(image)
        if offset in placed:
            raise RequestError(f"two images start at token {offset}; give each its own offset")
        placed[offset] = digest
    return {
        unit: canonical([(offset % unit_tokens, placed[offset]) for offset in offsets])
        for unit, offsets in groupby(sorted(placed), lambda offset: offset // unit_tokens)
    }


def canonical(value: Value) -> bytes:
    """`value` as bytes, as the module's format says: two different values never give the same bytes.

    Raises:
        ConfigError: an integer outside int64, or another type.
    """
    match value:
        case None:
            return b"n"
        case bytes():
            return b"b" + struct.pack("<Q", len(value)) + value
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"t" + struct.pack("<Q", len(text)) + text
        case int() if not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return b"i" + struct.pack("<q", value)
        case list() | tuple():
            return b"l" + struct.pack("<Q", len(value)) + b"".join(map(canonical, value))
        case _:
            raise ConfigError(f"{value!r} has no canonical bytes; use None, int64, str, bytes or a sequence of them")


def _algorithm(name: str) -> _Algorithm:
    found = _ALGORITHMS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"unknown hash {name!r}; choose one of {', '.join(_ALGORITHMS)}")
    return found


def _check_unit(unit_tokens: int) -> None:
    if isinstance(unit_tokens, bool) or not isinstance(unit_tokens, int) or unit_tokens < 1:
        raise ConfigError(f"a token unit must be a whole number of at least 1 token, got {unit_tokens!r}")


def _checked_adapter(adapter: Adapter | None) -> Value:
    match adapter:
        case None | str():
            return adapter
        case (str(), str()):
            return tuple(adapter)
        case _:
            raise RequestError(f"an adapter is a name or (name, revision), got {adapter!r}")


def _checked_image(image: Image) -> Image:
    try:
        offset, digest = image
    except (TypeError, ValueError) as error:
        raise RequestError(f"an image is (token offset, digest), got {image!r}") from error
    if isinstance(offset, bool) or not isinstance(offset, int | np.integer) or offset < 0:
        raise RequestError(f"an image starts at a token offset of at least 0, got {offset!r}")
    if not digest or not isinstance(digest, str | bytes):
        raise RequestError(f"the digest of the image at token {offset} must be a string or bytes, not empty")
    return int(offset), digest


def checked_tokens(tokens: ArrayLike) -> NDArray[np.uint32]:
    """Token ids as one row of uint32.

    Raises:
        ConfigError: more than one row.
        TokenOutOfRange: an id that is no uint32.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise ConfigError("token ids must be one row, got rows of different lengths") from error
    if ids.ndim != 1:
        raise ConfigError(f"token ids must be one row, got an array of shape {ids.shape}")
    if ids.dtype != np.uint32 and len(ids):
        # A silent cast would give -1 and 2**32 - 1 one digest.
        if ids.dtype.kind not in "iu":
            raise TokenOutOfRange(f"token ids must be integers, got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= 2**32:
            raise TokenOutOfRange(f"token ids must lie in [0, 2**32), got {ids.min()} to {ids.max()}")
    return ids.astype("<u4", copy=False)
