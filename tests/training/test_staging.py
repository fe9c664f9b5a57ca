"""The ring of host buffers that device tensors are copied into; with a real device it is tested in tests/gpu."""

import torch
from dcr_training.staging import BUFFERS, Staging


def test_host_tensors_pass_through():
    staging = Staging(100)
    tensor = torch.arange(12).reshape(3, 4)
    assert staging.copy(tensor).data_ptr() == tensor.data_ptr()
    assert torch.equal(staging.copy(tensor.t()), tensor.t()) and staging.copy(tensor.t()).is_contiguous()


def test_views_stay_valid_for_as_long_as_chunks_are_held():
    # Host tensors take the way of device tensors here: what matters is where their copies lie.
    staging = Staging(1000, pinned=False)
    held = []
    for number in range(4 * BUFFERS):
        shapes = [(3,), (1 + 700 * (number % 3), 2), (), (0, 4), (5, 5)]
        dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float64]
        tensors = [torch.full(shape, number % 100).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        held.append((tensors, [staging._stage(tensor) for tensor in tensors]))
        staging.finish()
        held = held[-(BUFFERS - 1) :]
        for originals, copies in held:
            for original, copy in zip(originals, copies, strict=True):
                assert torch.equal(original, copy) and copy.is_contiguous()
                assert copy.data_ptr() % copy.element_size() == 0


def test_all_devices_of_a_chunk_are_waited_for(monkeypatch):
    waited = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            waited.append(str(self.device))

    class Elsewhere:
        """A tensor that says it is on a device."""

        def __init__(self, device):
            self.device = torch.device(device)

        def detach(self):
            return self

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    staging = Staging(100, pinned=False)
    monkeypatch.setattr(staging, "_stage", lambda tensor: tensor)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        staging.copy(Elsewhere(device))
    staging.finish()
    assert sorted(waited) == ["cuda:0", "cuda:1"]
    staging.finish()
    assert len(waited) == 2, "a chunk of host tensors waits for no device"
