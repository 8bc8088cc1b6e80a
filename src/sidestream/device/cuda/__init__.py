"""An NVIDIA GPU as a device. The package can be imported without a GPU; `CudaDevice()` then raises ConfigError."""

from sidestream.device.cuda.device import CudaDevice
from sidestream.device.cuda.fences import CudaFence
from sidestream.device.cuda.graphs import CudaEvent, CudaGraph
from sidestream.device.cuda.stream import CudaStream

__all__ = ["CudaDevice", "CudaEvent", "CudaFence", "CudaGraph", "CudaStream"]
