"""What the layers of one kind store, and how a list of layer kinds becomes cache entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hybridkv.entries import CacheEntry, Part, attention_parts, latent_parts
from hybridkv.errors import MalformedConfig, UnsupportedModel
from hybridkv_models._facts import Facts, dtype_name


class Store(NamedTuple):
    """What a layer of one kind keeps: the group kind, its tensors and the parameters of its rule."""

    kind: str
    parts: tuple[Part, ...]
    params: tuple[tuple[str, int], ...] = ()


NOTHING: tuple[Store, ...] = ()
"""A layer without a cache: MLP, mixture of experts, or one that reads another layer's."""

SHARED = "dummy"
"""The layer type of a layer that attends to the keys and values of an earlier one."""


def full(kv_heads: int, head_dim: int, dtype: str, value_dim: int | None = None) -> tuple[Store, ...]:
    """Full attention: K and V of every token, (kv_heads, head_dim) each, or V of another size."""
    return (Store("full_attention", attention_parts(kv_heads, head_dim, dtype, value_dim)),)


def latent(facts: Facts) -> tuple[Store, ...]:
    """Latent attention (MLA): latent (1, kv_lora_rank) and rotary part (1, qk_rope_head_dim) of every token."""
    rank, rope_dim = facts.size("kv_lora_rank", 512), facts.size("qk_rope_head_dim", 64)
    return (Store("full_attention", latent_parts(rank, rope_dim, facts.dtype)),)


def sliding(kv_heads: int, head_dim: int, dtype: str, window: int, value_dim: int | None = None) -> tuple[Store, ...]:
    """Sliding-window attention: K and V of a token, as in `full`. `window` counts the token itself."""
    return (Store("sliding_attention", attention_parts(kv_heads, head_dim, dtype, value_dim), (("window", window),)),)


def chunked(kv_heads: int, head_dim: int, dtype: str, chunk: int) -> tuple[Store, ...]:
    """Chunked attention: K and V of a token, (kv_heads, head_dim) each. A token sees those of its own chunk."""
    return (Store("chunked_attention", attention_parts(kv_heads, head_dim, dtype), (("chunk", chunk),)),)


def full_and_sliding(
    facts: Facts, otherwise: Callable[[int], str], *, kv_heads: int, head_dim: int, window: int
) -> tuple[CacheEntry, ...]:
    """The entries of a model whose layers are of full or of sliding attention, all with K and V of one shape.

    Args:
        facts: the config; it may list its layers in `layer_types`.
        otherwise: the layer type of layer i where it does not.
        kv_heads, head_dim, window: defaults of `num_key_value_heads`, `head_dim` and `sliding_window`.
    """
    kinds = facts.layer_kinds("layer_types", otherwise)
    kv_heads, head_dim = facts.size("num_key_value_heads", kv_heads), facts.size("head_dim", head_dim)
    stores = {
        "full_attention": full(kv_heads, head_dim, facts.dtype),
        "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, window_of(facts, kinds, window)),
    }
    return cache_entries(facts, kinds, stores)


def window_of(
    facts: Facts, kinds: Sequence[str], default: int, name: str = "sliding_window", kind: str = "sliding_attention"
) -> int:
    """The field `name`, which must not be null where there are layers of `kind`.

    Raises:
        MalformedConfig: it is, or it is no number of tokens.
    """
    if kind in kinds and facts.get(name, default) is None:
        raise MalformedConfig(f"field {name!r} is null, but layer {kinds.index(kind)} is of kind {kind!r}")
    return facts.size(name, default)


