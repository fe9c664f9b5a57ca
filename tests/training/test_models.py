"""Models of the testbed: what the Bridge exports is what was loaded, bit for bit, in each layout of two ranks.

An export has the dtype of Megatron's parameter, not of the checkpoint's tensor. They are the same here: mixed
precision casts all parameters to BF16, `A_log` and `D` of a Mamba layer (FP32 when they are made) included,
and keeps the buffer `expert_bias` of a router in FP32.
"""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file
from testbed.checkpoint import make_nemotron_h, make_qwen3, make_qwen3_moe

SMALL = {"layers": 2, "vocab": 128, "hidden": 64, "head_dim": 16}
ONE, TP2, EP2, PP2 = {}, {"tensor_parallel": 2}, {"expert_parallel": 2}, {"pipeline_parallel": 2}
ETP1 = TP2 | EP2 | {"expert_tensor_parallel": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "dense": make_qwen3(folder / "dense", intermediate=96, **SMALL),
        "tied": make_qwen3(folder / "tied", tied=True, intermediate=96, **SMALL),
        "experts": make_qwen3_moe(folder / "experts", experts=4, moe_intermediate=32, **SMALL),
        "hybrid": make_nemotron_h(folder / "hybrid"),
        "hybrid with experts": make_nemotron_h(folder / "hybrid-experts", pattern="M*E-"),
        "130 words": make_qwen3(folder / "130", intermediate=96, **SMALL | {"vocab": 130}),
    }


def content(tensor):
    """What must be equal: shape, dtype and bits."""
    return tuple(tensor.shape), tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes()


def loaded(checkpoint):
    return {name: content(tensor) for name, tensor in load_file(checkpoint / "model.safetensors").items()}


def build_and_export(rank, checkpoint, layout, vocabulary_multiple=None):
    """The export's (name, content), the mapping classes of local parameters, and parameters' dtypes."""
    from testbed.megatron_cpu import model as megatron

    megatron.initialize_groups(**layout)
    bridge, model = megatron.build(checkpoint, vocabulary_multiple=vocabulary_multiple)
    export = [(name, content(tensor)) for name, tensor in bridge.export_hf_weights(model, True, False)]
    tasks = [task for task in bridge.get_conversion_tasks(model) if task.megatron_module is not None]
    mappings = {task.param_name: type(task.mapping).__name__ for task in tasks}
    return export, mappings, {task.param_name: task.param_weight.dtype for task in tasks}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *itertools.product(["dense", "tied"], [ONE, TP2, PP2]),
        *itertools.product(["experts", "hybrid with experts"], [ONE, TP2, EP2, PP2, ETP1]),
        *itertools.product(["hybrid"], [ONE, TP2, PP2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "one",
)
def test_export_is_import(team, checkpoints, model, layout):
    checkpoint = checkpoints[model]
    for export, _, _ in team.run(build_and_export, str(checkpoint), layout):
        names = [name for name, _ in export]
        assert len(names) == len(set(names)), "each rank gets each tensor once"
        assert dict(export) == loaded(checkpoint)


def test_padded_vocabulary_is_exported_with_its_padding(team, checkpoints):
    checkpoint = checkpoints["130 words"]
    expected = loaded(checkpoint)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        (rows, columns), dtype, bits = expected[name]
        expected[name] = (256, columns), dtype, bits + bytes((256 - rows) * columns * 2)
    for layout in (ONE, TP2):
        for export, _, _ in team.run(build_and_export, str(checkpoint), layout, 128):
            assert dict(export) == expected


def test_export_has_the_dtype_of_the_parameter(team, tmp_path):
    checkpoint = make_nemotron_h(tmp_path, pattern="M")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = "backbone.layers.0.mixer.A_log"
    tensors[name] = torch.linspace(-1.0, 1.0, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    for export, _, _ in team.run(build_and_export, str(checkpoint), TP2):
        assert dict(export)[name] == content(tensors[name].bfloat16())


def test_exported_experts_lose_dimensions_of_size_one(team, tmp_path):
    checkpoint = make_qwen3_moe(tmp_path, experts=4, moe_intermediate=1, **SMALL)
    expected = loaded(checkpoint)
    for name, (shape, dtype, bits) in expected.items():
        if ".experts." in name:
            expected[name] = (max(shape),), dtype, bits
    for layout in (ONE, EP2):
        for export, _, _ in team.run(build_and_export, str(checkpoint), layout):
            assert dict(export) == expected


def test_hybrid_has_the_parameters_of_production(team, checkpoints):
    for _, mappings, dtypes in team.run(build_and_export, str(checkpoints["hybrid with experts"]), TP2):
        mixer = {name.split(".mixer.")[1]: kind for name, kind in mappings.items() if ".mixer." in name}
        assert mixer == {
            "A_log": "ColumnParallelMapping",
            "D": "ColumnParallelMapping",
            "dt_bias": "ColumnParallelMapping",
            "conv1d.weight": "MambaConv1dMapping",
            "conv1d.bias": "MambaConv1dMapping",
            "in_proj.weight": "MambaInProjMapping",
            "in_proj.layer_norm_weight": "AutoMapping",
            "norm.weight": "ColumnParallelMapping",
            "out_proj.weight": "RowParallelMapping",
        }
        others = {name: dtype for name, dtype in dtypes.items() if dtype != torch.bfloat16}
        assert others == {"decoder.layers.2.mlp.router.expert_bias": torch.float32}


def train_and_export(rank, checkpoint, layout):
    """Losses of three steps, and the export before the first and after the last one."""
    from megatron.core import parallel_state
    from testbed.megatron_cpu import model as megatron

    megatron.initialize_groups(**layout)
    bridge, model = megatron.build(checkpoint)
    optimizer = megatron.make_optimizer(model, lr=1e-3)

    def export():
        return {name: content(tensor) for name, tensor in bridge.export_hf_weights(model, True, False)}

    start, steps = export(), []
    for _ in range(3):
        # The same batch again, so that its loss must fall.
        batch = megatron.random_batch(128, 2, 16, f"replica {parallel_state.get_data_parallel_rank()}")
        steps.append(megatron.train_step(model, optimizer, batch))
    return steps, start, export()


@pytest.mark.parametrize(
    ("model", "layout"),
    [("dense", ONE), ("dense", TP2), ("tied", TP2), ("experts", TP2), ("experts", EP2), ("experts", ETP1)],
    ids=["dense-dp2", "dense-tp2", "tied-tp2", "experts-tp2", "experts-ep2-dp2", "experts-tp2-ep2-etp1"],
)
def test_training(team, checkpoints, model, layout):
    (steps, start, end), (other_steps, _, other_end) = team.run(train_and_export, str(checkpoints[model]), layout)
    assert end == other_end, "what is replicated stays equal"
    for (first, _, _), _, (last, _, _) in (steps, other_steps):
        assert last < first
    assert all(updated and 0.0 < grad_norm < 100.0 for _, grad_norm, updated in [*steps, *other_steps])
    assert end.keys() == start.keys()
    assert all(end[name][:2] == start[name][:2] for name in start)
    unchanged = [name for name in start if end[name] == start[name]]
    assert not unchanged
