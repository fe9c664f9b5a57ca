"""Shards on a GPU: copied to pinned host chunks while the previous chunk is compared, and never missed."""

import dcr._native as native
import torch
from dcr_training import RefitClient, RefitConfig, StateDictSource
from dcr_training.staging import BUFFERS, Staging


def bits(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).reshape(-1, tensor.element_size()).cpu()


def test_changes_on_the_device_are_emitted():
    generator = torch.Generator(device="cuda").manual_seed(0)
    weights = {
        f"{number}": torch.randn(257, 129, generator=generator, device="cuda").to(dtype)
        for number, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32] * 5)
    }
    weights["host"] = torch.zeros(5)
    # Far smaller than the tensors, and far larger.
    for chunk_bytes in (1000, 100_000, 1 << 30):
        config = RefitConfig(record="unused", chunk_bytes=chunk_bytes, bucket_bytes=chunk_bytes)
        client = RefitClient(StateDictSource(lambda: dict(weights)), config)
        client.take_baseline()
        old = {name: bits(tensor) for name, tensor in weights.items()}
        for _ in range(3):
            for tensor in weights.values():
                flat = tensor.view(-1)
                flat[torch.randint(flat.numel(), (flat.numel() // 100 + 1,), device=flat.device)] *= -1
            client.rehearse("mixed", commit=True, keep=True)
            for payload in client.rehearsed():
                for item in native.decode_payload(payload):
                    positions = torch.frombuffer(bytearray(item.positions()), dtype=torch.int64)
                    values = torch.frombuffer(bytearray(item.values()), dtype=torch.uint8)
                    old[item.name][positions] ^= values.reshape(len(positions), -1)
            for name, tensor in weights.items():
                assert torch.equal(old[name], bits(tensor)), name
        client.close()


def test_pinned_buffers_are_used_again_only_when_their_chunk_is_done():
    staging = Staging(1 << 20)
    tensors = [torch.full((1000,), float(number), device="cuda") for number in range(12)]
    chunks = []
    for number in range(0, 12, 2):
        chunk = [staging.copy(tensor) for tensor in tensors[number : number + 2]]
        staging.finish()
        assert all(host.is_pinned() for host in chunk)
        chunks.append((number, chunk))
        for first, held in chunks[-BUFFERS + 1 :]:
            assert [host[0].item() for host in held] == [float(first), float(first + 1)]
