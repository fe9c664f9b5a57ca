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
