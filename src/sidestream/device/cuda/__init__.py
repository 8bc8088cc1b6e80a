"""One CUDA GPU as a device. Can be imported without one; `CudaDevice()` then says what is missing."""

from sidestream.device.cuda.device import CudaDevice
from sidestream.device.cuda.graphs import CudaEvent, CudaGraph
from sidestream.device.cuda.stream import CudaFence, CudaStream

__all__ = ["CudaDevice", "CudaEvent", "CudaFence", "CudaGraph", "CudaStream"]
