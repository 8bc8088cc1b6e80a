"""Nothing here reaches a network: models are tiny and made on the spot, servers listen on loopback."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
