#!/bin/sh
# SGLang with its KV cache in host memory and on disk: serve.sh MODEL DIRECTORY [further options of launch_server]
#   pip install sidestream-kv      in the environment of SGLang 0.5.23
# Stop it, start it again, and ask the same: the log says "blocks reused". docs/sglang.md has the options.
set -eu
model=$1 directory=$2
shift 2

exec python -m sglang.launch_server --model-path "$model" --page-size 64 "$@" \
  --enable-hierarchical-cache --hicache-mem-layout page_first \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
    "backend_name": "sidestream",
    "module_path": "sidestream_kv.connectors.sglang_storage",
    "class_name": "SidestreamStorage",
    "interface_v1": 1,
    "disk": "'"$directory"'",
    "disk_capacity": "100GiB"
  }'
