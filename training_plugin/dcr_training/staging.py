"""Host copies of tensors on a device, in pinned memory that is used again and again."""

import torch

BUFFERS = 3
"""One is filled while another waits and a third is compared."""


class Staging:
    """Host views of tensors, chunk by chunk; tensors that are in host memory are passed through.

    A copy stays valid until the chunk `BUFFERS` later is begun. Device copies are asynchronous: they run while the
    caller works on earlier chunks, and are complete after `finish`.
    """

    def __init__(self, chunk_bytes: int, *, pinned: bool = True) -> None:
        self._chunk_bytes = chunk_bytes
        self._pinned = pinned
        self._buffers: list[torch.Tensor | None] = [None] * BUFFERS
        self._at = 0
        self._used = 0
        self._devices: set[torch.device] = set()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bits in contiguous host memory."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        self._devices.add(tensor.device)
        return self._stage(tensor)

    def finish(self) -> None:
        """The end of a chunk: its copies are complete, and the next chunk's go elsewhere."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._devices.clear()
        self._at, self._used = (self._at + 1) % BUFFERS, 0

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._buffers[self._at]
        if buffer is None or self._used + nbytes > buffer.numel():
            if self._used:
                # Views of this chunk lie in the old buffer, which they keep alive.
                self._used = 0
            wanted = max(self._chunk_bytes, nbytes)
            buffer = torch.empty(wanted, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers[self._at] = buffer
        host = buffer[self._used : self._used + nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        # Widest elements are 8 bytes, and views must be aligned to theirs.
        self._used += -(-nbytes // 64) * 64
        return host
