"""What devices and links do, as the cost model assumes it: a declared table, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Sustained rates of one device and of its link to a context-parallel peer."""

    name: str
    forward_tflops: float
    """Attention over large causal tiles, forward, in TFLOP/s."""
    backward_tflops: float
    link_gb_s: float
    """One way to one peer, while the other way is as busy, in GB/s."""
    memory_gb_s: float
    """Bytes read plus bytes written, in GB/s."""
    call_us: float
    """What one more tile costs beside its arithmetic: launches, small kernels, in microseconds."""
    message_us: float
    """Before a message's first byte, in microseconds."""
    source: str


H200 = Hardware(
    name="H200",
    forward_tflops=550.0,
    backward_tflops=490.0,
    link_gb_s=380.0,
    memory_gb_s=4200.0,
    call_us=50.0,
    message_us=30.0,
    source=(
        "one NVIDIA H200: cuDNN on causal bf16 tiles, sustained (614 / 546 TFLOP/s at best, docs/benchmarks.md); "
        "one-sided copies over NVLink, both ways at once"
    ),
)
CPU = Hardware(
    name="CPU core",
    forward_tflops=0.065,
    backward_tflops=0.060,
    link_gb_s=1.0,
    memory_gb_s=4.3,
    call_us=100.0,
    message_us=200.0,
    source="one x86-64 core: ATen's CPU flash attention, fp32, 2048 causal rows; gloo over loopback",
)
HARDWARE = {"cuda": H200, "cpu": CPU}
"""By the device type of the parameters; meta ones are planned for a GPU."""


def hardware_for(device_type: str) -> Hardware:
    """Rates that the cost model assumes for a device type."""
    return HARDWARE.get(device_type, H200)
