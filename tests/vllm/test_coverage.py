"""Which shapes fit a rank that holds a part of the model."""

import pytest
import torch
from dcr_vllm.coverage import Coverage

BF16 = torch.bfloat16


def copied(dst: torch.Tensor, offset: int, strides: list[int]) -> tuple:
    """The record of a copy into `dst` from an offset in scratch, as a dry run makes it."""
    source = (offset, str(BF16), list(dst.shape), strides)
    return ("p", dst.data_ptr(), str(dst.dtype), list(dst.shape), list(dst.stride()), *source)


def filled(dst: torch.Tensor) -> tuple:
    return ("aten.fill_.Scalar", "p", dst.data_ptr(), dst.nbytes)


class Model(torch.nn.Module):
    def __init__(self, *shape: int, dtype=BF16) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize(("rows", "fits"), [(8, True), (16, True), (17, False), (32, False)])
def test_one_of_two_ranks_takes_half(rows, fits):
    model, coverage = Model(8, 4), Coverage(shards=2)
    reason = coverage.add((rows, 4), [copied(model.p, 0, [4, 1])], [])
    assert (reason is None) == fits
    assert coverage.incomplete(model) is None


def test_the_last_rank_of_a_padded_vocabulary_takes_fewer_rows():
    model, coverage = Model(8, 4), Coverage(shards=2)
    assert coverage.add((13, 4), [copied(model.p[:5], 64, [4, 1])], [filled(model.p[5:])]) is None
    assert coverage.incomplete(model) is None


def test_a_skipped_tensor_fits_and_fills_nothing():
    model, coverage = Model(8, 4), Coverage()
    assert coverage.add((1000, 1000), [], []) is None
    assert "fill nothing of parameter p" in coverage.incomplete(model)


def test_a_repeated_copy_and_a_broadcast_one_count_once():
    model, coverage = Model(8, 4), Coverage()
    copy = copied(model.p[:4], 0, [4, 1])
    assert "takes 16 of its 32" in coverage.add((8, 4), [copy, copy], [])
    assert "all but 16 elements of parameter p" in coverage.incomplete(model)
    assert "takes 4 of its 32" in coverage.add((8, 4), [copied(model.p, 0, [0, 1])], [])


def test_parts_of_several_tensors_fill_a_parameter_of_another_dtype_and_layout():
    model, coverage = Model(4, 6, dtype=torch.float32), Coverage()
    model.p.data = model.p.data.t()
    for part in range(2):
        assert coverage.incomplete(model) is not None
        half = model.p[3 * part : 3 * part + 3]
        assert coverage.add((3, 4), [copied(half, 0, [4, 1])], []) is None
    assert coverage.incomplete(model) is None


def test_tied_parameters_are_filled_once():
    model, coverage = torch.nn.Sequential(Model(2, 2), Model(2, 2)), Coverage()
    model[1].p = model[0].p
    assert coverage.add((2, 2), [copied(model[0].p, 0, [2, 1])], []) is None
    assert coverage.incomplete(model) is None
