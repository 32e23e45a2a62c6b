"""One shared pool of KV memory for models that mix kinds of layers.

The core (groups, pool, manager) needs no torch. What runs a model is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridkv.audit import GroupUsage, Usage
from hybridkv.catalog import layer_groups
from hybridkv.entries import CacheEntry, LayerGroup, Part, attention_parts, group_entries
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.manager import GroupManager
from hybridkv.pool import PageCopy
from hybridkv.rules import GroupKind, Rule, register_group_kind
from hybridkv.sequence import Sequence, StatePages, TokenPages

if TYPE_CHECKING:
    from hybridkv.engine.async_engine import AsyncEngine
    from hybridkv.engine.engine import Engine
    from hybridkv.engine.outputs import Completion, Likely, RequestOutput, StreamEvent, TokenLogprob
    from hybridkv.engine.params import SamplingParams
    from hybridkv.engine.wrap import wrap
    from hybridkv.hf.paged_cache import paged_cache

__version__ = "0.1.0"

_LAZY = {
    "AsyncEngine": "hybridkv.engine.async_engine",
    "Completion": "hybridkv.engine.outputs",
    "Engine": "hybridkv.engine.engine",
    "Likely": "hybridkv.engine.outputs",
    "RequestOutput": "hybridkv.engine.outputs",
    "SamplingParams": "hybridkv.engine.params",
    "StreamEvent": "hybridkv.engine.outputs",
    "TokenLogprob": "hybridkv.engine.outputs",
    "paged_cache": "hybridkv.hf.paged_cache",
    "wrap": "hybridkv.engine.wrap",
}

__all__ = [
    "AsyncEngine",
    "CacheEntry",
    "Completion",
    "Engine",
    "GroupKind",
    "GroupManager",
    "GroupUsage",
    "HybridKVError",
    "LayerGroup",
    "Likely",
    "OutOfPages",
    "PageCopy",
    "Part",
    "RequestOutput",
    "Rule",
    "SamplingParams",
    "Sequence",
    "StatePages",
    "StreamEvent",
    "TokenLogprob",
    "TokenPages",
    "Usage",
    "__version__",
    "attention_parts",
    "group_entries",
    "layer_groups",
    "paged_cache",
    "register_group_kind",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hybridkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
