"""Items through a real vLLM's native loader, in process: bit-identical to the loader's own dense load.

The model's reference states are made by vLLM's loader alone, before any code of dcr writes.
"""

import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from testbed.checkpoint import make_qwen3_moe
from testbed.verify import named_storage, raw

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # The engine would otherwise wait for a relay.
    "DCR_RELAY": "",
}


class Served:
    """A served model, its old and new canonical tensors, and what a dense load of each leaves in storage."""

    def __init__(self, folder) -> None:
        from vllm import LLM

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
        )
        self.llm.collective_rpc(lambda worker: setattr(self, "model", worker.model_runner.get_model()))
        self.old = load_file(folder / "model.safetensors")
        self.new = {name: perturbed(tensor, index) for index, (name, tensor) in enumerate(self.old.items())}
        self.resident_new = self.load(self.new)
        self.resident_old = self.load(self.old)

    def load(self, tensors) -> dict[str, torch.Tensor]:
        """vLLM's own dense load, and the storage after it."""
        with torch.no_grad():
            self.model.load_weights(list(tensors.items()))
        return {name: tensor.clone() for name, tensor in named_storage(self.model)}

    def holds(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether every parameter and buffer has these bits."""
        return all(torch.equal(raw(tensor), raw(state[name])) for name, tensor in named_storage(self.model))

    def items(self, encoding: str, names=None) -> list:
        """The step from old to new, one item a tensor."""
        from dcr import _native

        made = []
        for name, old in self.old.items():
            if names is None or name in names:
                new = self.new[name]
                shape, size = list(old.shape), old.numel() * 2
                made.append(_native.make_item(name, shape, "BF16", old.data_ptr(), new.data_ptr(), size, encoding))
        return made

    def manager(self):
        """A prewarmed scratch manager."""
        from dcr_vllm.prewarm import prewarm
        from dcr_vllm.scratch import ScratchManager
        from dcr_vllm.storage import ResidentStorage

        storage = ResidentStorage(self.model)
        manager = ScratchManager(self.model, storage, prewarm(self.model, storage, self.catalog()))
        manager.begin_attempt()
        return manager

    def catalog(self):
        """The canonical tensors, as prewarm takes them."""
        from dcr_vllm.prewarm import CanonicalTensor

        return [CanonicalTensor(name, tuple(tensor.shape), "BF16") for name, tensor in self.old.items()]


def perturbed(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """About 2% of the values with other low bits, and among them a flipped sign, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(seed)
    new = tensor.clone()
    words = new.view(-1).view(torch.int16)
    chosen = torch.rand(words.shape, generator=generator) < 0.02
    words[chosen] ^= torch.randint(1, 128, words.shape, generator=generator, dtype=torch.int32).to(torch.int16)[chosen]
    words[0] ^= -0x8000
    words[1], words[2] = 0x7FC1, 0x7F80
    return new


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One engine for the whole module."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield Served(tmp_path_factory.mktemp("served"))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def old_weights(served):
    """Every test starts from the old weights."""
    served.load(served.old)
    assert served.holds(served.resident_old)


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "dense"])
@pytest.mark.parametrize("hook", ["cpp", "python"])
def test_a_step_is_bit_identical_to_a_dense_load(served, encoding, hook, monkeypatch):
    import dcr_vllm.hook

    monkeypatch.setattr(dcr_vllm.hook, "copy_hook", lambda: hook)
    if hook == "cpp":
        monkeypatch.undo()
        assert dcr_vllm.hook.copy_hook() == "cpp"
    errors = []

    def apply():
        try:
            served.manager().apply(served.items(encoding))
        except Exception as error:
            errors.append(error)

    # As in a worker: on a thread that is not the engine's.
    thread = threading.Thread(target=apply)
    thread.start()
    thread.join()
    assert errors == []
    assert served.holds(served.resident_new)


def test_overwrites_may_be_repeated_and_xor_twice_undoes_itself(served):
    manager = served.manager()
    for _ in range(2):
        manager.apply(served.items("overwrite"))
    assert served.holds(served.resident_new)
    manager.apply(served.items("xor"))
    assert served.holds(served.resident_old)


def test_the_order_of_tensors_does_not_matter(served):
    served.manager().apply(served.items("xor")[::-1])
    assert served.holds(served.resident_new)


def test_prewarm_writes_nothing_and_finds_every_path_plain(served):
    classes = served.manager().prewarmed.classes
    assert {kind for kind, _ in classes.values()} == {"xor"}
    assert len(classes) == len(served.old)
    assert served.holds(served.resident_old)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("model.layers.0.nonsense.weight", (4,), "BF16", "nonsense"),
        ("model.norm.weight", (3,), "BF16", "3"),
        ("lm_head.weight", (512, 128), "F64", "F64"),
    ],
    ids=["unknown", "shape", "dtype"],
)
def test_what_the_loader_cannot_take_is_unsupported_and_writes_nothing(served, name, shape, dtype, words):
    from dcr_vllm.prewarm import CanonicalTensor, prewarm
    from dcr_vllm.storage import ResidentStorage

    found = prewarm(served.model, ResidentStorage(served.model), [CanonicalTensor(name, shape, dtype)])
    kind, reason = found.classes[name]
    assert kind == "unsupported"
    assert words in reason and "\n" not in reason
    assert served.holds(served.resident_old)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (256, 128)),
        ("model.layers.0.self_attn.q_proj.weight", (129, 128)),
        ("model.layers.0.self_attn.o_proj.weight", (128, 160)),
    ],
)
def test_a_tensor_that_the_loader_would_cut_is_unsupported(served, name, shape):
    """vLLM's loader narrows it without a word; its shape is another model's."""
    from dcr_vllm.prewarm import CanonicalTensor, prewarm
    from dcr_vllm.storage import ResidentStorage

    found = prewarm(served.model, ResidentStorage(served.model), [CanonicalTensor(name, shape, "BF16")])
    kind, reason = found.classes[name]
    assert kind == "unsupported"
    assert str(list(shape)) in reason and "another shape" in reason
    assert served.holds(served.resident_old)


