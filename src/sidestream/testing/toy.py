"""A model whose next token is a hash of every KV byte it must attend to: one stale byte changes the text.

No weights, no arithmetic that rounds: its outputs are equal or wrong. For tests and for the torture test.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sidestream.attention.paged import PagedBatch
from sidestream.kv.layout import KVLayout

_PRIME = (1 << 31) - 1


class ToyModel:
    """Writes numbers made of token, position and layer into the KV pool, and draws from the sum of what it reads there.

    The logits are zero but for one token, so greedy and sampled draws agree. `eos_every` makes about one token in so many
    the end of sequence, id 0.
    """

    def __init__(
        self, *, block_tokens: int = 4, num_layers: int = 3, vocab_size: int = 97, max_model_len: int = 512, eos_every: int = 0
    ) -> None:
        self.layout = KVLayout(num_layers, 1, 2, block_tokens, "float32")
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = (0,)
        self.fingerprint = f"toy-{num_layers}-{vocab_size}-{eos_every}"
        self._eos_every = eos_every

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        """See `ForwardModel.forward`."""
        pool = batch.kv
        size = self.layout.block_tokens
        blocks, offsets = batch.slots // size, batch.slots % size
        for layer in range(self.layout.num_layers):
            batch.before_layer(layer)
            written = _written(tokens.numpy(), positions.numpy(), layer)
            pool[blocks, layer, :, offsets, 0, :] = torch.from_numpy(written).view(len(tokens), 2, 2)
        last_row = {stop - 1: row for row, stop in enumerate(batch.query_starts[1:])}
        logits = torch.zeros(len(logit_rows), self.vocab_size)
        for at, packed in enumerate(logit_rows.tolist()):
            row = last_row[packed]
            logits[at, self._draw(pool, batch.block_tables[row], batch.kv_lens[row])] = 100.0
        return logits

    def _draw(self, pool: torch.Tensor, table: torch.Tensor, length: int) -> int:
        count = self.layout.num_blocks_for(length)
        seen = pool[table[:count]].transpose(0, 1).transpose(1, 2).reshape(self.layout.num_layers, 2, -1, 2)[:, :, :length].numpy()
        return self.next_token(_bits(seen))

    def next_token(self, seen: npt.NDArray[np.int64]) -> int:
        """The token drawn after KV `seen`, the bits of its numbers as int64 `[layers, 2, length, 2]`."""
        weights = (np.arange(1, seen.size + 1, dtype=np.int64) * 48271 % _PRIME).reshape(seen.shape)
        mixed = int((seen * weights % _PRIME).sum() % _PRIME) * 69621 % _PRIME
        if self._eos_every and mixed % self._eos_every == 0:
            return 0
        return 1 + mixed // 7 % (self.vocab_size - 1)

    def expected(self, prompt: list[int], num_outputs: int) -> list[int]:
        """What the model draws after `prompt`, computed without any pool: the reference."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_outputs:
            positions = np.arange(len(tokens))
            layers = [
                _written(np.array(tokens), positions, layer).reshape(-1, 2, 2).swapaxes(0, 1) for layer in range(self.layout.num_layers)
            ]
            tokens.append(self.next_token(_bits(np.stack(layers))))
            if tokens[-1] == 0 and self._eos_every:
                break
        return tokens[len(prompt) :]


def _written(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.float32]:
    """Float32 `[T, 4]`: keys and values of each token; whole numbers below 2**20, so exact."""
    base = tokens.astype(np.int64) * 7919 + positions.astype(np.int64) * 104729 + layer * 1299709
    return np.stack([(base + part * 611953) % (1 << 20) for part in range(4)], axis=-1).astype(np.float32)


def _bits(kv: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Numbers that differ wherever a single bit does."""
    return np.ascontiguousarray(kv).view(np.int32).astype(np.int64)