def share_last(facts: Facts, kinds: tuple[str, ...], default: int) -> tuple[str, ...]:
    """The layer kinds of a model whose last `num_kv_shared_layers` layers keep nothing themselves.

    Each of them attends to the keys and values of the last layer of its kind before them.

    Args:
        facts: the config.
        kinds: the layer type of every layer.
        default: of `num_kv_shared_layers`.

    Raises:
        MalformedConfig: a layer would have nobody to read from.
    """
    shared = facts.size("num_kv_shared_layers", default, least=0)
    own = kinds[: max(len(kinds) - shared, 0)]
    for layer, kind in enumerate(kinds[len(own) :], len(own)):
        if kind not in own:
            raise MalformedConfig(
                f"field 'num_kv_shared_layers' is {shared}: layer {layer} ({kind}) is to share the keys and values of "
                f"an earlier layer of its kind, but none of the first {len(own)} is one"
            )
    return own + (SHARED,) * (len(kinds) - len(own))


def full_every(facts: Facts, period: int, name: str = "sliding_window_pattern") -> Callable[[int], str]:
    """The layer type of layer i where every so many layers one has full attention and the others slide.

    Args:
        facts: the config, read when a layer is asked for: one that lists its layers may have anything in this field.
        period: default of the field `name`.
    """
    return lambda layer: "sliding_attention" if (layer + 1) % facts.size(name, period) else "full_attention"


def alternating(layer: int) -> str:
    """The layer type where sliding and full attention take turns."""
    return "full_attention" if layer % 2 else "sliding_attention"


def state(channels: int, kernel: int, recurrent: tuple[int, ...], *, dtype: str, state_dtype: str) -> tuple[Store, ...]:
    """A recurrent layer's state.

    Args:
        channels: channels of the short convolution.
        kernel: its width K. Only the last K - 1 columns matter for the next token: conv is (channels, K - 1).
        recurrent: shape of the recurrent state.
        dtype: of the conv columns, the model's.
        state_dtype: of the recurrent state.
    """
    (conv,) = short_conv(channels, kernel, dtype)
    return (Store(conv.kind, (*conv.parts, Part("recurrent", recurrent, dtype_name(state_dtype)))),)


def short_conv(channels: int, kernel: int, dtype: str) -> tuple[Store, ...]:
    """A layer that is a convolution of width `kernel` and nothing else: the last columns of its input."""
    if kernel < 2:
        raise MalformedConfig(f"a convolution of width {kernel} keeps no columns; its width must be at least 2")
    return (Store("linear_attention", (Part("conv", (channels, kernel - 1), dtype),)),)


def mamba2(
    facts: Facts, *, heads: int, head_dim: int, groups: int, size: int, kernel: int, state_dtype: str
) -> tuple[Store, ...]:
    """A Mamba-2 layer: its convolution runs over the inner width and over B and C of every group.

    Args:
        facts: the config, for its dtype.
        heads, head_dim: how the inner width is shared out.
        groups: of heads with the same B and C.
        size: of the state of one channel.
        kernel: width of the convolution.
        state_dtype: of the recurrent state.
    """
    channels = heads * head_dim + 2 * groups * size
    return state(channels, kernel, (heads, head_dim, size), dtype=facts.dtype, state_dtype=state_dtype)


def mamba2_fields(facts: Facts, inner: int, state_dtype: str) -> tuple[Store, ...]:
    """A Mamba-2 layer of inner width `inner` whose sizes are the `mamba_*` fields that Bamba introduced."""
    heads = facts.size("mamba_n_heads", 128)
    # "auto" is how the config classes spell "share the inner width out to the heads".
    head_dim = inner // heads if facts.get("mamba_d_head") in (None, "auto") else facts.size("mamba_d_head")
    return mamba2(
        facts,
        heads=heads,
        head_dim=head_dim,
        groups=facts.size("mamba_n_groups", 1),
        size=facts.size("mamba_d_state", 256),
        kernel=facts.size("mamba_d_conv", 4),
        state_dtype=state_dtype,
    )


