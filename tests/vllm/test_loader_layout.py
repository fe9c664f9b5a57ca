"""The loader's layout on vLLM's CPU backend, and the comparison with a dense load, in one real engine.

What parameters must hold is cut from the checkpoint's tensors here, without vLLM's loader.
"""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from testbed.checkpoint import make_qwen3_moe
from testbed.verify import named_storage, raw

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # No relay: these tests do not refit.
    "DCR_RELAY": "",
}
PROMPT = "baba babe babi babo"
LAYER = "model.layers.1"


class Engine:
    """A served model, its checkpoint's tensors, and its parameters and buffers by name."""

    def __init__(self, folder) -> None:
        from vllm import LLM

        self.folder = folder
        make_qwen3_moe(folder)
        self.llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            gpu_memory_utilization=0.2,
            weight_transfer_config={"backend": "dcr"},
            worker_extension_cls="testbed.verify.VerifyExtension",
        )
        self.llm.collective_rpc(lambda worker: setattr(self, "worker", worker))
        self.model = self.worker.model_runner.get_model()
        self.checkpoint = load_file(folder / "model.safetensors")

    def stored(self, ending: str) -> torch.Tensor:
        """The one parameter of LAYER whose name ends so."""
        (found,) = [tensor for name, tensor in self.tensors().items() if name.startswith(LAYER) and ending in name]
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(named_storage(self.model))

    def call(self, method: str, *arguments: str) -> dict:
        """The answer of the one rank."""
        (answer,) = self.llm.collective_rpc(method, args=arguments)
        return answer

    def generate(self) -> tuple[int, ...]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = self.llm.generate([PROMPT], greedy, use_tqdm=False)
        return tuple(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for the whole module."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield Engine(tmp_path_factory.mktemp("engine"))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def test_attention_projections_are_stacked_rows(engine):
    parts = [engine.checkpoint[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert same(engine.stored("qkv_proj.weight"), torch.cat(parts))
    assert same(engine.stored("o_proj.weight"), engine.checkpoint[f"{LAYER}.self_attn.o_proj.weight"])


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_experts_are_gate_above_up_and_down(engine, expert):
    parts = [engine.checkpoint[f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
    assert same(engine.stored("w13_weight")[expert], torch.cat(parts[:2]))
    assert same(engine.stored("w2_weight")[expert], parts[2])


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", f"{LAYER}.mlp.gate.weight"])
def test_other_matrices_are_as_in_the_checkpoint(engine, name):
    assert same(engine.tensors()[name], engine.checkpoint[name])


def test_it_generates_and_leaves_every_bit_alone(engine):
    before = engine.call("dcr_digests")
    assert len(before) > 20 and "error" not in before
    tokens = engine.generate()
    assert len(tokens) == 8
    assert engine.generate() == tokens
    assert engine.call("dcr_digests") == before


def test_experts_compute_what_torch_computes(engine):
    from dcr_vllm.loader_layout import KEPT
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    w13, w2 = engine.stored("w13_weight"), engine.stored("w2_weight")
    (layer,) = [m for name, m in engine.model.named_modules() if name.startswith(LAYER) and hasattr(m, "w13_weight")]
    experts = layer.quant_method.moe_kernel.fused_experts
    assert getattr(experts, KEPT)
    hidden = torch.randn(5, w2.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weights = torch.tensor([[0.75, 0.25]] * 5)
    chosen = torch.tensor([[0, 3], [7, 1], [2, 6], [5, 4], [3, 0]], dtype=torch.int32)
    output = torch.empty_like(hidden)
    nothing = (None,) * 6
    experts.apply(output, hidden, w13, w2, weights, chosen, MoEActivation.SILU, 8, *nothing, False)
    expected = torch.zeros(hidden.shape)
    for token, (row, experts_of_row) in enumerate(zip(hidden.float(), chosen.tolist(), strict=True)):
        for weight, expert in zip(weights[token], experts_of_row, strict=True):
            gate, up = (w13[expert].float() @ row).chunk(2)
            expected[token] += weight * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


def test_a_dense_load_of_the_same_checkpoint_is_the_same(engine):
    config = engine.worker.vllm_config.compilation_config
    registered = dict(config.static_forward_context), list(config.static_all_moe_layers)
    tokens = engine.generate()
    answer = engine.call("dcr_verify", str(engine.folder))
    assert answer["error"] is None and answer["differing"] == []
    tensors = engine.tensors().values()
    assert answer["tensors"] == len(tensors) > 20
    assert answer["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert answer["elements"] == sum(tensor.numel() for tensor in tensors)
    # The engine still serves its own model.
    assert (config.static_forward_context, config.static_all_moe_layers) == registered
    assert engine.generate() == tokens


def test_single_bits_of_the_checkpoint_are_found(engine, tmp_path):
    perturbed = tmp_path / "perturbed"
    shutil.copytree(engine.folder, perturbed)
    tensors = {name: tensor.clone() for name, tensor in engine.checkpoint.items()}
    expected = {
        "model.layers.0.self_attn.v_proj.weight": "model.layers.0.self_attn.qkv_proj.weight",
        f"{LAYER}.self_attn.k_norm.weight": f"{LAYER}.self_attn.k_norm.weight",
        f"{LAYER}.mlp.experts.3.up_proj.weight": "w13_weight",
        f"{LAYER}.mlp.experts.7.down_proj.weight": "w2_weight",
        "lm_head.weight": "lm_head.weight",
    }
    for name in expected:
        raw(tensors[name])[-2] ^= 1
    save_file(tensors, perturbed / "model.safetensors", metadata={"format": "pt"})
    answer = engine.call("dcr_verify", str(perturbed))
    assert answer["error"] is None
    assert len(answer["differing"]) == len(expected)
    for canonical, ending in expected.items():
        prefix = ".".join(canonical.split(".")[:3]) if canonical.startswith("model.layers") else ""
        assert any(name.startswith(prefix) and name.endswith(ending) for name in answer["differing"]), canonical


@pytest.mark.parametrize("part", ["w2_weight", "cos_sin_cache", "norm.weight"])
def test_single_bits_of_the_served_model_are_found(engine, part):
    (name, *_) = [name for name in engine.tensors() if name.endswith(part)]
    same_memory = {n for n, t in engine.tensors().items() if t.data_ptr() == engine.tensors()[name].data_ptr()}
    assert engine.call("dcr_flip", name) == {"error": None}
    try:
        answer = engine.call("dcr_verify", str(engine.folder))
    finally:
        engine.call("dcr_flip", name)
    assert answer["error"] is None
    assert set(answer["differing"]) == same_memory


def test_what_goes_wrong_is_answered_in_one_line(engine, tmp_path):
    shutil.copytree(engine.folder, tmp_path / "no weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(engine.folder, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 100_000)
    answers = [engine.call("dcr_verify", str(tmp_path / name)) for name in ("none", "no weights", "cut")]
    assert "none is not a folder with a checkpoint" in answers[0]["error"]
    for answer in (*answers, engine.call("dcr_flip", "no.such.tensor")):
        assert answer["error"] and "\n" not in answer["error"]
    assert engine.call("dcr_verify", str(engine.folder))["error"] is None


def test_the_layout_is_kept_and_what_is_not_is_named(engine, monkeypatch):
    from dcr_vllm.loader_layout import KEPT, layout_is_kept
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    assert layout_is_kept(engine.model) is None
    attention = engine.model.model.layers[1].self_attn

    class Packing(UnquantizedLinearMethod):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(attention.o_proj, "quant_method", Packing())
        assert f"{LAYER}.self_attn.o_proj" in (reason := layout_is_kept(engine.model)) and "Packing" in reason
    with monkeypatch.context() as patch:
        patch.setattr(type(attention.attn.impl), "process_weights_after_loading", lambda self, dtype: None)
        assert "self_attn.attn" in layout_is_kept(engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(attention.qkv_proj.weight, "data", torch.empty(0))
        assert "qkv_proj.weight is empty" in layout_is_kept(engine.model)
    (experts,) = [m for n, m in engine.model.named_modules() if n.startswith(LAYER) and hasattr(m, "w13_weight")]
    with monkeypatch.context() as patch:
        patch.delattr(experts, KEPT)
        assert "experts" in layout_is_kept(engine.model)
    assert layout_is_kept(engine.model) is None


def test_other_engines_are_repacked_as_ever(engine):
    from dcr_vllm.loader_layout import KEPT, keep_loader_layout
    from vllm.model_executor.layers import utils

    keep_loader_layout()
    dispatch = utils.dispatch_cpu_unquantized_gemm
    assert not hasattr(dispatch.__wrapped__, KEPT), "replaced twice"
    layers = []
    for call in (dispatch, dispatch.__wrapped__):
        # No engine is being loaded here, so none of backend dcr.
        layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        call(layer, remove_weight=True)
        assert not hasattr(layer, KEPT)
        layers.append(layer)
    assert layers[0].weight.shape == layers[1].weight.shape


def test_convolutions_are_packed_when_they_are_used(engine):
    from dcr_vllm.loader_layout import _replace_convolutions
    from vllm._custom_ops import causal_conv1d_weight_pack
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no packed convolution")
    _replace_convolutions()
    generator = torch.Generator().manual_seed(2)
    x, weight, states = (
        torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in ((2, 64), (64, 1, 4), (4, 3, 64))
    )
    results = []
    for form in (weight, causal_conv1d_weight_pack(weight.view(64, 4).clone())):
        own, kept = states.clone().transpose(1, 2), form.clone()
        convolved = gdn_attention._causal_conv1d_update_cpu(
            x=x.clone(),
            conv_states=own,
            weight=form,
            bias=None,
            silu_activation=True,
            conv_state_indices=torch.tensor([1, 2], dtype=torch.int32),
            is_weight_packed=True,
        )
        assert same(form, kept)
        results.append((convolved, own))
    assert same(results[0][0], results[1][0]) and same(results[0][1], results[1][1])
