"""After `apply(model)`, calls accept per-token fields, and detect the documents of packed rows with
padding.

Losses are compared with those of materialised logits, and with calls without padding.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_head_models import tiny
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import headloss as hl
from headloss.integrations import megatron
from headloss.integrations.documents import as_documents, documents_of

transformers = pytest.importorskip("transformers")
from transformers import LlamaForCausalLM as Llama  # noqa: E402

from headloss.integrations.transformers import apply  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(2, 37, (2, 7), generator=GENERATOR)
WEIGHTS = torch.rand(2, 7, generator=GENERATOR)
PER_SEQUENCE = hl.cross_entropy().over("sequence_mean")


def shifted(value: Tensor, fill: float) -> Tensor:
    return pad(value[:, 1:], (0, 1), value=fill)


# ---------------------------------------------------------------------- per-token fields


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_fields_come_as_labels_come(kind: torch.dtype) -> None:
    model, weights = tiny("llama"), (WEIGHTS * 2).to(kind)
    term = hl.cross_entropy()
    term = term.where("w") if kind == torch.bool else term.weighted("w")
    labels = shifted(IDS, -100)
    with apply(model, term, fields=("w",)):
        want = model(IDS, labels=IDS, w=weights).loss
        got = model(IDS, labels=labels, shift_labels=labels, w=shifted(weights, 0)).loss
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("align", ["labels", {"w": "labels", "candidate_ids": "labels"}])
def test_a_batch_of_labels_lies_as_a_call_does(align: Any) -> None:
    """With equal token ids, weights and candidates, a model after `apply(model)` and
    `Batch.from_labels` give the loss of float64 logits.

    Fields that are shifted differently from the labels give a different loss.
    """

    @hl.term
    def likelier(stats: Any, batch: Any) -> Tensor:
        return -stats.logp * batch.w - stats.candidate_logps.sum(-1)

    model, objective = tiny("llama").double(), likelier()
    candidates = (IDS[..., None] + torch.arange(3)) % 37
    fields: Any = {"w": WEIGHTS, "candidate_ids": candidates}
    with apply(model, objective, fields=tuple(fields)):
        got = model(IDS, labels=IDS, **fields).loss
    hidden, head = model.model(IDS).last_hidden_state, hl.Head.of_model(model)
    logps = head.logits(hidden)[:, :-1].log_softmax(-1)

    def plain(weights: Tensor, ids: Tensor) -> Tensor:
        own = logps.gather(-1, IDS[:, 1:, None])[..., 0] * weights
        return -(own + logps.gather(-1, ids).sum(-1)).mean()

    batch = hl.Batch.from_labels(IDS, align=align, **fields)
    out = hl.head_loss(hidden, head, batch, objective)
    torch.testing.assert_close(out.loss, plain(WEIGHTS[:, 1:], candidates[:, 1:]))
    torch.testing.assert_close(got, out.loss)
    batch = hl.Batch.from_labels(IDS, align="targets", **fields)
    out = hl.head_loss(hidden, head, batch, objective)
    torch.testing.assert_close(out.loss, plain(WEIGHTS[:, :-1], candidates[:, :-1]))


def test_the_last_field_of_a_shard_counts() -> None:
    """In a shard of a row with shifted labels, the field of the last position counts, since its
    label is the next shard's first token."""
    model = tiny("llama")
    labels, weights = shifted(IDS, -100), shifted(WEIGHTS, 0)
    logits = model(IDS[:, :4]).logits.transpose(1, 2)
    want = cross_entropy(logits, labels[:, :4], reduction="none") * weights[:, :4]
    with apply(model, hl.cross_entropy().weighted("w"), fields=("w",)):
        call: Any = {"labels": labels[:, :4], "shift_labels": labels[:, :4]}
        got = model(IDS[:, :4], **call, w=weights[:, :4], num_items_in_batch=12).loss
    torch.testing.assert_close(got, want.sum() / 12, rtol=1e-5, atol=1e-6)


HEAD_TAIL = {"position_ids": torch.tensor([[0, 1, 2, 9, 10, 11, 12]])}
LATER = {"position_ids": torch.arange(7, 14)[None], "attention_mask": torch.ones(2, 7)}


@pytest.mark.parametrize(("told", "at"), [(HEAD_TAIL, 9), (LATER, 7)])
def test_a_shard_is_no_sequence(told: dict[str, Tensor], at: int) -> None:
    """A context-parallel shard (front and back, or a later part of a sequence) is not treated as a
    sequence."""
    model, labels = tiny("llama"), shifted(IDS, -100)
    call: Any = {"labels": labels, "shift_labels": labels, **told}
    with apply(model):  # a loss that is a mean over tokens accepts a shard of a sequence
        model(IDS, **call)
    with apply(model, PER_SEQUENCE, fields=("segments",)):
        with pytest.raises(ValueError, match=f"shift_labels: got them .* at position {at}, as of"):
            model(IDS, **call)
        got = model(IDS, segments=hl.Segments.rows(2, 7), **call).loss
        want = model(IDS, labels=IDS, segments=hl.Segments.rows(2, 7), **told).loss
    torch.testing.assert_close(got, want)


