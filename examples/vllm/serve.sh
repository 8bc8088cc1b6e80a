#!/bin/sh
# vLLM with its KV cache in host memory and on disk: serve.sh MODEL DIRECTORY [further options of vllm serve]
#   pip install sidestream-kv      in the environment of vLLM
# Stop it, start it again, and ask the same: the log says "Sidestream reused". docs/vllm.md has the options.
set -eu
model=$1 directory=$2
shift 2

# vLLM before its hashes had a fixed seed finds nothing after a restart without this; later versions accept it.
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"

exec vllm serve "$model" "$@" --kv-transfer-config '{
  "kv_connector": "SidestreamConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {"host": "8GiB", "disk": "'"$directory"'", "disk_capacity": "100GiB"}
}'
