"""Writes the golden payloads, independently of the Rust code: struct, hashlib and hand-made zstd frames.

`*.bin` are valid payloads and `*.json` say what they hold; `refused/*.bin` must be refused for the reasons in
`refused/reasons.json`. The encoder's own golden file, `encoder.bin`, is not made here.
"""

import hashlib
import json
import struct
from pathlib import Path

HERE = Path(__file__).parent
DTYPES = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8", "I16", "I32", "I64", "U8", "BOOL"]
ENCODINGS = {"xor": 1, "overwrite": 2, "dense": 3}
ATTEMPT = bytes(range(16))


def frame(data, rle=False):
    """One zstd frame of raw blocks, or of one block that repeats a byte: no library is needed."""
    out = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(data))
    if rle:
        assert data == data[:1] * len(data)
        return out + struct.pack("<I", 1 | 1 << 1 | len(data) << 3)[:3] + data[:1]
    blocks = [data[at : at + 100_000] for at in range(0, len(data), 100_000)] or [b""]
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        out += struct.pack("<I", last | len(block) << 3)[:3] + block
    return out


def body(items, **changes):
    """The uncompressed body. `changes` spoil fields, for the files that must be refused."""
    metadata = locations = values = b""
    for item in items:
        name = item.get("name_bytes") or item["name"].encode()
        width, positions = item.get("gap_width", 0), item["positions"]
        if isinstance(positions, dict):
            count, start = positions["count"], positions["start"]
        else:
            count, start, last = len(positions), len(locations), -1
            for position in positions:
                locations += (position - last - 1).to_bytes(width, "little")
                last = position
        metadata += struct.pack(
            "<HBBBBHQQQ",
            len(name),
            item.get("dtype_code") or DTYPES.index(item["dtype"]) + 1,
            item.get("encoding_code") or ENCODINGS[item["encoding"]],
            item.get("location_type", width),
            item.get("rank", len(item["shape"])),
            item.get("reserved", 0),
            item.get("count", count),
            item.get("start", start),
            item.get("value_offset", len(values)),
        )
        metadata += name + b"".join(struct.pack("<Q", size) for size in item["shape"])
        values += bytes.fromhex(item["values"])
    locations += changes.get("more_locations", b"")
    values += changes.get("more_values", b"")
    lengths = [len(metadata), len(locations), len(values)]
    lengths[0] += changes.get("metadata_length", 0)
    return struct.pack("<QQQ", *lengths) + metadata + locations + values


def payload(items, owner=3, sequence=7, **changes):
    data = changes.get("body", body(items, **changes))
    packed = changes.get("frame", frame(data))
    header = struct.pack(
        "<4sHH16sIIHHIQQ",
        changes.get("magic", b"DCRP"),
        changes.get("version", 1),
        changes.get("header_length", 72),
        ATTEMPT,
        owner,
        sequence,
        changes.get("codec", 1),
        changes.get("reserved", 0),
        changes.get("item_count", len(items)),
        changes.get("uncompressed", len(data)),
        changes.get("compressed", len(packed)),
    )
    digest = changes.get("digest", hashlib.blake2b(packed, digest_size=16).digest())
    return header + digest + packed + changes.get("after", b"")


def item(name, shape, kind, positions, values, **more):
    dtype, encoding = kind.split()
    if isinstance(positions, tuple):
        positions = {"start": positions[0], "count": positions[1]}
    fields = {"name": name, "shape": shape, "dtype": dtype, "encoding": encoding}
    return fields | {"positions": positions, "values": values} | more


# Figure D.3: the changes of A are one run, those of B are 2, 5 and 8.
A = item("model.a.weight", [2, 4], "BF16 xor", (3, 2), "0300 0080")
B = item("model.b.weight", [3, 3], "BF16 xor", [2, 5, 8], "0100 ff7f c07f", gap_width=1)

VALID = {
    "figure": [A, B],
    "empty": [],
    "kinds": [
        item("scale", [], "F32 overwrite", (0, 1), "0000c07f"),
        item("bias.é", [4], "F64 overwrite", [0, 2], "000000000000f0bf 0000000000000080", gap_width=1),
        item("dense", [2, 3], "I8 dense", (0, 6), "00 01 7f 80 ff 02"),
        item("nothing", [5], "F16 xor", (0, 0), ""),
        item("none", [0, 7], "I64 dense", (0, 0), ""),
        item("flags", [3], "BOOL overwrite", [0, 2], "01 00", gap_width=1),
        item("fp8", [1, 2, 1, 2], "F8_E4M3 xor", [1, 3], "80 7f", gap_width=1),
        item("fp8.5", [2], "F8_E5M2 dense", (0, 2), "7c fd"),
        item("counts", [9], "I32 overwrite", (8, 1), "ffffffff"),
        item("short", [2, 2], "I16 xor", (1, 3), "0100 0200 0080"),
    ],
    "gaps": [
        item("u8", [600], "U8 xor", [255, 511, 513], "01 02 03", gap_width=1),
        item("u16", [70000], "U8 xor", [256, 65792, 65793], "01 02 03", gap_width=2),
        item("u32", [1 << 33], "U8 overwrite", [65536, 65536 + (1 << 32)], "01 02", gap_width=4),
        item("u64", [1 << 34], "U8 overwrite", [1, 2 + (1 << 32), (1 << 34) - 1], "01 02 03", gap_width=8),
        # Wider than needed, and contiguous: writers do neither, readers accept both.
        item("wide", [10], "U8 overwrite", [1, 4], "01 02", gap_width=8),
        item("contiguous", [10], "U8 overwrite", [4, 5, 6], "01 02 03", gap_width=1),
    ],
}
ZERO = item("zeros", [1000], "U8 dense", (0, 1000), "00" * 1000)
ZEROS = body([ZERO])


