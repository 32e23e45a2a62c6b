"""Every error hybridkv raises.

    HybridKVError
    ├── ConfigError (ValueError)         a setting, size or layout that cannot work
    │   ├── UnknownPreset                no preset, file or config of that name
    │   ├── MalformedConfig              a config.json that cannot be read
    │   ├── MalformedTrace               a trace of requests that cannot be read
    │   ├── UnknownGroupKind             a layer kind nobody registered
    │   └── PoolTooSmall                 the pool cannot hold what was asked of it
    ├── UnsupportedModel (ValueError)    an architecture hybridkv cannot serve
    ├── RequestError (ValueError)        a request that can never be served
    │   ├── EmptyPrompt
    │   ├── TokenOutOfRange
    │   ├── InvalidSampling
    │   ├── UnknownAdapter
    │   └── PromptTooLong
    ├── OutOfPages (MemoryError)         no room now; nothing was changed
    ├── UsageError (RuntimeError)        calls in an order that cannot be right
    ├── EngineClosed (RuntimeError)
    └── IntegrityError (RuntimeError)    an invariant is broken: a bug in hybridkv

Messages say what happened, with the numbers, and what to do about it.
"""

from __future__ import annotations


class HybridKVError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(HybridKVError, ValueError):
    """A setting, size or layout that cannot work."""


class UnknownPreset(ConfigError):
    """A name that is neither a preset, a config file, nor a config object."""


class MalformedConfig(ConfigError):
    """A config.json that cannot be read or lacks a field its model type needs."""


class MalformedTrace(ConfigError):
    """A trace of requests that cannot be read, with the number of the line."""


class UnknownGroupKind(ConfigError):
    """A layer kind that was never registered."""


class PoolTooSmall(ConfigError):
    """A pool that cannot hold one slab for every group, or one request."""


class UnsupportedModel(HybridKVError, ValueError):
    """An architecture that cannot be served, with the layer kind at fault."""


class RequestError(HybridKVError, ValueError):
    """A request that can never be served as it was submitted."""


class EmptyPrompt(RequestError):
    """A prompt without a single token."""


class TokenOutOfRange(RequestError):
    """A token id outside the vocabulary."""


class InvalidSampling(RequestError):
    """A sampling parameter outside its range."""


class UnknownAdapter(RequestError):
    """A LoRA adapter that is not loaded, or not any more."""


class PromptTooLong(RequestError):
    """A request longer than the model's context or than the pool can ever hold."""


class OutOfPages(HybridKVError, MemoryError):
    """No room for a reservation now; nothing was changed.

    Attributes:
        requested: bytes asked for, whole pages.
        live: bytes held by running requests.
        pool: bytes of the pool.
    """

    def __init__(self, message: str, *, requested: int, live: int, pool: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.live = live
        self.pool = pool


class UsageError(HybridKVError, RuntimeError):
    """Calls in an order that cannot be right, such as committing more than was reserved."""


class EngineClosed(HybridKVError, RuntimeError):
    """A call on an engine after `close()`."""


class IntegrityError(HybridKVError, RuntimeError):
    """An invariant of the pool, the index or a sequence does not hold. Please report it."""
