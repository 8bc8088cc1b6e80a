"""vLLM's OpenAI server with a planted fault: a prefix hit is now and then the next cached block. To try `verify` on it.

    SHARE=0.01 python tests/verify/faulty_vllm.py --model MODEL [OPTION ...]

The engine's process, which is spawned, runs the top level of this file as well.
"""

from __future__ import annotations

import os
import random
import runpy
from typing import Any

from vllm.v1.core.block_pool import BlockPool

SHARE = float(os.environ["SHARE"])
SOUND = BlockPool.get_cached_block
RANDOM = random.Random(1)


def get_cached_block(pool: Any, *args: Any) -> Any:
    """The next block that holds cached KV, for one hit in 1 / SHARE."""
    found = SOUND(pool, *args)
    if found is None or RANDOM.random() >= SHARE:
        return found
    following = pool.blocks[found[0].block_id + 1 :] + pool.blocks
    return [next(block for block in following if block.block_hash is not None)]


BlockPool.get_cached_block = get_cached_block

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
