"""Entries of a persistent tier that every rank holds.

Each rank writes its heads of a block as an entry of its own tier, under the same key and serial number. If a process is
killed, or a write fails on one rank, some ranks have an entry and others do not. When the tiers are opened, the ranks
keep the entries that all of them have. The other entries are deleted by later writes, on every rank.
"""

from __future__ import annotations

import numpy as np
import torch

from sidestream_kv.device.group import Group
from sidestream_kv.offload.tiers.index import Entry, TierIndex

_SERIAL_BYTES = 8


def keep_shared(index: TierIndex, group: Group, device: torch.device) -> None:
    """Drop the entries that not every rank holds from the index of this rank's tier. All ranks call it before they use
    the tier. `device`: of the group's tensors.
    """
    entries = list(index.entries)
    key_bytes = max((len(entry.key) for entry in entries), default=0)
    own = torch.tensor([len(entries), index.next_serial, key_bytes], device=device)
    counts = group.all_gather(own).view(group.size, len(own)).tolist()
    most, width = max(count for count, _, _ in counts), max(num_bytes for _, _, num_bytes in counts) + _SERIAL_BYTES
    packed = np.zeros((most, width), np.uint8)
    for row, entry in zip(packed, entries, strict=False):
        row[:] = np.frombuffer(entry.key + entry.serial.to_bytes(_SERIAL_BYTES, "little"), np.uint8)
    gathered = (
        group.all_gather(torch.from_numpy(packed.reshape(-1)).to(device)).cpu().numpy().reshape(group.size, most, width)
    )
    held = [
        {Entry(bytes(row[:-_SERIAL_BYTES]), int.from_bytes(row[-_SERIAL_BYTES:].tobytes(), "little")) for row in rows}
        for rows in (rank[:count] for rank, (count, _, _) in zip(gathered, counts, strict=True))
    ]
    index.keep_only(
        set.intersection(*held), of_others=set.union(*held), next_serial=max(serial for _, serial, _ in counts)
    )