OVERFLOW = struct.pack("<QQQ", 2**64 - 1, 2**64 - 1, 2)


def changed(base, **changes):
    return {**base, **changes}


REFUSED = {
    "magic": (payload([A], magic=b"DCRX"), "not a dcr payload"),
    "version": (payload([A], version=2), "format version 2"),
    "header_length": (payload([A], header_length=80), "header of 80 bytes"),
    "codec": (payload([A], codec=9), "codec 9"),
    "reserved": (payload([A], reserved=1), "reserved bytes of the header"),
    "short": (payload([A])[:71], "71 bytes are too few"),
    "cut": (payload([A])[:-1], "compressed body is"),
    "after": (payload([A], after=b"\0"), "compressed body is"),
    "digest": (payload([A], digest=bytes(16)), "does not match its digest"),
    "bomb_declared": (payload([A], uncompressed=1 << 60), "the limit is"),
    "bomb": (payload([A], frame=frame(bytes(120_000), rle=True)), "cannot be decompressed"),
    "less_than_declared": (payload([A], uncompressed=200), "when uncompressed"),
    "not_zstd": (payload([A], frame=b"\0" * 40), "cannot be decompressed"),
    "two_frames": (payload([A], frame=frame(body([A])) + frame(b"")), "zstd frame ends after"),
    "skippable_frame": (payload([], frame=struct.pack("<II", 0x184D2A50, 4) + bytes(4)), "when uncompressed"),
    "sections": (payload([A], metadata_length=1), "do not fill the body"),
    "sections_overflow": (
        payload([], body=struct.pack("<QQQ", 2**64 - 1, 2**64 - 1, 2)),
        "do not fill the body",
    ),
    "no_sections": (payload([], body=bytes(23)), "the body end inside"),
    "more_items": (payload([A], item_count=2), "item 1: the metadata end inside its fixed fields"),
    "fewer_items": (payload([A, B], item_count=1), "left over in the metadata"),
    "locations_left": (payload([B], more_locations=b"\0"), "left over in the locations"),
    "values_left": (payload([B], more_values=b"\0"), "left over in the values"),
    "no_name": (payload([changed(A, name="")]), "empty name"),
    "long_name": (payload([changed(A, name="x" * 4097)]), "4097 bytes long"),
    "name_not_utf8": (payload([changed(A, name_bytes=b"a\xff")]), "not UTF-8"),
    "dtype": (payload([changed(A, dtype_code=13)]), "unknown dtype code 13"),
    "encoding": (payload([changed(A, encoding_code=4)]), "unknown encoding code 4"),
    "location_type": (payload([changed(A, location_type=3)]), "unknown location type 3"),
    "item_reserved": (payload([changed(A, reserved=5)]), "reserved bytes of an item"),
    "rank": (payload([changed(A, shape=[1] * 17)]), "17 dimensions"),
    "rank_beyond": (payload([changed(A, rank=9)]), "metadata end inside its shape"),
    "shape_overflow": (payload([changed(A, shape=[1 << 40, 1 << 40])]), "too large"),
    "duplicate": (payload([A, A]), "occurs twice"),
    "run_outside": (payload([changed(A, positions={"start": 7, "count": 2})]), "does not fit in 8 elements"),
    "run_overflow": (payload([changed(A, start=2**64 - 1)]), "does not fit in 8 elements"),
    "empty_run": (payload([item("a", [4], "U8 xor", (2, 0), "")]), "run of no elements starts at 2"),
    "position_outside": (payload([changed(B, positions=[2, 5, 9])]), "position 9 is outside its 9 elements"),
    "gap_overflow": (payload([changed(B, positions=[2, 2**64 - 1, 2**64], gap_width=8)]), "its gaps add up"),
    "location_offset": (payload([changed(B, start=1)]), "its locations start at 1"),
    "value_offset": (payload([A, changed(B, value_offset=2)]), "its values start at 2"),
    "many_values": (payload([changed(A, count=1 << 62)]), "values end inside"),
    "many_gaps": (payload([changed(B, count=1 << 63)]), "locations end inside"),
    "half_dense": (payload([changed(A, encoding="dense")]), "dense item with 2 of 8"),
}


def write(name, data, items):
    (HERE / f"{name}.bin").write_bytes(data)
    keys = ("name", "shape", "dtype", "encoding", "positions")
    described = [{key: it[key] for key in keys} | {"values": it["values"].replace(" ", "")} for it in items]
    text = {"attempt": ATTEMPT.hex(), "owner": 3, "sequence": 7}
    lines = ",\n".join("  " + json.dumps(it, ensure_ascii=False) for it in described)
    text = json.dumps(text)[:-1] + ', "items": [\n' + lines + "\n]}\n"
    json.loads(text)
    (HERE / f"{name}.json").write_text(text)


def main():
    for name, items in VALID.items():
        write(name, payload(items), items)
    # Two raw blocks and one that repeats a byte.
    head, zeros = ZEROS[:-1000], ZEROS[-1000:]
    packed = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(ZEROS))
    for part in (head[:30], head[30:]):
        packed += struct.pack("<I", len(part) << 3)[:3] + part
    packed += frame(zeros, rle=True)[9:]
    write("repeated", payload([], frame=packed, body=ZEROS, item_count=1), [ZERO])

    for name, (data, _) in REFUSED.items():
        (HERE / "refused" / f"{name}.bin").write_bytes(data)
    reasons = {name: reason for name, (_, reason) in REFUSED.items()}
    (HERE / "refused" / "reasons.json").write_text(json.dumps(reasons, indent=1) + "\n")


if __name__ == "__main__":
    main()