def test_shifted_labels_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shifted labels on several ranks are refused unless segments declare whole sequences per
    rank."""
    model, labels = tiny("llama"), shifted(IDS, -100)
    call: Any = {"labels": labels, "shift_labels": labels}
    with apply(model, PER_SEQUENCE, fields=("segments",)):
        want = model(IDS, **call).loss
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        with pytest.raises(ValueError, match="shift_labels: got them with 2 ranks, as of context"):
            model(IDS, **call)
        monkeypatch.undo()
        assert torch.equal(model(IDS, **call, segments=hl.Segments.rows(2, 7)).loss, want)


# ---------------------------------------------------------------------- documents

LENGTHS = (5, 6)
POSITIONS = [*range(5), *range(6)]
def test_documents_by_the_text_positions_of_m_rope() -> None:
    """With m-rope, whose position ids have one row for text and three rows for images, documents
    are found from the row for text."""
    text = torch.tensor([POSITIONS])
    images = torch.arange(text.numel()).flip(0).expand(3, 1, -1)
    targets = torch.zeros_like(text)
    packed = documents_of({"position_ids": torch.cat([text[None], images])}, targets)
    want = documents_of({"position_ids": text}, targets)
    assert packed is not None and want is not None
    assert torch.equal(packed.ids, want.ids) and packed.count == len(LENGTHS)
    wrong = r"got shape \(3, 1, 11\), want \(1, 11\) or \(4, 1, 11\) to tell"
    with pytest.raises(ValueError, match=wrong):
        documents_of({"position_ids": images}, targets)


TOLD_BY = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def packed(padding: list[int], told: str, pads: int = 0, same: bool = True) -> dict[str, Any]:
    """Make a row of two documents and padding; `told` names the argument that marks documents, and
    `pads` says how it marks padding."""
    n, after = len(padding), sum(LENGTHS)
    ends, index = [0, 5, 11], [0] * 5 + [1] * 6
    ends += {0: [], 1: [after + n]}.get(pads, [after + i + 1 for i in range(n)])
    index += {0: [-1] * n, 1: [2] * n}.get(pads, [2 + i for i in range(n)])
    tokens = [3, 8, 2, 11, 30, 4, 22, 8, 7, 16, 9]
    return {
        "input_ids": torch.tensor([tokens + ([0] * n if same else list(range(2, n + 2)))]),
        "labels": torch.tensor([[-100, *tokens[1:5], -100, *tokens[6:], *[-100] * n]]),
        told: {
            "position_ids": torch.tensor([POSITIONS + padding]),
            "seq_idx": torch.tensor([index], dtype=torch.int32),
        }.get(told, torch.tensor(ends, dtype=torch.int32)),
    }


def per_sequence(calls: list[dict[str, Any]]) -> list[Tensor]:
    """Return the loss of each sequence in each call, and check that document markers other than
    position ids reach the adapter, but not attention."""
    model, losses = tiny("llama"), []
    position = lambda n: torch.tensor([POSITIONS + [0] * (n - 11)])  # noqa: E731
    with apply(model, PER_SEQUENCE) as applied:
        for call in calls:
            more = {} if "position_ids" in call else {"position_ids": None}
            own, length = Llama.forward, call["labels"].shape[1]

            def forward(*a: Any, own: Any = own, n: int = length, **k: Any) -> Any:
                k = {name: v for name, v in k.items() if name not in TOLD_BY}
                return own(model, *a, **k, position_ids=position(n))

            applied.own_forward = forward
            losses.append(model(**call, **more, use_cache=False).loss)
            applied.own_forward = None
            assert applied.metrics is not None and applied.metrics["segments"].value == 2
    return losses


@pytest.mark.parametrize("told", TOLD_BY)
def test_padding_at_the_end_of_a_row_is_no_document(told: str) -> None:
    """Padding at the end of a row is no document, however its positions are numbered."""
    calls = [packed([], told)]
    for n in (1, 4):
        if told == "position_ids":
            calls += [packed([0] * n, told), packed([1] * n, told), packed([*range(n)], told)]
        else:
            calls += [packed([0] * n, told, pads) for pads in (0, 1, n)]
        calls.append(packed([0] * n, told, n, same=False))
    want = per_sequence([packed([], "position_ids")])[0]
    model = tiny("llama")
    log_p = -cross_entropy(
        model(calls[0]["input_ids"], position_ids=torch.tensor([POSITIONS])).logits[0, :-1],
        calls[0]["labels"][0, 1:], reduction="none",
    )  # fmt: skip
    torch.testing.assert_close(want, -(log_p[:4].mean() + log_p[5:].mean()) / 2)
    for loss in per_sequence(calls):
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)


def test_an_unscored_document_counts() -> None:
    """A packed document without scored tokens counts as a document if it has several tokens, if
    another document follows it, or if it is the only document."""
    targets = torch.tensor([[1, 2, -100, -100, -100, -100, 5, -100, -100, -100]])
    tokens = torch.tensor([[3, 4, 5, 3, 4, 7, 9, 8, 6, 5]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 0, 1]])
    call = {"position_ids": positions, "input_ids": tokens}
    documents = documents_of(call, targets)
    assert documents is not None and documents.count == 5
    assert documents_of({"position_ids": torch.zeros(3, 1)}, torch.full((3, 1), -100)).count == 3  # type: ignore[union-attr]
    assert documents_of({}, targets) is None


def test_ends_tell_more_than_positions() -> None:
    """`cu_seq_lens_q` marks the ends of documents, also if position ids have three axes or never
    restart; two equal ends mark no document between them."""
    targets = torch.arange(8).view(1, 8)
    call = {"position_ids": torch.zeros(3, 1, 8), "cu_seq_lens_q": torch.tensor([0, 3, 3, 8, 8])}
    documents = documents_of(call, targets)
    assert documents is not None and documents.ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert documents.count == 2


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 16])}, r"cu_seq_lens_q: got an end at 16 in .* 8"),
        ({"cu_seq_lens_k": torch.tensor([1, 8])}, r"cu_seq_lens_k: got \[1, 8\], want .* at 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 8])}, r"cu_seq_lens_q: got .* not to decrease"),
        ({"cu_seq_lens_q": torch.zeros(2, 2).long()}, r"cu_seq_lens_q: got \(2, 2\), want \[S \+"),
        ({"cu_seq_lens_q": torch.rand(3)}, r"cu_seq_lens_q: got \(3,\), want \[S \+ 1\] integers"),
        ({"seq_idx": torch.zeros(2, 4).int()}, r"seq_idx: got \(2, 4\), want integers \(1, 8\)"),
        ({"seq_idx": [0]}, "seq_idx: got list, want integers"),
    ],
)
def test_malformed_document_borders_are_refused(told: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        documents_of(told, torch.zeros(1, 8).long())


def test_a_scored_token_behind_the_last_end_is_refused() -> None:
    documents = documents_of({"cu_seq_lens_q": torch.tensor([0, 3])}, torch.arange(5)[None])
    batch = hl.Batch(torch.arange(5)[None], documents)
    with pytest.raises(ValueError, match="segment"):
        hl.head_loss(torch.ones(1, 5, 2), hl.Head(torch.ones(9, 2)), batch, PER_SEQUENCE)


def test_rows_of_torchtitan() -> None:
    """For torchtitan rows without token ids, constant positions mark padding."""
    targets = torch.tensor([[1, 2, 3, -100, 4, -100, -100, -100]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0]])
    assert as_documents(positions, targets.shape).count == 4
    assert as_documents(positions, targets.shape, targets=targets).count == 2


@pytest.mark.parametrize(
    ("ends", "padded", "want"),
    [
        ([0, 2, 5, 6], None, [0, 0, 1, 1, 1, 2]),
        ([0, 2, 6, 6, 6], None, [0, 0, 1, 1, 1, 1]),
        ([0, 2, 2, 6], None, [0, 0, 1, 1, 1, 1]),
        # The third document is two positions of padding without tokens.
        ([0, 1, 3, 3], [0, 2, 4, 6], [0, 0, 1, 1, 2, 2]),
    ],
)
def test_ends_of_megatron(ends: list[int], padded: list[int] | None, want: list[int]) -> None:
    """Repeated ends in `cu_seqlens_q`, with which Megatron fills a buffer of fixed size, and
    documents made of padding count as no documents."""
    told = SimpleNamespace(
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
    )
    config = SimpleNamespace(context_parallel_size=1)
    segments = megatron._segments(told, torch.ones(1, 6), torch.zeros(6, 1).long(), config)
    assert segments.ids.flatten().tolist() == want
    assert segments.count == sum(a < b for a, b in pairwise(ends))


def test_whole_sequences_by_m_rope() -> None:
    """Under M-RoPE position ids are [4, 1, L], and the text positions in row 0 tell whether a call
    with shifted labels holds whole documents."""
    model = tiny("llama").train()
    terms = hl.cross_entropy().over("sequence_mean")
    labels, one = torch.arange(11)[None] % 7, torch.arange(11)[None]
    with apply(model, terms) as applied:
        for text, fits in ((one, True), (one + 5, False)):
            positions = torch.cat([text[None], one.expand(3, 1, -1)])
            call = {"labels": labels, "shift_labels": labels, "position_ids": positions}
            if fits:
                assert applied.batch_of(call, labels.device).segments.count == 1
            else:
                with pytest.raises(ValueError, match="a document that begins at position 5"):
                    applied.batch_of(call, labels.device)
