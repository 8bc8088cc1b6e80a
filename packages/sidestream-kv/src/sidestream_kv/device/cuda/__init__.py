"""An NVIDIA GPU as a device. The package can be imported without a GPU; `CudaDevice()` then raises ConfigError."""

from sidestream_kv.device.cuda.device import CudaDevice
from sidestream_kv.device.cuda.fences import CudaFence
from sidestream_kv.device.cuda.graphs import CudaEvent, CudaGraph
from sidestream_kv.device.cuda.stream import CudaStream

__all__ = ["CudaDevice", "CudaEvent", "CudaFence", "CudaGraph", "CudaStream"]
