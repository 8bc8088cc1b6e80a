"""The expected cache content of each key (block hash). The keys are computed by the code under test, so a different
hash function is no error. But if the code leaves out a part of a block's identity, two different blocks have the same
key, which is a finding (hazard H14).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from proof.torture.oracle import SALT, Computed, Reference, toy_of
from proof.torture.script import ScriptedModel
from proof.torture.workload import Workload
from proof.toy import STATE_WIDTH
from sidestream.engine.build_plan import block_layout, windowed_layers
from sidestream.schedule.states import part_keys
from sidestream.schedule.windows import page_keys
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateLayout, StateTensor, blocks_per_state
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import Key

_OTHER_STATES = StateLayout((StateTensor(0, "other", 0, (1,), "float32"),), 1, "float32")


@dataclass(slots=True)
class Contents:
    """The contents of keys in one schedule.

    block_bytes  bytes of a block
    without_window  byte range of each layer without a sliding window, in a block
    blocks       the KV bytes of each key's block; equal in every tier
    states       the recurrent state at the end of each key's block; empty: the model has none
    parts        by key, a block that holds a part of a checkpoint of the recurrent state, or of a page: first byte and
                 content of each range to compare. Other bytes are undefined
    collisions   findings: one sentence for each pair of different blocks with the same key
    """

    block_bytes: int
    without_window: tuple[slice, ...] = ()
    blocks: dict[Key, bytes] = field(default_factory=dict)
    states: dict[Key, int] = field(default_factory=dict)
    parts: dict[Key, tuple[tuple[int, bytes], ...]] = field(default_factory=dict)
    collisions: list[str] = field(default_factory=list)


def contents_of(workload: Workload, reference: Reference) -> Contents:
    """Compute the contents of all keys that the workload's requests may use."""
    model = ScriptedModel(toy_of(workload))
    layout, windows = block_layout(model), windowed_layers(model)
    layers = layout.layers_without_window
    contents = Contents(layout.block_bytes, tuple(slice(*layout.layer_span(0, layer, layer + 1)) for layer in layers))
    identities: dict[Key, tuple[int, str, tuple[int, ...]]] = {}
    size = model.layout.block_tokens
    keys_of_version = {
        weights: BlockKeys(
            fingerprint=model.fingerprint_of(weights), layout=layout, salt=SALT, states=model.state_layout
        )
        for weights in range(len(reference.samples))
    }
    for computed in reference.computed:
        keys: list[Key] = []
        keys_of_version[computed.weights].extend(keys, computed.tokens, salt=computed.salt)
        for index, (key, block) in enumerate(zip(keys, computed.blocks, strict=True)):
            identity = computed.weights, computed.salt, computed.tokens[: (index + 1) * size]
            if (known := identities.setdefault(key, identity)) != identity:
                contents.collisions.append(f"{_words(known)} and {_words(identity)} have the key {key.hex()[:8]} (H14)")
            contents.blocks[key] = block if windows is None else _layers_in(block, model.layout, windows, -1)
            for part in range(0 if windows is None else windows.parts):
                assert windows is not None
                held = _layers_in(block, model.layout, windows, part)
                contents.parts[page_keys(key, windows.parts)[part]] = ((0, held),)
        for key, state in zip(keys, computed.states, strict=False):
            contents.states[key] = state
        contents.parts.update(_parts_of(model, dict(zip(keys, computed.states, strict=False))))
    contents.collisions += _shared_with_other_engines(model, identities, reference.computed)
    return contents


def _shared_with_other_engines(
    model: ScriptedModel,
    identities: dict[Key, tuple[int, str, tuple[int, ...]]],
    computed: tuple[Computed, ...],
) -> Iterator[str]:
    """Keys of the first computed tokens in engines with another model, layout or salt. They must differ from this
    engine's key.
    """
    if not computed:
        return
    layout, first = block_layout(model), computed[0]
    others: dict[str, tuple[str, KVLayout, str, StateLayout | None]] = {
        "other weights": (model.fingerprint_of(len(computed)), layout, SALT, model.state_layout),
        "another dtype": (model.fingerprint, replace(layout, dtype="float16"), SALT, model.state_layout),
        "another number of layers": (
            model.fingerprint,
            replace(layout, num_layers=layout.num_layers + 1),
            SALT,
            model.state_layout,
        ),
        "another salt": (model.fingerprint, layout, f"not {SALT}", model.state_layout),
        "other recurrent states": (model.fingerprint, layout, SALT, _OTHER_STATES),
    }
    for what, (fingerprint, layout_, salt, states) in others.items():
        keys: list[Key] = []
        BlockKeys(fingerprint=fingerprint, layout=layout_, salt=salt, states=states).extend(
            keys, first.tokens, salt=first.salt
        )
        for key in keys[:1]:
            if key in identities:
                yield f"an engine with {what} has the key {key.hex()[:8]}, too: {_words(identities[key])} (H14)"


def _words(identity: tuple[int, str, tuple[int, ...]]) -> str:
    weights, salt, tokens = identity
    salted = f" with salt {salt!r}" if salt else ""
    return f"the block behind {list(tokens)}{salted} under weights {weights}"


def _layers_in(block: bytes, layout: KVLayout, windows: WindowedLayers, part: int) -> bytes:
    """Those layers of a block of all layers that lie in one part of a page; -1: in the block itself."""
    places = windows.places(layout.num_layers)
    spans = [layout.layer_span(0, layer, layer + 1) for layer in range(layout.num_layers) if places[layer][0] == part]
    return b"".join(block[start:stop] for start, stop in spans)


def _parts_of(model: ScriptedModel, states: dict[Key, int]) -> dict[Key, tuple[tuple[int, bytes], ...]]:
    """The parts of a sample's checkpoints. `states` are in the order of the blocks."""
    layout, size = model.state_layout, model.layout.block_bytes
    if layout is None:
        return {}
    parts: dict[Key, tuple[tuple[int, bytes], ...]] = {}
    for index, (key, state) in enumerate(states.items()):
        covered = (index + 1) * model.layout.block_tokens
        number_at = 4 * (STATE_WIDTH - 1)
        meaningful = ((number_at, np.float32(state).tobytes()), (layout.covered_offset, np.int64(covered).tobytes()))
        for number, part in enumerate(part_keys(key, blocks_per_state(layout, size))):
            parts[part] = tuple((at - number * size, data) for at, data in meaningful if at // size == number)
    return parts