@pytest.mark.parametrize(
    ("name", "shape", "parameter", "words"),
    [
        ("lm_head.weight", None, "lm_head.weight", "fill nothing of"),
        ("model.layers.1.self_attn.k_proj.weight", None, "layers.1.self_attn.qkv_proj.weight", "all but 8192 elements"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", None, "layers.0.mlp", "w13_weight"),
        # The expert loader takes less than it has room for.
        ("model.layers.0.mlp.experts.3.up_proj.weight", (32, 128), "layers.0.mlp", "all but 4096 elements"),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (128, 32), "w2_weight", "all but 4096 elements"),
    ],
)
def test_a_parameter_that_the_catalog_leaves_out_is_named(served, name, shape, parameter, words):
    from dcr_vllm.prewarm import CanonicalTensor, prewarm
    from dcr_vllm.storage import ResidentStorage

    catalog = [tensor for tensor in served.catalog() if tensor.name != name]
    if shape is not None:
        catalog.append(CanonicalTensor(name, shape, "BF16"))
    reason = prewarm(served.model, ResidentStorage(served.model), catalog).incomplete
    assert parameter in reason and words in reason and "\n" not in reason
    assert served.manager().prewarmed.incomplete is None


def test_a_receiver_refuses_what_does_not_fit_before_anything_is_written(served):
    from dcr_vllm.receiver import ReceiverThread
    from fake_receiver import FakeReceiver

    native = FakeReceiver()
    catalog = [(name, list(tensor.shape), "BF16") for name, tensor in served.old.items()]
    native.give("prewarm", catalog=catalog[1:])
    native.give("apply", items=served.items("xor"))
    native.give("prewarm", catalog=catalog)
    native.give("apply", items=served.items("xor"))
    native.give("finish")
    thread = ReceiverThread(served.model, "receiver/test", receiver=native)
    try:
        refused, early, classes, applied, finished = native.answers(5)
    finally:
        thread.close()
    assert refused[1] == [] and "parameter" in refused[2]
    assert "has not been prewarmed" in early[2]
    assert {kind for _, kind, _ in classes[1]} == {"xor"} and classes[2] is None
    assert applied == ("applied", len(catalog), None)
    assert finished == ("finished", None)
    assert served.holds(served.resident_new)


def test_a_loader_that_writes_another_way_fails_the_attempt(served, monkeypatch):
    from dcr_vllm.scratch import LoaderConditionError

    manager = served.manager()
    load = type(served.model).load_weights

    def through_a_temporary(self, weights):
        return load(self, ((name, tensor.clone()) for name, tensor in weights))

    monkeypatch.setattr(type(served.model), "load_weights", through_a_temporary)
    with pytest.raises(LoaderConditionError, match="scratch"):
        manager.apply(served.items("xor"))
    assert served.holds(served.resident_old)
    monkeypatch.undo()
    with pytest.raises(Exception, match="failed"):
        manager.apply(served.items("xor"))
    manager.begin_attempt()
    manager.apply(served.items("xor"))
    assert served.holds(served.resident_new)


def reports_without_copying(load):
    return lambda self, weights: {name for name, _ in weights}


def reports_more_than_it_copied(load):
    return lambda self, weights: load(self, weights) | {"lm_head.weight"}


def copies_without_reporting(load):
    return lambda self, weights: load(self, weights) - {"model.norm.weight"}


def stops_early(load):
    return lambda self, weights: {next(iter(weights))[0]}


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (reports_without_copying, "wrote nothing"),
        (reports_more_than_it_copied, "reports lm_head.weight as loaded, but no copy"),
        (copies_without_reporting, "wrote model.norm.weight without reporting"),
        (stops_early, "returned before it had taken it"),
    ],
)
def test_reports_that_do_not_match_the_copies_fail_the_attempt(served, monkeypatch, loader, words):
    from dcr_vllm.scratch import LoaderConditionError

    manager = served.manager()
    monkeypatch.setattr(type(served.model), "load_weights", loader(type(served.model).load_weights))
    with pytest.raises(LoaderConditionError, match=words):
        manager.apply(served.items("xor", {"model.norm.weight"}))


def test_storage_that_was_replaced_after_prewarm_is_named(served):
    from dcr_vllm.scratch import LoaderConditionError

    manager = served.manager()
    norm = served.model.model.norm.weight
    kept = norm.data
    norm.data = kept.clone()
    try:
        with pytest.raises(LoaderConditionError, match=r"model\.norm\.weight"):
            manager.begin_attempt()
    finally:
        norm.data = kept


def test_the_layout_rule_holds_and_is_missed_where_it_was_not_applied(served):
    from dcr_vllm.loader_layout import KEPT, layout_is_kept

    assert layout_is_kept(served.model) is None
    head = served.model.lm_head
    delattr(head, KEPT)
    try:
        assert "lm_head" in layout_is_kept(served.model)
    finally:
        setattr(head, KEPT, True)


def test_it_still_generates(served):
    served.manager().apply(served.items("xor", {"model.norm.weight"}))
    (output,) = served.llm.generate(["baba babe babi"], use_tqdm=False)
    assert output.outputs[0].token_ids
