"""Supervised fine-tuning with cross-entropy and a z-loss: one softmax, two micro-batches."""

from __future__ import annotations

import torch

import headloss as hl

VOCAB, WIDTH, ROWS, LENGTH = 1000, 32, 8, 24


class Model(torch.nn.Module):
    """A recurrent model that returns hidden states and has a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.body = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(tokens))[0]  # [B, T, H]; headloss applies the head


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(50, (ROWS, 1)) + torch.arange(LENGTH)  # every row counts upwards
    labels = tokens.clone()
    labels[:, :4] = -100  # the prompt is not scored

    batches = [hl.Batch.from_labels(part) for part in labels.chunk(2)]
    totals = sum(hl.Totals.of(batch) for batch in batches)  # denominators for both halves
    objective = hl.cross_entropy() + 1e-4 * hl.z_loss()
    for step in range(30):
        metrics = hl.Metrics()
        for part, labels_part in zip(tokens.chunk(2), labels.chunk(2), strict=True):
            batch = hl.Batch.from_labels(labels_part, totals=totals)
            out = hl.head_loss(model(part), hl.Head.of(model.lm_head), batch, objective)
            out.loss.backward()
            metrics = metrics.merge(out.metrics)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 29:
            seen = metrics.compute()
            print(
                f"step {step:2}: perplexity {seen['cross_entropy/perplexity']:8.2f}, "
                f"top-1 {seen['cross_entropy/top1']:4.0%} of {seen['tokens']:.0f} tokens"
            )


if __name__ == "__main__":
    main()
