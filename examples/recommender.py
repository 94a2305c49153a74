"""SASRec on synthetic clicks: full cross-entropy compared with sampled binary cross-entropy."""

import argparse

import torch
from torch import nn
from torch.nn.functional import logsigmoid

import headloss as hl

ITEMS, LENGTH, WIDTH = 2000, 20, 32


@hl.term
def bce(stats, batch):  # Binary cross-entropy [T] of the clicked item and its sampled negatives.
    z = stats.candidate_logps + stats.lse[:, None]
    return -(logsigmoid(z[:, 0]) + logsigmoid(-z[:, 1:]).sum(1)) / z.shape[1]


class SASRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.items.weight, std=0.1)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, 64, 0.1, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, clicks):  # Map clicks [B, L] to hidden states [B, L, H].
        length = clicks.shape[1]
        x = self.items(clicks) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.norm(self.block(x, src_mask=mask, is_causal=True))


def draw(users):
    """Return [users, LENGTH + 1] synthetic clicks.

    With probability 0.7, the next click is one to three items after the previous click, within a
    group of 20 items. With probability 0.3, the next click is any item, with a probability
    proportional to 1 / (1 + item number).
    """
    popular = torch.distributions.Categorical(1 / torch.arange(1.0, ITEMS + 1))
    clicks = [popular.sample((users,))]
    for _ in range(LENGTH):
        near = clicks[-1] // 20 * 20 + (clicks[-1] % 20 + torch.randint(1, 4, (users,))) % 20
        clicks.append(torch.where(torch.rand(users) < 0.7, near, popular.sample((users,))))
    return torch.stack(clicks, 1)  # [users, LENGTH + 1]


@torch.no_grad()
def ndcg(model, clicks, k=10):
    """Return the NDCG@k of the last click of held-out users."""
    hidden, clicked = model.eval()(clicks[:, :-1])[:, -1], clicks[:, -1]
    hits = hl.head_topk(hidden, hl.Head(model.items.weight), k=k).ids == clicked[:, None]
    model.train()
    return float((hits / torch.arange(2, k + 2).log2()).sum(1).mean())


def train(kind, clicks, held_out, steps, every):
    torch.manual_seed(1)
    model, curve = SASRec(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        if step % every == 0:
            curve.append((step, ndcg(model, held_out)))
        some = clicks[torch.randint(len(clicks), (64,))]
        targets, objective = some[:, 1:], hl.cross_entropy()
        batch = hl.Batch(targets)
        if kind == "sampled BCE":  # one negative item per position, as in SASRec
            drawn = torch.randint(ITEMS, targets.shape)
            drawn = (drawn + (drawn == targets)) % ITEMS
            ids = torch.stack([targets, drawn], 2)
            objective = bce()
            batch = hl.Batch(targets, support_ids=ids, candidate_ids=ids)
        hidden, head = model(some[:, :-1]), hl.Head(model.items.weight)
        optimizer.zero_grad()
        hl.head_loss(hidden, head, batch, objective).loss.backward()
        optimizer.step()
    return curve


def plot(curves, path):
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for kind, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=kind)
    axes.set(xlabel="steps of 64 users", ylabel="NDCG@10, held out", ylim=(0, None))
    axes.legend(frameon=False)
    pyplot.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", help="a picture, by matplotlib")
    options = parser.parse_args()
    torch.manual_seed(0)
    clicks, held_out, curves = draw(4000), draw(1000), {}
    for kind in ("full cross-entropy", "sampled BCE"):
        curves[kind] = train(kind, clicks, held_out, options.steps, max(1, options.steps // 10))
        print(f"{kind:18} NDCG@10", *(f"{step}:{value:.3f}" for step, value in curves[kind]))
    if options.plot:
        plot(curves, options.plot)