def gated_delta_rule(
    facts: Facts, state_dtype: str, *, key_heads: int = 16, value_heads: int = 32
) -> tuple[Store, ...]:
    """A layer of the gated delta rule, sized by the fields that the Qwen models have in common.

    conv is (2 key heads x key size + value heads x value size, K - 1), recurrent (value heads, key size, value size).

    Args:
        facts: the config.
        state_dtype: of the recurrent state.
        key_heads, value_heads: defaults of `linear_num_key_heads` and `linear_num_value_heads`.
    """
    key_heads = facts.size("linear_num_key_heads", key_heads)
    value_heads = facts.size("linear_num_value_heads", value_heads)
    key_dim, value_dim = facts.size("linear_key_head_dim", 128), facts.size("linear_value_head_dim", 128)
    return state(
        2 * key_heads * key_dim + value_heads * value_dim,
        facts.size("linear_conv_kernel_dim", 4),
        (value_heads, key_dim, value_dim),
        dtype=facts.dtype,
        state_dtype=state_dtype,
    )


def kimi_delta(heads: int, head_dim: int, kernel: int, *, dtype: str, state_dtype: str) -> tuple[Store, ...]:
    """A layer of Kimi delta attention: conv (3 heads x head_dim, K - 1), recurrent (heads, head_dim, head_dim)."""
    return state(3 * heads * head_dim, kernel, (heads, head_dim, head_dim), dtype=dtype, state_dtype=state_dtype)


def delta_and_full(facts: Facts, state_dtype: str, *, kv_heads: int, head_dim: int) -> tuple[CacheEntry, ...]:
    """The entries of a Qwen model of gated-delta-rule layers and, every so many layers, full attention.

    Args:
        facts: the config; `layer_types` or `full_attention_interval` says which layers are which.
        state_dtype: of the recurrent states.
        kv_heads, head_dim: defaults of `num_key_value_heads` and `head_dim`.
    """
    period = facts.size("full_attention_interval", 4)
    kinds = facts.layer_kinds("layer_types", lambda i: "linear_attention" if (i + 1) % period else "full_attention")
    kv_heads, head_dim = facts.size("num_key_value_heads", kv_heads), facts.size("head_dim", head_dim)
    stores = {
        "full_attention": full(kv_heads, head_dim, facts.dtype),
        "linear_attention": gated_delta_rule(facts, state_dtype),
    }
    return cache_entries(facts, kinds, stores)


def cache_entries(
    facts: Facts,
    kinds: tuple[str, ...],
    stores: Mapping[str, tuple[Store, ...]] | Callable[[int], Mapping[str, tuple[Store, ...]]],
) -> tuple[CacheEntry, ...]:
    """One cache entry for each store of each layer, in layer order.

    Args:
        facts: the config, for the message.
        kinds: the layer type of every layer.
        stores: what a layer of each kind keeps, or a function that says it for layer i.

    Raises:
        UnsupportedModel: a layer of a kind the family has no store for.
    """
    entries: list[CacheEntry] = []
    for layer, kind in enumerate(kinds):
        known = stores(layer) if callable(stores) else stores
        if kind not in known:
            raise UnsupportedModel(
                f"layer {layer} of this {facts.model_type!r} model is of kind {kind!r}, which hybridkv cannot serve "
                f"for it; it knows {', '.join(sorted(known))}. Use a config with these layer kinds only, or describe "
                "the layer in hybridkv_models (docs/models.md)"
            )
        for i, store in enumerate(known[kind]):
            index = [earlier.kind for earlier in known[kind][:i]].count(store.kind)
            entries.append(CacheEntry(layer, store.kind, store.parts, store.params, index))
    return tuple(entries)


def refuse_bidirectional(facts: Facts) -> None:
    """Refuse an encoder in a decoder's clothes: every token sees later ones, so no prefix can be reused.

    Raises:
        UnsupportedModel: the config asks for bidirectional attention.
    """
    if facts.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            f"this {facts.model_type!r} model uses bidirectional attention, so its full_attention layers have no cache "
            "to reuse; run it with its own forward pass"
        )
