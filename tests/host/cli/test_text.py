# SPDX-License-Identifier: Apache-2.0
"""Documents as tokens: which bytes are read, and what a byte becomes."""

from pathlib import Path

import pytest
import torch

from moeos.cli.text import ByteEmbedding, read_documents


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def test_documents_are_read_in_order_and_each_once(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "z.md").write_bytes(b"first ")
    (tmp_path / "docs" / "b.md").write_bytes(b"third")
    (tmp_path / "docs" / "a.md").write_bytes(b"second ")
    read = read_documents(["z.md", "docs/*.md", "*.md", "none/*.md"], tmp_path)
    assert bytes(read.tolist()) == b"first second third"


def test_a_document_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        read_documents(["absent.md"], tmp_path)


def test_documents_without_a_byte_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\*\.md.*have 0 bytes"):
        read_documents(["*.md"], tmp_path)


def test_a_token_depends_on_its_byte_and_on_those_before_it_alone() -> None:
    embedding = ByteEmbedding(16)
    first = embedding.embed(as_bytes(b"the same words"), 0, 14)
    other = embedding.embed(as_bytes(b"the same wordZ"), 0, 14)
    torch.testing.assert_close(first[7:13], other[7:13])
    assert not torch.equal(first[13], other[13])


def test_a_text_goes_on_where_the_last_call_ended_and_then_from_its_start() -> None:
    embedding, text = ByteEmbedding(8), as_bytes(bytes(range(30)))
    twice = embedding.embed(text, 0, 60)
    torch.testing.assert_close(embedding.embed(text, 17, 25), twice[17:42])
    torch.testing.assert_close(twice[:30], twice[30:])


def test_elements_have_about_unit_variance_and_are_the_same_in_every_run() -> None:
    text = as_bytes(bytes(range(256)))
    rows = ByteEmbedding(64).embed(text, 0, 256)
    assert abs(float(rows.std()) - 1) < 0.05
    assert torch.equal(rows, ByteEmbedding(64).embed(text, 0, 256))
