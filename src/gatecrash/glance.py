"""A number that a device computes, read by the host without making the device wait."""

from __future__ import annotations

import torch
from torch import Tensor


class Glance:
    """A number on its way to the host.

    To read a device's number is to wait for all that the device was told to do until then; afterwards it has nothing to
    do until it is told more. A glance sets out at once, right behind what computes the number, so that whoever reads it
    some steps later waits for that alone, and the device works on.
    """

    def __init__(self, number: Tensor) -> None:
        self._number, self._arrived = number, None
        if number.is_cuda:
            self._number = number.to("cpu", non_blocking=True)  # into pinned memory, which the device writes by itself
            self._arrived = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> float:
        """The number; where it is not there yet the host waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)
